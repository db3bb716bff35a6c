"""The folder that `augment` writes and `measure` reads: cases.json, compute.parquet, collective.parquet; tiers.parquet if any.

A compute case is a row of lists with an entry a table: name, rows, dim, pooling_factor. The rest of a table (reuse bins, bytes,
pooling) is that of the base table of this name in cases.json. cases.json is written last: a folder without it is unfinished.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from neuroshard.core.case import Case, Cases, CollectiveCase, ComputeCase, TierCase
from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import DIM_STEP, MAX_DIM, MAX_ROWS, MOST_LOOKUPS, Table
from neuroshard.core.value import SparseValue, check_format, decode_json, explain, shown
from neuroshard.files import parquet
from neuroshard.files.disk import disk_errors, only_writer, read_bytes, write_bytes, writing

Fields = list[tuple[str, pa.DataType]]
KINDS: dict[str, type[Case]] = {kind.kind: kind for kind in (ComputeCase, CollectiveCase, TierCase)}
TABLE_COLUMNS = {"table": "name"} | {name: name for name in ("rows", "dim", "pooling_factor")}  # and fields of Table
_COMPUTE: Fields = [
    ("case_id", pa.string()),
    ("split", pa.string()),
    ("table", pa.list_(pa.string())),
    ("rows", pa.list_(pa.int64())),
    ("dim", pa.list_(pa.int32())),
    ("pooling_factor", pa.list_(pa.float64())),
    ("batch_size", pa.int64()),
]
CASE_FIELDS: dict[str, Fields] = {
    "compute": _COMPUTE,
    "collective": [
        ("case_id", pa.string()),
        ("split", pa.string()),
        ("device_dims", pa.list_(pa.int64())),
        ("start_delays_ms", pa.list_(pa.float64())),
    ],
    # missing in folders without cases beyond HBM
    "tiers": [*_COMPUTE, ("tier", pa.string()), ("missed_share", pa.float64())],
}


class CasesManifest(SparseValue):
    """cases.json: the base tables, and the numbers of cases in the Parquet files."""

    UNSAID: ClassVar = ("tier_cases",)

    format_version: Literal[1] = 1
    tables: tuple[Table, ...]
    compute_cases: int
    collective_cases: int
    tier_cases: int = 0
    max_dim: Annotated[int, Field(gt=0, le=MAX_DIM)]
    seed: int


def write_cases(folder: Path, cases: Cases) -> None:
    """Write a case set. cases.json comes last, so that a killed run leaves no folder that looks complete.

    Raises InvalidInput if another run writes cases there.
    """
    counts: dict[str, Any] = {_count_of(kind): len(getattr(cases, kind)) for kind in KINDS}
    manifest = CasesManifest(tables=cases.tables, max_dim=cases.max_dim, seed=cases.seed, **counts)
    with only_writer(folder, "cases"):
        with disk_errors(folder, "write to it"):
            (folder / "cases.json").unlink(missing_ok=True)
            (folder / "tiers.parquet").unlink(missing_ok=True)
        for kind, fields in CASE_FIELDS.items():
            if kind != "tiers" or cases.tiers:
                write_rows(folder / f"{kind}.parquet", list(map(case_row, getattr(cases, kind))), fields)
        write_bytes(folder / "cases.json", manifest.canonical_json())


def read_cases(folder: Path) -> Cases:
    """Read a case set. Raises InvalidInput that names the file, and the row where one is at fault."""
    path = folder / "cases.json"
    if not path.exists():
        raise InvalidInput(
            f"{folder}: no cases.json here; make cases with `neuroshard augment tables.json -o {folder}`"
        )
    manifest = CasesManifest.parse(check_format(decode_json(read_bytes(path), str(path)), 1, str(path)), str(path))
    base = {table.name: table for table in manifest.tables}
    found: dict[str, Any] = {}
    for kind, fields in CASE_FIELDS.items():
        said, part = getattr(manifest, _count_of(kind)), folder / f"{kind}.parquet"
        rows = read_rows(part, fields) if said or kind != "tiers" else ()
        found[kind] = tuple(case_from_row(kind, row, base, f"{part} row {index}") for index, row in enumerate(rows))
        if len(found[kind]) != said:
            raise InvalidInput(
                f"{path}: says {said} cases in {part.name}, but it holds {len(found[kind])}; make the cases again"
            )
    return Cases(tables=manifest.tables, max_dim=manifest.max_dim, seed=manifest.seed, **found)


def _count_of(kind: str) -> str:
    """The field of CasesManifest."""
    return f"{kind.removesuffix('s')}_cases"


def case_row(case: Case) -> dict[str, Any]:
    row = {"case_id": case.case_id, **case.model_dump(exclude={"tables"})}
    tables = () if isinstance(case, CollectiveCase) else case.tables
    return row | {name: [getattr(table, field) for table in tables] for name, field in TABLE_COLUMNS.items()}


def case_from_row(kind: str, row: Mapping[str, Any], base: Mapping[str, Table], where: str) -> Case:
    """A row as a case, whose tables those in `base` complete. Raises InvalidInput."""
    tables = {} if kind == "collective" else {"tables": _tables_from_row(row, base, where)}
    case = KINDS[kind].parse({**row, **tables}, where)
    if case.case_id != row["case_id"]:
        raise InvalidInput(f"{where}: case_id {shown(row['case_id'])} does not match its contents ({case.case_id})")
    return case


def _tables_from_row(row: Mapping[str, Any], base: Mapping[str, Table], where: str) -> tuple[Table, ...]:
    columns = [row[name] for name in TABLE_COLUMNS]
    if any(column is None or None in column for column in columns) or len(set(map(len, columns))) > 1:
        raise InvalidInput(f"{where}: table, rows, dim and pooling_factor are not lists of one length, without nulls")
    try:
        tables = [
            # the base table is valid, and of its rules only those of these three fields matter, checked below
            base[name].resized(rows, dim, pooling)
            for name, rows, dim, pooling in zip(*columns, strict=True)
        ]
        for table in tables:
            right = 1 <= table.rows <= MAX_ROWS and DIM_STEP <= table.dim <= MAX_DIM and not table.dim % DIM_STEP
            if not right or not 0 <= table.pooling_factor <= MOST_LOOKUPS:
                raise InvalidInput(
                    f"{where}: table {table.name!r} has {table.rows} rows, dim {table.dim}, pooling {table.pooling_factor}"
                )
    except KeyError as error:
        raise InvalidInput(f"{where}: table {error} is not among the base tables") from None
    except ValidationError as error:
        raise InvalidInput(f"{where}: {explain(error)}") from None
    return tuple(tables)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], fields: Fields) -> None:
    """Rows as one Parquet file, whole or not at all."""
    with writing(path) as temporary:
        table = pa.Table.from_pylist(list(rows), schema=pa.schema(fields))
        with temporary.open("wb") as file:  # given a path, pyarrow would try to parse it as a URL
            pq.write_table(table, file, write_page_checksum=True)


def read_rows(path: Path, fields: Fields) -> list[dict[str, Any]]:
    """Rows of a Parquet file. Raises InvalidInput where it is missing, damaged, not Parquet, or lacks a column."""
    with parquet.opened(path) as table:
        columns: dict[str, pa.ChunkedArray] = {}
        for name, kind in fields:
            times = table.column_names.count(name)
            if times != 1:
                raise InvalidInput(
                    f"{path}: column {name!r} {'is missing' if times == 0 else f'is there {times} times'}"
                )
            columns[name] = parquet.column(table, name, kind)
            if columns[name] is None:
                raise InvalidInput(f"{path}: column {name!r} is {table.schema.field(name).type}, expected {kind}")
        rows: list[dict[str, Any]] = pa.table(columns).to_pylist()
    return rows
