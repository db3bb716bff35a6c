"""How the devices of a plan divide their HBM: the tier of each table beyond HBM, and how many of its rows are cached.

A table has one tier and one share of cached rows, wherever its shards are: TorchRec has one compute kernel and one load factor a
table. So those with shards on several devices are chosen first. Then every device gives what it has left to its other tables,
first to those that save most a byte.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from neuroshard.core.plan import Shard, parts_of
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import WAYS, Tier
from neuroshard.costmodel.cache import convex_hull
from neuroshard.search.tiers.points import PartPoints, Points

Tiers = Mapping[str, tuple[Tier, int | None]]  # of tables, with the cached rows


def divided(
    task: ShardingTask, shards: Sequence[Shard], beyond: Collection[str], cached: Tiers, points: PartPoints
) -> dict[str, tuple[Tier, int | None]]:
    """The tiers of the tables `beyond` HBM, of which those `cached` have theirs already, where these are the shards of all
    tables.

    `task` has none of these tables in a tier.
    """
    found, free = dict(cached), np.array(task.usable_bytes, dtype=np.float64)
    parts: dict[str, list[tuple[int, Points]]] = {name: [] for name in beyond if name not in cached}
    of_shards = parts_of(task, shards)
    each = zip(shards, of_shards, task.with_tiers(cached).memories(of_shards), strict=True)
    for shard, part, memory in each:
        if shard.table in parts:
            [of_part] = points([part])
            parts[shard.table].append((shard.device, of_part))
            free[shard.device] -= of_part.nbytes[-1]  # every table has at least a place in host memory
        else:
            free[shard.device] -= memory.total
    alone: dict[int, list[str]] = {}
    for name, some in parts.items():
        if len(some) == 1:
            alone.setdefault(some[0][0], []).append(name)
            continue
        ms, need = np.zeros(len(some[0][1].ms)), np.zeros((len(some[0][1].ms), task.devices))
        for device, of_part in some:
            ms += of_part.ms
            need[:, device] += of_part.nbytes - of_part.nbytes[-1]
        ms[0] = np.inf
        fits = np.all(need <= free / 2, axis=1)  # half is left for the others
        at = int(np.where(fits, ms, np.inf).argmin())
        free -= need[at]
        found[name] = _tier(float(some[0][1].rows[at]), len(some))
    for device, names in alone.items():
        rows = _filled([parts[name][0][1] for name in names], float(free[device]))
        found |= {name: _tier(of, 1) for name, of in zip(names, rows, strict=True)}
    return found


def _tier(rows: float, parts: int) -> tuple[Tier, int | None]:
    """The tier of a table with so many cached rows, in whole sets of each part."""
    whole = int(rows) // (WAYS * parts) * WAYS * parts
    return ("cached", whole) if whole else ("host", None)


def _filled(parts: Sequence[Points], free: float) -> list[float]:
    """Cached rows of each part of a device whose caches have so many bytes beyond what all take in host memory.

    Bytes go to the parts segment by segment of the convex hulls of their points, first where they save most. In the last
    segment, and between host memory and a first cache, the rest makes as large a cache as fits.
    """
    segments, curves = [], []
    for number, part in enumerate(parts):
        points = np.array(
            [len(part.ms) - 1, *range(1, len(part.ms) - 1)]
        )  # host memory, then caches from small to large
        nbytes, ms, rows = part.nbytes[points] - part.nbytes[-1], part.ms[points], part.rows[points]
        curves.append((nbytes, ms, rows))
        hull = convex_hull(nbytes, np.minimum.accumulate(ms))
        for first, last in pairwise(hull):
            saved = (ms[first] - ms[last]) / max(nbytes[last] - nbytes[first], 1.0)
            if saved > 0:
                segments.append((-saved, number, float(nbytes[last])))
    found, used, full = np.zeros(len(parts)), np.zeros(len(parts)), np.zeros(len(parts), dtype=bool)
    for _, number, after in sorted(segments):
        if full[number]:
            continue
        nbytes, ms, rows = curves[number]
        room = free - used.sum() + used[number]
        full[number] = after > room
        size = min(after, room)
        if np.interp(size, nbytes[1:], ms[1:]) < ms[0] and size > nbytes[1]:  # else host memory is as good
            found[number], used[number] = np.interp(size, nbytes[1:], rows[1:]), size
    return [float(rows) for rows in found]
