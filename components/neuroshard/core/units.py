"""Amounts in and out of text: bytes (`32GiB` -> 34359738368 -> `32.0 GiB`), rates, durations, shares and counts."""

import math
import re
from collections.abc import Callable
from typing import Literal

from neuroshard.core.errors import UsageError
from neuroshard.core.text import counted
from neuroshard.core.value import shown

_FACTORS = {
    "": 1,
    "B": 1,
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGTP", 1)},
    **{f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)},
}
_ROUNDED: dict[str, Callable[[float], float]] = {"nearest": float, "up": math.ceil, "down": math.floor}
FEWEST_BARE = 1_000_000  # bytes that a number without a unit can mean: 80 and 81920 are meant in GiB and MiB
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_BY_LOWER = {unit.lower(): factor for unit, factor in _FACTORS.items()}


def parse_bytes(text: str, option: str = "", *, least: int = 1) -> int:
    """`"32GiB"`, `"1.5 TB"` or `"34359738368"` as bytes. Raises UsageError, which begins with `option`, also for fewer than
    `least`, and for a number without a unit that is too small to be of bytes."""
    begins = f"{option}: " if option else ""
    match = _BYTES.fullmatch(text)
    factor = _BY_LOWER.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{begins}{shown(text)} is not an amount of memory; write bytes or a unit, as in 32GiB or 80GB"
        )
    value = float(match.group(1)) * factor
    if not math.isfinite(value) or value < least or value > 2**63:
        raise UsageError(
            f"{begins}{shown(text)} is not a usable amount of memory; write at least one byte, as in 32GiB"
        )
    if not match.group(2) and 0 < value < FEWEST_BARE:
        number, unit = match.group(1), "GiB" if value < 1024 else "MiB"
        raise UsageError(
            f"{begins}{shown(text)} has no unit, so it is read as {number} bytes, too few to be meant; write {number}{unit}, or "
            f"{number}B"
        )
    return int(value)


_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def parse_percent(text: str) -> float | None:
    """`"15%"` as the share 0.15; None for what is no percentage. Raises UsageError unless it is below 100 %."""
    match = _PERCENT.fullmatch(text)
    share = float(match.group(1)) / 100 if match else 0.0
    if share >= 1:
        raise UsageError(f"{shown(text)} leaves nothing; write a share below 100%, as in 15%")
    return share if match else None


def parse_memory(text: str, devices: int) -> tuple[int, ...]:
    """`--memory`: one amount for all devices, or one per device separated by commas. Returns `devices` numbers of bytes."""
    amounts = tuple(parse_bytes(part, "--memory") for part in text.split(","))
    if len(amounts) == 1:
        return amounts * devices
    if len(amounts) != devices:
        raise UsageError(
            f"--memory lists {len(amounts)} amounts for {counted(devices, 'device')}; give one, or one per device"
        )
    return amounts


_RATE = re.compile(r"\s*([0-9.]+\s*[A-Za-z]*?)(B|b|bit)\s*/\s*s\s*")


def parse_rate(text: str) -> float:
    """`"50GB/s"` or `"400Gb/s"` as bytes a second. Raises UsageError, also for zero."""
    match = _RATE.fullmatch(text)
    try:
        rate = parse_bytes(f"{match.group(1)}B") if match else 0
    except UsageError:
        rate = 0
    if match is None or not rate:
        raise UsageError(f"{shown(text)} is not a rate; write bytes or bits a second, as in 50GB/s or 400Gb/s")
    return rate / (1 if match.group(2) == "B" else 8)


_SHORT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s)\s*")
_SHORT_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def parse_network(text: str) -> tuple[float, float | None]:
    """`"50GB/s"`, or `"50GB/s,0.06ms"` with what a small message takes, as bytes a second and ms; None where that is not said.

    Raises UsageError.
    """
    rate, comma, latency = text.partition(",")
    if not comma:
        return parse_rate(rate), None
    match = _SHORT.fullmatch(latency)
    if match is None:
        raise UsageError(
            f"{shown(text)}: {shown(latency)} is not a latency; write the network as 50GB/s, or as 50GB/s,0.06ms"
        )
    return parse_rate(rate), float(match.group(1)) * _SHORT_MS[match.group(2)]


MOST_STEP_MS = 1e6  # a quarter of an hour, beyond which a unit is wrong


def parse_step_time(text: str) -> float:
    """`"12ms"`, `"800us"` or `"0.5s"` as ms. Raises UsageError, also for zero, beyond 1,000 s and where no unit is said."""
    match = _SHORT.fullmatch(text)
    ms = float(match.group(1)) * _SHORT_MS[match.group(2)] if match else 0.0
    if not 0 < ms < math.inf:
        raise UsageError(
            f"{shown(text)} is not a time in a step; write a number above 0 with its unit, as in 12ms or 800us"
        )
    if ms > MOST_STEP_MS:
        raise UsageError(f"{shown(text)} is too long for a time in a step; write at most {MOST_STEP_MS / 1e3:g}s")
    return ms


def format_bytes(count: float, rounded: Literal["nearest", "up", "down"] = "nearest") -> str:
    """`1536` -> `1.5 KiB`. Binary units, one decimal; `up` for an amount that is needed, `down` for a limit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            steps = 1 if unit == "B" else 10
            size = _ROUNDED[rounded](size * steps) / steps
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d)\s*")


def parse_duration(text: str, option: str = "") -> float:
    """`"3m"`, `"90s"`, `"1.5h"` or `"7d"` as seconds. Raises UsageError, which begins with `option`, also for zero.

    A unit must be there: 5 may be meant as minutes.
    """
    match = _DURATION.fullmatch(text)
    seconds = float(match.group(1)) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match.group(2)] if match else 0.0
    if not 0 < seconds < 1e9:
        begins = f"{option}: " if option else ""
        raise UsageError(
            f"{begins}{shown(text)} is not a usable length of time; write a number and its unit, as in 90s, 3m, 1h or 7d"
        )
    return seconds


def format_duration(seconds: float) -> str:
    """`95` -> `95 s`, `600` -> `10 min`, `9000` -> `2.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def parse_share(text: str) -> tuple[int, int]:
    """`"2/8"`, the second of eight shares, as (2, 8). Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    share, of = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if not 1 <= share <= of:
        raise UsageError(f"{shown(text)} is not a share; write which of how many, as in 2/8")
    return share, of


def parse_portion(text: str) -> float:
    """`"0.5%"` or `"0.005"` as 0.005. Raises UsageError."""
    number = parse_number(text.removesuffix("%").rstrip())
    if number is None:
        raise UsageError(f"{shown(text)} is not a share; write per cent or a fraction, as in 0.5% or 0.005")
    return number / 100 if text.endswith("%") else float(number)


_NUMBER = re.compile(r"[+-]?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def parse_number(text: str) -> float | None:
    """`"1000"` as an int, `"1.5e3"` as a float; None for anything else, such as `1_000` or `nan`."""
    if not _NUMBER.fullmatch(text):
        return None
    return int(text) if text.lstrip("+-").isdigit() and len(text) < 20 else float(text)


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """`"4"` or `"2,4,8"` as whole numbers above zero. Raises UsageError that names the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 11 and 0 < int(part) < 2**31 for part in parts):
        raise UsageError(f"{option} {shown(text)} is not a number, or several separated by commas, as in 4 or 2,4,8")
    return tuple(int(part) for part in parts)
