"""Into how many equal column shards a plan cuts sequences (problem/equal_shards.py): halves are searched first, then of the other
numbers whose bound leaves something to gain the one with the lowest."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from neuroshard.core.errors import Infeasible
from neuroshard.core.plan import Plan
from neuroshard.costmodel.averaging import least_averaging_ms
from neuroshard.costmodel.network import for_task
from neuroshard.orders.options import LOCAL_SEARCH
from neuroshard.search.asked import Asked
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.bound.settings import BOUND, QUICK, BoundSettings
from neuroshard.search.copies import STAY
from neuroshard.search.problem.equal_shards import HALVES, equal_sequence
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State

Cut = tuple[Plan, State]  # a plan, and the same as arrays
Bounds = dict[tuple[int, BoundSettings], Bound]


def cut_alike(asked: Asked, search: Callable[[Asked], Cut]) -> Plan:
    """The cheapest of the plans that `search` finds for each number of equal shards, with the fewest cuts where they cost about
    as much; none is dearer than that of halves. Raises Infeasible where none fits."""
    settings, numbers = asked.settings, _numbers(asked)
    if len(numbers) == 1:
        return search(replace(asked, cut_into=numbers[0]))[0]
    quick = replace(asked, settings=replace(settings, tuning=replace(settings.tuning, hints=False)), bounded=False)
    left, found, bounds = list(numbers), dict[int, Cut](), Bounds()
    while left and not (found and asked.watch.expired):
        number = left[0]
        if found:
            best = min(found.values(), key=_cost_ms)
            number, bound = _least(left, bounds, asked, best)
            if (bound.ms or 0.0) * (1 + settings.simplicity) >= _cost_ms(best):
                break
        left.remove(number)
        with suppress(Infeasible), asked.watch.sharing(settings.tuning.time.halves if left else 1.0):
            found[number] = search(replace(quick, cut_into=number))
    if not found:
        return search(replace(asked, cut_into=numbers[-1]))[0]  # raises, with hints
    best = min(found.values(), key=_cost_ms)
    most = min(_cost_ms(best) * (1 + settings.simplicity), _cost_ms(found.get(HALVES, best)))
    plan, _ = min((it for it in found.values() if _cost_ms(it) <= most), key=lambda it: (it[1].cuts, _cost_ms(it)))
    _, bound = _least(numbers, bounds, asked, best)
    return plan.model_copy(update={"lower_bound_ms": bound.ms, "bound_assumptions": bound.why})


def _numbers(asked: Asked) -> list[int]:
    """Halves, and each other number that some sequence may be cut into; only that of the plan to start from, where it has cuts
    that are kept."""
    if asked.settings.algorithm != LOCAL_SEARCH:
        return [HALVES]
    task = asked.permitted
    sequences = [table for table in task.placed if table.pooling == "none"]
    if asked.previous is not None and asked.settings.keep_optimizer_state:
        held = asked.previous.plan.by_table()
        for table in sequences:
            shards = held.get(table.name, ())
            if table.optimizer_bytes_per_row and len({shard.column_offset for shard in shards}) > 1:
                return [max(table.dim // min(shard.dim for shard in shards), HALVES)]
    more = range(HALVES + 1, task.devices + 1)
    return [HALVES, *(n for n in more if any(equal_sequence((one,), task, n) == n for one in sequences))]


def _least(numbers: list[int], bounds: Bounds, asked: Asked, best: Cut) -> tuple[int, Bound]:
    """The number of these with the least bound, of all plans with the copies of the best one. `bounds` are quick ones, and full
    ones where these are least."""
    task = asked.permitted.with_copies(best[0].task.constraints.data_parallel)
    model, tuning = for_task(asked.cost_model, task), asked.settings.tuning

    def bound(number: int, settings: BoundSettings) -> Bound:
        if (number, settings) not in bounds:
            if not task.placed:
                return Bound(best[0].cost_ms, (STAY,))
            found = lower_bound(Problem(task, model, tuning, cut_into=number), best[1], settings)
            ms = found.ms and min(found.ms + least_averaging_ms(asked.cost_model, task), _cost_ms(best))
            bounds[number, settings] = replace(found, ms=ms)
        return bounds[number, settings]

    while True:
        least = min(numbers, key=lambda one: bound(one, BOUND if (one, BOUND) in bounds else QUICK).ms or 0.0)
        if (least, BOUND) in bounds or not task.placed:
            return least, bound(least, BOUND)
        bound(least, BOUND)


def _cost_ms(found: Cut) -> float:
    return found[0].cost_ms or 0.0
