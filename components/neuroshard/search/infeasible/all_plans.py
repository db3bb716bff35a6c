"""The cheapest of all plans, where there are few enough to price each: in a tiny task with little memory to spare every step that
helps may lead over plans that do not fit, so that no local search finds it."""

from collections.abc import Iterator

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints, device_costs
from neuroshard.search.problem.problem import Problem, Widths
from neuroshard.search.problem.state import State

FEW = 20_000  # plans that fit: pricing them takes a tenth of a second or two
TRIED = 300_000  # ways to deal some of the items, of which memory alone is looked at: a hundredth of a second
DEVICES, WIDEST = 4, 32  # of more devices, or for items of more units, there are too many
AT_ONCE = 4096  # priced in one batch


def cheapest_of_all(problem: Problem) -> list[State]:
    """The cheapest plan column-wise that fits, and keeps a move budget; none where there is none, or more than FEW
    or finding them takes more than TRIED."""
    items = np.flatnonzero(problem.whole)
    if not 1 < problem.devices <= DEVICES or not len(items) or problem.widest[items].max() > WIDEST:
        return []
    if np.log(np.maximum(problem.places[items], 1)).sum() > np.log(TRIED):
        return []
    items = items[np.argsort(-problem.nbytes[problem.whole[items]], kind="stable")]  # the largest leave the fewest ways
    deals: list[Widths] = []
    ways, filled = np.zeros((1, 0), dtype=np.int64), np.zeros((1, problem.devices), dtype=np.int64)
    for item in items.tolist():
        deals.append(_all_deals(problem, item))
        if len(ways) * len(deals[-1]) > TRIED:
            return []
        whole = filled[:, None] + problem.nbytes[problem.numbers(np.full(deals[-1].shape, item), deals[-1])]
        way, deal = np.nonzero((whole <= problem.memory).all(axis=2))
        ways, filled = np.column_stack([ways[way], deal]), whole[way, deal]
    if not 0 < len(ways) <= FEW:
        return []
    problem.price(np.arange(1, len(problem.item)))
    costs = np.concatenate(
        [_costs(problem, items, deals, ways[at : at + AT_ONCE]) for at in range(0, len(ways), AT_ONCE)]
    )
    for way in np.argsort(costs, kind="stable").tolist():
        widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
        widths[items] = [of[place] for of, place in zip(deals, ways[way].tolist(), strict=True)]
        held = problem.held
        if held is None or held.budget_bytes is None or held.total(widths) <= held.budget_bytes:
            return [State(problem, widths)]
    return []


def _costs(problem: Problem, items: Ints, deals: list[Widths], ways: Ints) -> Floats:
    """Ms of the slowest device of each of these plans: (P,)."""
    shape = (len(ways), problem.devices)
    sums: Floats = problem.base
    dims: Floats = np.full(shape, float(problem.base_dims))
    for place, item in enumerate(items.tolist()):
        units = deals[place][ways[:, place]]
        shards = problem.numbers(np.full(units.shape, item), units)
        sums = sums + problem.vectors[shards]
        dims = dims + problem.dims[shards]
    compute, forward, backward = device_costs(problem.model, sums, dims)
    cost: Floats = (compute + forward + backward).max(axis=1)
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
