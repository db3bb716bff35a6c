"""Search plans of tables that HBM does not hold: which are beyond it, how they are cut, and on which devices.

1. A relaxation, in which every part of a table may be in any tier, says what a byte of HBM is worth on each device, and bounds
   what any plan costs (divided.py, sides.py).
2. At these prices tables get their first tiers, for less and less HBM until plans become dearer (choice.py), or those of the
   plan to start from (start.py). A usual search places the tables of each.
3. One or two tables at a time change their tier, those that an estimate ranks best, as long as that helps (toggle.py).

Every plan is compared by what it costs once its devices have divided their HBM (division.py). All of it is done once more where
hosts have too little memory (hosts.py), and where dense layers hide what is fetched ahead.
"""

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.protocol import CostModel, Floats
from neuroshard.costmodel.tiers import with_tiers
from neuroshard.search.algorithms import Asked, Found, find
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tiers.choice import Estimates, first_choice, worth
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.hosts import HostPrices
from neuroshard.search.tiers.options import InTierPlan, StartFrom, TierProblems
from neuroshard.search.tiers.points import PartPoints, refined
from neuroshard.search.tiers.sides import Sides, bound_by_sides
from neuroshard.search.tiers.start import start_plan
from neuroshard.search.tiers.toggle import toggled
from neuroshard.search.watch import Watch

# Of the relaxation, and of first plans. 4 gave the same plans of 60 tables on 8 devices within 2 %, a sixth sooner, but a plan of
# 500 tables on 64 devices that was 9 % dearer
RELAXED_ROUNDS = 16
HOSTS_TRIED = 5  # times as many rounds, for hosts that have little memory: a guess
# Shares of all HBM that first choices fill, from the largest on until a plan is dearer. Of 500 tables on 64 devices, a few large
# ones leave no room for moves: 0.75 gave plans 13 to 47 % below 0.97 at 10 and 50 % of HBM
ROOMS = (0.97, 0.9, 0.75, 0.5, 0.25, 0.0)
# The bound distinguishes so many tables: 6,000 over the shards of the problem, a guess, at least 1, and at most 32. Of 12 tables
# on 3 devices 8, 32 and 500 gave the same bounds, and a search took ten times as long with 500 as with 32
SIDES_SHARDS, MOST_SIDES = 6_000, 32


@dataclass(frozen=True)
class FoundTiers:
    """The best plan found, how the search got there, the bound, and notes on the plan that it started from."""

    plan: InTierPlan
    found: Found
    bound: Bound
    notes: tuple[str, ...] = ()


def search_tiers(
    task: ShardingTask, model: CostModel, asked: Asked, may: MayHold, before: StartFrom | None = None
) -> FoundTiers:
    """The best plan found, where the task's tables do not all fit into HBM, from the plan `before` if there is one.

    Where dense layers hide what is fetched ahead, one search is made as if they hid nothing and one as if they hid all of it. Of
    their plans the cheaper is taken, and of their bounds the higher.

    Raises Infeasible where HBM does not even hold what tables need there that are in host memory, or too many bytes would move,
    and UsageError where the model knows no tiers.
    """
    found = _on_hosts(task, model, asked, may, before, 1.0)
    if not task.hidden_ms or asked.watch.expired:
        return found
    try:
        hidden = _on_hosts(task, model, asked, may, before, 0.0)
    except Infeasible:
        return found
    best = min(found, hidden, key=lambda one: one.plan.rank)
    bound = max(found.bound, hidden.bound, key=lambda one: one.ms or 0.0)
    return replace(best, bound=bound if bound.ms is None else replace(bound, ms=min(bound.ms, best.plan.cost)))


def _on_hosts(
    task: ShardingTask, model: CostModel, asked: Asked, may: MayHold, before: StartFrom | None, weight: float
) -> FoundTiers:
    """The best plan found, where what is fetched ahead counts with this weight, but in the plan's own cost. If it needs more of a
    host than there is, a second search pays for that."""
    found = _searched(task, model, asked, may, before, weight)
    if found.bound.ms is not None:
        # by any weight from 0 to 1, a device waits at least weight x (fetched - hidden)
        ms = max(found.bound.ms - weight * task.hidden_ms, 0.0)
        found = replace(found, bound=replace(found.bound, ms=ms))
    if not found.plan.over:
        return found
    within = _searched(task, model, asked, may, before, weight, HostPrices.of(task, found.plan.cost))
    return replace(within, bound=found.bound)


