"""The tiers that a table may lie in, each a record, and what an FBGEMM operator takes there: to the byte, of HBM and of host
memory.

A table lies in HBM, in host memory, or in host memory behind a cache in HBM. What others say of a tier follows from its record
(docs/architecture.md). Counted is what grows with rows and cached rows, as
FBGEMM 1.8 allocates it (seen on the meta device in tests/core/test_tiers.py); a few hundred bytes an operator, which do not, are
left out. Row-wise state lies in HBM whatever the tier. State of elements lies where the weights do, and is never cached.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from neuroshard.core.part import Part

Tier = Literal["hbm", "cached", "host"]
BeyondHbmTier = Literal["cached", "host"]  # of which cases are measured
Resource = Literal["hbm", "host"]  # where weights and state of elements are
RESOURCES: dict[Resource, str] = {"hbm": "HBM", "host": "host memory"}


@dataclass(frozen=True)
class TierFacts:
    """A tier as everybody names it. Without a cache of its rows in HBM, all are read where they are."""

    name: Tier
    kernel: str  # TorchRec's compute kernel
    place: str  # FBGEMM's EmbeddingLocation, on a GPU
    words: str
    elements: Resource = "host"
    cached: bool = False
    since: int = 2  # the oldest format of plans that knows it

    @property
    def beyond_hbm(self) -> bool:
        """Whether its elements are elsewhere than in HBM."""
        return self.elements != "hbm"

    def holds(self, rows: int, cached_rows: int | None) -> str:
        """Where so many rows are, in words: `in host memory`, `cached, 96 of 1,000 rows in HBM (9.6%)`."""
        some = "" if cached_rows is None else f", {cached_rows:,} of {rows:,} rows in HBM ({cached_rows / rows:.1%})"
        return f"{self.words}{some}"


IN_HBM = TierFacts("hbm", "fused", "DEVICE", "in HBM", "hbm")
CACHED = TierFacts("cached", "fused_uvm_caching", "MANAGED_CACHING", "cached", cached=True)
IN_HOST = TierFacts("host", "fused_uvm", "MANAGED", "in host memory")
TIERS: dict[Tier, TierFacts] = {tier.name: tier for tier in (IN_HBM, CACHED, IN_HOST)}
BY_KERNEL: dict[str, TierFacts] = {tier.kernel: tier for tier in TIERS.values()}

WAYS = 32  # rows of a set of the cache (CUDA; HIP has 64: there a cache may have a set of 32 more than counted)
TAG_BYTES = 8  # of a cached row: which row it is
TIME_BYTES = 8  # of a cached row, under LRU: when it was last read
COUNT_BYTES = 8  # of every row that may be cached, under LFU: how often it was read
LOCK_BYTES = 4  # of a cached row, where batches are fetched ahead
ABOVE_WHOLE = 1 / 64  # of a row: FBGEMM rounds down, and so many shards of a table on a device do not make a row more
MAP_BYTES = 4  # of every row that may be cached: which table it is of


class TierBytes(NamedTuple):
    """Bytes of each resource: of HBM on a device, and of memory on its host."""

    hbm: int = 0
    host: int = 0

    @property
    def beyond_hbm(self) -> dict[str, int]:
        """Those of the others than HBM, by name."""
        return {name: nbytes for name, nbytes in self._asdict().items() if name != "hbm"}


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


def element_bytes(part: Part) -> int:
    """Weights and state of elements: what lies where the tier says."""
    weights, state, *_ = part.memory()
    return weights + state - part.rows * part.table.optimizer_bytes_per_row


def operator_bytes(parts: Sequence[tuple[Part, Tier]], cache: Cache | None = None) -> TierBytes:
    """Weights and optimizer state of one operator of these parts. A cached row is as wide as the widest cached part.

    Raises ValueError where some are cached and `cache` does not say how.
    """
    taken = Counter[str]()
    for part, tier in parts:
        taken["hbm"] += part.rows * part.table.optimizer_bytes_per_row
        taken[TIERS[tier].elements] += element_bytes(part)
    cached = [part for part, tier in parts if TIERS[tier].cached]
    if not cached:
        return TierBytes(**taken)
    if cache is None:
        raise ValueError(f"table {cached[0].table.name!r} is cached, but nothing says how many of its rows are")
    rows = sum(part.rows for part in cached)
    slot = max(part.dim * part.table.element_bytes for part in cached)
    slot += slot_bytes(lfu=cache.lfu, prefetch=cache.prefetch)
    counts = (rows + 1) * COUNT_BYTES if cache.lfu else 0
    taken["hbm"] += cache.slots(rows) * slot + rows * MAP_BYTES + counts
    return TierBytes(**taken)
