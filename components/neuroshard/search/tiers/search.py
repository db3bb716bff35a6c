"""Search plans of tables that HBM does not hold: which are beyond it, how they are cut, and on which devices.

1. A relaxation, in which every part of a table may be in any tier, says what a byte of HBM is worth on each device, and bounds
   what any plan costs (divided.py, sides.py).
2. At these prices tables get their first tiers, for less and less HBM until plans become dearer (choice.py), or those of the
   plan to start from (start.py). A short search places the tables of each, from the relaxed plan where its shards may stay.
3. One or two tables at a time change their tier, those that an estimate ranks best, as long as that helps (toggle.py).
4. Tables that gain nothing beyond HBM come back to it (toggle.py).

Every plan is compared by what it costs once its devices have divided their HBM (division.py). All of it is done once more where
hosts have too little memory (hosts.py), and where dense layers hide what is fetched ahead.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.tiers import with_tiers
from neuroshard.search.algorithms import find
from neuroshard.search.asked import Asked
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.notes import more_in_hbm_cost
from neuroshard.search.problem.filling import started
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tiers.choice import Estimates, first_choice
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.hosts import HostPrices
from neuroshard.search.tiers.options import InTierPlan, TierProblems
from neuroshard.search.tiers.points import PartPoints, refined
from neuroshard.search.tiers.sides import bound_by_sides
from neuroshard.search.tiers.start import start_plan
from neuroshard.search.tiers.toggle import fewest_beyond, toggled
from neuroshard.search.watch import Watch

RELAXED_ROUNDS = 16  # of the relaxation, whose plan the first ones begin with: a guess
# Of first plans. 16 gave plans of 500 tables on 64 devices within 0.5 % of these, in 1.5 times the time
FIRST_ROUNDS = 4
HOSTS_TRIED = 5  # times as many rounds, for hosts that have little memory: a guess
# Shares of all HBM that first choices fill, from the largest on. Of 500 tables on 64 devices, a few large ones leave no room for
# moves: 0.75 gave plans 13 to 47 % below 0.97 at 10 and 50 % of HBM
ROOMS = (0.97, 0.9, 0.75, 0.5, 0.25, 0.0)
# Plans in a row that are dearer than the best, after which no smaller share is tried. With 1, of 15 tasks of 60 to 500 tables one
# cost 44 % more, one 28 % more, and one 14 % less
PATIENCE = 2
# Tables that the bound distinguishes, at most. Of 12 tables on 3 devices 8, 32 and 500 gave the same bounds, and a search took
# ten times as long with 500 as with 32. Of 500 on 64 devices 1 left a gap of 59 %, 32 one of 22 %
MOST_SIDES = 32


@dataclass(frozen=True)
class FoundTiers:
    """The best plan found, the bound, and notes on the plan that it started from."""

    plan: InTierPlan
    bound: Bound
    notes: tuple[str, ...] = ()


def search_tiers(asked: Asked) -> FoundTiers:
    """The best plan found, where the task's tables do not all fit into HBM.

    Where dense layers hide what is fetched ahead, one search is made as if they hid nothing and one as if they hid all of it. The
    cheaper plan is taken, and the higher bound. Where first plans need more of a host than there is, others pay for that.

    Raises Infeasible where HBM does not even hold what tables need there that are in host memory, or too many bytes would move,
    and UsageError where the model knows no tiers.
    """
    found = _searched(asked, 1.0)
    if not asked.permitted.hidden_ms or asked.watch.expired:
        return found
    with suppress(Infeasible):
        hidden = _searched(asked, 0.0)
        bound = max(found.bound, hidden.bound, key=lambda one: one.ms or 0.0)
        found = min(found, hidden, key=lambda one: one.plan.rank)
        found = replace(found, bound=bound if bound.ms is None else replace(bound, ms=min(bound.ms, found.plan.cost)))
    return found


def _searched(asked: Asked, weight: float) -> FoundTiers:
    """The same where what is fetched ahead counts with this weight, but in the plan's own cost."""
    first = _begun(asked, weight)
    if not first.plan.over:
        return _ended(asked, first)
    within = _begun(asked, weight, HostPrices.of(asked.permitted, first.plan.state.cost))
    return replace(_ended(asked, within), bound=first.bound)


def relaxation(asked: Asked, weight: float = 1.0, hosts: HostPrices | None = None) -> tuple[TierProblems, State]:
    """The problems of a task, and a plan in which each part of a table may be in any tier. What is fetched ahead counts with this
    weight."""
    searched = asked.permitted if asked.kept is None else asked.kept.task
    points = PartPoints(searched, with_tiers(for_task(asked.cost_model, searched)), weight)
    with asked.watch.sharing(asked.settings.tuning.time.relaxation):
        prices = points.prices()
        problems = TierProblems(asked, refined(prices, _mean_price(searched, prices, points)), points, hosts)
        few = replace(asked, settings=few_rounds(asked.settings), watch=asked.watch.quiet(), current=problems.current)
        return problems, find(problems.anywhere, few).best


