"""The cheapest way to cut all items column-wise, where each part has a price: for the bound."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem

CUT_EXACTLY = 64  # units, 256 columns


@dataclass(frozen=True)
class Cuts:
    """The cheapest cuts of all items, and their total, infinite where an item has none.

    They are of so many `times` (S,) each of the `shards` (S,); `none` are the items that have no cut.
    """

    total: float
    shards: Ints
    times: Floats
    none: Ints


def cheapest_cuts(problem: Problem, price: Floats) -> Cuts:
    """The cheapest way to cut every item where each shard has a price (S,), infinite where there is none.

    Where no part is cheaper a column than the item whole, whole is cheapest. The others are cut by dynamic programming, up to
    CUT_EXACTLY units wide; wider ones as if they were made of their cheapest part a column, be it in fractions.
    """
    a_unit = price / np.maximum(problem.units, 1)
    least = np.minimum.reduceat(a_unit, problem.first + 1)  # of the item's parts, narrowest first
    whole = problem.whole
    kept = np.isfinite(price[whole]) & (a_unit[whole] <= least)
    wide = ~kept & (problem.all_units > CUT_EXACTLY)

    best = np.lexsort((a_unit, problem.group))[np.searchsorted(problem.group, np.arange(len(whole)))]
    shares = np.where(kept, 1.0, problem.all_units / np.maximum(problem.units[best], 1))[kept | wide]
    counted = np.where(kept, whole, best)[kept | wide]
    total = float(price[counted] @ shares)
    chosen, none = [counted], [np.flatnonzero(wide & ~np.isfinite(least))]

    limit = np.where(problem.max_shards * problem.min_units < problem.all_units, problem.max_shards, 0)
    for most in sorted(set(limit[~kept & ~wide].tolist())):
        items = np.flatnonzero(~kept & ~wide & (limit == most))
        shards, able = _cut(price, problem.first[items], problem.min_units[items], problem.all_units[items], most)
        total += float(price[shards].sum())
        chosen.append(shards)
        none.append(items[~able])
    without, parts = np.concatenate(none), np.concatenate(chosen)
    times = np.append(shares, np.ones(len(parts) - len(shares)))
    return Cuts(np.inf if len(without) else total, parts, times, without)


def _cut(price: Floats, first: Ints, least: Ints, widest: Ints, most: int) -> tuple[Ints, NDArray[np.bool_]]:
    """The shards of the cheapest cuts of items, of at most `most` parts each; 0 is no limit. And which items have a cut."""
    layers, units_most = most or 1, int(widest.max())
    cost = np.full((layers + 1, units_most + 1, len(first)), np.inf)
    last = np.zeros((layers + 1, units_most + 1, len(first)), dtype=np.int64)
    cost[:, 0] = 0.0
    part = np.arange(1, units_most + 1)[:, None]
    by_part = np.where((part >= least) & (part <= widest), price[first + np.minimum(part, widest)], np.inf)
    for layer in range(1, layers + 1):
        before = cost[layer - 1 if most else layer]
        for units in range(1, units_most + 1):
            tried = by_part[:units] + before[units - 1 :: -1]
            last[layer, units] = tried.argmin(axis=0) + 1
            cost[layer, units] = tried.min(axis=0)
    at = np.arange(len(first))
    able = np.isfinite(cost[layers, widest, at])
    shards: list[Ints] = []
    left = np.where(able, widest, 0)
    while (left > 0).any():
        layer = layers - len(shards) if most else layers
        wide = np.where(left > 0, last[layer, left, at], 0)
        shards.append((first + wide)[left > 0])
        left = left - wide
    return np.concatenate(shards) if shards else np.zeros(0, dtype=np.int64), able
