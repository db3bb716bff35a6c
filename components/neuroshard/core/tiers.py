"""The tiers that a table may lie in, and what an FBGEMM operator takes there: to the byte, of HBM and of host memory.

A table lies in HBM, in host memory, or in host memory behind a cache in HBM. Counted is what grows with rows and cached rows, as
FBGEMM 1.8 allocates it (seen on the meta device in tests/core/test_tiers.py); a few hundred bytes an operator, which do not, are
left out. Row-wise state lies in HBM whatever the tier. State of elements lies where the weights do, and is never cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from neuroshard.core.part import Part

Tier = Literal["hbm", "cached", "host"]
BeyondHbmTier = Literal["cached", "host"]


class TierFacts(NamedTuple):
    """A tier as everybody names it."""

    kernel: str  # TorchRec's compute kernel
    place: str  # FBGEMM's EmbeddingLocation, on a GPU
    in_host: bool  # elements are in host memory
    cached: bool  # behind a cache in HBM
    words: str


TIERS: dict[Tier, TierFacts] = {
    "hbm": TierFacts("fused", "DEVICE", in_host=False, cached=False, words="in HBM"),
    "cached": TierFacts("fused_uvm_caching", "MANAGED_CACHING", in_host=True, cached=True, words="cached"),
    "host": TierFacts("fused_uvm", "MANAGED", in_host=True, cached=False, words="in host memory"),
}
BY_KERNEL: dict[str, Tier] = {facts.kernel: tier for tier, facts in TIERS.items()}

WAYS = 32  # rows of a set of the cache (CUDA; HIP has 64: there a cache may have a set of 32 more than counted)
TAG_BYTES = 8  # of a cached row: which row it is
TIME_BYTES = 8  # of a cached row, under LRU: when it was last read
COUNT_BYTES = 8  # of every row that may be cached, under LFU: how often it was read
LOCK_BYTES = 4  # of a cached row, where batches are fetched ahead
ABOVE_WHOLE = 1 / 64  # of a row: FBGEMM rounds down, and so many shards of a table on a device do not make a row more
MAP_BYTES = 4  # of every row that may be cached: which table it is of


class TierBytes(NamedTuple):
    """Bytes of HBM on a device, and of memory on its host."""

    hbm: int
    host: int


@dataclass(frozen=True)
class Cache:
    """How the cached tables of an operator are cached. `load_factor` is the share of their rows that the cache has room for."""

    load_factor: float
    lfu: bool = False
    prefetch: bool = False  # batches are fetched ahead (`prefetch_pipeline`), which locks their rows

    def slots(self, rows: int) -> int:
        """Rows that it has room for, of so many: whole sets of WAYS, at least one."""
        return max(-(-int(rows * self.load_factor) // WAYS), 1) * WAYS


def slot_bytes(*, lfu: bool = False, prefetch: bool = False) -> int:
    """Bytes of HBM for a cached row, beside the row."""
    return TAG_BYTES + (0 if lfu else TIME_BYTES) + (LOCK_BYTES if prefetch else 0)


def load_factor(cached_rows: int, rows: int) -> float:
    """The share of a table's rows for which FBGEMM makes caches of at least so many, and of less than a set more for each block
    that the rows are split into (of up to 32). Column shards of a table on one device share one, as large as theirs together."""
    sets = max(-(-cached_rows // WAYS), 1)
    return min((sets * WAYS + ABOVE_WHOLE) / rows, 1.0)


def operator_bytes(parts: Sequence[tuple[Part, Tier]], cache: Cache | None = None) -> TierBytes:
    """Weights and optimizer state of one operator of these parts. A cached row is as wide as the widest cached part.

    Raises ValueError where some are cached and `cache` does not say how.
    """
    hbm = host = 0
    for part, tier in parts:
        weights, state, *_ = part.memory()
        beyond = weights + state - part.rows * part.table.optimizer_bytes_per_row if TIERS[tier].in_host else 0
        hbm += weights + state - beyond
        host += beyond
    cached = [part for part, tier in parts if TIERS[tier].cached]
    if not cached:
        return TierBytes(hbm, host)
    if cache is None:
        raise ValueError(f"table {cached[0].table.name!r} is cached, but nothing says how many of its rows are")
    rows = sum(part.rows for part in cached)
    slot = max(part.dim * part.table.element_bytes for part in cached)
    slot += slot_bytes(lfu=cache.lfu, prefetch=cache.prefetch)
    counts = (rows + 1) * COUNT_BYTES if cache.lfu else 0
    return TierBytes(hbm + cache.slots(rows) * slot + rows * MAP_BYTES + counts, host)
