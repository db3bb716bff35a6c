"""How close: a number of ms that no plan of the task can go below, by a convex cost model.

The device that is ready last is so no earlier than all are on average, and a convex compute cost of the mean sum of vectors is
at most the mean cost (Jensen). The sum depends on the cuts, so all of them are allowed for: a tangent of the cost at any point
is below it, and the sum that is cheapest along the tangent is found table by table. The best tangent is sought (Frank and Wolfe).

Parts are left out that no device has memory for, and those that by themselves take longer than the plan at hand: a better plan
has none of them. So what is found is a bound on better plans; where it is above the plan at hand, there are none.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem import Problem
from neuroshard.search.state import State, transfers

TANGENTS = 60
ASSUMPTIONS = (
    "the cost model's compute cost is convex and grows with every vector, its exchanges take least where all devices hold the "
    "same columns, and waiting is added by rule",
    "columns are cut in steps of 4, rows are not cut; of memory, only what a single shard needs is looked at",
)
NOT_CONVEX = "nothing is proven: the cost model is not known to be convex"


@dataclass(frozen=True)
class Bound:
    """No plan costs less than `ms`; None where nothing can be proven. Why, in words."""

    ms: float | None
    why: tuple[str, ...]


def lower_bound(problem: Problem, plan: State) -> Bound:
    """A lower bound on the cost of every plan that honours the task's constraints on cuts, at most what `plan` costs."""
    model, devices = problem.model, problem.devices
    if not model.convex:
        return Bound(None, (NOT_CONVEX,))
    every = np.arange(1, len(problem.item))
    problem.price(every)
    even = np.full(devices, float(problem.dims[problem.whole].sum()) / devices)
    forward, backward = transfers(problem, even)
    ahead, back = float(forward.mean()), float(backward.mean())

    alone = np.where(np.arange(len(problem.item)) > 0, model.compute_ms(problem.vectors), 0.0)
    largest = np.where(problem.allowed, problem.memory, 0).max(axis=1)[problem.item]
    possible = (problem.nbytes <= largest) & (alone <= (plan.cost - ahead) * (1 + 1e-9))
    possible[problem.placement(plan.widths).shards] = True

    point = plan.sums.mean(axis=0)
    best = _widest_part(problem, alone, possible)
    for step in range(TANGENTS):
        slope = np.maximum(model.compute_slope(point), 0.0)
        cheapest, sums = _cheapest_cuts(problem, slope, possible)
        intercept = float(model.compute_ms(point)) - float(slope @ point)
        best = max(best, _over_devices(intercept, cheapest, devices, back))
        point = point + (sums / devices - point) * (2 / (step + 3))
    return Bound(min(best + ahead, plan.cost), ASSUMPTIONS)


def _over_devices(intercept: float, total: float, devices: int, back: float) -> float:
    """The least that the last device is ready, where compute is at least `intercept` plus its share of `total`.

    Devices may stay empty, and compute nothing then; so the least is taken over how many do not. All devices' backward
    exchanges take `back` on average. Of devices that hold tables, the mean of compute alone is a bound as well.
    """
    used = np.arange(1, devices + 1)
    all_devices = used / devices * intercept + total / devices + back
    used_alone = intercept + total / used
    return float(np.maximum(all_devices, used_alone).min())


def _widest_part(problem: Problem, alone: Floats, possible: NDArray[np.bool_]) -> float:
    """Some device holds at least so wide a part of every item: compute of the worst of them."""
    places = np.minimum(problem.allowed.sum(axis=1), problem.most)
    narrowest = -(-problem.widest // places)
    wide = np.flatnonzero((problem.units >= narrowest[problem.item]) & possible & (problem.units > 0))
    least = np.full(len(problem.whole), np.inf)
    np.minimum.at(least, problem.item[wide], alone[wide])
    return float(least.max())


def _cheapest_cuts(problem: Problem, slope: Floats, possible: NDArray[np.bool_]) -> tuple[float, Floats]:
    """The cheapest way to cut every item where a part costs `slope` times its vector: the total, and the sum of vectors.

    Dynamic programming over widths, for all items of one width at once. How many parts there may be is counted only where a
    table has a limit below what its width allows.
    """
    price = np.where(possible, problem.vectors @ slope, np.inf)
    total, sums = 0.0, np.zeros(problem.vectors.shape[1])
    limit = np.where(problem.most * problem.least < problem.widest, problem.most, 0)
    for widest, most in {*zip(problem.widest.tolist(), limit.tolist(), strict=True)}:
        items = np.flatnonzero((problem.widest == widest) & (limit == most))
        least = problem.least[items]
        parts = _cut(price, problem.first[items], least, widest, most)
        shards = np.concatenate(parts)
        shards = shards[shards > 0]
        total += float(price[shards].sum())
        sums += problem.vectors[shards].sum(axis=0)
    return total, sums


def _cut(price: Floats, first: Ints, least: Ints, widest: int, most: int) -> list[Ints]:
    """The parts of each item, as shards (0 for none), one array a part."""
    layers = most or 1
    cost = np.full((layers + 1, widest + 1, len(first)), np.inf)
    last = np.zeros((layers + 1, widest + 1, len(first)), dtype=np.int64)
    cost[:, 0] = 0.0
    for layer in range(1, layers + 1):
        before = cost[layer - 1 if most else layer]
        for units in range(1, widest + 1):
            part = np.arange(1, units + 1)
            tried = price[first + part[:, None]] + before[units - part]
            tried[part[:, None] < least] = np.inf
            last[layer, units] = tried.argmin(axis=0) + 1
            cost[layer, units] = tried.min(axis=0)
    parts: list[Ints] = []
    left, at = np.full(len(first), widest), np.arange(len(first))
    while (left > 0).any():
        layer = layers - len(parts) if most else layers
        wide = np.where(left > 0, last[layer, left, at], 0)
        parts.append(np.where(left > 0, first + wide, 0))
        left = left - wide
    return parts
