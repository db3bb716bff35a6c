"""What FBGEMM's embedding operator can hold, by device and kind of table: one table of facts.

Above some widths the CUDA operator returns wrong rows without an error, so a shard that it may not hold is made by no search and
given to no trainer. "Read" is read in the source of FBGEMM (fbgemm_gpu/codegen/training), "tried" was run.

On CUDA, above 1,024 columns (read in v1.0 to v1.8, and in August 2026):

- Pooled tables with at most 8 lookups a sample: another forward kernel ends warps too early, and the last samples of a batch
  keep what memory held, mostly zeros (torchrec#3673, up to 1.6; FBGEMM#5569 mends it, a guard of all fused kinds, torchrec#3876,
  is not merged).
- Above 2,048 every kind is refused: `max_D <= 2048`, of sequences in the backward pass only.

A plan does not know which FBGEMM a trainer has, so 1,024 holds for all kinds and versions: a search loses little, as it cuts
wider tables. On CPUs (tried with 1.8) pooled tables give what torch gives up to 16,384 columns in fp32, sequences and copies up
to 65,536: our limits, not FBGEMM's.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import DIM_STEP, ELEMENT_BYTES, OPTIMIZER_BYTES, Table
from neuroshard.core.text import counted

Device = Literal["cuda", "cpu"]
Kind = Literal["pooled", "weighted", "sequence", "data-parallel"]


class Widths(NamedTuple):
    """Columns of a shard: the `widest` that a plan may have, and the widest that the operator does not refuse; None for any."""

    widest: int | None
    refused_above: int | None


class OperatorFacts(NamedTuple):
    """What the operator of a device holds and trains. Rows and elements: any that fit memory, by ids of int64; int32 ids reach
    2^31 - 1 rows. In a step it takes 2^31 - 1 lookups, and refuses more."""

    widths: Mapping[Kind, Widths]
    element_types: frozenset[str]
    optimizers: frozenset[str]


_CUDA, _CPU, _ANY = Widths(1024, 2048), Widths(16_384, None), Widths(None, None)
OPERATORS: Mapping[Device, OperatorFacts] = {
    "cuda": OperatorFacts(
        {"pooled": _CUDA, "weighted": _CUDA, "sequence": _CUDA, "data-parallel": _CUDA},
        frozenset(
            ELEMENT_BYTES
        ),  # of those that a table can have; bf16 weights are refused (read: DISPATCH_EMB_CACHE_TYPES)
        frozenset(OPTIMIZER_BYTES),
    ),
    "cpu": OperatorFacts(
        {"pooled": _CPU, "weighted": _CPU, "sequence": _ANY, "data-parallel": _ANY},
        frozenset(ELEMENT_BYTES),  # tried; bf16 weights are refused
        frozenset({"sgd", "adagrad", "rowwise_adagrad"}),  # tried; others are refused: "not supported in CPU mode"
    ),
}
# Columns of equal shards, where a table is cut only since it is too wide: in narrower ones, shards cost most
NARROW_DIM = 64
MOST_ROWS_OF_INT32 = 2**31 - 1
WHY: Mapping[Device, str] = {
    "cuda": "FBGEMM's CUDA operator holds {:,} columns (above, lookups may come back as zeros)",
    "cpu": "NeuroShard plans up to {:,} columns for FBGEMM's CPU operator (the widest that was compared with torch)",
}


def device_of(backend: str | None, name: str | None) -> Device:
    """Whose operator a plan by a cost model of this backend and name is for. Only costs of CPUs say that it is not CUDA's."""
    return "cpu" if backend == "cpu" or f"{name}*".startswith("analytic:cpu*") else "cuda"


def kind_of(table: Table, *, copied: bool = False) -> Kind:
    """The kind of operator that holds a table."""
    if copied:
        return "data-parallel"
    return "sequence" if table.pooling == "none" else "weighted" if table.weighted else "pooled"


def widest_shard(table: Table, device: Device, *, copied: bool = False) -> int | None:
    """Columns of the widest shard of a table that a device's operator holds; None for any."""
    return OPERATORS[device].widths[kind_of(table, copied=copied)].widest


def equal_shards(dim: int, widest: int, least: int = NARROW_DIM) -> list[int]:
    """The numbers of equal shards of `least` to `widest` columns that so many columns can be cut into, in order. TorchRec takes
    all column shards of a table on a rank to be equally wide, and those of sequences on all ranks (torchrec 1.8)."""
    steps = dim // DIM_STEP
    return [n for n in range(-(-dim // widest), dim // max(least, DIM_STEP) + 1) if steps % n == 0]


def widest_cut(table: Table, most: int) -> int | None:
    """Columns of the widest shard that a plan can have of a table, none of them wider than `most`; None if it has none."""
    if table.dim <= most:
        return table.dim
    equal, steps = equal_shards(table.dim, most), table.dim // DIM_STEP
    if not equal and table.pooling == "none":
        return None
    return DIM_STEP * -(-steps // (equal[0] if equal else -(-table.dim // most)))


def fault_of_plan(plan: Plan, device: Device) -> str:
    """Which shards of a plan a device's operator cannot hold, in words; empty if it holds all."""
    task = plan.parted
    return fault_of_shards(task.tables, plan.shards, device, task.constraints.data_parallel)


def fault_of_shards(
    tables: Iterable[Table], shards: Iterable[Shard], device: Device, copied: Collection[str] = ()
) -> str:
    """The same of shards of `tables`, of which the `copied` are data-parallel."""
    wide = _too_wide(tables, shards, device, copied)
    if not wide:
        return ""
    shard, most = wide[0]
    more = f" (and {counted(len(wide) - 1, 'table')} more)" if len(wide) > 1 else ""
    return (
        f"table {shard.table!r}{more} has a shard of {shard.dim:,} columns on rank {shard.device}; {held(most, device)}"
    )


def fault_of_tables(tables: Iterable[Table], device: Device) -> str:
    """Which of these tables, each a shard, a device's operator cannot hold, in words; empty if it holds all."""
    for table in tables:
        most = widest_shard(table, device)
        if most is not None and table.dim > most:
            return f"table {table.name!r} has {table.dim:,} columns; {held(most, device)}"
    return ""


def held(most: int, device: Device) -> str:
    """What a device's operator holds, and what happens above, in words."""
    return WHY[device].format(most)


def _too_wide(
    tables: Iterable[Table], shards: Iterable[Shard], device: Device, copied: Collection[str]
) -> list[tuple[Shard, int]]:
    """The first shard of each table that the operator cannot hold, with the columns that it can."""
    widest = {table.name: widest_shard(table, device, copied=table.name in copied) for table in tables}
    found: dict[str, tuple[Shard, int]] = {}
    for shard in shards:
        most = widest[shard.table]
        if most is not None and shard.dim > most:
            found.setdefault(shard.table, (shard, most))
    return list(found.values())
