"""The folder that `augment` writes and `measure` reads: cases.json, compute.parquet, collective.parquet; tiers.parquet if any.

A compute case is a row of lists with an entry a table: name, rows, dim, pooling_factor. The rest of a table (reuse bins, bytes,
pooling) is that of the base table of this name in cases.json. cases.json is written last: a folder without it is unfinished.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase, TierCase
from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import DIM_STEP, MAX_DIM, MAX_ROWS, MOST_LOOKUPS, Table
from neuroshard.core.value import Value, check_format, decode_json, explain, shown, without_defaults
from neuroshard.files import parquet
from neuroshard.files.disk import disk_errors, only_writer, read_bytes, write_bytes, writing

_Case = TypeVar("_Case", ComputeCase, CollectiveCase, TierCase)

COMPUTE_CASE_FIELDS: list[tuple[str, pa.DataType]] = [
    ("case_id", pa.string()),
    ("split", pa.string()),
    ("table", pa.list_(pa.string())),
    ("rows", pa.list_(pa.int64())),
    ("dim", pa.list_(pa.int32())),
    ("pooling_factor", pa.list_(pa.float64())),
    ("batch_size", pa.int64()),
]
COLLECTIVE_CASE_FIELDS: list[tuple[str, pa.DataType]] = [
    ("case_id", pa.string()),
    ("split", pa.string()),
    ("device_dims", pa.list_(pa.int64())),
    ("start_delays_ms", pa.list_(pa.float64())),
]
# missing in folders without cases beyond HBM
TIER_CASE_FIELDS: list[tuple[str, pa.DataType]] = [
    *COMPUTE_CASE_FIELDS,
    ("tier", pa.string()),
    ("missed_share", pa.float64()),
]


class CasesManifest(Value):
    """cases.json: the base tables, and the numbers of cases in the Parquet files."""

    format_version: Literal[1] = 1
    tables: tuple[Table, ...]
    compute_cases: int
    collective_cases: int
    tier_cases: int = 0
    max_dim: Annotated[int, Field(gt=0, le=MAX_DIM)]
    seed: int

    @model_serializer(mode="wrap")
    def _without_defaults(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(fields(self), {"tier_cases": 0})


def write_cases(folder: Path, cases: Cases) -> None:
    """Write a case set. cases.json comes last, so that a killed run leaves no folder that looks complete.

    Raises InvalidInput if another run writes cases there.
    """
    manifest = CasesManifest(
        tables=cases.tables,
        compute_cases=len(cases.compute),
        collective_cases=len(cases.collective),
        tier_cases=len(cases.tiers),
        max_dim=cases.max_dim,
        seed=cases.seed,
    )
    compute = [compute_case_row(case) for case in cases.compute]
    collective = [collective_case_row(case) for case in cases.collective]
    with only_writer(folder, "cases"):
        with disk_errors(folder, "write to it"):
            (folder / "cases.json").unlink(missing_ok=True)
            (folder / "tiers.parquet").unlink(missing_ok=True)
        write_rows(folder / "compute.parquet", compute, COMPUTE_CASE_FIELDS)
        write_rows(folder / "collective.parquet", collective, COLLECTIVE_CASE_FIELDS)
        if cases.tiers:
            write_rows(folder / "tiers.parquet", list(map(tier_case_row, cases.tiers)), TIER_CASE_FIELDS)
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
    compute_path, collective_path = folder / "compute.parquet", folder / "collective.parquet"
    compute = [
        compute_case_from_row(row, base, f"{compute_path} row {index}")
        for index, row in enumerate(read_rows(compute_path, COMPUTE_CASE_FIELDS))
    ]
    collective = [
        collective_case_from_row(row, f"{collective_path} row {index}")
        for index, row in enumerate(read_rows(collective_path, COLLECTIVE_CASE_FIELDS))
    ]
    tiers_path = folder / "tiers.parquet"
    tiers = [
        tier_case_from_row(row, base, f"{tiers_path} row {index}")
        for index, row in enumerate(read_rows(tiers_path, TIER_CASE_FIELDS) if manifest.tier_cases else ())
    ]
    if (len(compute), len(collective)) != (manifest.compute_cases, manifest.collective_cases):
        raise InvalidInput(
            f"{path}: says {manifest.compute_cases} compute and {manifest.collective_cases} collective cases, but the Parquet "
            f"files hold {len(compute)} and {len(collective)}; make the cases again"
        )
    if len(tiers) != manifest.tier_cases:
        raise InvalidInput(
            f"{path}: says {manifest.tier_cases} cases beyond HBM, but {tiers_path.name} holds {len(tiers)}; make the cases again"
        )
    return Cases(
        tables=manifest.tables,
        compute=tuple(compute),
        collective=tuple(collective),
        tiers=tuple(tiers),
        max_dim=manifest.max_dim,
        seed=manifest.seed,
    )


def compute_case_row(case: ComputeCase) -> dict[str, Any]:
    return {
        "case_id": case.case_id,
        "split": case.split,
        "table": [t.name for t in case.tables],
        "rows": [t.rows for t in case.tables],
        "dim": [t.dim for t in case.tables],
        "pooling_factor": [t.pooling_factor for t in case.tables],
        "batch_size": case.batch_size,
    }


def tier_case_row(case: TierCase) -> dict[str, Any]:
    of_set = ComputeCase(tables=case.tables, split=case.split, batch_size=case.batch_size)
    own = {"case_id": case.case_id, "tier": case.tier, "missed_share": case.missed_share}
    return {**compute_case_row(of_set), **own}


def collective_case_row(case: CollectiveCase) -> dict[str, Any]:
    return {
        "case_id": case.case_id,
        "split": case.split,
        "device_dims": list(case.device_dims),
        "start_delays_ms": list(case.start_delays_ms),
    }


def compute_case_from_row(row: Mapping[str, Any], base: Mapping[str, Table], where: str) -> ComputeCase:
    """A row of lists as a ComputeCase, completed by the tables in `base`. Raises InvalidInput."""
    tables = _tables_from_row(row, base, where)
    try:
        case = ComputeCase(tables=tables, split=row["split"], batch_size=row["batch_size"])
    except ValidationError as error:
        raise InvalidInput(f"{where}: {explain(error)}") from None
    return check_case_id(case, row, where)


def tier_case_from_row(row: Mapping[str, Any], base: Mapping[str, Table], where: str) -> TierCase:
    """The same of a TierCase."""
    return check_case_id(TierCase.parse({**row, "tables": _tables_from_row(row, base, where)}, where), row, where)


def _tables_from_row(row: Mapping[str, Any], base: Mapping[str, Table], where: str) -> tuple[Table, ...]:
    columns = (row["table"], row["rows"], row["dim"], row["pooling_factor"])
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


def collective_case_from_row(row: Mapping[str, Any], where: str) -> CollectiveCase:
    """A row as a CollectiveCase. Raises InvalidInput."""
    return check_case_id(CollectiveCase.parse(row, where), row, where)


def check_case_id(case: _Case, row: Mapping[str, Any], where: str) -> _Case:
    """`case`, if its id is the one in the row. Raises InvalidInput."""
    if case.case_id != row["case_id"]:
        raise InvalidInput(f"{where}: case_id {shown(row['case_id'])} does not match its contents ({case.case_id})")
    return case


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], fields: list[tuple[str, pa.DataType]]) -> None:
    """Rows as one Parquet file, whole or not at all."""
    with writing(path) as temporary:
        table = pa.Table.from_pylist(list(rows), schema=pa.schema(fields))
        with temporary.open("wb") as file:  # given a path, pyarrow would try to parse it as a URL
            pq.write_table(table, file, write_page_checksum=True)


def read_rows(path: Path, fields: list[tuple[str, pa.DataType]]) -> list[dict[str, Any]]:
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
