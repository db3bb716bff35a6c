"""Faults and oddities of a set of tables: `neuroshard tables --from FILE --check`."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from neuroshard.core.errors import InvalidInput
from neuroshard.core.operator_limits import MOST_ROWS_OF_INT32, equal_shards, held, widest_shard
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.text import counted, wrapped
from neuroshard.core.units import format_bytes
from neuroshard.files.importers.imported import Defaults, TableEntry

CACHE_LINE_BYTES = 64  # of CPUs; two of the sectors of 32 bytes that a GPU fetches
WASTED_SHARE = 0.25
STAYS_IN_CACHE_BYTES = 2**20  # a table of so much is read from an L2 cache, whatever its lines hold
DEVICE_BYTES = 80 * 2**30  # of an A100 or H100
MANY_LOOKUPS = 1_000
SHOWN = 5  # findings of the same kind that are printed


class Finding(NamedTuple):
    """`fault`: the table cannot be sharded as it is. `odd`: it can, but somebody should look."""

    table: str
    severity: Literal["fault", "odd"]
    what: str  # one word for programs
    message: str


def check_entries(entries: Sequence[TableEntry], defaults: Defaults) -> tuple[Finding, ...]:
    """All findings, in the order of the entries."""
    names = Counter(str(entry.fields.get("name")) for entry in entries)
    findings: list[Finding] = []
    for name, count in names.items():
        if count > 1:
            findings.append(
                Finding(
                    name,
                    "odd",
                    "duplicate",
                    f"{count} tables have this name; numbered here, but a trainer knows them as one",
                )
            )
    for entry in entries:
        name = str(entry.fields.get("name"))
        try:
            table = defaults.table(entry.fields, entry.where)
        except InvalidInput as error:
            findings.append(Finding(name, "fault", "rule", str(error) + _way_out(entry)))
        else:
            findings += check_table(table)
    return tuple(findings)


def check_table(table: Table) -> Iterator[Finding]:
    """The oddities of one valid table."""

    def odd(what: str, message: str) -> Finding:
        return Finding(table.name, "odd", what, message)

    if table.pooling_factor == 0:
        yield odd(
            "unread", f"pooling factor 0: never read, but occupies {format_bytes(table.memory_bytes)}; leave it out?"
        )
    elif not any(table.reuse_bins):
        yield odd(
            "unread",
            f"reuse_bins say that no row is read, pooling_factor that {table.pooling_factor:g} are; one is wrong",
        )
    elif table.pooling_factor < 0.01:
        yield odd(
            "rare", f"pooling factor {table.pooling_factor:g}: read once in {1 / table.pooling_factor:,.0f} samples"
        )
    if table.pooling_factor > MANY_LOOKUPS:
        yield odd(
            "many-lookups",
            f"{table.pooling_factor:,.0f} lookups a sample; is that of a batch, or a history to cut off?",
        )
    if table.rows == 1:
        yield odd("one-row", "one row: every lookup returns the same vector; use a bias instead")
    elif table.pooling_factor > table.rows:
        yield odd(
            "few-rows",
            f"{table.pooling_factor:g} lookups a sample of {table.rows:,} rows: each row is read several times a sample",
        )
    yield from _wide(table)
    if table.rows > MOST_ROWS_OF_INT32:
        yield odd("int64-ids", f"{table.rows:,} rows: ids must be int64, since int32 ends at 2^31")
    row_bytes, _ = table.row_bytes(table.dim)
    wasted = -row_bytes % CACHE_LINE_BYTES
    in_lines = row_bytes + wasted
    if wasted / in_lines > WASTED_SHARE and table.rows * in_lines > STAYS_IN_CACHE_BYTES:
        yield odd(
            "cache-line",
            f"a row of {row_bytes} bytes leaves {wasted / in_lines:.0%} of its cache lines ({CACHE_LINE_BYTES} bytes) unused",
        )
    narrow_bytes = table.with_dim(DIM_STEP).memory_bytes
    if narrow_bytes > DEVICE_BYTES:
        yield odd(
            "too-tall",
            f"even {DIM_STEP} of its columns take {format_bytes(narrow_bytes)}, more than 80 GiB; only cutting rows would fit it",
        )
    elif table.memory_bytes > DEVICE_BYTES:
        yield odd(
            "huge",
            f"{format_bytes(table.memory_bytes)} with optimizer state, more than 80 GiB: it must be cut column-wise",
        )


def _wide(table: Table) -> Iterator[Finding]:
    """What follows where GPUs do not hold the table uncut. A fault where it cannot be cut into shards that they hold."""
    most = widest_shard(table, "cuda")
    if most is None or table.dim <= most:
        return
    fewest = -(-table.dim // most)
    if table.pooling == "none" and not equal_shards(table.dim, most):
        wider = fewest * DIM_STEP * -(-table.dim // (fewest * DIM_STEP))
        yield Finding(
            table.name,
            "fault",
            "too-wide",
            f"{table.dim:,} columns of a sequence; {held(most, 'cuda')}, and they have no equal shards; "
            f"make it {wider:,}",
        )
        return
    yield Finding(
        table.name,
        "odd",
        "too-wide",
        f"{table.dim:,} columns; {held(most, 'cuda')}. For GPUs a search cuts it into {fewest} shards or more; it cannot be "
        "data-parallel, row-wise, or kept whole",
    )


def findings_json(findings: Sequence[Finding]) -> str:
    """A list of objects with table, severity, what and message."""
    return json.dumps([finding._asdict() for finding in findings], indent=2)


def findings_text(findings: Sequence[Finding], tables: int) -> str:
    """The findings, faults first, in lines of at most 80 columns; of many findings of a kind the first few."""
    if not findings:
        return f"{counted(tables, 'table')}, nothing odd"
    faults = sum(finding.severity == "fault" for finding in findings)
    lines = [f"{counted(tables, 'table')}: {counted(faults, 'fault')}, {len(findings) - faults:,} odd"]
    alike: dict[tuple[bool, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.severity != "fault", finding.what), []).append(finding)
    for _, found in sorted(alike.items()):
        for finding in found[:SHOWN]:
            lines += wrapped(f"  {finding.severity:<5}  {finding.table}: {finding.message}", indent=9)
        if len(found) > SHOWN:
            lines.append(f"  and {len(found) - SHOWN:,} more {found[0].what} (--json lists all)")
    return "\n".join(lines)


def _way_out(entry: TableEntry) -> str:
    dim = entry.fields.get("dim")
    if isinstance(dim, int) and dim > 0 and dim % DIM_STEP:
        return f"; make it {dim + -dim % DIM_STEP}"
    return ""
