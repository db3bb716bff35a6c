"""Text that fits 80 columns, on a terminal and piped: counted nouns, wrapped lines."""

import re
import textwrap
from collections.abc import Sequence

from neuroshard.core.clean import clean

WIDTH = 80


def counted(number: int, noun: str) -> str:
    """`1 table`, `2,000 tables`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def agreeing(number: int, noun: str, one: str, several: str) -> str:
    """A counted noun with the verb that agrees with it: `1 table is`, `2 tables are`."""
    return f"{counted(number, noun)} {one if number == 1 else several}"


def spanned(first: int, count: int) -> str:
    """`0-999,999`: so many rows or columns from the first on."""
    return f"{first:,}-{first + count - 1:,}"


def first_few(names: Sequence[str]) -> str:
    """`a, b, c, …`: the first three of many."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def short_name(name: str) -> str:
    """A cost model's name as people read it: the first 12 digits of a digest, any other name whole."""
    return name[:12] if re.fullmatch(r"[0-9a-f]{64}", name) else name


def one_line(said: object, most: int | None = 300) -> str:
    """An error of foreign code, cleaned, without line breaks, and no longer than `most` characters."""
    return clean(" ".join(str(said).split()))[:most]


def wrapped(text: str, indent: int = 2, width: int = WIDTH) -> list[str]:
    """Lines of at most 80 columns (or `width`), all but the first indented; a word that is longer stays whole."""
    return textwrap.wrap(
        clean(text),
        width,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
        drop_whitespace=True,
    )
