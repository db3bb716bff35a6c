"""What tables beyond HBM take more: behind a cache in HBM, or in host memory (core/tiers.py).

A cached table is an operator of its own. Misses are those of its miss curve (costmodel/cache.py). A cache of fewer rows than
CROWDED times those that a batch reads has conflicts, which are read and written in host memory: what it takes lies on a chord,
from a cache without conflicts to host memory.

A trainer that prefetches populates its caches for the next batch on a stream of its own: it sorts lookups, looks for their rows,
and fetches those that are missed. In FBGEMM 1.8 an operator's backward pass waits for that (`_update_cache_counter_and_locations`
of split_table_batched_embeddings_ops_training.py), and the next batch's begins after it (`_sync_stream_post_backward`). So what
lies between two backward passes hides it: the dense layers, whose ms a task states. What takes longer is waited for. Not hidden
at all are launches, state of elements, rows in host memory, and those that conflicts leave there. Not counted as hiding anything
are the embeddings' own forward pass and collectives, which share the memory, and often the bus, with what is fetched.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import numpy as np

from neuroshard.core.errors import UsageError
from neuroshard.core.part import Part
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import WAYS
from neuroshard.costmodel.cache import CROWDED, miss_curve
from neuroshard.costmodel.protocol import CostModel, Dips, Floats

CHORD = 6  # points of the chord of crowded caches
MOST_CACHED = 0.98  # share of its rows up to which a table is cached: with more it may as well be in HBM


class BeyondHbm(NamedTuple):
    """Ms that each of N tables takes more than in HBM, (N,) each: through a cache that misses nothing, for each row that it
    misses, and in host memory. A missed row comes before forward, while another is written back. `populated` is the part of
    `cached_forward` in which lookups are sorted, looked for and inserted. `updated` is the part of both backward passes in which
    state of elements is read and written in host memory, whatever the tier."""

    cached_forward: Floats
    missed: Floats
    host_forward: Floats
    cached_backward: Floats
    host_backward: Floats
    populated: Floats
    updated: Floats

    @property
    def cached_ms(self) -> Floats:
        """Through a cache that misses nothing, forward and backward."""
        return self.cached_forward + self.cached_backward

    @property
    def host_ms(self) -> Floats:
        """In host memory, forward and backward."""
        return self.host_forward + self.host_backward

    @property
    def spilt_ms(self) -> Floats:
        """Of a cached table all of whose rows are read and written in host memory, more than of one that misses nothing."""
        return self.host_ms - self.updated


class KnowsTiers(CostModel, Protocol):
    """A cost model that knows what tables beyond HBM take."""

    @property
    def has_tiers(self) -> bool:
        """Whether its device has memory beyond its own."""

    @property
    def tiers_from(self) -> str:
        """Where its figures beyond HBM are from, as the end of a sentence."""

    def beyond_hbm(self, parts: Sequence[Part]) -> BeyondHbm:
        """What (N,) parts of tables take more beyond HBM."""


def knows_tiers(model: CostModel) -> TypeGuard[KnowsTiers]:
    """Whether it is a `KnowsTiers`, of a device that has tiers."""
    return bool(getattr(model, "has_tiers", False))


@dataclass(frozen=True, eq=False)
class CacheSizes:
    """Caches of a whole table: `rows` kept (P,), from 0 on, in whole sets; rows `missed` a batch (P,); and the share of its
    lookups that conflicts leave in host memory (P,), `spilt`. Misses fall as they are, not as their hull does: what a plan takes
    is not what a mixture of two caches would.
    """

    rows: Floats
    missed: Floats
    spilt: Floats

    @classmethod
    def of(cls, table: Table, batch_size: int, *, prefetch: bool = False) -> "CacheSizes":
        """At a global batch size; with `prefetch` two batches are in the cache at a time."""
        curve, most = miss_curve(table, batch_size), MOST_CACHED * table.rows
        most = most // WAYS * WAYS or most  # of a table of fewer rows than a set, these
        crowded = min(np.ceil(CROWDED * (1 + prefetch) * curve.distinct_rows / WAYS) * WAYS, most)
        in_sets = np.unique(curve.cached_rows // WAYS * WAYS)
        roomy = np.append(in_sets[(in_sets > crowded) & (in_sets < most)], most)
        share = np.linspace(0.0, 1.0, CHORD)
        missed = [share * float(curve.missed(crowded)), curve.missed(roomy)]
        spilt = np.concatenate([1 - share, np.zeros(len(roomy))])
        return cls(np.concatenate([share * crowded, roomy]), np.concatenate(missed), spilt)

    def at(self, rows: float) -> "CacheSizes":
        """The one cache of so many rows."""
        return CacheSizes(np.array([rows]), *(np.interp([rows], self.rows, of) for of in (self.missed, self.spilt)))

    def ms(self, part: Part, operator_ms: float, cached_ms: float, missed_ms: float, spilt_ms: float) -> Floats:
        """What a part of the table takes more than in HBM (P,): an operator of its own, and as `BeyondHbm` says of the part."""
        return operator_ms + cached_ms + part.share_of_misses * self.missed * missed_ms + self.spilt * spilt_ms

    def fetched_ms(self, part: Part, populated_ms: float, missed_ms: float) -> Floats:
        """Of `ms`, what a trainer that prefetches does ahead (P,)."""
        return populated_ms + part.share_of_misses * self.missed * missed_ms


class MoreTerms:
    """A CostModel that adds to `inner` what M more terms of each vector say."""

    def __init__(self, inner: CostModel, terms: int) -> None:
        self.inner, self.terms = inner, terms

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def of_parts(self, parts: Sequence[Part]) -> Floats:
        """The terms of (N,) parts of tables: (N, M)."""
        raise NotImplementedError

    def terms_ms(self, terms: Floats) -> Floats:
        """Ms of sums of terms: (…, M) -> (…)."""
        raise NotImplementedError

    def terms_slope(self, terms: Floats) -> Floats:
        """The gradient of `terms_ms`: (…, M) -> (…, M)."""
        raise NotImplementedError

    def for_task(self, task: ShardingTask, *, waiting: bool) -> CostModel:
        return self.changed(inner=cast(Any, self.inner).for_task(task, waiting=waiting))

    def sending_more(self, more: Any) -> CostModel:
        return self.changed(inner=cast(Any, self.inner).sending_more(more))

    def waiting_ms(self, vector_sums: Floats) -> Floats:
        return cast(Floats, cast(Any, self.inner).waiting_ms(vector_sums[..., : -self.terms]))

    def part_vectors(self, parts: Sequence[Part]) -> Floats:
        return np.concatenate([self.inner.part_vectors(parts), self.of_parts(parts)], axis=-1)

    def compute_ms(self, vector_sums: Floats) -> Floats:
        inner, terms = vector_sums[..., : -self.terms], vector_sums[..., -self.terms :]
        ms: Floats = self.inner.compute_ms(inner) + self.terms_ms(terms)
        return ms

    def compute_slope(self, vector_sums: Floats) -> Floats:
        inner, terms = vector_sums[..., : -self.terms], vector_sums[..., -self.terms :]
        return np.concatenate([self.inner.compute_slope(inner), self.terms_slope(terms)], axis=-1)

    @property
    def dips(self) -> Dips:
        """As in protocol.Bending: those of `inner`, which the terms do not move."""
        found: Dips = cast(Any, self.inner).dips
        return Dips(np.concatenate([found.weight, np.zeros((self.terms, found.weight.shape[1]))]), found.bias)

    def convex_below(self, low: Floats, high: Floats) -> CostModel:
        """As in protocol.Bending."""
        return self.changed(inner=cast(Any, self.inner).convex_below(low, high))

    def beyond_own_ms(self, vectors: Floats, holds: Floats) -> Floats:
        """As in protocol.Bending."""
        added: Floats = cast(Any, self.inner).beyond_own_ms(vectors[..., : -self.terms], holds[..., : -self.terms])
        return added

    def changed(self, **attributes: object) -> CostModel:
        """The same model with other values of some attributes."""
        new = copy.copy(self)
        new.__dict__.update(attributes)
        return cast(CostModel, new)


class InTiers(MoreTerms):
    """A cost model of a task whose constraints say which tables lie beyond HBM. Two terms, ms more than in HBM: what is always
    waited for, and what is fetched ahead, of which the task hides so much."""

    def __init__(self, inner: KnowsTiers, task: ShardingTask) -> None:
        super().__init__(inner, 2)
        self.hidden_ms = task.hidden_ms
        self.rules = task.constraints.beyond_hbm
        self.tables = {table.name: table for table in task.tables if table.name in self.rules}
        prefetch = task.pipeline == "prefetch"
        self.caches = {
            name: CacheSizes.of(table, task.batch_size, prefetch=prefetch)
            for name, table in self.tables.items()
            if self.rules[name].in_tier.cached
        }

    def of_parts(self, parts: Sequence[Part]) -> Floats:
        terms = np.zeros((len(parts), 2))
        some = [number for number, part in enumerate(parts) if part.table.name in self.rules]
        if not some:
            return terms
        beyond = cast(KnowsTiers, self.inner).beyond_hbm([parts[number] for number in some])
        all_ms = (beyond.cached_ms, beyond.missed, beyond.host_ms, beyond.spilt_ms, beyond.populated)
        for number, cached_ms, missed_ms, host_ms, spilt_ms, populated_ms in zip(
            some, *(ms.tolist() for ms in all_ms), strict=True
        ):
            part = parts[number]
            cached_rows = self.rules[part.table.name].cached_rows
            if cached_rows is None:
                terms[number, 0] = host_ms
                continue
            cache = self.caches[part.table.name].at(cached_rows)
            [ms] = cache.ms(part, self.inner.operator_ms, cached_ms, missed_ms, spilt_ms)
            fetched_ms = float(cache.fetched_ms(part, populated_ms, missed_ms)[0]) if self.hidden_ms else 0.0
            terms[number] = ms - fetched_ms, fetched_ms
        return terms

    def terms_ms(self, terms: Floats) -> Floats:
        return np.asarray(terms[..., 0] + np.maximum(terms[..., 1] - self.hidden_ms, 0.0))

    def terms_slope(self, terms: Floats) -> Floats:
        slope = np.ones_like(terms)
        slope[..., 1] = terms[..., 1] > self.hidden_ms
        return slope


def in_tiers(model: CostModel, task: ShardingTask) -> CostModel:
    """The model for the tiers that a task's constraints name, or itself where none is named. Raises UsageError where it knows no
    memory beyond HBM."""
    if not task.constraints.beyond_hbm:
        return model
    return cast(CostModel, InTiers(with_tiers(model), task))


def with_tiers(model: CostModel) -> KnowsTiers:
    """The model, which knows tiers. Raises UsageError where it does not."""
    if not knows_tiers(model):
        why = f": backend {model.backend} has no tiers" if model.backend in ("cpu", "synthetic") else ""
        raise UsageError(
            f"cost model {model.name} ({model.device_name}) knows no memory beyond HBM{why}; plan with analytic:h100 or another "
            "GPU's datasheet, or without --host-memory"
        )
    return model
