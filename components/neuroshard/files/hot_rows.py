"""Batches of lookups -> the order of a table's rows by access, in memory that does not grow with the batches.

    hot = HotRows(rows=table.rows)
    for ids in batches:
        hot.add(*np.unique(ids, return_counts=True))
    found = hot.order("500 batches", time)     # None where rows are read alike

Counted are the rows that SpaceSaving keeps (Metwally, Agrawal and El Abbadi, ICDT 2005), by batches: where more than `counters`
rows were read, those that can have been read least leave, and a row that comes later may have been read as often before. So no
row that was read more than `lookups / counters` times is lost, and what is counted of a row is never more than it was read.

Rows that were read most in some batches seem hotter than they are: of a million equal rows, some are read four times by chance.
So the batches are counted in two halves, in turn, and the share of lookups of the hottest rows of one half is that of the other.

How the lookups fall over the ids is counted beside it, in RANGES equal ranges (`lookups_by_id`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neuroshard.core.row_order import RowOrder
from neuroshard.core.value import sha256
from neuroshard.files.access import Floats, Ints
from neuroshard.files.row_orders import bytes_of_ids

# of a table that is counted alone, in 270 MB at most; 130 bytes each, most of it while they are sorted
COUNTERS = 2**21
FEWEST_COUNTERS = 2**15  # of a table; it may list half as many rows
FEWEST_LOOKUPS = 4  # of a row that is listed; a guess: which of the rows below are hotter is mostly chance
LEAST_SKEW = 0.05  # of all lookups: so many more than other rows must the hottest have to be listed; a guess
RANGES = 64  # of ids: blocks of rows for as many devices. More would be chance, and bytes of every plan
UNEVEN = 0.05  # of all lookups: so many at least are in other ranges than evenly spread ones would be; a guess
LOOKUPS_A_RANGE = 400  # with fewer, even ranges differ by 2 % of the lookups by chance
AS_GOOD = 0.01  # of all lookups: as much less may the rows 0, 1, 2, … have than the hottest, to need no list


@dataclass(frozen=True)
class Ordered:
    """An order of rows, and the file that lists its ids, b"" where none is needed."""

    order: RowOrder
    file: bytes


class _Counts(NamedTuple):
    """Counted rows (N,), rising; how often each was read in each half (N, 2); how often it may have been read before (N,)."""

    rows: Ints
    halves: Ints
    before: Ints


class HotRows:
    """Counts the lookups of one table: `rows` are its rows; without `counters` how lookups fall over ids alone. `lookups` are of
    each half of the batches."""

    def __init__(self, rows: int, counters: int = COUNTERS) -> None:
        self.rows, self.counters = rows, counters
        self.lookups, self.batches = np.zeros(2, dtype=np.int64), 0
        self._lost = 0  # lookups that a row which is not counted may have had
        self._counts = _Counts(*(np.empty(shape, dtype=np.int64) for shape in (0, (0, 2), 0)))
        self._new: list[tuple[Ints, Ints]] = []
        self._waiting = 0  # rows in it
        self._by_id = np.zeros(min(RANGES, rows), dtype=np.int64)

    def add(self, rows: Ints, counts: Ints) -> None:
        """Count one batch: distinct rows (N,), and how often each is read in it (N,)."""
        half = self.batches % 2
        self.batches += 1
        self.lookups[half] += counts.sum()
        ranges = len(self._by_id)
        self._by_id += np.bincount(rows * ranges // self.rows, counts, ranges).astype(np.int64)
        if self.counters:
            self._new.append((rows, counts[:, None] * np.eye(2, dtype=np.int64)[half]))
            self._waiting += len(rows)
        if self._waiting > self.counters // 2:  # sorting a few at once costs much each
            self._merge()

    @property
    def lookups_by_id(self) -> tuple[float, ...]:
        """The shares of the lookups in equal ranges of ids; none where they are even, or too few were counted."""
        lookups, ranges = int(self._by_id.sum()), len(self._by_id)
        if lookups < LOOKUPS_A_RANGE * ranges:
            return ()
        shares = self._by_id / lookups
        return tuple(map(_short, shares.tolist())) if np.abs(shares - 1 / ranges).sum() / 2 >= UNEVEN else ()

    def order(self, source: str, time: str) -> Ordered | None:
        """The order of the rows by what was counted; None where batches are fewer than two, or the rows are read alike."""
        self._merge()
        rows, halves, _ = self._counts
        every = halves.sum(axis=1)
        if self.batches < 2 or not self.lookups.all() or not (every >= FEWEST_LOOKUPS).any():
            return None
        hottest = np.lexsort((rows, -every))[: self.counters // 2]
        ids = rows[hottest][every[hottest] >= FEWEST_LOOKUPS]
        points = np.append(2 ** np.arange(int(len(ids) - 1).bit_length()), len(ids))
        shares = self._shares(points)
        if (shares - points / self.rows).max() < LEAST_SKEW:
            return None
        before = np.searchsorted(rows, points)  # counted rows among the first ids
        first = np.append(0, np.cumsum(every))[before] / self.lookups.sum()
        is_sorted = bool((first >= shares - AS_GOOD).all())
        if is_sorted:
            shares = first
        file = b"" if is_sorted else bytes_of_ids(ids)
        curve = [(int(n), _short(share)) for n, share in zip(points, shares, strict=True)]
        order = RowOrder(
            ids_digest=sha256(file) if file else "",
            rows=self.rows,
            hot_rows=len(ids),
            lookup_share=curve[-1][1],
            points=tuple(curve[:-1]),
            source=source,
            time=time,
        )
        return Ordered(order, file)

    def _shares(self, points: Ints) -> Floats:
        """The shares of lookups that so many of the hottest rows of one half have in the other; the mean of both ways."""
        rows, halves, _ = self._counts
        shares = np.zeros(len(points))
        for half in (0, 1):
            hottest = np.lexsort((rows, -halves[:, half]))
            read = hottest[halves[hottest, half] > 0]  # others are here because the other half has read them
            found = np.append(0, np.cumsum(halves[read, 1 - half])) / self.lookups[1 - half]
            shares += found[np.minimum(points, len(read))]
        return shares / 2

    def _merge(self) -> None:
        """Count what is new, and let the rows go that can have been read least, so that `counters` are left."""
        if not self._new:
            return
        rows = np.concatenate([self._counts.rows, *(rows for rows, _ in self._new)])
        halves = np.concatenate([self._counts.halves, *(halves for _, halves in self._new)])
        self._new, self._waiting = [], 0
        by_row = np.argsort(rows, kind="stable")
        rows = rows[by_row]
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        old = by_row[first] < len(self._counts.rows)  # the sort is stable, so a row's first entry is the old one
        before = np.full(len(first), self._lost)
        before[old] = self._counts.before[by_row[first][old]]
        counts = _Counts(rows[first], np.add.reduceat(halves[by_row], first), before)
        if len(first) > self.counters:
            most = counts.halves.sum(axis=1) + counts.before
            least = np.partition(most, len(most) - self.counters - 1)[len(most) - self.counters - 1]
            self._lost = int(least)
            counts = _Counts(*(one[most > least] for one in counts))
        self._counts = counts


def _short(share: float) -> float:
    """Six digits, which keep files small; the order of shares stays."""
    return float(f"{min(share, 1.0):.6g}")
