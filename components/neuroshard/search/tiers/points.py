"""What parts of tables take in each tier: points of HBM bytes and ms, of which a device chooses one for each part.

in HBM               all of its bytes                                     0 ms
cached, of k rows    k rows, their tags and times, a map, row-wise state  an operator of its own, its lookups, its misses
in host memory       row-wise state                                       its lookups over the bus
"""

from collections.abc import Sequence
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
CHEAPEST = 0.02  # share of all points that save less for their bytes than the cheapest price but 0; a guess


class Points(NamedTuple):
    """The tiers of a part: bytes of HBM (P,), ms more than in HBM (P,), and cached rows of the whole table (P,). The first is
    in HBM, the last in host memory."""

    nbytes: Floats
    ms: Floats
    rows: Floats

    def at(self, rows: int) -> "Points":
        """The one point at which so many rows of the table are cached; in host memory for none."""
        if not rows:
            return Points(self.nbytes[-1:], self.ms[-1:], self.rows[-1:])
        cached = self.rows[1:-1]
        return Points(*(np.array([np.interp(rows, cached, of[1:-1])]) for of in self))


class PartPoints:
    """The points of the parts of a task's placed tables, each computed once. Of `tables` a search chooses the tier; those whose
    tier a rule names have one point, with the bytes that they take there."""

    def __init__(self, task: ShardingTask, model: KnowsTiers) -> None:
        self.task, self.model, self.prefetch = task, model, task.pipeline == "prefetch"
        self.tables = {table.name: table for table in task.without_tier}
        self.caches = {
            name: CacheSizes.of(table, task.batch_size, prefetch=self.prefetch) for name, table in self.tables.items()
        }
        self._known: dict[tuple[str, int, int], Points] = {}

    def __call__(self, parts: Sequence[Part]) -> list[Points]:
        """Of (N,) parts."""
        keys = [(part.table.name, part.rows, part.dim) for part in parts]
        new = {key: number for number, key in enumerate(keys) if key not in self._known}
        for key in [key for key in new if key[0] not in self.tables]:
            held = self.task.memory(parts[new.pop(key)]).total
            self._known[key] = Points(np.array([float(held)]), np.zeros(1), np.zeros(1))
        if new:
            more = self.model.beyond_hbm([parts[number] for number in new.values()])
            each = zip(new.items(), more.cached_ms.tolist(), more.missed.tolist(), more.host_ms.tolist(), strict=True)
            for (key, number), cached_ms, missed_ms, host_ms in each:
                self._known[key] = self._points(parts[number], cached_ms, missed_ms, host_ms)
        return [self._known[key] for key in keys]

    def _points(self, part: Part, cached_ms: float, missed_ms: float, host_ms: float) -> Points:
        table, caches, whole = part.table, self.caches[part.table.name], self.task.memory(part)
        share = part.rows / table.rows
        least = part.rows * table.optimizer_bytes_per_row + whole.step
        slot = part.dim * table.element_bytes + slot_bytes(prefetch=self.prefetch)
        cached = share * caches.rows * slot + part.rows * MAP_BYTES
        ms = caches.ms(part, self.model.operator_ms, cached_ms, missed_ms, host_ms)
        return Points(
            np.concatenate([[whole.total], cached + least, [least]]),
            np.concatenate([[0.0], ms, [host_ms]]),
            np.concatenate([[table.rows], caches.rows, [0.0]]),
        )

    def prices(self) -> Floats:
        """Prices of a byte of HBM, in ms, from 0 to more than any byte of a table is worth: (M,)."""
        found = []
        for one in self(list(map(Part.of, self.tables.values()))):
            order = np.argsort(one.nbytes, kind="stable")
            saved = -np.diff(one.ms[order]) / np.maximum(np.diff(one.nbytes[order]), 1.0)
            found.append(saved[saved > 0])
        every = np.concatenate([np.zeros(0), *found])
        if not len(every):
            return np.zeros(1)
        return np.concatenate([[0.0], np.geomspace(np.quantile(every, CHEAPEST), every.max() * 1.5, PRICES)])


def refined(prices: Floats, there: Floats) -> Floats:
    """More prices around those `there`, which the devices of a plan have, and a sixth of the others."""
    there = there[there > 0]
    if not len(there):
        return prices
    near = np.geomspace(there.min() / NARROWED, there.max() * NARROWED, len(prices))
    return np.unique(np.concatenate([prices[:1], near, prices[1::6], prices[-1:]]))
