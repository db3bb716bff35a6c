"""The sources of tables (a preset, a file, a TorchRec model, its planner's printout) as one kind of value.

A file is JSON, CSV, Parquet, or Meta's dlrm_datasets. A table there is an object or a row with name, rows, dim, pooling_factor,
and optionally the other fields of Table; those of TorchRec's configs are read too (files/importers/imported.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import ELEMENT_BYTES, MOST_LOOKUPS, Table
from neuroshard.core.units import parse_number
from neuroshard.core.value import decode_json, shown
from neuroshard.files import parquet
from neuroshard.files.disk import read_bytes
from neuroshard.files.importers.check_tables import Finding, check_entries
from neuroshard.files.importers.dlrm_datasets import read_dlrm_dataset
from neuroshard.files.importers.imported import (
    KNOWN,
    REQUIRED,
    Defaults,
    Imported,
    TableEntry,
    check_once,
    checked_tables,
    csv_rows,
    notes_of,
    our_name,
    plain,
    read_json,
    read_number,
    table_defaults,
)
from neuroshard.files.importers.presets import PRESETS, preset
from neuroshard.files.importers.sharding_stats import Printed, read_stats, stats_entries
from neuroshard.files.traces import Traces

if TYPE_CHECKING:  # it takes seconds
    import pandas as pd
    from torch import nn

NUMBERS = {"rows", "dim", "pooling_factor", "reuse_batch_size", "element_bytes"}
NUMBERS |= {"optimizer_bytes_per_row", "optimizer_bytes_per_element"}
LISTS = ("reuse_bins", "lookups_by_id")  # of numbers
OBJECTS = ("features", "access", "row_order", "id_map")


def has_lookups(path: Path) -> bool:
    """Whether a file is one of dlrm_datasets, which holds lookups and no widths, by its name."""
    return path.name.lower().endswith((".pt", ".pt.gz"))


def read_entries(path: Path) -> tuple[list[TableEntry], tuple[str, ...]]:
    """The unchecked entries of a .json, .csv or .parquet file, and notes. Raises UsageError, InvalidInput."""
    read = READERS.get(path.suffix.lower())
    if read is None:
        preset_too = f"; for a preset: neuroshard tables --preset {path} -o tables.json" * (str(path) in PRESETS)
        raise UsageError(f"{path}: its name has no known suffix; known: {', '.join(READERS)}, .pt, .pt.gz{preset_too}")
    entries, unknown = read(path)
    return entries, notes_of(entries, unknown)


def read_csv(path: Path) -> tuple[list[TableEntry], set[str]]:
    """A header line, then a line per table. An empty cell counts as absent; `reuse_bins` are 17 numbers separated by spaces or
    commas, and what is an object in JSON is JSON here too."""
    header, rows = csv_rows(path)
    unknown = _unknown(header, path) if header else set[str]()
    return [
        TableEntry.of(where, {name: _value(our_name(name), cell, where) for name, cell in row.items()})
        for where, row in rows
    ], unknown


def read_parquet(path: Path) -> tuple[list[TableEntry], set[str]]:
    """A row a table, with lists and structs where JSON has lists and objects. Null counts as absent."""
    columns = parquet.column_names(path)
    unknown = _unknown(columns, path)
    # other columns may be of any type, or too large
    with parquet.opened(path, set(columns) - unknown) as table:
        rows = table.to_pylist()
    return [TableEntry.of(f"{path}: row {index}", plain(row)) for index, row in enumerate(rows)], unknown


def _is_absent(value: Any) -> bool:
    return (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    )


READERS: dict[str, Callable[[Path], tuple[list[TableEntry], set[str]]]] = {
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def _unknown(columns: Sequence[str], path: Path | str) -> set[str]:
    """Columns that we do not know. Raises InvalidInput if a required column is missing, or if one occurs twice."""
    check_once(columns, path)
    for name in REQUIRED[:-1]:  # lookups may be those of the features
        if name not in map(our_name, columns):
            raise InvalidInput(f"{path}: column {name!r} is missing; there are {shown(', '.join(columns), 200)}")
    return {name for name in columns if our_name(name) not in KNOWN}


def _value(column: str, cell: str, where: str) -> Any:
    """A cell of a CSV file as a value of its column. Raises InvalidInput."""
    if column in LISTS:
        return [read_number(column, share, where) for share in cell.strip("[]").replace(",", " ").split()]
    if column in OBJECTS and cell.startswith(("[", "{")):
        return decode_json(cell.encode(), f"{where}: column {column!r}")
    return read_number(column, cell, where) if column in NUMBERS else cell


class Asked(NamedTuple):
    """What holds where a source does not say: access, element type (None: fp32, or as is printed), optimizer, columns of tables
    of a .pt; and lookups a sample of a model's tables or features."""

    access: str = "uniform"
    dtype: str | None = None
    optimizer: str = "rowwise_adagrad"
    dim: int = 128
    pooling_factors: Mapping[str, float] = MappingProxyType({})
    default_pooling_factor: float | None = None

    @property
    def as_text(self) -> dict[str, str]:
        return {"access": self.access, "dtype": self.dtype or "fp32", "optimizer": self.optimizer}

    @property
    def defaults(self) -> Defaults:
        """Raises UsageError."""
        return table_defaults(**self.as_text)


