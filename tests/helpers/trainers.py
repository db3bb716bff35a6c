"""What tests of several trainers have in common: plans cut by hand, and what a checkpoint holds."""

from collections.abc import Collection, Sequence
from typing import Any

from helpers.plans import row_wise
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

Cuts = dict[str, list[tuple[int, int]]]  # (width, rank) from the left, by table; of no cuts: row-wise


def cut_plan(tables: Sequence[Table], ranks: int, cuts: Cuts, *, batch_size: int, copied: Collection[str] = ()) -> Plan:
    """Tables cut as said; those that are `copied` are whole on every rank."""
    shards: list[Shard] = []
    for table in tables:
        if table.name in copied:
            shards += [Shard(table=table.name, rows=table.rows, dim=table.dim, device=rank) for rank in range(ranks)]
            continue
        column = 0
        for width, rank in cuts[table.name]:
            shards.append(Shard(table=table.name, rows=table.rows, column_offset=column, dim=width, device=rank))
            column += width
        shards += [] if cuts[table.name] else row_wise(table, ranks)
    task = ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=(2**20,) * ranks,
        batch_size=batch_size,
        constraints=Constraints(tables=tuple(TableRule(table=name, data_parallel=True) for name in copied)),
    )
    return Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


class Saved:
    """A sharded model, and what a checkpoint of it holds."""

    model: Any

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.model.fused_optimizer.state_dict()}
