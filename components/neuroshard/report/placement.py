"""What lies where, as columns: devices with their costs and memory, tables, and the shards of them."""

from collections.abc import Sequence

from neuroshard.core.plan import Plan
from neuroshard.costmodel.pricing import Prices
from neuroshard.report.evaluated import Evaluated
from neuroshard.report.numbers import Columns, short


def device_columns(plan: Plan, live_ms: Sequence[float] | None) -> Columns:
    """A value a device. Costs are predicted ms, memory is exact bytes; `live_ms` what the live plan's devices would take."""
    columns: Columns = {
        "shards": list(plan.shards_by_device()),
        "memory": list(plan.memory_bytes()),
        "limit": list(plan.task.usable_bytes),
    }
    if plan.predicted:
        columns["compute"] = short(cost.compute_ms for cost in plan.predicted)
        columns["forward"] = short(cost.forward_comm_ms for cost in plan.predicted)
        columns["backward"] = short(cost.backward_comm_ms for cost in plan.predicted)
    if plan.predicted_ms:
        columns["total"] = short(plan.predicted_ms)
    if live_ms is not None:
        columns["live"] = short(live_ms)
    return columns


def evaluated_columns(plan: Plan, evaluated: Evaluated) -> Columns:
    """A value a device: ms as measured, null where an error was met, and the same part as predicted."""
    measured = [None if ms is None else short([ms])[0] for ms in evaluated.ms()]
    return {"measured": measured, "predicted": short(evaluated.predicted_ms(plan)) or [None] * len(measured)}


def table_columns(plan: Plan) -> Columns:
    """A value a table, in the order of the task."""
    tables = plan.task.tables
    return {
        "name": [table.name for table in tables],
        "rows": [table.rows for table in tables],
        "dim": [table.dim for table in tables],
        "pooling": short(table.pooling_factor for table in tables),
        "element": [table.element_bytes for table in tables],
    }


def shard_columns(plan: Plan, prices: Prices | None) -> Columns:
    """A value a shard; `table` is a place among the tables, `alone` and `adds` are predicted ms of compute."""
    place = {table.name: index for index, table in enumerate(plan.task.tables)}
    tables = plan.task.tables
    columns: Columns = {
        "table": [place[shard.table] for shard in plan.shards],
        "device": [shard.device for shard in plan.shards],
        "column": [shard.column_offset for shard in plan.shards],
        "dim": [shard.dim for shard in plan.shards],
        "row": [shard.row_offset for shard in plan.shards],
        "rows": [shard.rows for shard in plan.shards],
        "bytes": [tables[place[s.table]].shard_bytes(s.rows, s.dim) for s in plan.shards],
    }
    if prices is not None:
        columns |= {"alone": short(prices.alone_ms), "adds": short(prices.adds_ms)}
    return columns
