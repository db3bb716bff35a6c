"""Which hardware a name means. Every comparison of hardware names is made here.

People write `h200`, drivers report `NVIDIA H200`, and node labels say `NVIDIA-H200`: case, blanks, punctuation never count.
"""

import re


def is_part_of_name(wanted: str, name: str) -> bool:
    """Whether `wanted` occurs in a device's name, as `h200` does in `NVIDIA-H200`. An empty `wanted` occurs in no name."""
    plain = _plain(wanted)
    return bool(plain) and plain in _plain(name)


def is_same_name(one: str, other: str) -> bool:
    """Whether both are the name of one device. The maker NVIDIA, and what follows a comma, may be left out."""
    return _device(one) == _device(other)


def words(name: str) -> frozenset[str]:
    """The words of a device's name, in lower case: an RTX A4000 is no A40. What follows a comma is left out."""
    return frozenset(re.findall(r"[a-z0-9]+", name.partition(",")[0].lower()))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _device(name: str) -> str:
    return _plain(name.partition(",")[0]).removeprefix("nvidia")
