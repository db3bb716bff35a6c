"""The cheapest of all plans, where there are few enough to price each: in a tiny task with little memory to spare every step that
helps may lead over plans that do not fit, so that no local search finds it."""

from collections.abc import Iterator

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints, device_costs
from neuroshard.search.problem import Problem, Widths
from neuroshard.search.state import State

FEW = 20_000  # plans: a tenth of a second or two
DEVICES, WIDEST = 4, 32  # of more devices, or for items of more units, there are too many
AT_ONCE = 4096  # priced in one batch


def cheapest_of_all(problem: Problem) -> list[State]:
    """The cheapest plan by columns that fits, and keeps a move budget; none where there is none, or there are more than FEW."""
    items = np.flatnonzero(problem.whole)
    if not 1 < problem.devices <= DEVICES or not len(items) or problem.widest[items].max() > WIDEST:
        return []
    if np.log(np.maximum(problem.places[items], 1)).sum() > np.log(FEW):
        return []
    deals = []
    for item in items.tolist():
        deals.append(_all_deals(problem, item))
        if np.prod([len(one) for one in deals], dtype=np.float64) > FEW:
            return []
    counts = [len(one) for one in deals]
    if not all(counts):
        return []
    problem.price(np.arange(1, len(problem.item)))
    ways = np.stack(np.unravel_index(np.arange(np.prod(counts)), counts), axis=1)  # (P, I)
    costs = np.concatenate(
        [_costs(problem, items, deals, ways[at : at + AT_ONCE]) for at in range(0, len(ways), AT_ONCE)]
    )
    for way in np.argsort(costs, kind="stable")[: np.count_nonzero(np.isfinite(costs))].tolist():
        widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
        widths[items] = [of[place] for of, place in zip(deals, ways[way].tolist(), strict=True)]
        held = problem.held
        if held is None or held.budget_bytes is None or held.total(widths) <= held.budget_bytes:
            return [State(problem, widths)]
    return []


def _costs(problem: Problem, items: Ints, deals: list[Widths], ways: Ints) -> Floats:
    """Ms of the slowest device of each of these plans, infinite where it does not fit: (P,)."""
    shape = (len(ways), problem.devices)
    sums, nbytes = problem.base, np.zeros(shape, dtype=np.int64)
    dims: Floats = np.full(shape, float(problem.base_dims))
    for place, item in enumerate(items.tolist()):
        units = deals[place][ways[:, place]]
        shards = problem.numbers(np.full(units.shape, item), units)
        sums = sums + problem.vectors[shards]
        dims, nbytes = dims + problem.dims[shards], nbytes + problem.nbytes[shards]
    compute, forward, backward = device_costs(problem.model, sums, dims)
    fits = (nbytes <= problem.memory).all(axis=1)
    cost: Floats = np.where(fits, (compute + forward + backward).max(axis=1), np.inf)
    return cost


def _all_deals(problem: Problem, item: int) -> Widths:
    """Every way to deal an item's units to the devices that may hold them: (N, D)."""
    allowed, least, cap = problem.allowed[item], int(problem.least[item]), int(problem.cap[item])

    def to(device: int, left: int, shards: int) -> Iterator[list[int]]:
        if device == problem.devices:
            if not left:
                yield []
            return
        for units in (0, *(range(least, min(left, cap) + 1) if allowed[device] and shards else ())):
            for rest in to(device + 1, left - units, shards - (units > 0)):
                yield [units, *rest]

    found = list(to(0, int(problem.widest[item]), int(problem.most[item])))
    return np.array(found, dtype=np.int64).reshape(-1, problem.devices)
