"""One scorer for every method: a plan is rows of (table, columns, device), whoever made it."""

from collections.abc import Iterable, Sequence

import numpy as np

from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, device_costs

Row = tuple[int, int, int]  # table by place in the task, columns, device


def rows_of(plan: Plan) -> list[Row]:
    place = {table.name: index for index, table in enumerate(plan.task.tables)}
    return [(place[shard.table], shard.dim, shard.device) for shard in plan.shards]


def cost_ms(model: CostModel, task: ShardingTask, rows: Sequence[Row]) -> float:
    """Milliseconds of the slowest device, priced from scratch."""
    table, dims, device = np.array(rows, dtype=np.int64).T
    vectors = model.table_vectors([task.tables[t] for t in table], dims)
    sums, columns = np.zeros((task.devices, vectors.shape[1])), np.zeros(task.devices)
    np.add.at(sums, device, vectors)
    np.add.at(columns, device, dims)
    return float(sum(device_costs(model, sums, columns)).max())


def fault(task: ShardingTask, rows: Iterable[Row]) -> str | None:
    """Why these rows are no plan of the task: columns missing or too many, or a device over its memory."""
    columns, used = [0] * len(task.tables), [0] * task.devices
    for table, dim, device in rows:
        columns[table] += dim
        used[device] += task.tables[table].shard_bytes(task.tables[table].rows, dim)
    for table, count in zip(task.tables, columns, strict=True):
        if count != table.dim:
            return f"table {table.name!r} has {count} of {table.dim} columns"
    for device, (need, have) in enumerate(zip(used, task.device_memory_bytes, strict=True)):
        if need > have:
            return f"device {device} needs {need:,} of {have:,} bytes"
    return None
