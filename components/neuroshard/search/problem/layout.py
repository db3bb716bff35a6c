"""From a placement to a plan: where each shard's columns begin, and what the plan is predicted to cost."""

from collections.abc import Mapping

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Baseline, Improvement, Plan, Provenance, Shard
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.averaging import averaged_bytes, averaging_ms, least_averaging_ms
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel, Floats, device_costs
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.kinds import blocks_over_all, copies_of
from neuroshard.search.problem.state import State


def make_plan(
    model: CostModel,
    task: ShardingTask,
    shards: tuple[Shard, ...],
    *,
    bound_ms: float | None,
    bound_assumptions: tuple[str, ...],
    provenance: Provenance,
    improvements: tuple[Improvement, ...] = (),
    baselines: tuple[Baseline, ...] = (),
) -> Plan:
    """The plan of these shards of the task's tables, priced by the cost `model`. No bound is above what it costs.

    Raises InvalidInput where the cost model predicts a cost that is negative or not finite.
    """
    prices = price_shards(model, task, shards)
    assert prices is not None  # models that price no rows split none
    total = prices.total_ms
    if not (np.isfinite(total).all() and total.min() >= 0):
        raise InvalidInput(f"cost model {model.name} predicts {total.min():g} ms for a device; train it again")
    return Plan(
        task=task.keeping_free(()),
        shards=shards,
        predicted_ms=tuple(total.tolist()),
        predicted=prices.of_devices,
        baselines=baselines,
        lower_bound_ms=None
        if bound_ms is None
        else min(bound_ms + least_averaging_ms(model, task), float(total.max())),  # sums round
        bound_assumptions=bound_assumptions,
        # a search does not weigh averaging, whose cost differs from plan to plan
        improvements=() if task.groups is not None else improvements,
        provenance=provenance,
    )


def compared(model: CostModel, attempts: Mapping[str, State | str]) -> tuple[Baseline, ...]:
    """What each heuristic's plan costs, or why it has none."""
    return tuple(
        Baseline(algorithm=name, error=plan)
        if isinstance(plan, str)
        else Baseline(algorithm=name, predicted_ms=_baseline_ms(model, plan), cuts=plan.cuts)
        for name, plan in attempts.items()
    )


def _baseline_ms(model: CostModel, plan: State) -> tuple[float, ...]:
    """What each device takes under a heuristic's plan."""
    more, task = plan.launched_ms, plan.problem.task
    if task.groups is not None:
        more += averaging_ms(model, task, averaged_bytes(task, lay_out(plan)))
    each: Floats = np.sum(device_costs(plan.problem.model, plan.sums, plan.dims), axis=0) + more
    return tuple(each.tolist())


def lay_out(plan: State, current: CurrentPlacement | None = None) -> tuple[Shard, ...]:
    """Shards in the order of the tables. The columns of a table are dealt out from left to right, by device; or, from a current
    plan, so that most of them stay where they are."""
    problem = plan.problem
    places = dict(zip(problem.spread.tolist(), problem.places.tolist(), strict=True))
    shards: dict[str, list[Shard]] = {table.name: [] for table in problem.task.tables}
    for shard in (*copies_of(problem.copied, problem.devices), *blocks_over_all(problem.mapped, problem.devices)):
        shards[shard.table].append(shard)
    for group, (tables, widths) in enumerate(zip(problem.tables, plan.widths, strict=True)):
        if group in places:
            laid = problem.options.shards(tables[0], places[group])
        elif current is not None:
            laid = current.lay_out(group, widths)
        else:
            by_device = np.flatnonzero(widths).tolist()
            laid = [shard for table in tables for shard in problem.dealt(group, table, widths, by_device)]
        for shard in laid:
            shards[shard.table].append(shard)
    return tuple(shard for laid in shards.values() for shard in laid)
