"""Tables of which every device has a copy: they take the same on every device.

A search places the other tables in the memory that the copies leave. What the copies cost is added to its plan afterwards. Which
tables to copy is decided before (`worth_copying`), by plans that are improved a little.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from math import inf

import numpy as np

from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import Infeasible
from neuroshard.core.launches import launches
from neuroshard.core.moves import arriving_bytes
from neuroshard.core.operator_limits import Device, held, widest_shard
from neuroshard.core.plan import Baseline, DeviceCost, Improvement, Plan, Shard, device_memory
from neuroshard.core.table import DenseOptimizer, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.pricing import LaunchMs, copies_ms, launch_ms
from neuroshard.costmodel.protocol import CostModel, trains_on
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.infeasible.feasibility import any_plan, feasible
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.registry import propose
from neuroshard.search.settings import SearchSettings
from neuroshard.search.watch import Watch

STAY = "data-parallel tables stay so, and no others become so"
ASSUMED: DenseOptimizer = "adam"  # of the usual dense optimizers the one with most state


class Copies:
    """The data-parallel tables of a task, and the `rest` of it: the other tables on devices with less memory.

    Where the task names no dense optimizer, copies are taken to be trained by the ASSUMED one. Raises Infeasible where the copies
    need more than a device has, or are wider than the operator of `device` holds.
    """

    def __init__(self, task: ShardingTask, device: Device) -> None:
        names = task.constraints.data_parallel
        assumed = " (assumed; --dense-optimizer says another)" * (task.dense_optimizer is None)
        self.task = task = with_dense_optimizer(task)
        self.memory_as = f"with gradients and the state of {task.dense_optimizer}{assumed}"
        self.tables: Sequence[Table] = [table for table in task.tables if table.name in names]
        _check_widths(self.tables, device)
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
                f"every device, {self.memory_as}, and device {short} has {format_bytes(task.usable_bytes[short])}; let fewer be "
                "data-parallel"
            )
        if len(self.tables) == len(task.tables):
            raise Infeasible("every table is data-parallel: there is nothing to place; leave one out")
        left = tuple(usable - used for usable, used in zip(task.usable_bytes, taken, strict=True))
        self.rest = _task_of(task, [table for table in task.tables if table.name not in names], left)

    def budget_left(self, plan: Plan, budget_bytes: int) -> int:
        """Of a budget of bytes to move from this plan, what copies leave that it does not have. Raises Infeasible."""
        before, dims = plan.by_table(), {table.name: table.dim for table in plan.task.tables}
        held = [before[table.name] if dims.get(table.name) == table.dim else () for table in self.tables]
        arriving = sum(
            arriving_bytes(
                table,
                shards,
                [shard for shard in self.shards if shard.table == table.name],
                copied_before=table.name in plan.task.constraints.data_parallel,
                copied_after=True,
            )
            for table, shards in zip(self.tables, held, strict=True)
        )
        if arriving > budget_bytes:
            raise Infeasible(
                f"new copies of data-parallel tables take {format_bytes(arriving, 'up')} to move, more than the budget of "
                f"{format_bytes(budget_bytes)}; give a larger --move-budget, or let fewer be data-parallel"
            )
        return budget_bytes - arriving

    def without(self, plan: Plan) -> Plan | None:
        """A plan of other days without these tables, so that a search may start from it; None if it has no others."""
        names = {table.name for table in self.tables}
        kept = [table for table in plan.task.tables if table.name not in names]
        if not kept:
            return None
        task = _task_of(plan.task, kept, plan.task.usable_bytes)
        shards = tuple(shard for shard in plan.shards if shard.table not in names)
        return Plan(task=task, shards=shards, provenance=plan.provenance)

    def ms(self, model: CostModel) -> float:
        """What the copies take on every device where no rows are split beside them, which saves some of the order of outputs."""
        _, most = self._joined(self.rest)
        ordered = launch_ms(model, self.task.devices, 0, 0, reordered=most)
        return copies_ms(model, self.tables, self.task).total_ms + ordered.total_ms

    def added_to(self, plan: Plan, model: CostModel) -> Plan:
        """The plan of the whole task, from the plan of the rest, with what its search permitted itself."""
        constraints = self.task.constraints.model_copy(update={"row_wise": plan.task.constraints.row_wise})
        task = self.task.model_copy(update={"constraints": constraints})
        more = copies_ms(model, self.tables, task)

        def ordering(columns: float) -> LaunchMs:
            return launch_ms(model, task.devices, 0, 0, reordered=columns)

        before, after = (
            launches(one, shards).reordered
            for one, shards in ((plan.task, plan.shards), (task, (*plan.shards, *self.shards)))
        )
        joined = ordering(after - before)  # to the outputs of the copies
        least, most = (more.total_ms + ordering(columns).total_ms for columns in self._joined(plan.task))
        more = LaunchMs(*(own + one for own, one in zip(more, joined, strict=True)))
        predicted = plan.predicted and tuple(
            DeviceCost(
                compute_ms=cost.compute_ms + more.compute_ms,
                forward_collective_ms=cost.forward_collective_ms + more.forward_ms,
                backward_collective_ms=cost.backward_collective_ms + more.backward_ms,
            )
            for cost in plan.predicted
        )
        shards: dict[str, list[Shard]] = {table.name: [] for table in task.tables}
        for shard in (*plan.shards, *self.shards):
            shards[shard.table].append(shard)
        names = first_few([table.name for table in self.tables])
        nbytes = sum(task.copy_memory(table).total for table in self.tables)
        note = (
            f"{counted(len(self.tables), 'table')} data-parallel ({names}): their gradients are dense and summed up over all "
            f"devices ({more.backward_ms:.3g} ms), and the trainer's dense optimizer trains them; they take "
            f"{format_bytes(nbytes, 'up')} of every device, {self.memory_as}"
        )
        bound = plan.lower_bound_ms
        return Plan(
            task=task,
            shards=tuple(shard for held in shards.values() for shard in held),
            predicted=predicted,
            predicted_ms=predicted and tuple(cost.total_ms for cost in predicted),
            baselines=tuple(_with(most, each) for each in plan.baselines),
            lower_bound_ms=None if bound is None else bound + least,
            bound_assumptions=(*plan.bound_assumptions, *([] if bound is None else [STAY])),
            improvements=tuple(
                Improvement(step=one.step, cost_ms=one.cost_ms + more.total_ms) for one in plan.improvements
            ),
            provenance=plan.provenance.model_copy(update={"notes": (*plan.provenance.notes, note)}),
        )

    def _joined(self, rest: ShardingTask) -> tuple[float, float]:
        """Columns of outputs that are concatenated because of the copies: at least, and where the rest is not split row-wise.

        These are all outputs of a collection that has other tables too, or only those of the copies where the others are
        concatenated anyway, having several sharding types.
        """
        least = most = 0.0
        may_split_rows = set(rest.may_split_rows)
        for key in {(table.module, table.weighted) for table in self.tables}:
            others = [t for t in rest.tables if (t.module, t.weighted) == key and t.pooling != "none"]
            if not others:
                continue
            own = sum(table.sent_columns for table in self.tables if (table.module, table.weighted) == key)
            rest_columns = sum(table.sent_columns for table in others)
            several_types = len(others) > 1 and any(table.name in may_split_rows for table in others)
            most += own + rest_columns
            least += own if several_types else own + rest_columns
        return least, most


def worth_copying(
    task: ShardingTask, model: CostModel, settings: SearchSettings, watch: Watch, stay: Collection[str] = ()
) -> tuple[str, ...]:
    """The tables, beside those of which there are copies anyway, whose copies make improved plans cheaper by `copies_worth`. The
    tables that `stay` sharded are none of them.

    A copy of a table saves a device its outputs, of as many columns for all samples, and takes gradients of as many columns for
    all rows: the fewer rows, the better. So of the tables in order of their rows those of at most 1, 2, 4, … rows are tried,
    until the copies alone take longer than the best first plan, or the time is up. First plans are up to a tenth off, so the
    numbers of tables whose first plans cost little more than the best are compared by improved ones, and then numbers between
    the best and its neighbours.
    """
    tables, tuning = may_be_copied(task, stay, trains_on(model))[: _most_copied(task)], settings.tuning

    @cache
    def copying(count: int) -> _Try:
        return _Try(task, tables[:count], model, settings, watch)

    rows = [table.rows for table in tables]
    powers = range(max(rows, default=1).bit_length() + 1)
    counts = sorted({0, *(bisect_right(rows, 2**power) for power in powers)})
    least = inf
    for place, count in enumerate(counts):
        if copying(count).copies_ms > least or (place and watch.expired):
            counts = counts[:place]
            break
        least = min(least, copying(count).first_ms)

    def improved_ms(count: int) -> float:
        return copying(count).improved_ms

    near = [count for count in counts if copying(count).first_ms <= least * (1 + tuning.copies_compared)]
    best = min(near, key=improved_ms)
    place = counts.index(best)
    low, high = counts[max(place - 1, 0)], counts[min(place + 1, len(counts) - 1)]
    while high - low > 2 and not watch.expired:
        low, high = (low + best + 1) // 2, (best + high) // 2
        best = min((low, best, high), key=improved_ms)
    names = tuple(table.name for table in tables[:best])
    return names if improved_ms(best) < improved_ms(0) * (1 - tuning.copies_worth) else ()


def rescuing(
    task: ShardingTask, model: CostModel, settings: SearchSettings, watch: Watch, stay: Collection[str] = ()
) -> tuple[str, ...]:
    """Tables whose copies make a task fit of which nothing fits without; none if no such are found.

    A copy needs the inputs and outputs of a device's own samples; a whole table, or a column shard, those of all samples. So the
    tables are tried that need less of a device as a copy than whole, those that need least in comparison first.
    """

    dense = with_dense_optimizer(task)

    def relief(table: Table) -> int:
        return dense.shard_bytes(table, table.rows, table.dim) - dense.copy_memory(table).total

    free = may_be_copied(task, stay, trains_on(model))
    tables = sorted((table for table in free if relief(table) > 0), key=relief, reverse=True)[: _most_copied(task)]
    counts = sorted({len(tables), *(2**power for power in range(len(tables).bit_length()))} - {0})
    tries = [_Try(task, tables[:count], model, settings, watch) for count in counts]
    best = min(tries, key=lambda one: one.first_ms, default=None)
    if best is None or best.first_ms == inf:
        return ()
    return tuple(best.task.constraints.data_parallel - task.constraints.data_parallel)


class _Try:
    """A task with copies of these tables too: what they and the plans of the rest take, in ms; infinite where nothing fits."""

    def __init__(
        self, task: ShardingTask, copied: Sequence[Table], model: CostModel, settings: SearchSettings, watch: Watch
    ) -> None:
        self.task = task.with_copies(task.constraints.data_parallel.union(table.name for table in copied))
        self.model, self.settings, names = for_task(model, task), settings, self.task.constraints.data_parallel
        self.copies_ms = copies_ms(self.model, [table for table in task.tables if table.name in names], task).total_ms
        self.watch = watch

    @cached_property
    def first_plans(self) -> list[State]:
        """Plans of the tables that are not copied, cheapest first: row-wise ones too where the task allows them."""
        try:
            device = trains_on(self.model)
            rest = Copies(self.task, device).rest if self.task.constraints.data_parallel else self.task
            problem = feasible(rest, for_task(self.model, rest), self.settings.tuning, hinting=False)
            plans = [plan for name in ("greedy", "row_wise") for plan in propose(name, problem, self.settings.seed)]
            return sorted(plans or [State(*any_plan(problem, hinting=False))], key=lambda plan: plan.cost)
        except Infeasible:
            return []

    @property
    def first_ms(self) -> float:
        return min((plan.cost + self.copies_ms for plan in self.first_plans[:1]), default=inf)

    @cached_property
    def improved_ms(self) -> float:
        """The same after the cheapest first plans were improved once, as far as there is time."""
        some = self.first_plans[: self.settings.tuning.lockstep_plans]
        if not some:
            return inf
        return LocalSearch(some, np.random.default_rng(self.settings.seed), self.watch).best.cost + self.copies_ms


def with_dense_optimizer(task: ShardingTask) -> ShardingTask:
    """The task with a dense optimizer: the ASSUMED one where it names none."""
    return task.model_copy(update={"dense_optimizer": task.dense_optimizer or ASSUMED})


def _check_widths(tables: Sequence[Table], device: Device) -> None:
    """Raise Infeasible for a table that the operator cannot hold whole, as copies are."""
    for table in tables:
        most = widest_shard(table, device, copied=True)
        if most is not None and table.dim > most:
            raise Infeasible(
                f"table {table.name!r} is data-parallel and has {table.dim:,} columns, all of them in a copy; "
                f"{held(most, device)}: leave it out of the data-parallel tables, so that it is cut"
            )


def may_be_copied(task: ShardingTask, stay: Collection[str], device: Device) -> list[Table]:
    """Tables without a rule that are no sequences, need not `stay` and are not too wide, those of the fewest rows first."""
    constraints = task.constraints
    ruled = {*stay, *constraints.rules(), *(name for group in constraints.together for name in group)}
    free = [
        table
        for table in task.tables
        if table.name not in ruled
        and table.pooling != "none"
        and table.dim <= (widest_shard(table, device, copied=True) or table.dim)
    ]
    return sorted(free, key=lambda table: (table.rows, table.dim, table.name))


def _most_copied(task: ShardingTask) -> int:
    """How many more tables may be copied: one must be left."""
    return len(task.tables) - len(task.constraints.data_parallel) - 1


def _task_of(task: ShardingTask, tables: Sequence[Table], memory_bytes: tuple[int, ...]) -> ShardingTask:
    """A task of these tables alone, on devices with this memory for tables."""
    names = {table.name for table in tables}
    constraints = task.constraints
    rules = tuple(rule for rule in constraints.tables if rule.table in names)
    together = tuple(group for group in constraints.together if set(group) <= names)
    rest = {"tables": rules, "together": together, "reserve_bytes": 0, "reserve_share": 0.0}
    return ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=memory_bytes,
        batch_size=task.batch_size,
        pipeline=task.pipeline,
        topology=task.topology,
        collective_precision=task.collective_precision,
        dense_optimizer=task.dense_optimizer,
        constraints=Constraints(**{**constraints.model_dump(), **rest}),
    )


def _with(more_ms: float, baseline: Baseline) -> Baseline:
    if baseline.predicted_ms is None:
        return baseline
    return baseline.model_copy(update={"predicted_ms": tuple(ms + more_ms for ms in baseline.predicted_ms)})
