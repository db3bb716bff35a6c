"""Tables beyond HBM, timed beside the same tables in HBM: batches whose misses are known, one after another.

A batch reads each row as often as a drawn batch does, but other rows: the most read ones stay the same from batch to batch (hot),
the others move on to rows that were not read for so long that no cache of our size still has them (cold). After some batches they
come back to the first. FBGEMM's counters say how many rows a batch really missed. They run in batches that are not timed.

Only an NVIDIA GPU has tiers: on a CPU, FBGEMM takes a cached table for one in host memory, without a word.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from neuroshard.core.case import TierCase
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import Table
from neuroshard.core.text import counted
from neuroshard.core.tiers import WAYS, Tier
from neuroshard.files.access import spreading_step
from neuroshard.measure.rowcap import capped_rows, case_cap
from neuroshard.measure.timing.fbgemm import (
    GRADIENT,
    SAMPLE_WEIGHT,
    Ints,
    TableBatchedEmbedding,
    fused_groups,
    output_shape,
)
from neuroshard.measure.timing.harness import CaseTiming, time_case

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", Ints, "torch.Tensor")

# Cached rows over the distinct rows of a batch. A set of 32 slots then gets 16 rows a batch, 33 or more in 0.01 % of all cases:
# a cache without conflicts
ROOM = 2
# Cold rows, over the distinct rows of a batch, that are read before one comes back. A set has then got 64 of them on average, and
# at least the 32 that push a row out, by 4 standard deviations
APART = 4
CONFLICTS = 0.01  # of the distinct rows: with more, what is timed is not a cache without conflicts


@dataclass(frozen=True, eq=False)
class Stream(Generic[Array]):
    """Batches of one table: `indices` (L,) of batch 0, and `cold` (L,), which is 1 where a lookup is of a cold row, else 0.

    `lengths` are the lookups of each sample, feature after feature, the same in every batch. Batch n is batch n + `blocks` again.
    """

    indices: Array
    cold: Array
    lengths: Ints
    rows: int  # of the table
    distinct_rows: int  # that a batch reads
    blocks: int
    step: int  # that ids of cold rows move on from batch to batch

    def batch(self, number: int) -> Array:
        """Row indices (L,) of a batch."""
        return (self.indices + self.cold * (number % self.blocks * self.step % self.rows)) % self.rows

    def on(self, device: "torch.device") -> "Stream[torch.Tensor]":
        """The same with its arrays on a device."""
        import torch

        indices, cold = (torch.from_numpy(array).to(device) for array in (self.indices, self.cold))
        return replace(self, indices=indices, cold=cold)  # type: ignore[arg-type,return-value]

    @property
    def cache_sets(self) -> int:
        """Of a cache that has ROOM for it."""
        return max(math.ceil(ROOM * self.distinct_rows / WAYS), 1)


def stream_of(indices: Ints, lengths: Ints, rows: int, cold_share: float) -> "Stream[Ints]":
    """Batches that read rows as often as `indices` (L,) do, of which so large a share is cold. The table has `rows` rows, or
    more where the batches need more."""
    _, inverse, counts = np.unique(indices, return_inverse=True, return_counts=True)
    distinct = len(counts)
    cold = round(cold_share * distinct)
    hot = distinct - cold
    blocks = 1 + math.ceil(APART * distinct / cold) if cold else 1
    rows = max(rows, hot + blocks * cold, 1)
    place = np.empty(distinct, dtype=np.int64)
    place[np.argsort(-counts, kind="stable")] = np.arange(distinct)
    ids = place[inverse.reshape(-1)]
    stride = spreading_step(rows)  # ids of rows that are read alike are not neighbours
    return Stream(
        ids * stride % rows, (ids >= hot).astype(np.int64), lengths, rows, distinct, blocks, cold * stride % rows
    )


class TierTiming(NamedTuple):
    """Labels beyond HBM and in HBM. Rows a batch, by table: distinct, and those of them that FBGEMM counted as missed."""

    beyond: CaseTiming
    hbm: CaseTiming
    distinct_rows: tuple[float, ...]
    missed_rows: tuple[float, ...]


def time_tiers(sets: TableBatchedEmbedding, case: TierCase, warmup: int, repeats: int) -> TierTiming:
    """Time a case beyond HBM, and then in HBM. Raises MeasureError where the device has no tiers, or the cache has conflicts."""
    if not has_tiers(sets.device.torch):
        raise MeasureError("a CPU has no tiers")
    beyond = TieredSteps(sets, case, case.tier)
    beyond.fill()
    missed = beyond.missed_rows()
    timed = beyond.time(warmup, repeats)
    distinct = beyond.distinct_rows
    beyond.operators.clear()  # its memory, for the same tables in HBM
    hbm = TieredSteps(sets, case, "hbm")
    hbm.fill()
    return TierTiming(timed, hbm.time(warmup, repeats), distinct, missed)


def has_tiers(device: "torch.device") -> bool:
    """Whether a device has memory beyond its own."""
    return device.type != "cpu"


class TieredSteps:
    """The tables of a case, all in one tier, and the steps of their batches. A cached table is an operator of its own, and so it
    is where the same tables lie in HBM."""

    def __init__(self, sets: TableBatchedEmbedding, case: TierCase, tier: Tier) -> None:
        import torch

        self.sets, self.tier, self.number = sets, tier, 0
        batch_size = case.batch_size or sets.settings.batch_size
        groups = [[table] for table in case.tables] if case.tier == "cached" else fused_groups(case.tables)
        # in host memory nothing is missed, but rows of the batch before would be in caches of the host
        share = case.missed_share if case.tier == "cached" else 1.0
        cap = case_cap(case.tables, sets.settings.optimizer, sets.limit)
        drawn = [
            [
                self._stream(table, capped_rows(table, sets.settings.optimizer, cap), batch_size, share)
                for table in group
            ]
            for group in groups
        ]
        self.streams = [stream for group in drawn for stream in group]
        of_tables = dict(zip((table for group in groups for table in group), self.streams, strict=True))
        self.distinct_rows = tuple(float(of_tables[table].distinct_rows) for table in case.tables)
        self.operators = [
            sets.operator(group, [stream.rows for stream in of_group], tier, sum(one.cache_sets for one in of_group))
            for group, of_group in zip(groups, drawn, strict=True)
        ]
        device = sets.device.torch
        self.on_device = [[stream.on(device) for stream in group] for group in drawn]
        self.others = [_others(group, of_group, device) for group, of_group in zip(groups, drawn, strict=True)]
        self.batches = self._batches()
        self.gradients = [
            torch.full(output_shape(group, len(batch[0]), batch_size), GRADIENT, device=device)
            for group, batch in zip(groups, self.batches, strict=True)
        ]

    def _stream(self, table: Table, rows: int, batch_size: int, share: float) -> "Stream[Ints]":
        indices, lengths = self.sets.lookups.of(table, rows, batch_size)
        return stream_of(indices, lengths, rows, share)

    def _batches(self) -> "list[tuple[torch.Tensor, ...]]":
        """Of each operator: row indices, offsets, and weights of lookups if it has any."""
        import torch

        return [
            (torch.cat([stream.batch(self.number) for stream in group]), *others)
            for group, others in zip(self.on_device, self.others, strict=True)
        ]

    def next_batch(self) -> None:
        """Go on to the next batch."""
        self.number += 1
        self.batches = self._batches()

    def forward(self) -> "list[torch.Tensor]":
        return [operator(*batch) for operator, batch in zip(self.operators, self.batches, strict=True)]

    def backward(self, outputs: "list[torch.Tensor]") -> None:
        import torch

        torch.autograd.backward(outputs, self.gradients)

    def fill(self) -> None:
        """Write all weights, and take every batch once: then a cache has what it has from there on."""
        self.sets.write_weights(self.operators)
        self._all_batches()

    def _all_batches(self) -> int:
        """Take all batches, and the first one again; returns how many."""
        taken = max(stream.blocks for stream in self.streams) + 1
        for _ in range(taken):
            self.next_batch()
            self.backward(self.forward())
        return taken

    def missed_rows(self) -> tuple[float, ...]:
        """Rows that a batch misses of each table, by FBGEMM's counters, which count only here.

        Raises MeasureError where more than CONFLICTS of the distinct rows find no slot.
        """
        if self.tier != "cached":
            return (0.0,) * len(self.streams)
        for operator in self.operators:
            operator.gather_uvm_cache_stats = True
            operator.reset_uvm_cache_stats()
        batches = self._all_batches()
        # calls, requested, distinct, missed, and conflicts: distinct ones and all
        stats: list[list[float]] = [operator.get_uvm_cache_stats().tolist() for operator in self.operators]
        for operator in self.operators:
            operator.gather_uvm_cache_stats = False
        for stream, of_operator in zip(self.streams, stats, strict=True):
            if of_operator[4] > CONFLICTS * max(of_operator[2], 1):
                conflicts = of_operator[4] / batches
                raise MeasureError(
                    f"{conflicts:,.0f} of {counted(stream.distinct_rows, 'row')} of a batch found no slot in a cache of "
                    f"{stream.cache_sets * WAYS:,}: a cache without conflicts was to be measured"
                )
        return tuple(of_operator[3] / batches for of_operator in stats)

    def time(self, warmup: int, repeats: int) -> CaseTiming:
        """Forward and backward, each repeat of the next batch."""
        return time_case(self.sets.device, self.forward, self.backward, warmup, repeats, before=self.next_batch)


def _others(
    tables: Sequence[Table], streams: "Sequence[Stream[Ints]]", device: "torch.device"
) -> "tuple[torch.Tensor, ...]":
    """What all batches of an operator share: offsets, and weights of lookups if it has any."""
    import torch

    offsets = np.concatenate([[0], np.cumsum(np.concatenate([stream.lengths for stream in streams]))])
    weights = [np.full(int(offsets[-1]), SAMPLE_WEIGHT, dtype=np.float32)] if tables[0].weighted else []
    return tuple(torch.from_numpy(array).to(device) for array in (offsets, *weights))
