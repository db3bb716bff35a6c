"""A plan printed by TorchRec's planner -> a Plan, and its estimated cost of each table -> given costs."""

from collections.abc import Callable, Sequence
from typing import Any

from neuroshard import __version__
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.operator_limits import fault_of_shards
from neuroshard.core.plan import DeviceCost, Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.topology import Topology
from neuroshard.core.units import format_bytes
from neuroshard.files.importers.sharding_stats import GIB, Printed, PrintedTable, host_notes

GIVEN_FORMAT = 1


def stats_plan(
    printed: Printed,
    tables: Sequence[Table],
    where: str,
    memory_bytes: int | None = None,
    hosts: Callable[[int], Topology | None] = lambda ranks: None,
) -> Plan:
    """The printed plan of the printed `tables`, in their order (names may have got a module): of all, or of the pooled ones.

    A device has `memory_bytes`, or what the planner used, less what these take; `hosts` says how so many ranks are joined, which
    is not printed. Predicted milliseconds are the planner's own, of all tables. Raises UsageError if the memory is unknown, and
    InvalidInput for an invalid plan.
    """
    if not all(table.ranks for table in printed.tables) or not printed.ranks:
        raise InvalidInput(f"{where}: the planner found no plan, so there is none to write, only tables")
    if memory_bytes is None and printed.memory_gib is None:
        raise UsageError(
            f"{where}: does not show the memory that the planner planned with; give --memory, as in --memory 80GiB"
        )
    all_of_them = len(tables) == len(printed.tables)
    wanted = [table for table in printed.tables if all_of_them or table.pooled]
    held = list(zip(wanted, tables, strict=True))
    copied = [ours.name for table, ours in held if table.sharding == "DP"]
    limit = memory_bytes if memory_bytes is not None else round((printed.memory_gib or 0) * GIB)
    free = [limit] * printed.ranks
    others = [table for table in printed.tables if table not in wanted]
    for table in others:
        for rank in table.ranks:
            # where HBM holds nothing of it, its memory is the host's; not printed by old versions: fp32
            held_bytes = (table.hbm_gib or table.stored_gib or table.rows * table.dim * 4 / GIB) * GIB
            free[rank] -= round(held_bytes / len(table.ranks))
    if min(free) < 1:
        raise InvalidInput(
            f"{where}: what is left out already takes more than a rank's {format_bytes(limit)}; give --memory"
        )
    task = ShardingTask.parse(
        {
            "tables": [ours.model_dump() for _, ours in held],
            "device_memory_bytes": free,
            "batch_size": printed.batch_size * printed.ranks,
            "topology": hosts(printed.ranks),
            "constraints": {"tables": [{"table": name, "data_parallel": True} for name in copied]},
        },
        where,
    )
    costs = [
        DeviceCost(compute_ms=compute, forward_collective_ms=forward, backward_collective_ms=backward)
        for compute, forward, backward in printed.rank_ms
    ]
    hint = (
        " (its planner may not count the optimizer's state; --memory says what a device has)"
        if memory_bytes is None
        else ""
    )
    shards = [Shard(**shard) for table, ours in held for shard in _shards(table, ours)]
    wide = fault_of_shards(task.tables, shards, "cuda", copied)
    notes = [*_notes(printed, held, others), *([f"on GPUs this plan trains wrongly: {wide}"] if wide else [])]
    if few := [ours.name for table, ours in held if not ours.has_rows_for(_row_blocks(table))]:
        notes.append(
            f"no trainer takes this plan, as it leaves ranks without rows of {first_few(few)}: FBGEMM may fail there"
        )
    return Plan.parse(
        {
            "task": task,
            "shards": shards,
            "predicted": costs,
            "predicted_ms": [cost.total_ms for cost in costs],
            "provenance": Provenance(
                neuroshard_version=__version__,
                algorithm="torchrec",
                cost_model="planner",
                cost_model_backend="given",
                cost_model_device="TorchRec's planner",
                notes=tuple(notes),
            ),
        },
        f"{where}: the printed plan{hint}",
    )


def given_costs(printed: Printed, tables: Sequence[Table], where: str) -> dict[str, Any]:
    """The content of a file for `--model given:FILE`: the planner's ms of every pooled table; sequence tables as `fixed_ms`.

    Raises InvalidInput unless each sequence table is on all ranks.
    """
    everywhere = tuple(range(printed.ranks))
    others = [table for table in printed.tables if not table.pooled]
    uneven = next((table.path for table in others if table.ranks != everywhere), None)
    if uneven:
        raise InvalidInput(
            f"{where}: sequence table {uneven!r} is on some ranks only, so its cost is not a fixed cost of all ranks"
        )
    pairs = zip(
        (table for table in printed.tables if table.pooled),
        (table for table in tables if table.pooling != "none"),
        strict=True,
    )
    return {
        "format_version": GIVEN_FORMAT,
        "batch_size": printed.batch_size * max(1, printed.ranks),
        "fixed_ms": sum(table.perf_ms for table in others) / max(1, printed.ranks),
        "device_name": "as TorchRec's planner printed",
        "tables": [{"name": ours.name, "cost_ms": table.perf_ms} for table, ours in pairs],
    }


def _notes(printed: Printed, held: Sequence[tuple[PrintedTable, Table]], others: Sequence[PrintedTable]) -> list[str]:
    notes = ["costs are the printed estimates of TorchRec's planner; they do not include waiting", *printed.notes]
    if others:
        notes.append(f"{counted(len(others), 'sequence table')} left out")
    notes += host_notes((table, ours.memory_bytes) for table, ours in held)
    return notes


def _row_blocks(printed: PrintedTable) -> int:
    """Blocks that its rows are split into, in each part of its columns."""
    parts = -(-printed.dim // printed.shard_dim)
    return 1 if printed.sharding == "DP" else max(len(printed.ranks) // parts, 1)


def _shards(printed: PrintedTable, table: Table) -> list[dict[str, Any]]:
    """The shards in the order of the ranks: column blocks of the printed width, each split row-wise over its ranks."""
    if printed.sharding == "DP":
        return [{"table": table.name, "rows": table.rows, "dim": table.dim, "device": rank} for rank in printed.ranks]
    widths = [min(printed.shard_dim, table.dim - at) for at in range(0, table.dim, printed.shard_dim)]
    row_blocks = _row_blocks(printed)
    if row_blocks * len(widths) != len(printed.ranks):
        raise InvalidInput(
            f"{printed.where}: {printed.path} is in {len(widths)} shards of columns, on {len(printed.ranks)} ranks"
        )
    block = -(-table.rows // row_blocks)
    shards = []
    for column, width in enumerate(widths):
        for row in range(row_blocks):
            rows = min(block, table.rows - row * block)
            if rows > 0:  # a table of few rows leaves ranks empty
                shards.append(
                    {
                        "table": table.name,
                        "row_offset": row * block,
                        "rows": rows,
                        "column_offset": column * printed.shard_dim,
                        "dim": width,
                        "device": printed.ranks[column * row_blocks + row],
                    }
                )
    return shards
