"""Which rows a cache in HBM misses: a table, a batch size and cached rows -> missed rows a batch, of a warm LRU cache.

    curve = miss_curve(table, batch_size=65536)
    curve.missed(0.1 * table.rows)    # rows a batch that come from host memory
    curve.warm_up(0.1 * table.rows)   # batches until the cache is full, and the figure holds

A row block or a column shard is a table of its own (`Table.part`), so it has its own curve. Where a table's access curve counted
a stream of batches, misses are its stack distances; else rows are read independently, and Che's approximation for batches holds
(Che, Tung and Wang, IEEE JSAC 20, 2002): a row that a batch reads with probability q stays in the cache for the same T batches as
all others, so it is cached with probability 1 - (1 - q)^T and missed with q (1 - q)^T a batch. FBGEMM hashes rows to sets of 32
slots: a set that got more rows than others keeps them for less time. What LRU keeps of a set's rows follows a gamma distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.access import StreamMisses
from neuroshard.core.reuse import uniform_bins
from neuroshard.core.table import Table
from neuroshard.core.tiers import WAYS, slot_bytes
from neuroshard.files.access import row_groups

Floats = NDArray[np.float64]

# A cache of fewer times a batch's distinct rows has conflicts; of 3 with prefetch, which locks two batches
CROWDED = 1.5

_STEPS_AN_OCTAVE = 8  # of the LRU time; chords between are at most 0.1 % of the misses too high
_FEWEST_BATCHES = 2.0**-6
_MOST_BATCHES = 2.0**80
_NEVER = 1e-12  # rows a batch, or lookups of a row, below which nothing is read
_QUANTILES = 24
_STEPS_ONE_BY_ONE = 64  # batches
_POINTS_AN_OCTAVE = 24  # of a stream's curve: a third of the standard deviation of sets


@dataclass(frozen=True, eq=False)
class MissCurve:
    """Misses of one table by cached rows, at P points from an empty cache to one that holds all rows that are read.

    `cached_rows` (P,) never falls, `missed_rows` (P,) never rises, `batches` (P,) is the warm-up: batches until so many rows
    have been read. `first_touches` are the rows a batch that no cache has seen before; `missed_rows` have them at every point
    that a stream has counted.
    """

    rows: float
    cached_rows: Floats
    missed_rows: Floats
    batches: Floats
    first_touches: float = 0.0

    @property
    def distinct_rows(self) -> float:
        """Rows that a batch reads, each counted once: all missed without a cache."""
        return float(self.missed_rows[0])

    def missed(self, cached_rows: Floats | float) -> Floats:
        """Missed rows a batch, shape of `cached_rows`. None where the whole table is in HBM, which needs no cache."""
        cached = np.asarray(cached_rows, dtype=np.float64)
        missed = np.interp(cached, self.cached_rows, self.missed_rows)
        return np.asarray(np.where(cached >= self.rows, 0.0, missed))

    def warm_up(self, cached_rows: Floats | float) -> Floats:
        """Batches until so many rows are cached, shape of `cached_rows`. No more than until all rows that are read are."""
        return np.asarray(np.interp(cached_rows, self.cached_rows, self.batches))

    def rows_touched(self, batches: Floats | float) -> Floats:
        """Distinct rows of so many batches in a row, shape of `batches`."""
        return np.asarray(np.interp(batches, self.batches, self.cached_rows))

    def hull(self) -> "MissCurve":
        """The lower convex hull, from no row cached to the whole table in HBM: each row saves no more than the one before."""
        cached = np.append(self.cached_rows[self.cached_rows < self.rows], self.rows)
        missed = self.missed(cached)
        kept = convex_hull(cached, missed)
        return MissCurve(self.rows, cached[kept], missed[kept], self.warm_up(cached[kept]), self.first_touches)


def miss_curve(table: Table, batch_size: int, ways: int = WAYS) -> MissCurve:
    """What a cache of a table misses at this batch size, global where every rank's lookups reach the cache.

    `ways` 0 is a cache in which any row may lie in any slot. Without an access curve, rows are read as the reuse bins say, and
    which rows are hot stays the same from batch to batch.
    """
    curve = _of_rates(float(table.rows), *row_rates(table, batch_size))
    if table.access is not None and table.access.stream is not None:
        counted = table.access.batch_size
        by_rates = _of_rates(float(table.rows), *row_rates(table, counted))
        curve = _of_stream(float(table.rows), table.access.stream, by_rates, batch_size / counted)
    return _in_sets(curve) if ways == WAYS else curve


def row_rates(table: Table, batch_size: int) -> tuple[Floats, Floats]:
    """Groups of rows of a table: rows (G,) and mean lookups of one row in a batch (G,), hottest first."""
    lookups = table.pooling_factor * batch_size
    if table.access is None and table.reuse_bins == uniform_bins(
        table.rows, table.pooling_factor, table.reuse_batch_size
    ):
        rows, shares = np.array([float(table.rows)]), np.ones(1)  # bins are too few to say that of a large table
    elif table.access is None:
        groups = row_groups(table)
        rows, shares = groups.rows, groups.lookup_shares
    else:
        rows = np.array(table.access.group_rows)
        of_groups = rows * np.array(table.access.lookups_per_row)
        shares = of_groups / max(of_groups.sum(), _NEVER)
    rates = lookups * shares / rows
    read = (rates > _NEVER) & (rows > 0)
    return rows[read], rates[read]


def _of_rates(rows: float, group_rows: Floats, rates: Floats) -> MissCurve:
    """Che's approximation at a grid of LRU times."""
    if not len(rates):
        nothing = np.zeros(2)
        return MissCurve(rows, np.array([0.0, rows]), nothing, nothing)
    batches = _lru_times(float(rates.min()))
    left = np.exp(-np.outer(batches, rates))  # probability that a row is not read in so many batches
    touched = -np.expm1(-np.outer(batches, rates)) @ group_rows
    missed = left @ (group_rows * -np.expm1(-rates))
    missed[-1] = 0.0
    cached = np.minimum(np.maximum.accumulate(touched), rows)
    return MissCurve(rows, cached, np.minimum.accumulate(missed), batches)