def _bound(asked: Asked, weight: float) -> Bound:
    """A bound on all plans, whatever their cuts, where what is fetched ahead counts with this weight."""
    problems, relaxed = relaxation(replace(asked, previous=None, kept=None), weight)
    return lower_bound(problems.anywhere, relaxed)


class Begun(NamedTuple):
    """The cheapest first plan, the plan to start from in its tiers, and a bound."""

    problems: TierProblems
    plan: InTierPlan
    start: InTierPlan | None
    bound: Bound


def _begun(asked: Asked, weight: float, hosts: HostPrices | None = None) -> Begun:
    """First plans, whatever hosts have; with prices of their memory (`hosts`), the bound is none of all plans."""
    problems, relaxed = relaxation(asked, weight, hosts)
    few = replace(asked, settings=few_rounds(asked.settings), current=problems.current)
    before, start, estimates = asked.previous, None, Estimates.of(problems, relaxed)
    if before is not None:
        start = start_plan(problems, before.plan, asked.watch)
    plan = _first_plan(problems, estimates, start, relaxed, few)
    bound, most = lower_bound(problems.anywhere, relaxed), MOST_SIDES if hosts is None else 0
    bound = bound_by_sides(problems.sides, bound, plan.state, most, lambda: asked.watch.expired)
    if asked.kept is not None and asked.kept.cut:
        bound = _bound(asked, weight)
    if bound.ms is not None:
        # by any weight from 0 to 1, a device waits at least weight x (fetched - hidden)
        bound = replace(bound, ms=max(bound.ms - weight * asked.permitted.hidden_ms, 0.0))
    return Begun(problems, plan, start, bound)


def _ended(asked: Asked, begun: Begun) -> FoundTiers:
    """What first plans are improved to."""
    problems, plan, start, bound = begun
    asked, rng = replace(asked, current=problems.current), np.random.default_rng(asked.settings.seed)
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
    worth = 1 - start.state.problem.tuning.worth_moving if start is not None else 1.0
    if start is not None and start.over <= plan.over and plan.cost > start.cost * worth:
        plan = start  # nothing moves for next to no gain
    best, plan = plan, fewest_beyond(problems, plan, asked.settings.simplicity, asked.watch)
    if not plan.over:
        asked.watch.note(plan.cost)
    said = more_in_hbm_cost(len(best.tiers), best.cost, len(plan.tiers), plan.cost)
    return FoundTiers(plan, bound, (*problems.notes, *said))


def few_rounds(settings: SearchSettings) -> SearchSettings:
    """Those of a search whose plan is improved later, or only tells something."""
    return replace(settings, rounds=min(RELAXED_ROUNDS, settings.most_rounds), simplicity=0.0)


def _mean_price(task: ShardingTask, prices: Floats, points: PartPoints) -> Floats:
    """What a byte of HBM is worth, in ms, if every device has an equal share of every table: (1,)."""
    relaxed = Divided(points.model, float(np.mean(task.placeable_bytes)), prices, points)
    terms = relaxed.of_parts(list(map(Part.of, task.placed)))
    return relaxed.price_of(terms.sum(axis=0)[None] / task.devices)


def _first_plan(
    problems: TierProblems,
    estimates: Estimates,
    start: InTierPlan | None,
    relaxed: State,
    few: Asked,
) -> InTierPlan:
    """The cheapest plan of the first choices, of less and less HBM until some are dearer. If none fits, of the choice of the plan
    to start from, for others may ask to move too much. Raises Infeasible if none fits."""
    best, dearer, why, quiet, tried = None, 0, None, few.watch.quiet(), set[bytes]()
    choices = (first_choice(problems, estimates, room) for room in ROOMS)
    for choice in choices if start is None else chain(choices, [start.choice]):
        if choice.tobytes() in tried or (best is not None and few.watch.expired):
            continue
        tried.add(choice.tobytes())
        try:
            state = _placed(problems.of(choice), relaxed, replace(few, watch=quiet))
        except Infeasible as error:
            why = why or error
            continue
        plan = problems.found(state, choice, few.watch, quiet)
        dearer = dearer + 1 if best is not None and plan.rank >= best.rank else 0
        best = best if dearer else plan
        if dearer == PATIENCE:
            break
    if best is None:
        assert why is not None
        raise why
    return best


def _placed(problem: Problem, relaxed: State, few: Asked) -> State:
    """A plan of the problem: from the shards of the relaxed plan, or else from greedy plans. Raises Infeasible if none fits."""
    few = replace(few, settings=replace(few.settings, rounds=min(FIRST_ROUNDS, few.settings.most_rounds)))
    near = started(problem, relaxed) if few.current is None else None
    if near is None:
        return find(problem, few).best
    rng = np.random.default_rng(few.settings.seed)
    return LocalSearch([near], rng, few.watch, toggle=problem.may_spread).run(few.settings.most_rounds)
