"""Search plans of tables that HBM does not hold: which are beyond it, how they are cut, and on which devices.

First every part may be in any tier, and devices divide their HBM as is cheapest: a relaxation, since a table is in one tier.
Its plan says what a byte of HBM is worth on each device, and at these prices which tables would rather be in HBM, whole. Those
stay there, as far as they fit; the others are cached or in host memory. A search finds a plan for them. Then single tables
change sides, those that an estimate ranks best, as long as that helps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.costmodel.tiers import with_tiers
from neuroshard.search.algorithms import Asked, Found, find
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.hosts import HostPrices
from neuroshard.search.tiers.options import DIVIDED, WHOLE, InTierPlan, StartFrom, TierProblems, linear_ms
from neuroshard.search.tiers.points import PartPoints, refined
from neuroshard.search.tiers.sides import Sides, bound_by_sides
from neuroshard.search.tiers.start import start_plan
from neuroshard.search.tiers.toggle import toggled
from neuroshard.search.watch import Watch

# Of the relaxation, and of first plans. 12 gave plans within 0.1 % on three tasks of 60 tables, and took half as long again
RELAXED_ROUNDS = 4
HOSTS_TRIED = 5  # times as many rounds, for hosts that have little memory: a guess
# Shares of all HBM that tables in it fill at first: the first that can be packed. Guesses
ROOMS = (0.97, 0.9, 0.75, 0.5, 0.25, 0.0)
SIDES_SHARDS = 6_000  # over the shards of the problem: the bound distinguishes so many tables, at least 1: a guess


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
    and UsageError where the model knows no tiers."""
    found = _on_hosts(task, model, asked, may, before, 1.0)
    if not task.hidden_ms or asked.watch.expired:
        return found
    hidden = _on_hosts(task, model, asked, may, before, 0.0)
    best = min(found, hidden, key=lambda one: one.plan.rank)
    bound = max(found.bound, hidden.bound, key=lambda one: one.ms or 0.0)
    return replace(best, bound=bound if bound.ms is None else replace(bound, ms=min(bound.ms, best.plan.cost)))


def _on_hosts(
    task: ShardingTask, model: CostModel, asked: Asked, may: MayHold, before: StartFrom | None, weight: float
) -> FoundTiers:
    """The best plan found, where what is fetched ahead counts with this weight, but in the plan's own cost. If it needs more of a
    host than there is, a second search pays for that."""
    found = _searched(task, model, asked, may, before, weight)
    if (
        found.bound.ms is not None
    ):  # a device waits for what is fetched ahead beyond `hidden_ms`: by any weight at least so long
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
    """The same, whatever hosts have; with `hosts` there is no bound of all plans."""
    searched = task if before is None or before.kept is None else before.kept.task
    points = PartPoints(searched, with_tiers(for_task(model, searched)), weight)
    few = replace(asked, settings=replace(asked.settings, rounds=RELAXED_ROUNDS, simplicity=0.0))
    rng = np.random.default_rng(asked.settings.seed)
    with asked.watch.sharing(0.4):
        prices = points.prices()
        prices = refined(prices, _mean_price(searched, prices, points))
        problems = TierProblems(task, model, prices, points, may, before, hosts)
        asked, few = (replace(one, current=problems.current) for one in (asked, few))
        relaxed = find(problems.anywhere, replace(few, watch=asked.watch.quiet())).best
    first = lower_bound(problems.anywhere, relaxed)
    start = None if before is None else start_plan(problems, before, _worth(problems, relaxed), asked.watch)
    plan, found = _first_plan(problems, _first_choices(problems, relaxed, None, start), few)
    most = max(SIDES_SHARDS // len(problems.anywhere.group), 1) if hosts is None else 0
    bound, sides = bound_by_sides(problems.sides, first, plan.state, most, lambda: asked.watch.expired)
    if (sides.inside.any() or sides.beyond.any()) and not asked.watch.expired:
        other, other_found = _first_plan(problems, _first_choices(problems, relaxed, sides, start), few)
        plan, found = min((plan, found), (other, other_found), key=lambda one: one[0].rank)
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


def _first_plan(problems: TierProblems, choices: Iterable[Ints], few: Asked) -> tuple[InTierPlan, Found]:
    """A plan of the first of these choices for which there is one. Raises Infeasible where there is none."""
    why, quiet = None, few.watch.quiet()
    for choice in choices:
        try:
            found = find(problems.of(choice), replace(few, watch=quiet))
        except Infeasible as error:
            why = why or error
            continue
        return problems.found(found.best, choice, few.watch, quiet), found
    assert why is not None
    raise why


def _first_choices(
    problems: TierProblems, relaxed: State, sides: Sides | None, start: InTierPlan | None
) -> Iterator[Ints]:
    """`_first_choice` with less and less HBM filled, until what is there can be packed; then the choice of the plan to start
    from, for others may ask to move too much."""
    for room in ROOMS:
        yield _first_choice(problems, relaxed, room, sides)
    if start is not None:
        yield start.choice


def _first_choice(problems: TierProblems, relaxed: State, share: float, sides: Sides | None) -> Ints:
    """What each table group would rather be at the prices of the relaxed plan: in HBM, those first that gain most a byte as far
    as they fit into this share of it, or else beyond it. Groups with a side are on it, if they fit."""
    worth = _worth(problems, relaxed)
    choice: Ints = np.where(problems.chosen, 1 + worth[1:].argmin(axis=0), WHOLE)
    gain = worth[1:].min(axis=0) - worth[WHOLE]
    need = problems.need_bytes
    if sides is not None:
        gain[sides.inside], gain[sides.beyond] = np.inf, -np.inf
    room = share * sum(problems.task.placeable_bytes) - float(need[choice, np.arange(len(choice))].sum())
    need = problems.of_owner(need)
    more = need[WHOLE] - need[choice, np.arange(len(choice))]
    on_hosts, owned = problems.host_bytes[choice, np.arange(len(choice))].sum(), problems.of_owner(problems.host_bytes)
    of_hosts = (problems.task.host_memory_bytes or 0) * (problems.task.devices // problems.task.devices_of_host)
    for group in np.argsort(-gain / np.maximum(more, 1.0), kind="stable").tolist():
        if choice[group] != WHOLE and (gain[group] > 0 or on_hosts > of_hosts) and more[group] <= room:
            on_hosts -= owned[choice[group], group] - owned[WHOLE, group]
            choice[problems.owner == problems.owner[group]] = WHOLE
            room -= more[group]
    return choice


def _worth(problems: TierProblems, relaxed: State) -> Floats:
    """What each option of each table group takes at the prices of the relaxed plan, in ms: (O, G). Infinite where it is none."""
    model = cast(Divided, relaxed.problem.model)
    worth = linear_ms(problems, relaxed, model.worth_of_bytes(relaxed.sums))
    worth[DIVIDED, problems.large] = np.inf
    if len(problems.options) > 2:
        worth[2:, ~problems.large] = np.inf
    return worth
