"""Tables of which every device has a copy: they take the same on every device.

A search places the other tables in the memory that the copies leave. What the copies cost is added to its plan afterwards. Which
tables to copy is decided before (`worth_copying`), by first plans.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from math import inf

from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.launches import launches
from neuroshard.core.plan import Baseline, DeviceCost, Improvement, Plan, Shard, device_memory
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.pricing import LaunchMs, copies_ms, launch_ms
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.infeasible.feasibility import feasible
from neuroshard.search.proposers.registry import propose
from neuroshard.search.tuning import Tuning

STAY = "data-parallel tables stay so, and no others become so"


class Copies:
    """The data-parallel tables of a task, and the `rest` of it: the other tables on devices with less memory.

    Raises Infeasible where the copies need more than a device has.
    """

    def __init__(self, task: ShardingTask) -> None:
        names = task.constraints.data_parallel
        self.task = task
        self.tables: Sequence[Table] = [table for table in task.tables if table.name in names]
        self.shards = tuple(
            Shard(table=table.name, rows=table.rows, dim=table.dim, device=device)
            for table in self.tables
            for device in range(task.devices)
        )
        taken = [memory.total for memory in device_memory(task, self.shards)]
        short = next((d for d, usable in enumerate(task.usable_bytes) if usable <= taken[d]), None)
        if short is not None:
            raise Infeasible(
                f"the copies of {counted(len(self.tables), 'data-parallel table')} need {format_bytes(taken[short], 'up')} on "
                f"every device, and device {short} has {format_bytes(task.usable_bytes[short])}; let fewer be data-parallel"
            )
        if len(self.tables) == len(task.tables):
            raise Infeasible("every table is data-parallel: there is nothing to place; leave one out")
        left = tuple(usable - used for usable, used in zip(task.usable_bytes, taken, strict=True))
        self.rest = _task_of(task, [table for table in task.tables if table.name not in names], left)

    def without(self, plan: Plan) -> Plan:
        """A plan of other days without these tables, so that a search may start from it."""
        names = {table.name for table in self.tables} | plan.task.constraints.data_parallel
        kept = [table for table in plan.task.tables if table.name not in names]
        task = _task_of(plan.task, kept, plan.task.usable_bytes)
        shards = tuple(shard for shard in plan.shards if shard.table not in names)
        return Plan(task=task, shards=shards, provenance=plan.provenance)

    def added_to(self, plan: Plan, model: CostModel) -> Plan:
        """The plan of the whole task, from the plan of the rest."""
        more = copies_ms(model, self.tables, self.task)
        tables = {table.name: table for table in self.task.tables}
        before, after = (
            launches(tables, shards, self.task.devices).reordered
            for shards in (plan.shards, (*plan.shards, *self.shards))
        )
        joined = launch_ms(model, self.task.devices, 0, 0, reordered=after - before)  # to the outputs of the copies
        more = LaunchMs(*(own + one for own, one in zip(more, joined, strict=True)))
        predicted = plan.predicted and tuple(
            DeviceCost(
                compute_ms=cost.compute_ms + more.compute_ms,
                forward_collective_ms=cost.forward_collective_ms + more.forward_ms,
                backward_collective_ms=cost.backward_collective_ms + more.backward_ms,
            )
            for cost in plan.predicted
        )
        shards: dict[str, list[Shard]] = {table.name: [] for table in self.task.tables}
        for shard in (*plan.shards, *self.shards):
            shards[shard.table].append(shard)
        names = first_few([table.name for table in self.tables])
        note = (
            f"{counted(len(self.tables), 'table')} data-parallel ({names}): their gradients are dense and summed up over all "
            f"devices ({more.backward_ms:.3g} ms), and the trainer's dense optimizer trains them"
        )
        bound = plan.lower_bound_ms
        return Plan(
            task=self.task,
            shards=tuple(shard for held in shards.values() for shard in held),
            predicted=predicted,
            predicted_ms=predicted and tuple(cost.total_ms for cost in predicted),
            baselines=tuple(_with(more.total_ms, each) for each in plan.baselines),
            lower_bound_ms=None if bound is None else bound + more.total_ms,
            bound_assumptions=(*plan.bound_assumptions, *([] if bound is None else [STAY])),
            improvements=tuple(
                Improvement(step=one.step, cost_ms=one.cost_ms + more.total_ms) for one in plan.improvements
            ),
            provenance=plan.provenance.model_copy(update={"notes": (*plan.provenance.notes, note)}),
        )


def worth_copying(task: ShardingTask, model: CostModel, tuning: Tuning) -> tuple[str, ...]:
    """The tables, beside those of which there are copies anyway, whose copies make first plans cheaper by `copies_worth`.

    A copy of a table saves a device its outputs, of as many columns for all samples, and takes gradients of as many columns for
    all rows: the fewer rows, the better. So of the tables in order of their rows those of at most 1, 2, 4, … rows are tried,
    until the copies alone take longer than the best plan, and then numbers of tables between the best and its neighbours.
    """
    tables = _may_be_copied(task)
    names = [table.name for table in tables]
    known: dict[int, float] = {}

    def cost(count: int) -> float:
        if count not in known:
            known[count] = _first_cost(with_copies(task, names[:count]), model, tuning)
        return known[count]

    rows = [table.rows for table in tables]
    powers = range(max(rows, default=1).bit_length() + 1)
    counts = sorted({0, *(bisect_right(rows, 2**power) for power in powers)})
    best = 0
    for count in counts:
        if copies_ms(model, tables[:count], task).total_ms > cost(best):
            break
        best = min(best, count, key=cost)
    place = counts.index(best)
    low, high = counts[max(place - 1, 0)], counts[min(place + 1, len(counts) - 1)]
    while high - low > 2:
        low, high = (low + best + 1) // 2, (best + high) // 2
        best = min((low, best, high), key=cost)
    return tuple(names[:best]) if cost(best) < cost(0) * (1 - tuning.copies_worth) else ()


def with_copies(task: ShardingTask, names: Collection[str]) -> ShardingTask:
    """The task with the rule that these tables are data-parallel."""
    rules = dict(task.constraints.rules())
    rules |= {name: TableRule(table=name, data_parallel=True) for name in names}
    ordered = tuple(rules[table.name] for table in task.tables if table.name in rules)
    return task.model_copy(update={"constraints": task.constraints.model_copy(update={"tables": ordered})})


def _may_be_copied(task: ShardingTask) -> list[Table]:
    """Tables without a rule that are no sequences, those of the fewest rows first; all but one of them, if they are all."""
    constraints = task.constraints
    ruled = {*constraints.rules(), *(name for group in constraints.together for name in group)}
    free = [table for table in task.tables if table.name not in ruled and table.pooling != "none"]
    ordered = sorted(free, key=lambda table: (table.rows, table.dim, table.name))
    return ordered[: len(task.tables) - len(constraints.data_parallel) - 1]


def _first_cost(task: ShardingTask, model: CostModel, tuning: Tuning) -> float:
    """Ms of the cheapest first plan, infinite if there is none: row-wise ones too where the task allows them."""
    model = for_task(model, task)
    try:
        copies = Copies(task) if task.constraints.data_parallel else None
        problem = feasible(copies.rest if copies else task, model, tuning)
    except Infeasible:
        return inf
    plans = [*propose("greedy", problem), *propose("row_wise", problem)]
    cheapest = min((plan.cost for plan in plans), default=inf)
    return cheapest + (copies_ms(model, copies.tables, task).total_ms if copies else 0.0)


def _task_of(task: ShardingTask, tables: Sequence[Table], memory_bytes: tuple[int, ...]) -> ShardingTask:
    """A task of these tables alone, on devices with this memory for tables."""
    names = {table.name for table in tables}
    constraints = task.constraints
    rules = tuple(rule for rule in constraints.tables if rule.table in names and not rule.data_parallel)
    together = tuple(group for group in constraints.together if set(group) <= names)
    rest = {"tables": rules, "together": together, "reserve_bytes": 0, "reserve_share": 0.0}
    return ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=memory_bytes,
        batch_size=task.batch_size,
        pipeline=task.pipeline,
        topology=task.topology,
        collective_precision=task.collective_precision,
        constraints=Constraints(**{**constraints.model_dump(), **rest}),
    )


def _with(more_ms: float, baseline: Baseline) -> Baseline:
    if baseline.predicted_ms is None:
        return baseline
    return baseline.model_copy(update={"predicted_ms": tuple(ms + more_ms for ms in baseline.predicted_ms)})
