"""Tables from a file of any known format: `neuroshard tables --from FILE`. JSON, CSV, Parquet, or Meta's dlrm_datasets.

A table is an object or a row with name, rows, dim, pooling_factor, and optionally the other fields of Table. The fields of
TorchRec's configs are read too (files/importers/imported.py). Options give what the file leaves out.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.text import counted
from neuroshard.core.units import parse_number
from neuroshard.core.value import decode_json, shown
from neuroshard.files import parquet
from neuroshard.files.disk import read_bytes
from neuroshard.files.importers.dlrm_datasets import read_dlrm_dataset
from neuroshard.files.importers.imported import (
    KNOWN,
    REQUIRED,
    Imported,
    TableEntry,
    checked_tables,
    notes_of,
    our_name,
    plain,
    read_json,
    table_defaults,
)

NUMBERS = {"rows", "dim", "pooling_factor", "reuse_batch_size", "element_bytes"}
NUMBERS |= {"optimizer_bytes_per_row", "optimizer_bytes_per_element"}
LISTS = ("reuse_bins", "lookups_by_id")  # of numbers
OBJECTS = ("features", "access", "row_order", "id_map")


def import_tables(
    path: Path,
    *,
    access: str = "uniform",
    dtype: str = "fp32",
    optimizer: str = "rowwise_adagrad",
    dim: int = 128,
) -> Imported:
    """Tables of a .json, .csv, .parquet, .pt or .pt.gz file, with notes on what was left out, renamed or assumed.

    The file wins over the options. `dim` is for .pt files, which have no dims. Repeated names are numbered. `sequence: true` is
    `pooling: none`, and `num_features` are features that share the lookups equally. 1 and 0 are true and false here. Raises
    UsageError for an unknown option or suffix, and InvalidInput for a fault in the file.
    """
    defaults = table_defaults(access=access, dtype=dtype, optimizer=optimizer)
    if has_lookups(path):
        return read_dlrm_dataset(path, dim=dim, defaults=defaults)
    entries, notes = read_entries(path)
    return checked_tables(entries, defaults, str(path), notes)


def has_lookups(path: Path) -> bool:
    """Whether a file is one of dlrm_datasets, which holds lookups and no widths, by its name."""
    return path.name.lower().endswith((".pt", ".pt.gz"))


def read_entries(path: Path) -> tuple[list[TableEntry], tuple[str, ...]]:
    """The unchecked entries of a .json, .csv or .parquet file, and notes. Raises UsageError, InvalidInput."""
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise UsageError(f"{path}: its name has no known suffix; known: {', '.join(READERS)}, .pt, .pt.gz")
    entries, unknown = read(path)
    return entries, notes_of(entries, unknown)


def read_csv(path: Path) -> tuple[list[TableEntry], set[str]]:
    """A header line, then a line per table. An empty cell counts as absent; `reuse_bins` are 17 numbers separated by spaces or
    commas, and what is an object in JSON is JSON here too."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: not UTF-8 text (byte {error.start}); if it is CSV, save it as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    entries: list[TableEntry] = []
    columns, unknown = list[str](), set[str]()
    try:
        for cells in reader:
            where = f"{path}: line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if not columns:
                columns, unknown = _columns((cell.strip() for cell in cells), path)
            elif len(cells) != len(columns):
                raise InvalidInput(f"{where}: has {counted(len(cells), 'cell')} for {counted(len(columns), 'column')}")
            else:
                fields = {name: cell.strip() for name, cell in zip(columns, cells, strict=True) if cell.strip()}
                entries.append(
                    TableEntry.of(where, {name: _value(our_name(name), cell, where) for name, cell in fields.items()})
                )
    except csv.Error as error:
        raise InvalidInput(f"{path}: line {reader.line_num}: not CSV: {error}") from None
    return entries, unknown


def read_parquet(path: Path) -> tuple[list[TableEntry], set[str]]:
    """A row a table, with lists and structs where JSON has lists and objects. Null counts as absent."""
    columns, unknown = _columns(parquet.column_names(path), path)
    # other columns may be of any type, or too large
    with parquet.opened(path, set(columns) - unknown) as table:
        rows = table.to_pylist()
    return [TableEntry.of(f"{path}: row {index}", plain(row)) for index, row in enumerate(rows)], unknown


def frame_entries(
    header: Sequence[str], rows: Iterable[Sequence[Any]], where: str
) -> tuple[list[TableEntry], set[str]]:
    """A row a table, as pandas has them; None, NaN and NaT count as absent. Raises InvalidInput."""
    columns, unknown = _columns(header, where)
    named = (
        {name: value for name, value in zip(columns, row, strict=True) if name not in unknown and not _is_absent(value)}
        for row in rows
    )
    return [TableEntry.of(f"{where}: row {index}", plain(row)) for index, row in enumerate(named)], unknown


def _is_absent(value: Any) -> bool:
    return (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    )


READERS: dict[str, Callable[[Path], tuple[list[TableEntry], set[str]]]] = {
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def _columns(header: Iterable[str], path: Path | str) -> tuple[list[str], set[str]]:
    """The columns, and those that we do not know. Raises InvalidInput if a required column is missing, or if one occurs twice."""
    columns = list(header)
    check_once(columns, path)
    for name in REQUIRED[:-1]:  # lookups may be those of the features
        if name not in map(our_name, columns):
            raise InvalidInput(f"{path}: column {name!r} is missing; there are {shown(', '.join(columns), 200)}")
    return columns, {name for name in columns if our_name(name) not in KNOWN}


def check_once(columns: Iterable[str], path: Path | str) -> None:
    """Raise InvalidInput if a column of a file occurs twice."""
    for name, times in Counter(columns).items():
        if times > 1:
            raise InvalidInput(f"{path}: column {name!r} occurs {times} times")


def _value(column: str, cell: str, where: str) -> Any:
    """A cell of a CSV file as a value of its column. Raises InvalidInput."""
    if column in LISTS:
        return [read_number(column, share, where) for share in cell.strip("[]").replace(",", " ").split()]
    if column in OBJECTS and cell.startswith(("[", "{")):
        return decode_json(cell.encode(), f"{where}: column {column!r}")
    return read_number(column, cell, where) if column in NUMBERS else cell


def read_number(column: str, cell: str, where: str) -> float:
    """A cell that is a number. Raises InvalidInput."""
    number = parse_number(cell)
    if number is None:
        raise InvalidInput(f"{where}: column {column!r} is {shown(cell)}, not a number")
    return number
