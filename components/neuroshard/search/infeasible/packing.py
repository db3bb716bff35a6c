"""A plan that fits, where memory is tight: greedy orders first, then every way to place the table groups.

A search of all ways ends after a number of them. If it ends before that, it is proven that no plan fits.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.column_shards import Widths
from neuroshard.search.problem.filling import put_back
from neuroshard.search.problem.problem import Problem

TRIED = 20_000  # placements of one group each: about a second
MOST_TRIED = 500  # groups and devices together, each a call inside the others; of more, TRIED is far from every way
NO_ROOM = np.iinfo(np.int64).max


class GaveUp(Exception):
    """The limit was reached before everything was tried."""


def quick_plan(problem: Problem) -> tuple[Problem, Widths] | None:
    """A plan that fits by a few greedy orders: column-wise, or with some tables spread.

    Each try has more of these: one more, and from eight on a quarter more. There is a series of tries for every way to hold
    tables. Returned are the problem with these tables spread, and the units of every group on every device (G, D).
    """
    series = [_relieved(problem, way) for way in range(len(problem.options.kinds))]
    for groups, places in series:
        count = 0
        while count <= len(groups):
            there = problem.with_spread(groups[:count], places[:count])
            if there is None:
                break
            widths = fill(there)
            if widths is not None:
                return there, widths
            count = min(count + max(1, count // 4), max(len(groups), count + 1))
    return None


def _relieved(problem: Problem, preferred: int) -> tuple[Ints, Ints]:
    """The groups that need less of a device spread than whole, those first that need least in comparison, and their places, each
    where most room is. Each is held in the preferred way, or in the first that it may if it may not in that.

    A row block has a share of the weights. A copy needs the inputs and outputs of a device's own samples; a whole table, or a
    column shard, those of all samples.
    """
    options, free, places = problem.options, problem.memory.copy(), []
    ways = np.where(options.allowed[:, preferred], preferred, options.allowed.argmax(axis=1))
    needs = options.nbytes[np.arange(len(ways)), ways, :-1].max(axis=-1)
    relief = problem.nbytes[problem.whole[options.groups]] - needs
    some = np.flatnonzero((relief > 0) & options.allowed.any(axis=1))
    some = some[np.argsort(-relief[some], kind="stable")]
    for position in some.tolist():
        way = int(ways[position])
        devices = options.kinds[way].devices
        room = free.reshape(-1, devices)
        roomiest = int(room.min(axis=1).argmax())
        room[roomiest] -= needs[position]
        places.append(options.place_of(way, roomiest * devices))
    return options.groups[some], np.array(places, dtype=np.int64)


def pack(problem: Problem, at_most: int = TRIED) -> Widths | None:
    """Units of every group on every device (G, D) that fit, or None if no plan fits.

    Raises GaveUp after `at_most` placements, and at once where there are too many groups and devices.
    """
    widths = fill(problem)
    if widths is not None:
        return widths
    if np.count_nonzero(problem.whole) + problem.devices > MOST_TRIED:
        raise GaveUp
    return _any_plan(problem, np.argsort(-_awkward(problem), kind="stable"), at_most)


def fill(problem: Problem) -> Widths | None:
    """The same by a few greedy orders; None if all of them fail."""
    keys = _awkward(problem), problem.nbytes[problem.first + problem.min_units].astype(np.float64)
    placed = [order[problem.whole[order] > 0] for order in (np.argsort(-key, kind="stable") for key in keys)]
    orders = {order.tobytes(): order for order in placed}  # equal tables have one
    tries = (_fill(problem, order, fullest) for order in orders.values() for fullest in (False, True))
    return next((widths for widths in tries if widths is not None), None)


def _awkward(problem: Problem) -> Floats:
    """Bytes of each group per device that may hold it."""
    return np.asarray(problem.nbytes[problem.whole] / problem.allowed.sum(axis=1), dtype=np.float64)


def _fill(problem: Problem, order: Ints, fullest: bool) -> Widths | None:
    """Each group whole on the device with the most room, or with the least that is enough; else cut to fill devices."""
    widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
    free = problem.memory.copy()
    for group in order.tolist():
        shard = problem.first[group] + problem.all_units[group]
        room = (free >= problem.nbytes[shard]) & problem.allowed[group]
        if room.any() and problem.all_units[group] <= problem.max_units[group]:
            device = int(np.where(room, free if fullest else -free, NO_ROOM).argmin())
            widths[group, device] = problem.all_units[group]
            free[device] -= problem.nbytes[shard]
        elif not put_back(problem, widths, free, [(group, int(problem.all_units[group]))]):
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
            if place(
                depth + 1, free - problem.nbytes[problem.shards_of(np.full(problem.devices, group), widths[group])]
            ):
                return True
        return False

    return widths if place(0, problem.memory.copy()) else None


def deals(problem: Problem, group: int, free: Ints) -> Iterator[list[int]]:
    """Every way to deal a group's units to devices with room, roomiest devices and widest shards first: units by device.

    Of devices with the same room and the same pins the first gets the most units. Every yield is the same list, changed.
    """
    devices = [int(d) for d in np.argsort(-free, kind="stable") if problem.allowed[group, d]]
    pairs = pairwise(devices)
    alike = [False] + [
        bool(free[d] == free[before] and (problem.allowed[:, d] == problem.allowed[:, before]).all())
        for before, d in pairs
    ]
    first, least, most = int(problem.first[group]), int(problem.min_units[group]), int(problem.max_units[group])
    sizes = problem.nbytes[first + 1 : first + most + 1]  # of 1 unit, of 2, …
    room = np.searchsorted(sizes, free[devices], side="right").tolist()  # units that each device has room for
    dealt = [0] * problem.devices

    def may_take(k: int, left: int, shards: int) -> bool:
        """Whether the devices from `k` on can take `left` units in at most so many shards: without this check most of the time
        is spent on ways that cannot be completed."""
        run = next((i for i in range(k, len(devices)) if not alike[i]), len(devices))
        limit = dealt[devices[k - 1]] if k else 0  # of the devices like the last one
        rooms = [min(units, limit) for units in room[k:run]] + room[run:]
        taken = 0  # units in 1, 2, … shards, each of `least` units to all of its device's room
        for number, units in enumerate(sorted(rooms, reverse=True)[:shards], 1):
            if taken >= left or units < least or number * least > left:
                break
            taken += units
        return taken >= left

    def deal(k: int, left: int, shards: int) -> Iterator[list[int]]:
        """Deal `left` units to the devices from `k` on, in at most so many shards."""
        if not left:
            yield dealt
        elif may_take(k, left, shards):
            device, limit = devices[k], dealt[devices[k - 1]] if alike[k] else left
            for units in (*range(min(left, room[k], limit), least - 1, -1), 0):
                dealt[device] = units
                yield from deal(k + 1, left - units, shards - (units > 0))
            dealt[device] = 0

    yield from deal(0, int(problem.all_units[group]), int(problem.max_shards[group]))
