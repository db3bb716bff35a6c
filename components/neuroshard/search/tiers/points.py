"""What parts of tables take in each tier: points of HBM bytes and ms, of which a device chooses one for each part.

in HBM               all of its bytes                                     0 ms
cached, of k rows    k rows, their tags and times, a map, row-wise state  an operator of its own, its lookups, its misses
in host memory       row-wise state                                       its lookups over the bus
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import MAP_BYTES, WAYS, slot_bytes
from neuroshard.costmodel.cache import convex_hull
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.tiers import CacheSizes, KnowsTiers

# Of a byte of HBM. Among so many the dual of a device was up to 3 % below its optimum, before prices near it were added
PRICES = 40
NARROWED = 4.0  # prices are refined between those that devices have, and this factor beyond: a guess
ROUNDING = 1e-9  # relative: so far apart are two ms that are the same
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

    def rows_of(self, nbytes: float) -> float:
        """Cached rows in so many bytes of HBM more than in host memory; none where that is as good."""
        cached = self.nbytes[1:-1] - self.nbytes[-1]
        if nbytes < cached[0] or np.interp(nbytes, cached, self.ms[1:-1]) >= self.ms[-1]:
            return 0.0
        return float(np.interp(nbytes, cached, self.rows[1:-1]))


@dataclass(frozen=True, eq=False)
class Curve:
    """A part beyond HBM: bytes of HBM more than in host memory (P,), and ms (P,): of host memory, then of caches from small to
    large. There is a cache of any size between two of them, and none between host memory and the first. `hull` are the places of
    the lower convex hull."""

    nbytes: Floats
    ms: Floats
    hull: NDArray[np.intp]

    @classmethod
    def of(cls, nbytes: Floats, ms: Floats) -> "Curve":
        return cls(nbytes, ms, convex_hull(nbytes, ms))

    @property
    def hulled(self) -> tuple[Floats, Floats]:
        """Bytes and ms of the hull."""
        return self.nbytes[self.hull], self.ms[self.hull]

    def at(self, nbytes: float) -> float:
        """The least ms in so many bytes, of a curve that begins in host memory."""
        if nbytes < self.nbytes[1]:
            return float(self.ms[0])
        return min(float(np.interp(nbytes, self.nbytes[1:], self.ms[1:])), float(self.ms[0]))

    def branches(self, nbytes: float) -> list["Curve"]:
        """The parts of the curve below and above so many bytes, where the hull is below the curve; none where it is not."""
        size, ms = self.hulled
        edge = min(max(int(np.searchsorted(size, nbytes, side="right")) - 1, 0), len(size) - 2)
        below, above = int(self.hull[edge]), int(self.hull[edge + 1])
        if below == 0 and self.nbytes[0] == 0:
            split = (0, 1) if nbytes > 0 else None
        elif float(np.interp(nbytes, self.nbytes, self.ms)) > float(np.interp(nbytes, size, ms)) * (1 + ROUNDING):
            near = int(np.clip(np.searchsorted(self.nbytes, nbytes), below + 1, above - 1))
            split = near, near
        else:
            split = None
        if split is None:
            return []
        return [Curve.of(self.nbytes[some], self.ms[some]) for some in (slice(split[0] + 1), slice(split[1], None))]


class PartPoints:
    """The points of the parts of a task's placed tables, each computed once. Of `tables` a search chooses the tier; those whose
    tier a rule names have one point, with the bytes that they take there. What is fetched ahead counts with `weight`."""

    def __init__(self, task: ShardingTask, model: KnowsTiers, weight: float = 1.0) -> None:
        self.task, self.model, self.weight, self.prefetch = task, model, weight, task.pipeline == "prefetch"
        self.tables = {table.name: table for table in task.without_tier}
        self.caches = {
            name: CacheSizes.of(table, task.batch_size, prefetch=self.prefetch) for name, table in self.tables.items()
        }
        self._known: dict[tuple[str, int, int, float | None], Points] = {}
        self._curves: dict[tuple[str, int, int, float | None], Curve] = {}

    def __call__(self, parts: Sequence[Part]) -> list[Points]:
        """Of (N,) parts."""
        keys = [(part.table.name, *part.size) for part in parts]
        new = {key: number for number, key in enumerate(keys) if key not in self._known}
        for key in [key for key in new if key[0] not in self.tables]:
            held = self.task.memory(parts[new.pop(key)]).total
            self._known[key] = Points(np.array([float(held)]), np.zeros(1), np.zeros(1))
        if new:
            more = self.model.beyond_hbm([parts[number] for number in new.values()])
            all_ms = (more.cached_ms, more.missed, more.host_ms, more.populated)
            for (key, number), *ms in zip(new.items(), *(of.tolist() for of in all_ms), strict=True):
                self._known[key] = self._points(parts[number], *ms)
        return [self._known[key] for key in keys]

    def curve(self, part: Part) -> Curve:
        """Of the points of a part beyond HBM."""
        key = (part.table.name, *part.size)
        if key not in self._curves:
            [of] = self([part])
            order = np.array([len(of.ms) - 1, *range(1, len(of.ms) - 1)])
            self._curves[key] = Curve.of(of.nbytes[order] - of.nbytes[-1], of.ms[order])
        return self._curves[key]

    def slot(self, part: Part) -> int:
        """Bytes of HBM for a cached row of a part."""
        return part.dim * part.table.element_bytes + slot_bytes(prefetch=self.prefetch)

    def _points(self, part: Part, cached_ms: float, missed_ms: float, host_ms: float, populated_ms: float) -> Points:
        table, caches, whole = part.table, self.caches[part.table.name], self.task.memory(part)
        share = part.rows / table.rows
        least = part.rows * table.optimizer_bytes_per_row + whole.step
        cached = share * caches.rows * self.slot(part) + part.rows * MAP_BYTES
        ms = caches.ms(part, self.model.operator_ms, cached_ms, missed_ms, host_ms)
        ms = ms - (1 - self.weight) * caches.fetched_ms(part, populated_ms, missed_ms)
        ms = np.where(caches.rows < WAYS, np.maximum(ms, host_ms), ms)  # in a set at least, or in host memory
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
            return np.array([0.0, 1.0])
        return np.concatenate([[0.0], np.geomspace(np.quantile(every, CHEAPEST), every.max() * 1.5, PRICES)])


def refined(prices: Floats, there: Floats) -> Floats:
    """More prices around those `there`, which the devices of a plan have, and a sixth of the others."""
    there = there[there > 0]
    if not len(there):
        return prices
    near = np.geomspace(there.min() / NARROWED, there.max() * NARROWED, len(prices))
    return np.unique(np.concatenate([prices[:1], near, prices[1::6], prices[-1:]]))
