"""The cheapest way to cut every table group into column shards, given a price for each shard."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem


@dataclass(frozen=True)
class Cuts:
    """The cheapest cuts of all groups: each of the `shards` (N,) so many `times` (N,), perhaps a fraction.

    `total` is their price, infinite if the groups `none` have no cut.
    """

    total: float
    shards: Ints
    times: Floats
    none: Ints


def cheapest_cuts(problem: Problem, price: Floats, exact_units: int) -> Cuts:
    """The cheapest cuts at a price for each shard (S,), infinite for a shard that may not be used.

    A group stays whole if no shard of it is cheaper per column. The others are cut by dynamic programming, up to `exact_units`
    wide; for wider ones the price is that of their shard cheapest per column, taken as often as it takes, in fractions.
    """
    per_unit = price / np.maximum(problem.units, 1)
    least = np.minimum.reduceat(per_unit, problem.first + 1)  # of each group's shards
    whole = problem.whole
    kept = np.isfinite(price[whole]) & (per_unit[whole] <= least)
    wide = ~kept & (problem.widest > exact_units)

    best = np.lexsort((per_unit, problem.item))[np.searchsorted(problem.item, np.arange(len(whole)))]
    shares = np.where(kept, 1.0, problem.widest / np.maximum(problem.units[best], 1))[kept | wide]
    counted = np.where(kept, whole, best)[kept | wide]
    total = float(price[counted] @ shares)
    chosen, none = [counted], [np.flatnonzero(wide & ~np.isfinite(least))]

    limit = np.where(problem.most * problem.least < problem.widest, problem.most, 0)
    for most in sorted(set(limit[~kept & ~wide].tolist())):
        groups = np.flatnonzero(~kept & ~wide & (limit == most))
        shards, able = _cut(price, problem.first[groups], problem.least[groups], problem.widest[groups], most)
        total += float(price[shards].sum())
        chosen.append(shards)
        none.append(groups[~able])
    without, found = np.concatenate(none), np.concatenate(chosen)
    times = np.append(shares, np.ones(len(found) - len(shares)))
    return Cuts(np.inf if len(without) else total, found, times, without)


def _cut(price: Floats, first: Ints, least: Ints, widest: Ints, most: int) -> tuple[Ints, NDArray[np.bool_]]:
    """The shards of the cheapest cuts of G groups into at most `most` shards each (0: any number), and which groups have one.

    Dynamic programming, of all groups at once: cost[n, u] is the least price of u units in at most n shards.
    """
    layers, units_most = most or 1, int(widest.max())
    cost = np.full((layers + 1, units_most + 1, len(first)), np.inf)
    last = np.zeros((layers + 1, units_most + 1, len(first)), dtype=np.int64)  # units of the last shard
    cost[:, 0] = 0.0
    width = np.arange(1, units_most + 1)[:, None]
    by_width = np.where((width >= least) & (width <= widest), price[first + np.minimum(width, widest)], np.inf)
    for layer in range(1, layers + 1):
        before = cost[layer - 1 if most else layer]
        for units in range(1, units_most + 1):
            tried = by_width[:units] + before[units - 1 :: -1]
            last[layer, units] = tried.argmin(axis=0) + 1
            cost[layer, units] = tried.min(axis=0)
    at = np.arange(len(first))
    able = np.isfinite(cost[layers, widest, at])
    shards: list[Ints] = []
    left = np.where(able, widest, 0)
    while (left > 0).any():
        layer = layers - len(shards) if most else layers
        taken = np.where(left > 0, last[layer, left, at], 0)
        shards.append((first + taken)[left > 0])
        left = left - taken
    return np.concatenate(shards) if shards else np.zeros(0, dtype=np.int64), able
