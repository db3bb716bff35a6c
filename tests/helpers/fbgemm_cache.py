"""A simulation of FBGEMM's LRU cache of embedding rows, as its CUDA sources have it: 32 ways, hashed sets, by batch.

Of a batch's distinct rows all hits get the batch's time first. Then the misses, in order of their rows, replace the slots of
their set in order of time. A slot of this batch is never replaced, nor with prefetch one of the batch before; rows that are left
over are read from host memory. After `lru_cache_find.cu`, `lru_cache_populate.cu` and `common.cuh` of FBGEMM.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WAYS = 32


class Counted(NamedTuple):
    """Rows a batch: distinct ones, those that were not in the cache, and those of them that found no slot."""

    distinct: float
    missed: float
    conflicts: float

    @property
    def miss_rate(self) -> float:
        return self.missed / self.distinct


def set_of(rows: NDArray[np.int64], sets: int) -> NDArray[np.int64]:
    """The set of each row: the last steps of murmur3's 64-bit hash, modulo the sets."""
    mixed = rows.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(33)
    return (mixed % np.uint64(sets)).astype(np.int64)


class LruCache:
    """A cache of at least so many rows, in whole sets."""

    def __init__(self, cached_rows: int, prefetch: bool = False) -> None:
        self.sets = max(-(-cached_rows // WAYS), 1)
        self.row = np.full((self.sets, WAYS), -1, dtype=np.int64)
        self.time = np.full((self.sets, WAYS), -2, dtype=np.int64)  # of the last batch that read the slot's row
        self.now = 0
        self.locked = 1 if prefetch else 0

    def read(self, lookups: NDArray[np.int64]) -> tuple[int, int, int]:
        """Distinct rows of a batch, how many of them missed, and how many of those found no slot."""
        rows = np.unique(lookups)
        sets = set_of(rows, self.sets)
        found = self.row[sets] == rows[:, None]
        hit = found.any(axis=1)
        self.time[sets[hit], found[hit].argmax(axis=1)] = self.now
        order = np.flatnonzero(~hit)
        order = order[np.argsort(sets[order], kind="stable")]
        missed, where = rows[order], sets[order]
        first_of_set = np.searchsorted(where, where)
        rank = np.arange(len(where)) - first_of_set
        oldest = np.argsort(self.time[where], axis=1, kind="stable")
        slot = oldest[np.arange(len(where)), np.minimum(rank, WAYS - 1)]
        free = (rank < WAYS) & (self.time[where, slot] < max(self.now - self.locked, 0))
        self.row[where[free], slot[free]] = missed[free]
        self.time[where[free], slot[free]] = self.now
        self.now += 1
        return len(rows), len(missed), int((~free).sum())


def simulated(
    batches: Iterable[NDArray[np.int64]], cached_rows: int, warm_up: int = 0, prefetch: bool = False
) -> Counted:
    """What a cache counts on average over the batches after the first `warm_up`."""
    cache = LruCache(cached_rows, prefetch)
    counted = [cache.read(batch) for batch in batches]
    return Counted(*np.mean(counted[warm_up:], axis=0).tolist())