def _searched(
    task: ShardingTask,
    model: CostModel,
    asked: Asked,
    may: MayHold,
    before: StartFrom | None,
    weight: float,
    hosts: HostPrices | None = None,
) -> FoundTiers:
    """As `_on_hosts`, whatever hosts have; with prices of their memory (`hosts`), there is no bound of all plans."""
    searched = task if before is None or before.kept is None else before.kept.task
    points = PartPoints(searched, with_tiers(for_task(model, searched)), weight)
    few = replace(asked, settings=few_rounds(asked.settings))
    rng = np.random.default_rng(asked.settings.seed)
    with asked.watch.sharing(0.4):
        prices = points.prices()
        prices = refined(prices, _mean_price(searched, prices, points))
        problems = TierProblems(task, model, prices, points, may, before, hosts)
        asked, few = (replace(one, current=problems.current) for one in (asked, few))
        relaxed = find(problems.anywhere, replace(few, watch=asked.watch.quiet())).best
    first = lower_bound(problems.anywhere, relaxed)
    start = None if before is None else start_plan(problems, before, worth(problems, relaxed), asked.watch)
    estimates, tried = Estimates.of(problems, relaxed), set[bytes]()
    first_plan = _first_plan(problems, estimates, None, start, tried, few)
    assert first_plan is not None
    most = min(max(SIDES_SHARDS // len(problems.anywhere.group), 1), MOST_SIDES) if hosts is None else 0
    bound, sides = bound_by_sides(problems.sides, first, first_plan[0].state, most, lambda: asked.watch.expired)
    other = _first_plan(problems, estimates, sides, start, tried, few) if not asked.watch.expired else None
    plan, found = min(filter(None, (first_plan, other)), key=lambda one: one[0].rank)
    if plan.over and hosts is None:
        return FoundTiers(plan, found, bound, problems.notes)  # improved with a price of host memory
    for _ in range(HOSTS_TRIED if plan.over else 0):  # whatever the time: a plan must fit
        fits = LocalSearch([plan.state], rng, Watch(), problems.current).run(RELAXED_ROUNDS)
        plan = min(plan, problems.found(fits, plan.choice, asked.watch, Watch()), key=lambda one: one.rank)
        if not plan.over:
            break
    plan = toggled(problems, plan, asked, rng)
    if start is not None:  # where little may move, other tiers where tables are now may be all that helps
        plan = min(plan, toggled(problems, start, asked, rng), key=lambda one: one.rank)
    quiet = asked.watch.quiet()
    last = LocalSearch([plan.state], rng, quiet, problems.current).run(asked.settings.most_rounds)
    plan = min(plan, problems.found(last, plan.choice, asked.watch, quiet), key=lambda one: one.rank)
    if (
        start is not None
        and start.over <= plan.over
        and plan.cost > start.cost * (1 - start.state.problem.tuning.worth_moving)
    ):
        plan = start  # nothing moves for next to no gain
    if before is not None and before.kept is not None and before.kept.cut:
        bound = _bound(task, model, prices, may, few, weight)
    return FoundTiers(plan, found, bound, problems.notes)


def few_rounds(settings: SearchSettings) -> SearchSettings:
    """Those of a search whose plan is improved later, or only tells something."""
    return replace(settings, rounds=min(RELAXED_ROUNDS, settings.most_rounds), simplicity=0.0)


def _bound(task: ShardingTask, model: CostModel, prices: Floats, may: MayHold, few: Asked, weight: float) -> Bound:
    """A bound on all plans, where a search had only those that keep column cuts."""
    points = PartPoints(task, with_tiers(for_task(model, task)), weight)
    problem = TierProblems(task, model, prices, points, may).anywhere
    relaxed = find(problem, replace(few, watch=few.watch.quiet(), current=None)).best
    return lower_bound(problem, relaxed)


def _mean_price(task: ShardingTask, prices: Floats, points: PartPoints) -> Floats:
    """What a byte of HBM is worth, in ms, if every device has an equal share of every table: (1,)."""
    relaxed = Divided(points.model, float(np.mean(task.placeable_bytes)), prices, points)
    terms = relaxed.of_parts(list(map(Part.of, task.placed)))
    return relaxed.price_of(terms.sum(axis=0)[None] / task.devices)


def _first_plan(
    problems: TierProblems,
    estimates: Estimates,
    sides: Sides | None,
    start: InTierPlan | None,
    tried: set[bytes],
    few: Asked,
) -> tuple[InTierPlan, Found] | None:
    """The cheapest plan of the first choices, of less and less HBM until one is dearer; then, if none fits, of the choice of the
    plan to start from, for others may ask to move too much. None if all were `tried` or none fits beside these sides. Raises
    Infeasible if none fits, without sides."""
    best, why, quiet = None, None, few.watch.quiet()
    choices = (first_choice(problems, estimates, room, sides) for room in ROOMS)
    for choice in choices if start is None else chain(choices, [start.choice]):
        if choice.tobytes() in tried or (best is not None and few.watch.expired):
            continue
        tried.add(choice.tobytes())
        try:
            found = find(problems.of(choice), replace(few, watch=quiet))
        except Infeasible as error:
            why = why or error
            continue
        plan = problems.found(found.best, choice, few.watch, quiet)
        if best is not None and plan.rank >= best[0].rank:
            break
        best = plan, found
    if best is None and sides is None:
        assert why is not None
        raise why
    return best
