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
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.costmodel.tiers import with_tiers
from neuroshard.search.algorithms import Asked, Found, find
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.options import DIVIDED, WHOLE, InTierPlan, TierProblems, linear_ms
from neuroshard.search.tiers.points import FEW_PRICES, PRICES, PartPoints, refined
from neuroshard.search.tiers.sides import Sides, bound_by_sides
from neuroshard.search.tiers.toggle import toggled

# Of the relaxation, and of first plans. 12 gave plans within 0.1 % on three tasks of 60 tables, and took half as long again
RELAXED_ROUNDS = 4
# Shares of all HBM that tables in it fill at first: the first that can be packed. Guesses
ROOMS = (0.97, 0.9, 0.75, 0.5, 0.25, 0.0)
SIDES_SHARDS = 6_000  # over the shards of the problem: the bound distinguishes so many tables, at least 1: a guess


@dataclass(frozen=True)
class FoundTiers:
    """The best plan found, how the search got there, and the bound."""

    plan: InTierPlan
    found: Found
    bound: Bound


def search_tiers(task: ShardingTask, model: CostModel, asked: Asked, may: MayHold) -> FoundTiers:
    """The best plan found, where the task's tables do not all fit into HBM. Raises Infeasible where HBM does not even hold what
    tables need there that are in host memory, and UsageError where the model knows no tiers.

    Where the task hides what is fetched ahead, a plan that was searched as if it hid nothing may be better: up to 58 % on a drawn
    task of 40 tables. So that is searched too, in what is left of the time.
    """
    found = _search(task, model, asked, may)
    if not task.hidden_ms or asked.watch.expired:
        return found
    waiting = _search(task.model_copy(update={"dense_ms": None}), model, asked, may).plan
    prices = price_shards(model, task.with_tiers(waiting.tiers), waiting.shards)
    assert prices is not None
    waiting = replace(waiting, cost=float(prices.total_ms.max()))
    return replace(found, plan=min(found.plan, waiting, key=lambda one: one.cost))


def _search(task: ShardingTask, model: CostModel, asked: Asked, may: MayHold) -> FoundTiers:
    """As `search_tiers`, once."""
    points = PartPoints(task, with_tiers(model))
    few = replace(
        asked, settings=replace(asked.settings, rounds=RELAXED_ROUNDS, simplicity=0.0), watch=asked.watch.anew()
    )
    rng = np.random.default_rng(asked.settings.seed)
    with asked.watch.sharing(0.4):
        problems = TierProblems(task, model, *_prices(task, model, points), points, may)
        relaxed = find(problems.anywhere, replace(few, watch=few.watch.anew())).best
    first = lower_bound(problems.anywhere, relaxed)
    plan, found = _first_plan(problems, relaxed, _first_choices(problems, relaxed, None), few, asked)
    most = max(SIDES_SHARDS // len(problems.anywhere.group), 1)
    bound, sides = bound_by_sides(problems.sides, first, plan.state, most, lambda: asked.watch.expired)
    if sides.inside.any() or sides.beyond.any():
        other, other_found = _first_plan(problems, relaxed, _first_choices(problems, relaxed, sides), few, asked)
        plan, found = min((plan, found), (other, other_found), key=lambda one: one[0].cost)
    plan = toggled(problems, plan, asked, rng)
    last = LocalSearch([plan.state], rng, asked.watch.anew()).run(asked.settings.most_rounds)
    return FoundTiers(min(plan, problems.in_tiers(last, plan.choice), key=lambda one: one.cost), found, bound)


def _prices(task: ShardingTask, model: CostModel, points: PartPoints) -> tuple[Floats, Floats]:
    """Prices of a byte of HBM in ms (M,), refined around that which it has if every device has an equal share of every table,
    most of them for the weight that is right there; and the weight of each (M,)."""
    found, by_weight, parts = [], points.by_weight, list(map(Part.of, task.placed))
    for weight, weighted in by_weight.items():
        prices = weighted.prices()
        relaxed = Divided(model, task.placeable_bytes[0], prices, points, weights=np.full(len(prices), weight))
        ms = relaxed.of_parts(parts).sum(axis=0) / task.devices - relaxed.free_ms
        at = int(ms.argmax())
        found.append((float(ms[at]), prices, prices[at : at + 1]))
    dearest = max(ms for ms, _, _ in found)
    of_weights = [refined(prices, there, PRICES + 1 if ms == dearest else FEW_PRICES) for ms, prices, there in found]
    return np.concatenate(of_weights), np.repeat([*by_weight], [len(prices) for prices in of_weights])


def _first_plan(
    problems: TierProblems, relaxed: State, choices: Iterable[Ints], few: Asked, asked: Asked
) -> tuple[InTierPlan, Found]:
    """A plan of the first of these choices for which there is one. Raises Infeasible where there is none."""
    why = None
    for choice in choices:
        try:
            found = find(problems.of(choice), replace(few, watch=asked.watch.anew()))
        except Infeasible as error:
            why = why or error
            continue
        return problems.in_tiers(found.best, choice), found
    assert why is not None
    raise why


def _first_choices(problems: TierProblems, relaxed: State, sides: Sides | None) -> Iterator[Ints]:
    """`_first_choice` with less and less HBM filled, until what is there can be packed."""
    for room in ROOMS:
        yield _first_choice(problems, relaxed, room, sides)


def _first_choice(problems: TierProblems, relaxed: State, share: float, sides: Sides | None) -> Ints:
    """What each table group would rather be at the prices of the relaxed plan: in HBM, those first that gain most a byte as far
    as they fit into this share of it, or else beyond it. Groups with a side are on it, if they fit."""
    model = cast(Divided, relaxed.problem.model)
    worth = linear_ms(problems, relaxed, model.worth_of_bytes(relaxed.sums))
    worth[DIVIDED, problems.large] = np.inf
    if len(problems.options) > 2:
        worth[2:, ~problems.large] = np.inf
    choice: Ints = 1 + worth[1:].argmin(axis=0)
    gain = worth[1:].min(axis=0) - worth[WHOLE]
    need = problems.need_bytes
    if sides is not None:
        gain[sides.inside], gain[sides.beyond] = np.inf, -np.inf
    room = share * sum(problems.task.placeable_bytes) - float(need[choice, np.arange(len(choice))].sum())
    more = need[WHOLE] - need[choice, np.arange(len(choice))]
    for group in np.argsort(-gain / more, kind="stable").tolist():
        if gain[group] > 0 and more[group] <= room:
            choice[group] = WHOLE
            room -= more[group]
    return choice
