"""Pooling factors (lookups a sample) by table or feature name, from the command line and a file: `{"user": 3.0}` or CSV."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.units import parse_number
from neuroshard.core.value import decode_json, shown
from neuroshard.files.disk import read_bytes
from neuroshard.files.importers.imported import csv_rows

COLUMNS = ["name", "pooling_factor"]


def pooling_factors(path: Path | None, options: Sequence[str]) -> dict[str, float]:
    """Read from a .json object, or a .csv with the columns name and pooling_factor, and from options NAME=LOOKUPS, which win.

    Raises UsageError and InvalidInput that name the place.
    """
    factors = {} if path is None else _checked(_pairs(path), str(path))
    for option in options:
        name, equals, value = option.rpartition("=")
        if not equals or not name:
            raise UsageError(f"--pooling-factor {option!r} is not NAME=LOOKUPS, as in user_id=3.0")
        factors |= _checked([(name, _from_text(value))], "--pooling-factor")
    return factors


def _pairs(path: Path) -> Iterable[tuple[str, Any]]:
    if path.suffix.lower() == ".csv":
        columns, rows = csv_rows(path)
        if columns != COLUMNS:
            raise InvalidInput(f"{path}: must begin with the line {','.join(COLUMNS)}, not {shown(columns or '')}")
        return [(row.get("name", ""), _from_text(row.get("pooling_factor", ""))) for _, row in rows]
    data = decode_json(read_bytes(path), str(path))
    if not isinstance(data, dict):
        raise InvalidInput(
            f'{path}: expected an object of lookups by name, {{"user_id": 3.0}}, found {type(data).__name__}'
        )
    return list(data.items())


def _from_text(text: str) -> float | str:
    number = parse_number(text.strip())
    return text if number is None else number


def _checked(pairs: Iterable[tuple[str, Any]], where: str) -> dict[str, float]:
    factors: dict[str, float] = {}
    for name, value in pairs:
        try:
            factor = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, OverflowError):
            factor = math.nan
        if not 0 <= factor <= 1e9:
            raise InvalidInput(
                f"{where}: {name} has {shown(value)} lookups a sample; it must be a number from 0 to 1e9"
            )
        if name in factors:
            raise InvalidInput(f"{where}: {name} occurs twice")
        factors[name] = factor
    return factors