def _lru_times(slowest_rate: float) -> Floats:
    """LRU times in batches, from 0 to when a row of this rate has been read for sure."""
    most = min(max(40.0 / slowest_rate, 1.0), _MOST_BATCHES)
    octaves = np.arange(np.log2(_FEWEST_BATCHES), np.log2(most) + 1, 1 / _STEPS_AN_OCTAVE)
    return np.concatenate([[0.0], 2.0**octaves])


def _of_stream(rows: float, stream: StreamMisses, by_rates: MissCurve, batches: float) -> MissCurve:
    """Misses counted on a stream, for batches that are `batches` times as large as the counted ones.

    The counted misses m(k) say how many distinct rows W(T) so many batches read: W(T + 1) = W(T) + m(W(T)) (Denning's working
    set). A batch c times as large misses W(T + c) - W(T) where the cache holds W(T). What less than a batch reads follows the
    rates. Beyond the rows that the stream read, misses are first touches, which become fewer as fewer rows are left: as if these
    were all as likely to be read. Rates would say that a stream with locality has read almost all rows that it ever will.
    """
    cached, missed = np.array(stream.cached_rows), np.array(stream.missed_rows) + stream.first_touches
    if cached[0] > 0:
        cached, missed = np.append(0.0, cached), np.append(stream.distinct_rows, missed)
    missed[0] = stream.distinct_rows
    if cached[-1] < rows:
        cached, missed = np.append(cached, rows), np.append(missed, 0.0)
    missed[-1] = 0.0
    times, touched = _working_set(cached, missed, by_rates)
    read = cached[np.argmax(missed <= _NEVER)]  # no cache holds more rows than are ever read
    at = np.interp(np.minimum(cached, read), touched, times)
    if batches != 1:
        missed = np.interp(at + batches, times, touched) - cached
        missed = np.minimum.accumulate(np.append(np.maximum(missed[:-1], 0.0), 0.0))
    # points of a file are few; sets smooth a curve between them
    fine = np.union1d(cached, 2.0 ** np.arange(2, np.log2(max(rows, 5)), 1 / _POINTS_AN_OCTAVE))
    fine = fine[fine <= cached[-1]]
    missed, at = np.interp(fine, cached, missed), np.interp(fine, cached, at)
    return MissCurve(rows, fine, missed, at / batches, stream.first_touches * batches)


