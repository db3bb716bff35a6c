"""Bars of block characters, for a terminal."""

from collections.abc import Sequence
from itertools import accumulate

FILLS = "█▓░"  # distinguishable without colour


def bar(parts: Sequence[float], whole: float, width: int) -> str:
    """`███▓░  `: up to three kinds of parts, one after another; `whole` would fill `width` characters."""
    if not whole > 0:
        return " " * width
    ends = [min(width, round(width * (end / whole))) for end in accumulate(parts)]
    pieces = (FILLS[index] * (end - begin) for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)))
    return "".join(pieces).ljust(width)
