"""Search plans of tables that HBM does not hold: which are beyond it, how they are cut, and on which devices.

First every part may be in any tier, and devices divide their HBM as is cheapest: a relaxation, since a table is in one tier.
Its plan says what a byte of HBM is worth on each device, and at these prices which tables would rather be in HBM, whole. Those
stay there, as far as they fit; the others are cached or in host memory. A search finds a plan for them. Then single tables
change sides, those that an estimate ranks best, as long as that helps.
"""

from dataclasses import dataclass, replace

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, Floats
from neuroshard.costmodel.tiers import with_tiers
from neuroshard.search.algorithms import Asked, Found, find
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.choice import first_choice
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.options import InTierPlan, TierProblems
from neuroshard.search.tiers.points import PartPoints, refined
from neuroshard.search.tiers.sides import Sides, bound_by_sides
from neuroshard.search.tiers.toggle import toggled

# Of the relaxation, and of first plans. 12 gave plans within 0.1 % on three tasks of 60 tables, and took half as long again
RELAXED_ROUNDS = 4
# Shares of all HBM that first choices fill, from the largest on until a plan is dearer. Of 500 tables on 64 devices, a few large
# ones leave no room for moves: 0.75 gave plans 13 to 47 % below 0.97 at 10 and 50 % of HBM
ROOMS = (0.97, 0.9, 0.75, 0.5, 0.25, 0.0)
# The bound distinguishes so many tables: 6,000 over the shards of the problem, a guess, at least 1, and at most 32. Of 12 tables
# on 3 devices 8, 32 and 500 gave the same bounds, and a search took ten times as long with 500 as with 32
SIDES_SHARDS, MOST_SIDES = 6_000, 32


@dataclass(frozen=True)
class FoundTiers:
    """The best plan found, how the search got there, and the bound."""

    plan: InTierPlan
    found: Found
    bound: Bound


def search_tiers(task: ShardingTask, model: CostModel, asked: Asked, may: MayHold) -> FoundTiers:
    """The best plan found, where the task's tables do not all fit into HBM. Raises Infeasible where HBM does not even hold what
    tables need there that are in host memory, and UsageError where the model knows no tiers."""
    points = PartPoints(task, with_tiers(model))
    few = replace(
        asked, settings=replace(asked.settings, rounds=RELAXED_ROUNDS, simplicity=0.0), watch=asked.watch.anew()
    )
    rng = np.random.default_rng(asked.settings.seed)
    with asked.watch.sharing(0.4):
        prices = points.prices()
        problems = TierProblems(task, model, refined(prices, _mean_price(task, model, prices, points)), points, may)
        relaxed = find(problems.anywhere, replace(few, watch=few.watch.anew())).best
    first = lower_bound(problems.anywhere, relaxed)
    tried = set[bytes]()
    first_plan = _first_plan(problems, relaxed, None, tried, few, asked)
    assert first_plan is not None
    most = min(max(SIDES_SHARDS // len(problems.anywhere.group), 1), MOST_SIDES)
    bound, sides = bound_by_sides(problems.sides, first, first_plan[0].state, most, lambda: asked.watch.expired)
    other = _first_plan(problems, relaxed, sides, tried, few, asked) if not asked.watch.expired else None
    plan, found = min(filter(None, (first_plan, other)), key=lambda one: one[0].cost)
    plan = toggled(problems, plan, asked, rng)
    last = LocalSearch([plan.state], rng, asked.watch.anew()).run(asked.settings.most_rounds)
    return FoundTiers(min(plan, problems.in_tiers(last, plan.choice), key=lambda one: one.cost), found, bound)


def _mean_price(task: ShardingTask, model: CostModel, prices: Floats, points: PartPoints) -> Floats:
    """What a byte of HBM is worth, in ms, if every device has an equal share of every table: (1,)."""
    relaxed = Divided(model, task.placeable_bytes[0], prices, points)
    terms = relaxed.of_parts(list(map(Part.of, task.placed)))
    return relaxed.price_of(terms.sum(axis=0)[None] / task.devices)


def _first_plan(
    problems: TierProblems, relaxed: State, sides: Sides | None, tried: set[bytes], few: Asked, asked: Asked
) -> tuple[InTierPlan, Found] | None:
    """The cheapest plan of the first choices, of less and less HBM until one is dearer; None if all were `tried` or none fits
    beside these sides. Raises Infeasible if none fits, without sides."""
    best, why = None, None
    for room in ROOMS:
        choice = first_choice(problems, relaxed, room, sides)
        if choice.tobytes() in tried or (best is not None and asked.watch.expired):
            continue
        tried.add(choice.tobytes())
        try:
            found = find(problems.of(choice), replace(few, watch=asked.watch.anew()))
        except Infeasible as error:
            why = why or error
            continue
        plan = problems.in_tiers(found.best, choice)
        if best is not None and plan.cost >= best[0].cost:
            break
        best = plan, found
    if best is None and sides is None:
        assert why is not None
        raise why
    return best