def _working_set(cached: Floats, missed: Floats, by_rates: MissCurve) -> tuple[Floats, Floats]:
    """Distinct rows of so many counted batches in a row: batches (P,) from 0, and rows (P,)."""
    parts = np.linspace(0.0, 1.0, 9)
    of_parts = by_rates.rows_touched(parts)
    touched = (float(missed[0]) * of_parts / max(float(of_parts[-1]), _NEVER)).tolist()
    for _ in range(_STEPS_ONE_BY_ONE):
        touched.append(min(touched[-1] + float(np.interp(touched[-1], cached, missed)), float(cached[-1])))
    times = np.concatenate([parts, 1.0 + np.arange(1, _STEPS_ONE_BY_ONE + 1)])
    later = np.append(touched[-1], cached[cached > touched[-1]])
    if len(later) == 1:
        return times, np.array(touched)
    # then misses change little within a batch, so the batches of a part of the curve are an integral
    fine = np.interp(np.arange(8 * len(later) - 7) / 8, np.arange(len(later)), later)
    pace = 1.0 / np.maximum(np.interp((fine[1:] + fine[:-1]) / 2, cached, missed), 1.0 / _MOST_BATCHES)
    times = np.append(times, times[-1] + np.cumsum(np.diff(fine) * pace))
    return times, np.append(touched, fine[1:])


def _in_sets(curve: MissCurve) -> MissCurve:
    """The misses of a cache whose rows are hashed to sets of 32 slots."""
    sets = np.maximum(curve.cached_rows / WAYS, 1.0)
    spread = (_set_shares() - 1.0) * np.sqrt(1.0 - 1.0 / sets)[:, None] + 1.0
    missed = np.interp(curve.cached_rows[:, None] * spread, curve.cached_rows, curve.missed_rows).mean(axis=1)
    return MissCurve(curve.rows, curve.cached_rows, missed, curve.batches, curve.first_touches)


@lru_cache(maxsize=1)
def _set_shares() -> Floats:
    """Distinct rows that a set keeps, over their mean: quantiles (24,) of a gamma distribution of shape 32, by
    Wilson-Hilferty."""
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)])
    shares = (1 - 1 / (9 * WAYS) + normal / (3 * np.sqrt(WAYS))) ** 3
    return np.asarray(shares / shares.mean())


def convex_hull(x: Floats, y: Floats) -> NDArray[np.intp]:
    """Places of the points on the lower convex hull of a falling curve; `x` (P,) rises."""
    hull: list[int] = []
    points = list(zip(x.tolist(), y.tolist(), strict=True))
    for place, (right, low) in enumerate(points):
        while len(hull) > 1:
            (x1, y1), (x2, y2) = points[hull[-2]], points[hull[-1]]
            if (y2 - y1) * (right - x1) < (low - y1) * (x2 - x1):
                break
            hull.pop()
        hull.append(place)
    return np.array(hull)