@dataclass(frozen=True)
class Source:
    """Tables as a source states them, not yet checked, and what else it holds: lookups, or a printed plan."""

    where: str
    entries: tuple[TableEntry, ...]
    defaults: Defaults
    notes: tuple[str, ...] = ()
    traces: Traces | None = None
    printed: Printed | None = None

    def tables(self, *, sequences: bool = True) -> Imported:
        """The tables, checked, with or without `sequences`. Repeated names are numbered. Raises InvalidInput."""
        return checked_tables(self.entries, self.defaults, self.where, self.notes, sequences=sequences)

    def findings(self) -> tuple[Finding, ...]:
        """What is odd about each table, faults included."""
        return check_entries(self.entries, self.defaults)


def from_preset(name: str, asked: Asked) -> Source:
    """A built-in table set. Raises UsageError."""
    return Source(name, _entries(name, preset(name, **asked.as_text)), asked.defaults)


def from_file(path: Path, asked: Asked) -> Source:
    """A .json, .csv, .parquet, .pt or .pt.gz file; only the last two have lookups. Raises UsageError and InvalidInput."""
    defaults = asked.defaults
    if has_lookups(path):
        imported = read_dlrm_dataset(path, dim=asked.dim, defaults=defaults)
        notes = tuple(note.removeprefix(f"{path}: ") for note in imported.notes)  # `tables` adds the path again
        return Source(str(path), _entries(str(path), imported.tables), defaults, notes, imported.traces)
    entries, notes = read_entries(path)
    return Source(str(path), tuple(entries), defaults, notes)


def import_tables(path: Path, **asked: Any) -> Imported:
    """Tables of a file, with notes on what was left out, renamed or assumed; `asked` are fields of Asked.

    The file wins over what is asked. Repeated names are numbered. `sequence: true` is `pooling: none`, and `num_features` are
    features that share the lookups equally. 1 and 0 are true and false here. Raises UsageError for an unknown option or suffix,
    and InvalidInput for a fault in the file.
    """
    source = from_file(path, Asked(**asked))
    return replace(source.tables(), traces=source.traces)


def from_list(items: Sequence[object], asked: Asked) -> Source:
    """Tables, or mappings with fields of Table, in Python. Raises UsageError and InvalidInput."""
    where = "the list of tables"
    entries = []
    for index, item in enumerate(items):
        place = f"tables[{index}]"
        if isinstance(item, Table):
            entries.append(TableEntry(place, item.model_dump()))
        elif isinstance(item, Mapping):
            entries.append(TableEntry.of(place, plain(item)))
        else:
            raise InvalidInput(f"{place}: is {shown(item)}, neither a Table nor a mapping with its fields")
    unknown = {key for entry in entries for key in entry.fields} - KNOWN
    return Source(where, tuple(entries), asked.defaults, notes_of(entries, unknown))


def from_frame(frame: pd.DataFrame, asked: Asked) -> Source:
    """A pandas DataFrame with a row a table, and the columns of a file; None, NaN and NaT count as absent. Raises UsageError,
    InvalidInput."""
    where, columns = "the DataFrame", list(map(str, frame.columns))
    unknown = _unknown(columns, where)
    named = (
        {name: value for name, value in zip(columns, row, strict=True) if name not in unknown and not _is_absent(value)}
        for row in frame.to_numpy(object).tolist()
    )
    entries = [TableEntry.of(f"{where}: row {index}", plain(row)) for index, row in enumerate(named)]
    return Source(where, tuple(entries), asked.defaults, notes_of(entries, unknown))


def from_torchrec(spec: str | nn.Module, asked: Asked) -> Source:
    """The model that `spec` makes, or is (files/importers/torchrec_model.py). Raises UsageError and InvalidInput."""
    from neuroshard.files.importers.torchrec_model import entries_of, torchrec_entries  # imports torch

    lookups = asked.pooling_factors, asked.default_pooling_factor
    if isinstance(spec, str):
        where = spec
        entries, notes = torchrec_entries(spec, *lookups)
    else:
        where = type(spec).__name__
        entries, notes = entries_of(spec, where, *lookups)
    return Source(where, tuple(entries), asked._replace(dtype=None).defaults, tuple(notes))


def from_stats(path: Path, asked: Asked) -> Source:
    """What TorchRec's planner printed; without a dtype element types are inferred. Raises UsageError and InvalidInput."""
    defaults = asked.defaults
    printed = read_stats(path)
    entries, notes = stats_entries(printed, None if asked.dtype is None else ELEMENT_BYTES[asked.dtype])
    return Source(str(path), tuple(entries), defaults, tuple(notes), printed=printed)


def _entries(where: str, tables: Iterable[Table]) -> tuple[TableEntry, ...]:
    return tuple(TableEntry(f"{where}: {table.name}", table.model_dump()) for table in tables)


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
        if name in factors:
            raise InvalidInput(f"{where}: {name} occurs twice")
        factors[name] = lookups(value, f"{where}: {name}")
    return factors


def lookups(value: object, whose: str) -> float:
    """Lookups a sample, of Python or NumPy. Raises InvalidInput."""
    try:
        factor = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        factor = math.nan
    if not 0 <= factor <= MOST_LOOKUPS:
        raise InvalidInput(f"{whose} has {shown(value)} lookups a sample; it must be a number from 0 to 1e9")
    return factor
