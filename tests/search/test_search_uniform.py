"""Few tables on many devices: no plan that treats all tables alike is cheaper than what a search finds."""

import numpy as np
import pytest

from neuroshard.core.constraints import Constraints
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.run import search


def even(task: ShardingTask, parts: int) -> list[Shard]:
    """Every table in so many equal parts, one after another on the next devices."""
    shards, device = [], 0
    for table in task.tables:
        for part in range(parts):
            dim = table.dim // parts
            shards.append(Shard(table=table.name, rows=table.rows, column_offset=part * dim, dim=dim, device=device))
            device = (device + 1) % task.devices
    return shards


def row_wise(task: ShardingTask) -> list[Shard]:
    """Every table row-wise over all devices."""
    return [
        Shard(table=table.name, row_offset=offset, rows=rows, dim=table.dim, device=device)
        for table in task.tables
        for device, (offset, rows) in enumerate(table.row_blocks(task.devices))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [False, True])
def test_no_plan_that_treats_all_tables_alike_is_cheaper(seed, rows):
    rng, devices = np.random.default_rng(seed), (8, 16)[seed % 2]
    tables = tuple(
        Table(
            name=f"t{i}",
            rows=int(10 ** rng.uniform(4, 8)),
            dim=int(rng.choice([128, 256])),
            pooling_factor=float(rng.choice([1, 5, 20])),
        )
        for i in range(3 + seed)
    )
    nbytes = sum(table.memory_bytes for table in tables)
    task = ShardingTask(
        tables=tables, device_memory_bytes=(nbytes,) * devices, batch_size=2048, constraints=Constraints(row_wise=rows)
    )
    model, known = analytic_model("h100", 2048), {table.name: table for table in tables}
    plan = search(task, model, rounds=4)
    others = [even(task, parts) for parts in (1, 2, 4, 8, 16)] + ([row_wise(task)] if rows else [])
    cheapest = min(price_shards(model, known, shards, devices).total_ms.max() for shards in others)
    assert plan.cost_ms <= cheapest * (1 + 1e-9)