class WaterFilling:
    """A budget given out over N convex curves: each next bit of it goes where it saves most, which is the optimum.

    The curves are (P,) sizes that rise and what is left at each, as on a lower convex hull. `least` is what their first sizes
    take together; a curve is not filled further where that saves nothing.
    """

    def __init__(self, curves: Sequence[tuple[Floats, Floats]]) -> None:
        self.first = np.array([float(size[0]) for size, _ in curves])
        self.least = float(self.first.sum())
        size, left = (np.concatenate([curve[axis] for curve in curves]) for axis in (0, 1))
        owner = np.repeat(np.arange(len(curves)), [len(curve[0]) for curve in curves])
        each = np.flatnonzero(owner[1:] == owner[:-1])  # a segment from each place but the last of a curve
        taken, saved = size[each + 1] - size[each], left[each] - left[each + 1]
        kept = np.flatnonzero(saved > 0)
        order = kept[np.argsort(-saved[kept] / np.maximum(taken[kept], _NEVER), kind="stable")]
        self.owner, self.taken = owner[each[order]], taken[order]
        self.spent = np.cumsum(np.append(self.least, self.taken))  # up to each segment
        self.left = np.cumsum(np.append(left[np.flatnonzero(np.diff(owner, prepend=-1))].sum(), -saved[order]))

    def sizes(self, budget: float) -> tuple[Floats, int]:
        """The best sizes (N,) for a budget of at least `least`, and how many segments are whole in them."""
        whole = int(np.searchsorted(self.spent[1:], budget, side="right"))
        sizes: Floats = self.first + np.bincount(self.owner[:whole], self.taken[:whole], len(self.first))
        if whole < len(self.owner):
            sizes[self.owner[whole]] += max(budget - float(self.spent[whole]), 0.0)
        return sizes, whole

    def left_at(self, budget: Floats | float) -> Floats:
        """What is left in all at the best sizes, shape of `budget`."""
        return np.asarray(np.interp(budget, self.spent, self.left))

    def budget_for(self, left: float) -> float:
        """The least budget that leaves no more than this; where none does, all that saves something."""
        return float(np.interp(-left, -self.left, self.spent))


@dataclass(frozen=True, eq=False)
class Shared:
    """HBM given out over the caches of N tables: `cached_rows` (N,), `missed_rows` a batch (N,), and the bytes of both.

    `hbm_bytes` are those of the caches with tags and times, `missed_bytes` those of the rows that a batch misses.
    """

    cached_rows: Floats
    missed_rows: Floats
    hbm_bytes: float
    missed_bytes: float


class Caches:
    """The caches of N tables that share HBM: each next row goes to the table where it saves most missed bytes a byte of HBM.

    Misses are taken from the lower convex hulls of the curves, on which this is the optimum. `row_bytes` (N,) are those of a
    row's weights, which a miss moves. A cached row takes 16 bytes of HBM more; the map of rows and row-wise optimizer state are
    not in.
    """

    def __init__(self, curves: Sequence[MissCurve], row_bytes: Sequence[float]) -> None:
        self.row_bytes = np.array(row_bytes, dtype=np.float64)
        self.hulls = [curve.hull() for curve in curves]
        self.distinct_bytes = float(sum(h.distinct_rows * b for h, b in zip(self.hulls, self.row_bytes, strict=True)))
        each = list(zip(self.hulls, (self.row_bytes + slot_bytes()).tolist(), self.row_bytes.tolist(), strict=True))
        self._filling = WaterFilling([(h.cached_rows * slot, h.missed_rows * row) for h, slot, row in each])

    def with_hbm(self, hbm_bytes: float) -> Shared:
        """The best use of so many bytes of HBM, or of fewer where more would save nothing."""
        cached = self._filling.sizes(hbm_bytes)[0] / (self.row_bytes + slot_bytes())
        missed = np.array([float(hull.missed(rows)) for hull, rows in zip(self.hulls, cached, strict=True)])
        used = float(cached @ (self.row_bytes + slot_bytes()))
        return Shared(cached, missed, used, float(missed @ self.row_bytes))

    def for_misses(self, share: float) -> Shared:
        """The fewest bytes of HBM with which at most this share of the distinct bytes of a batch is missed."""
        return self.with_hbm(self._filling.budget_for(share * self.distinct_bytes))
