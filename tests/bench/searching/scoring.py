"""One scorer for every method: a plan is rows of (table, columns, device, rows of the table), whoever made it."""

from collections.abc import Iterable, Sequence

import numpy as np

from neuroshard.core.launches import launches, operators_of
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.pricing import block_columns, launch_ms
from neuroshard.costmodel.protocol import CostModel, Floats, device_costs

Row = tuple[int, int, int, int]  # table by place in the task, columns, device, rows of the table


def rows_of(plan: Plan) -> list[Row]:
    place = {table.name: index for index, table in enumerate(plan.task.tables)}
    return [(place[shard.table], shard.dim, shard.device, shard.rows) for shard in plan.shards]


def cost_ms(model: CostModel, task: ShardingTask, rows: Sequence[Row]) -> float:
    """Milliseconds of the slowest device, priced from scratch: what it holds, and the operators and collectives of the plan."""
    return float(np.sum(device_costs(model, *sums(model, task, rows)), axis=0).max()) + launched_ms(model, task, rows)


def launched_ms(model: CostModel, task: ShardingTask, rows: Sequence[Row]) -> float:
    """Milliseconds of the operators and collectives of a plan, and of putting its outputs into order."""
    shards = [
        Shard(table=task.tables[table].name, rows=count, dim=dim, device=device) for table, dim, device, count in rows
    ]
    counted = launches(task, shards)
    operators = counted.kinds_of_operators - operators_of(task.tables)
    return launch_ms(model, task.devices, operators, counted.outputs - 1, reordered=counted.reordered).total_ms


def sums(model: CostModel, task: ShardingTask, rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Vectors and columns sent of each device: (D, K) and (D,). Some rows of a table are a table of their own."""
    parts, device = [Part(task.tables[t], count, dim) for t, dim, _, count in rows], [row[2] for row in rows]
    vectors = model.part_vectors(parts)
    found, columns = np.zeros((task.devices, vectors.shape[1])), np.zeros(task.devices)
    np.add.at(found, device, vectors)
    sent = [part.sent_columns if part.rows == part.table.rows else block_columns(model, part) for part in parts]
    np.add.at(columns, device, sent)
    return found, columns


def fault(task: ShardingTask, rows: Iterable[Row]) -> str | None:
    """Why these rows are no plan of the task: columns or rows missing or too many, cut both ways, or a device over its memory."""
    columns, blocks, used = [0] * len(task.tables), [0] * len(task.tables), [0] * task.devices
    for table, dim, device, count in rows:
        whole = task.tables[table]
        if count == whole.rows:
            columns[table] += dim
        elif dim == whole.dim:
            blocks[table] += count
        else:
            return f"table {whole.name!r} is cut row-wise and column-wise"
        used[device] += Part(whole, count, dim).memory().total
    for whole, wide, high in zip(task.tables, columns, blocks, strict=True):
        if (wide, high) not in ((whole.dim, 0), (0, whole.rows)):
            return f"table {whole.name!r} has {wide} of {whole.dim} columns and {high} of {whole.rows} rows in blocks"
    for device, (need, have) in enumerate(zip(used, task.device_memory_bytes, strict=True)):
        if need > have:
            return f"device {device} needs {need:,} of {have:,} bytes"
    return None
