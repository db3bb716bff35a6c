"""Tables that give rows to ids as they train, which a plan has in one way only: row-wise over all devices."""

from collections.abc import Callable

import numpy as np

from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.operator_limits import Device, held, widest_shard
from neuroshard.core.plan import DeviceCost, Plan
from neuroshard.core.sharding import DATA_PARALLEL
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.copies import STAY
from neuroshard.search.given import Given
from neuroshard.search.problem.changes import compare
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
        if taken > usable - task.by_access.map_bytes:
            raise Infeasible(
                f"the blocks of {counted(len(task.mapped), 'table')} that give rows to ids as they train need "
                f"{format_bytes(taken, 'up')} on device {place}, which has {format_bytes(usable)}; give them fewer rows, or take "
                "more devices"
            )


def blocks_only(given: Given, copied: frozenset[str] = frozenset()) -> Plan:
    """The plan of a task without tables to place, or with copies of all these, the `copied` ones. Raises Infeasible where they do
    not fit."""
    task, model = given.task, given.cost_model
    if copied:
        task = task.with_copies(task.constraints.data_parallel | copied)
    if task.densely_trained:
        task = task.model_copy(update={"dense_optimizer": given.permitted.dense_optimizer})
    _check_room(task)
    shards = [*blocks_over_all(task.mapped, task.devices), *copies_of(task.copied, task.devices)]
    order = {table.name: place for place, table in enumerate(task.tables)}
    shards.sort(key=lambda shard: order[shard.table])
    changed = () if given.previous is None else compare(task, given.previous.plan)
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
        bound_assumptions=(STAY if copied else "no table can be held otherwise",),
        provenance=given.provenance((*given.notes, *changed)),
    )


def _check_room(task: ShardingTask) -> None:
    """Raise Infeasible where the blocks and copies of such a task do not fit a device."""
    copies = task.copies_bytes
    for place, (blocks, usable) in enumerate(zip(task.mapped_bytes, task.usable_bytes, strict=True)):
        if blocks + copies > usable - task.by_access.map_bytes:
            raise Infeasible(
                f"the blocks of {counted(len(task.mapped), 'table')} that give rows to ids as they train need "
                f"{format_bytes(blocks, 'up')} on device {place}, and the copies of "
                f"{counted(len(task.copied), 'data-parallel table')} {format_bytes(copies, 'up')}, but it has "
                f"{format_bytes(usable)}; let fewer be data-parallel, or take more devices"
            )


def or_every_copied(given: Given, found: Callable[[], Plan]) -> Plan:
    """The plan `found`, or the one with a copy of every table that is placed, where that is better: a search places some table.
    It must be worth that tables are trained otherwise, as any plan with copies; where none is found, it will do."""
    every = _every_copied(given)
    try:
        plan = found()
    except Infeasible:
        if every is None:
            raise
        return every
    if every is None or plan.cost_ms is None or every.cost_ms is None:
        return plan
    tuning, previous = given.settings.tuning, given.previous
    before = frozenset[str]() if previous is None else previous.plan.task.constraints.data_parallel
    mine, theirs = (one.task.constraints.data_parallel for one in (every, plan))
    worth = 1.0 if theirs > given.task.constraints.data_parallel or before & mine else 1 - tuning.copies_worth
    if mine <= before:  # nothing moves for next to no gain
        worth += tuning.worth_moving
    return every if every.cost_ms < plan.cost_ms * worth else plan


def _every_copied(given: Given) -> Plan | None:
    """The plan with a copy of every table that is placed; None where that may not be, or does not fit."""
    task, within_budget = given.task, given.previous is not None and given.settings.move_budget_bytes is not None
    placed = frozenset(table.name for table in task.placed)
    if not task.mapped or within_budget or not placed.issubset(given.may.get(DATA_PARALLEL, ())):
        return None
    try:
        return blocks_only(given, placed)
    except Infeasible:
        return None
