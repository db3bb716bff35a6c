"""What parts of tables take in each tier: points of HBM bytes and ms, of which a device chooses one for each part.

in HBM               all of its bytes                                     0 ms
cached, of k rows    k rows, their tags and times, a map, row-wise state  an operator of its own, its lookups, its misses
in host memory       row-wise state                                       its lookups over the bus
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import MAP_BYTES, slot_bytes
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.tiers import CacheSizes, KnowsTiers

# Of a byte of HBM. Among so many the dual of a device was up to 3 % below its optimum, before prices near it were added
PRICES = 40
NARROWED = 4.0  # prices are refined between those that devices have, and this factor beyond: a guess
# Of what is fetched ahead, beside 1: a device hides all of it at 0, none at 1. All but one have FEW_PRICES near: guesses
WEIGHTS = (0.0, 0.25, 0.5, 0.75)
FEW_PRICES = 12
CHEAPEST = 0.02  # share of all points that save less for their bytes than the cheapest price but 0; a guess


class Points(NamedTuple):
    """The tiers of a part: bytes of HBM (P,), ms more than in HBM (P,), cached rows of the whole table (P,), and the part of
    the ms in which rows are fetched ahead (P,), 0 where a task hides none of it. The first is in HBM, the last in host memory."""

    nbytes: Floats
    ms: Floats
    rows: Floats
    fetched_ms: Floats

    def at(self, rows: int) -> "Points":
        """The one point at which so many rows of the table are cached; in host memory for none."""
        if not rows:
            return Points(*(of[-1:] for of in self))
        cached = self.rows[1:-1]
        return Points(*(np.array([np.interp(rows, cached, of[1:-1])]) for of in self))


class PartPoints:
    """The points of the parts of a task's tables, each computed once. What is fetched ahead counts with `weight`."""

    def __init__(
        self,
        task: ShardingTask,
        model: KnowsTiers,
        weight: float = 1.0,
        caches: Mapping[str, CacheSizes] = MappingProxyType({}),
    ) -> None:
        self.task, self.model, self.prefetch, self.weight = task, model, task.pipeline == "prefetch", weight
        self.tables = {table.name: table for table in task.placed}
        self.caches = caches or {
            name: CacheSizes.of(table, task.batch_size, prefetch=self.prefetch) for name, table in self.tables.items()
        }
        self._known: dict[tuple[str, int, int], Points] = {}

    @cached_property
    def by_weight(self) -> "Mapping[float, PartPoints]":
        """These by the weight of what is fetched ahead: by 1 alone where the task hides none of it."""
        others = WEIGHTS if self.task.hidden_ms else ()
        return {**{weight: PartPoints(self.task, self.model, weight, self.caches) for weight in others}, 1.0: self}

    def __call__(self, parts: Sequence[Part]) -> list[Points]:
        """Of (N,) parts."""
        keys = [(part.table.name, part.rows, part.dim) for part in parts]
        new = {key: number for number, key in enumerate(keys) if key not in self._known}
        if new:
            more = self.model.beyond_hbm([parts[number] for number in new.values()])
            all_ms = (more.cached_ms, more.missed, more.host_ms, more.populated)
            for (key, number), *ms in zip(new.items(), *(of.tolist() for of in all_ms), strict=True):
                self._known[key] = self._points(parts[number], *ms)
        return [self._known[key] for key in keys]

    def _points(self, part: Part, cached_ms: float, missed_ms: float, host_ms: float, populated_ms: float) -> Points:
        table, caches, whole = part.table, self.caches[part.table.name], self.task.memory(part)
        share = part.rows / table.rows
        least = part.rows * table.optimizer_bytes_per_row + whole.step
        slot = part.dim * table.element_bytes + slot_bytes(prefetch=self.prefetch)
        cached = share * caches.rows * slot + part.rows * MAP_BYTES
        ms = caches.ms(part, self.model.operator_ms, cached_ms, missed_ms, host_ms)
        fetched = caches.fetched_ms(part, populated_ms, missed_ms) * (self.task.hidden_ms > 0)
        return Points(
            np.concatenate([[whole.total], cached + least, [least]]),
            np.concatenate([[0.0], ms - (1 - self.weight) * fetched, [host_ms]]),
            np.concatenate([[table.rows], caches.rows, [0.0]]),
            np.concatenate([[0.0], fetched, [0.0]]),
        )

    def prices(self) -> Floats:
        """Prices of a byte of HBM, in ms, from 0 to more than any byte of a table is worth: (M,)."""
        found = []
        for one in self(list(map(Part.of, self.tables.values()))):
            order = np.argsort(one.nbytes, kind="stable")
            saved = -np.diff(one.ms[order]) / np.maximum(np.diff(one.nbytes[order]), 1.0)
            found.append(saved[saved > 0])
        every = np.concatenate(found)
        if not len(every):
            return np.zeros(1)
        return np.concatenate([[0.0], np.geomspace(np.quantile(every, CHEAPEST), every.max() * 1.5, PRICES)])


def refined(prices: Floats, there: Floats, many: int = PRICES + 1) -> Floats:
    """So `many` prices around those `there`, which the devices of a plan have, and a sixth of the others."""
    there = there[there > 0]
    if not len(there):
        return prices[:: PRICES // many or 1]
    near = np.geomspace(there.min() / NARROWED, there.max() * NARROWED, many)
    return np.unique(np.concatenate([prices[:1], near, prices[1::6], prices[-1:]]))
