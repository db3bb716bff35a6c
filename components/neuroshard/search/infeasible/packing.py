"""A plan that fits, where memory is tight: greedy orders first, then every way to place the table groups.

A search of all ways ends after a number of them. If it ends before that, it is proven that no plan fits.
"""

from collections.abc import Iterator
from functools import cache
from itertools import islice

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints, device_costs
from neuroshard.search.problem.problem import Problem, Widths
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.start import squeeze

TRIED = 20_000  # placements of one group each: about a second
ALL_PLANS = 20_000  # plans that fit: all are priced in 0.1 to 0.2 s
ALL_DEALS = 300_000  # plans of some of the groups, of which only memory is checked: 0.03 s
ALL_DEVICES, ALL_UNITS = 4, 32  # with more devices, or wider groups, there are too many plans
AT_ONCE = 4096  # plans priced in one batch


class GaveUp(Exception):
    """The limit was reached before everything was tried."""


def quick_plan(problem: Problem) -> tuple[Problem, Widths] | None:
    """A plan that fits by a few greedy orders: column-wise, or with as few of the largest tables row-wise as it takes.

    It is the problem with these tables row-wise, and the units of every group on every device (I, D).
    """
    blocks = problem.row_blocks
    largest, count = blocks.items[np.argsort(-blocks.nbytes.sum(axis=1), kind="stable")], 0
    while count <= len(largest):
        there = problem.with_rows(largest[:count])
        if there is None:
            break
        widths = fill(there)
        if widths is not None:
            return there, widths
        count = min(count + max(1, count // 4), max(len(largest), count + 1))
    return None


def pack(problem: Problem, at_most: int = TRIED) -> Widths | None:
    """Units of every group on every device (I, D) that fit, or None if no plan fits. Raises GaveUp after `at_most` placements."""
    widths = fill(problem)
    return widths if widths is not None else _any_plan(problem, np.argsort(-_awkward(problem), kind="stable"), at_most)


def fill(problem: Problem) -> Widths | None:
    """The same by a few greedy orders; None if all of them fail."""
    for key in (-_awkward(problem), -problem.nbytes[problem.first + problem.least].astype(np.float64)):
        for fullest in (False, True):
            widths = _fill(problem, np.argsort(key, kind="stable"), fullest)
            if widths is not None:
                return widths
    return None


def _awkward(problem: Problem) -> Floats:
    """Bytes of each group per device that may hold it."""
    return np.asarray(problem.nbytes[problem.whole] / problem.allowed.sum(axis=1), dtype=np.float64)


def _fill(problem: Problem, order: Ints, fullest: bool) -> Widths | None:
    """Each group whole on the device with the most room, or with the least that is enough; else cut to fill devices."""
    widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
    free = problem.memory.copy()
    for group in order[problem.whole[order] > 0].tolist():
        shard = problem.first[group] + problem.widest[group]
        room = (free >= problem.nbytes[shard]) & problem.allowed[group]
        if room.any() and problem.widest[group] <= problem.cap[group]:
            device = int(np.where(room, free if fullest else -free, np.iinfo(np.int64).max).argmin())
            widths[group, device] = problem.widest[group]
            free[device] -= problem.nbytes[shard]
        elif not squeeze(problem, widths, free, [(group, int(problem.widest[group]))]):
            return None
    return widths


def _any_plan(problem: Problem, order: Ints, at_most: int) -> Widths | None:
    """The first plan that fits, depth first, one group after another."""
    groups = order[problem.whole[order] > 0]
    ahead = np.concatenate([np.cumsum(problem.nbytes[problem.whole[groups]][::-1])[::-1], [0]])
    widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
    tried = 0

    def place(depth: int, free: Ints) -> bool:
        nonlocal tried
        if ahead[depth] > free.sum():
            return False
        if depth == len(groups):
            return True
        group = int(groups[depth])
        for deal in deals(problem, group, free):
            tried += 1
            if tried > at_most:
                raise GaveUp
            widths[group] = deal
            if place(depth + 1, free - problem.nbytes[problem.numbers(np.full(problem.devices, group), widths[group])]):
                return True
        return False

    return widths if place(0, problem.memory.copy()) else None


def cheapest_plan(problem: Problem) -> list[State]:
    """The cheapest column-wise plan that fits and keeps the move budget, where all plans are few enough to price; or none.

    In a tiny task with little memory to spare, every better plan may be several moves away, over plans that do not fit.
    """
    groups = np.flatnonzero(problem.whole)
    if not 1 < problem.devices <= ALL_DEVICES or not len(groups) or problem.widest[groups].max() > ALL_UNITS:
        return []
    if np.log(np.maximum(problem.places[groups], 1)).sum() > np.log(ALL_DEALS):
        return []
    # the largest first: they leave the fewest ways
    groups = groups[np.argsort(-problem.nbytes[problem.whole[groups]], kind="stable")]
    options: list[Widths] = []
    plans, filled = np.zeros((1, 0), dtype=np.int64), np.zeros((1, problem.devices), dtype=np.int64)
    for group in groups.tolist():
        some = islice(deals(problem, group, problem.memory, mirrored=True), ALL_DEALS // max(len(plans), 1) + 1)
        every = sorted(map(tuple, some))
        options.append(np.array(every, dtype=np.int64).reshape(-1, problem.devices))
        if len(plans) * len(every) > ALL_DEALS:
            return []
        total = filled[:, None] + problem.nbytes[problem.numbers(np.full(options[-1].shape, group), options[-1])]
        plan, deal = np.nonzero((total <= problem.memory).all(axis=2))
        plans, filled = np.column_stack([plans[plan], deal]), total[plan, deal]
    if not 0 < len(plans) <= ALL_PLANS:
        return []
    problem.price(np.arange(1, len(problem.item)))
    batches = np.array_split(plans, -(-len(plans) // AT_ONCE))
    costs = np.concatenate([_costs_ms(problem, groups, options, batch) for batch in batches])
    for plan in plans[np.argsort(costs, kind="stable")].tolist():
        widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
        widths[groups] = [option[deal] for option, deal in zip(options, plan, strict=True)]
        held = problem.held
        if held is None or held.budget_bytes is None or held.total(widths) <= held.budget_bytes:
            return [State(problem, widths)]
    return []


def _costs_ms(problem: Problem, groups: Ints, options: list[Widths], plans: Ints) -> Floats:
    """The cost of each of N plans, which are an option for each of the groups (N, groups): (N,)."""
    sums: Floats = problem.base
    dims: Floats = np.full((len(plans), problem.devices), float(problem.base_dims))
    for place, group in enumerate(groups.tolist()):
        units = options[place][plans[:, place]]
        shards = problem.numbers(np.full(units.shape, group), units)
        sums, dims = sums + problem.vectors[shards], dims + problem.dims[shards]
    worst: Floats = np.sum(device_costs(problem.model, sums, dims), axis=0).max(axis=1)
    return worst


def deals(problem: Problem, group: int, free: Ints, *, mirrored: bool = False) -> Iterator[list[int]]:
    """Every way to deal a group's units to devices with room, roomiest devices and widest shards first: units by device.

    Of devices that nothing tells apart the first gets the most units, unless ways that are `mirrored` are wanted too. The list is
    the same one every time.
    """
    devices = [int(d) for d in np.argsort(-free, kind="stable") if problem.allowed[group, d]]
    alike = [
        not mirrored
        and k > 0
        and free[d] == free[devices[k - 1]]
        and bool((problem.allowed[:, d] == problem.allowed[:, devices[k - 1]]).all())
        for k, d in enumerate(devices)
    ]
    first, least, cap = int(problem.first[group]), int(problem.least[group]), int(problem.cap[group])
    sizes = problem.nbytes[first + 1 : first + cap + 1]  # of 1 unit, of 2, …
    holds = np.searchsorted(sizes, free[devices], side="right").tolist()  # units that each has room for
    deal = [0] * problem.devices

    def may(k: int, left: int, shards: int) -> bool:
        """Whether the devices from `k` on can take `left` units in at most so many shards: without this check most of the time
        is spent on ways that cannot be completed."""
        run = next((i for i in range(k, len(devices)) if not alike[i]), len(devices))
        limit = deal[devices[k - 1]] if k else 0  # of the devices that nothing tells apart from the last one
        rooms = [min(units, limit) for units in holds[k:run]] + holds[run:]
        most = 0  # units in 1, 2, … shards, each of `least` units to all of its device's room
        for number, units in enumerate(sorted(rooms, reverse=True)[:shards], 1):
            if most >= left or units < least or number * least > left:
                break
            most += units
        return most >= left

    may_take = cache(may) if mirrored else may  # if devices are alike it depends on the deal as well

    def to(k: int, left: int, shards: int) -> Iterator[list[int]]:
        if not left:
            yield deal
            return
        device = devices[k]
        top = min(left, holds[k], deal[devices[k - 1]] if alike[k] else left)
        for units in (*range(top, least - 1, -1), 0):
            deal[device] = units
            if may_take(k + 1, left - units, shards - (units > 0)):
                yield from to(k + 1, left - units, shards - (units > 0))
        deal[device] = 0

    if may(0, int(problem.widest[group]), int(problem.most[group])):
        yield from to(0, int(problem.widest[group]), int(problem.most[group]))
