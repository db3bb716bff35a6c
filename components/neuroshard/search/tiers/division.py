"""How the devices of a plan divide their HBM: the tier of each table beyond HBM, and how many of its rows are cached.

A table has one tier and one share of cached rows, wherever its shards are: TorchRec has one compute kernel and one load factor a
table. So those in several shards are chosen first, by what the slowest devices then take. Then every device gives what it has
left to its other tables, as is cheapest.
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from neuroshard.core.part import Part
from neuroshard.core.plan import Shard, parts_of
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import WAYS, Tier
from neuroshard.costmodel.cache import WaterFilling, convex_hull
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.step_room import uncounted_bytes
from neuroshard.search.tiers.points import Curve, PartPoints

GAP = 1e-3  # relative, of a division's ms above its bound, at which it is good enough: a guess
MOST_BRANCHES = 40  # of the division of a device: a guess
SIZES = 33  # of caches of a table in several shards, evenly spaced, that are tried beside those of its points: a guess
MOST_SWEEPS = 3  # over the tables in several shards: a guess
SOFT = 16  # the norm of the devices' ms that stands for the slowest, so that the others count a little: a guess

Tiers = Mapping[str, tuple[Tier, int | None]]  # of tables, with the cached rows


def divided(
    task: ShardingTask,
    shards: Sequence[Shard],
    beyond: Collection[str],
    points: PartPoints,
    busy_ms: Floats,
) -> tuple[dict[str, tuple[Tier, int | None]], bool]:
    """The tiers of the tables `beyond` HBM, where these are the shards of all tables, and whether devices have room for all that
    stays in HBM.

    `task` has none of these tables in a tier. `busy_ms` (D,) is what each device takes with all of its tables in HBM.
    """
    task = task.keeping_free(())  # what a step takes is known here
    free, parts = np.array(task.searched_bytes, dtype=np.float64), dict[str, list[tuple[int, Part]]]()
    if task.counts_steps:
        free -= uncounted_bytes(task, shards, counts_sent=False)
    of_shards = parts_of(task, shards)
    for shard, part, memory in zip(shards, of_shards, task.memories(of_shards), strict=True):
        if shard.table in beyond:
            parts.setdefault(shard.table, []).append((shard.device, part))
            free[shard.device] -= points([part])[0].nbytes[-1]  # every table has at least a place in host memory
        else:
            free[shard.device] -= memory.total
    fits = bool((free >= 0).all())
    alone: list[list[Part]] = [[] for _ in range(task.devices)]
    several = {}
    for name, some in parts.items():
        if len(some) == 1:
            alone[some[0][0]].append(some[0][1])
        else:
            several[name] = _Several.of(some, points, task.devices)
    curves, found = [list(map(points.curve, some)) for some in alone], {}
    if several:
        rows = _of_several(list(several.values()), curves, free, busy_ms)
        found = {name: tier_of(cached, len(parts[name])) for name, cached in zip(several, rows, strict=True)}
    for there, of_there, room in zip(alone, curves, free.tolist(), strict=True):
        sizes = _filled(of_there, room).tolist() if there else []
        for part, of_part, size in zip(there, points(there), sizes, strict=True):
            found[part.table.name] = tier_of(of_part.rows_of(size))
    return found, fits


class _Several(NamedTuple):
    """What the shards of a table take, by the rows that it caches (P,), from none on: bytes of HBM more than in host memory and
    ms of each device, (P, D)."""

    rows: Floats
    nbytes: Floats
    ms: Floats

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Part]], points: PartPoints, devices: int) -> "_Several":
        each = points([part for _, part in parts])
        known = each[0].rows[1:-1]
        rows = np.union1d(known, np.linspace(known[0], known[-1], SIZES))
        nbytes, ms = np.zeros((len(rows) + 1, devices)), np.zeros((len(rows) + 1, devices))
        for (device, part), one in zip(parts, each, strict=True):
            last_set = WAYS * points.slot(part)  # of a block's, which FBGEMM makes whole
            nbytes[1:, device] += np.interp(rows, known, one.nbytes[1:-1]) - one.nbytes[-1] + last_set
            ms[:, device] += np.append(one.ms[-1], np.interp(rows, known, one.ms[1:-1]))
        return cls(np.append(0.0, rows), nbytes, ms)


def _of_several(
    several: Sequence[_Several], curves: Sequence[Sequence[Curve]], free: Floats, busy_ms: Floats
) -> list[float]:
    """Cached rows of tables in several shards, whose bytes are taken from those `free` (D,) beyond what all tables take in host
    memory. Their devices give the rest to the `curves` of their other tables, as the hulls of these have it.

    Of the choices to which `_filling_up` leads, the one is taken that is best for the slowest devices. From there, one table
    after another has the rows that are best for them, until none changes.
    """
    fillings = {device: WaterFilling([curve.hulled for curve in some]) for device, some in enumerate(curves) if some}
    busy_ms = busy_ms + sum(of.ms[0] for of in several)

    def slowest(nbytes: Floats, ms: Floats) -> Floats:
        """What the slowest devices take by what these tables take, both (N, D): (N,). Infinite but for the first without room."""
        room, total = free - nbytes, busy_ms + ms
        for device, filling in fillings.items():
            total[:, device] += filling.left_at(room[:, device])
        found: Floats = np.linalg.norm(total / total.max(), ord=SOFT, axis=1)
        found[1:][(room[1:] < 0).any(axis=1)] = np.inf
        return found

    taken = [(of.nbytes, of.ms - of.ms[0]) for of in several]
    choices = _filling_up(taken, free)
    nbytes, ms = (np.sum([of[axis][at] for of, at in zip(taken, choices.T, strict=True)], axis=0) for axis in (0, 1))
    at = choices[int(slowest(nbytes, ms).argmin())]
    for _ in range(MOST_SWEEPS):
        before = at.copy()
        for number, (nbytes, ms) in enumerate(taken):
            others = [sum(of[axis][at[n]] for n, of in enumerate(taken) if n != number) for axis in (0, 1)]
            at[number] = int(slowest(others[0] + nbytes, others[1] + ms).argmin())
        if (at == before).all():
            break
    free -= sum(of.nbytes[place] for of, place in zip(several, at.tolist(), strict=True))
    return [float(of.rows[place]) for of, place in zip(several, at.tolist(), strict=True)]


def _filling_up(taken: Sequence[tuple[Floats, Floats]], free: Floats) -> Ints:
    """Choices of a place in the bytes and ms (P, D) of each of N tables: first all in host memory, then one after another has
    more rows, as the hulls of what they take of all devices together have it, those first that save most a byte: (C, N)."""
    steps = []
    for number, (nbytes, ms) in enumerate(taken):
        size, least = nbytes.sum(axis=1), np.minimum.accumulate(ms.sum(axis=1))
        for before, after in pairwise(convex_hull(size, least).tolist()):
            saved = (least[before] - least[after]) / max(size[after] - size[before], 1.0)
            if saved > 0:
                steps.append((-saved, number, after))
    choices, room = [np.zeros(len(taken), dtype=np.int64)], free
    for _, number, place in sorted(steps):
        more = taken[number][0][place] - taken[number][0][choices[-1][number]]
        if (room >= more).all():
            room = room - more
            choices.append(choices[-1].copy())
            choices[-1][number] = place
    return np.array(choices)


def tier_of(rows: float, parts: int = 1) -> tuple[Tier, int | None]:
    """The tier of a table with about so many cached rows: in whole sets of each part."""
    whole = int(rows) // (WAYS * parts) * WAYS * parts
    return ("cached", whole) if whole else ("host", None)


def _filled(parts: Sequence[Curve], free: float) -> Floats:
    """Bytes of HBM for each part of a device (N,), which has so many beyond what all take in host memory: at the least ms.

    By branch and bound. The bound is that of the hulls; in it all parts but one are at places of their curves. Where that one is
    between two places with nothing between them, or above the hull, it is either below or above, a branch each.
    """
    best, least = np.zeros(len(parts)), float(sum(part.ms[0] for part in parts))
    branches, count = [(-np.inf, 0, tuple(parts))], 0
    while branches and count < MOST_BRANCHES:
        bound, _, curves = heappop(branches)
        if bound >= least * (1 - GAP):
            break
        count += 1
        filling = WaterFilling([curve.hulled for curve in curves])
        if filling.least > free:
            continue
        bound, (sizes, whole) = float(filling.left_at(free)), filling.sizes(free)
        if bound >= least * (1 - GAP):
            continue
        found = _of_caches(parts, filling, whole, free)
        ms = sum(part.at(size) for part, size in zip(parts, found.tolist(), strict=True))
        best, least = min((best, least), (found, ms), key=lambda one: one[1])
        if whole < len(filling.owner):
            torn = int(filling.owner[whole])
            for number, branch in enumerate(curves[torn].branches(float(sizes[torn]))):
                heappush(branches, (bound, 2 * count + number, (*curves[:torn], branch, *curves[torn + 1 :])))
    return best


def _of_caches(parts: Sequence[Curve], filling: WaterFilling, whole: int, free: float) -> Floats:
    """Sizes (N,) that caches have: the first segments whole, and of the next ones what fits and saves something."""
    sizes, full = filling.sizes(float(filling.spent[whole]))[0], set[int]()
    room = free - float(filling.spent[whole])
    for number, taken in zip(filling.owner[whole:].tolist(), filling.taken[whole:].tolist(), strict=True):
        if room <= 0:
            break
        size, part = float(sizes[number]), parts[number]
        if number not in full and part.at(size + min(taken, room)) < part.at(size):
            sizes[number] += min(taken, room)
            room -= min(taken, room)
        if taken > room:
            full.add(number)
    return sizes
