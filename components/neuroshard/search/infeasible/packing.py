"""Any plan at all, where memory is tight: every way to place the items is tried, the most awkward first, until one fits.

Small tasks are tried exhaustively, so that "no plan" is proven; large ones until a limit.
"""

from collections.abc import Iterator

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.filling import put_back
from neuroshard.search.problem.problem import Problem, Widths

TRIED = 20_000  # placements of one item


class GaveUp(Exception):
    """The limit was reached before all was tried."""


def quick_plan(problem: Problem) -> tuple[Problem, Widths] | None:
    """Units of every item on every device that fit, by a few greedy orders: column-wise, or with as few of the largest tables by
    rows as will do; and the problem with these tables row-wise."""
    blocks = problem.row_blocks
    largest, count = blocks.groups[np.argsort(-blocks.nbytes.sum(axis=1), kind="stable")], 0
    while count <= len(largest):
        there = problem.with_row_wise(largest[:count])
        if there is None:
            break
        widths = fill(there)
        if widths is not None:
            return there, widths
        count = min(count + max(1, count // 4), max(len(largest), count + 1))
    return None


def pack(problem: Problem, at_most: int = TRIED) -> Widths | None:
    """Units of every item on every device that fit in memory, or None where there is no such plan. Raises GaveUp."""
    widths = fill(problem)
    return (
        widths if widths is not None else _exhaustive(problem, np.argsort(-_awkward(problem), kind="stable"), at_most)
    )


def fill(problem: Problem) -> Widths | None:
    """The same by a few greedy orders, or None where all of them fail."""
    for key in (-_awkward(problem), -problem.nbytes[problem.first + problem.min_units].astype(np.float64)):
        for fullest in (False, True):
            widths = _fill(problem, np.argsort(key, kind="stable"), fullest)
            if widths is not None:
                return widths
    return None


def _awkward(problem: Problem) -> Floats:
    """Bytes of each item for each device that may hold it."""
    return np.asarray(problem.nbytes[problem.whole] / problem.allowed.sum(axis=1), dtype=np.float64)


def _fill(problem: Problem, order: Ints, fullest: bool) -> Widths | None:
    """Each item whole on the device with the most room, or the least that is enough; cut to fill where there is none."""
    widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
    free = problem.memory.copy()
    for item in order[problem.whole[order] > 0].tolist():
        shard = problem.first[item] + problem.all_units[item]
        room = (free >= problem.nbytes[shard]) & problem.allowed[item]
        if room.any() and problem.all_units[item] <= problem.max_units[item]:
            device = int(np.where(room, free if fullest else -free, np.iinfo(np.int64).max).argmin())
            widths[item, device] = problem.all_units[item]
            free[device] -= problem.nbytes[shard]
        elif not put_back(problem, widths, free, [(item, int(problem.all_units[item]))]):
            return None
    return widths


def _exhaustive(problem: Problem, order: Ints, at_most: int) -> Widths | None:
    """Depth first, item by item, every deal of its units to the devices."""
    order = order[problem.whole[order] > 0]
    items = order.tolist()
    ahead = np.concatenate([np.cumsum(problem.nbytes[problem.whole[order]][::-1])[::-1], [0]])
    widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
    tried = 0

    def place(depth: int, free: Ints) -> bool:
        nonlocal tried
        if ahead[depth] > free.sum():
            return False
        if depth == len(items):
            return True
        item = items[depth]
        for deal in _deals_with_room(problem, item, free):
            tried += 1
            if tried > at_most:
                raise GaveUp
            widths[item] = deal
            if place(depth + 1, free - problem.nbytes[problem.shards_of(np.full(problem.devices, item), widths[item])]):
                return True
        return False

    return widths if place(0, problem.memory.copy()) else None


def _deals_with_room(problem: Problem, item: int, free: Ints) -> Iterator[list[int]]:
    """Every way to deal an item's units to devices with room, roomiest devices and widest shards first.

    Of devices that nothing tells apart, the first gets the most.
    """
    devices = [int(d) for d in np.argsort(-free, kind="stable") if problem.allowed[item, d]]
    alike = [
        k > 0
        and free[d] == free[devices[k - 1]]
        and bool((problem.allowed[:, d] == problem.allowed[:, devices[k - 1]]).all())
        for k, d in enumerate(devices)
    ]
    first, least, cap = int(problem.first[item]), int(problem.min_units[item]), int(problem.max_units[item])
    sizes = problem.nbytes[first + 1 : first + cap + 1]  # of 1 unit, of 2, …
    holds = np.searchsorted(sizes, free[devices], side="right").tolist()  # units that each has room for
    deal = [0] * problem.devices

    def may(k: int, left: int, shards: int) -> bool:
        """Whether the devices from `k` on can take so many units in so many shards: without this, ways that end in nothing are
        followed without end."""
        run = next((i for i in range(k, len(devices)) if not alike[i]), len(devices))
        limit = deal[devices[k - 1]] if k else 0  # of the devices that nothing tells apart from the last one
        rooms = [min(units, limit) for units in holds[k:run]] + holds[run:]
        most = 0  # units in so many shards as there are, each of `least` to its room
        for number, units in enumerate(sorted(rooms, reverse=True)[:shards], 1):
            if most >= left or units < least or number * least > left:
                break
            most += units
        return most >= left

    def to(k: int, left: int, shards: int) -> Iterator[list[int]]:
        if not left:
            yield deal
            return
        device = devices[k]
        top = min(left, holds[k], deal[devices[k - 1]] if alike[k] else left)
        for units in (*range(top, least - 1, -1), 0):
            deal[device] = units
            if may(k + 1, left - units, shards - (units > 0)):
                yield from to(k + 1, left - units, shards - (units > 0))
        deal[device] = 0

    if may(0, int(problem.all_units[item]), int(problem.max_shards[item])):
        yield from to(0, int(problem.all_units[item]), int(problem.max_shards[item]))
