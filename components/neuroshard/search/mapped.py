"""Tables that give rows to ids as they train, which a plan has in one way only: row-wise over all devices."""

import numpy as np

from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.operator_limits import Device, held, widest_shard
from neuroshard.core.plan import DeviceCost, Plan
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.given import Given
from neuroshard.search.problem.kinds import blocks_over_all, copies_of


def check_mapped(task: ShardingTask, model: CostModel, device: Device) -> None:
    """Raise Infeasible where the blocks of such tables do not fit a device, or its operator, and UsageError where the cost model
    prices no rows."""
    if not task.mapped:
        return
    if not model.prices_rows:
        raise UsageError(
            f"table {task.mapped[0].name!r} gives rows to ids as it trains, so it is row-wise over all devices, and given costs "
            "are of whole tables; take a cost model that prices rows (measured, or analytic:DEVICE)"
        )
    for table in task.mapped:
        most = widest_shard(table, device)
        if most is not None and table.dim > most:
            raise Infeasible(
                f"table {table.name!r} gives rows to ids as it trains and has {table.dim:,} columns, all of them in each block "
                f"of rows; {held(most, device)}: give it fewer"
            )
    for place, (taken, usable) in enumerate(zip(task.mapped_bytes, task.usable_bytes, strict=True)):
        if taken > usable:
            raise Infeasible(
                f"the blocks of {counted(len(task.mapped), 'table')} that give rows to ids as they train need "
                f"{format_bytes(taken, 'up')} on device {place}, which has {format_bytes(usable)}; give them fewer rows, or take "
                "more devices"
            )


def blocks_only(given: Given) -> Plan:
    """The plan of a task without tables to place."""
    task, model = given.task, given.cost_model
    shards = [*blocks_over_all(task.mapped, task.devices), *copies_of(task.copied, task.devices)]
    order = {table.name: place for place, table in enumerate(task.tables)}
    shards.sort(key=lambda shard: order[shard.table])
    prices = price_shards(model, task, shards)
    assert prices is not None
    each = (prices.compute_ms, prices.forward_collective_ms, prices.backward_collective_ms)
    if not all(np.isfinite(ms).all() and ms.min() >= 0 for ms in each):
        raise InvalidInput(f"cost model {model.name} predicts no valid cost of the tables' row blocks; train it again")
    costs = [
        DeviceCost(compute_ms=compute, forward_collective_ms=forward, backward_collective_ms=backward)
        for compute, forward, backward in zip(*(ms.tolist() for ms in each), strict=True)
    ]
    return Plan(
        task=task,
        shards=tuple(shards),
        predicted_ms=tuple(cost.total_ms for cost in costs),
        predicted=tuple(costs),
        lower_bound_ms=max(cost.total_ms for cost in costs),
        bound_assumptions=("no table can be held otherwise",),
        provenance=given.provenance(given.notes),
    )
