"""Batches of lookups -> the access curve of a table, in constant memory however many batches there are.

    counter = AccessCounter(rows=table.rows)
    for ids in batches:               # in the order in which they are trained
        counter.add(ids, samples=4096)
    counter.fields("time", "6 days")  # access, reuse_bins, pooling_factor … of the table

Stack distances are counted by batch, as FBGEMM's cache works: before a batch is read, the rows of the last batch lie on top, in
no order among themselves, then those last read one batch before, and so on. A row hits every cache that is larger than what
lies above it. Where more rows are read than are tracked, a sample of rows stands for all, chosen by a hash of the row number
(SHARDS: Waldspurger, Park, Garthwaite and Ahmad, FAST 2015): half of the tracked rows leave, and the others count twice. Four
quarters of the sample, counted each by itself, say how large the error of that is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.access import AccessCurve, StreamMisses
from neuroshard.core.errors import InvalidInput
from neuroshard.core.reuse import REUSE_BINS
from neuroshard.core.table import Table
from neuroshard.files.access import Floats, Ints, fitted_rates
from neuroshard.files.hot_rows import HotRows

Order = Literal["time", "shuffled"]
Sampled = Literal["sampled"]  # batches with others between them: then nothing is known of a stream

TRACKED_ROWS = 2**16  # of a table at most; 24 bytes each, twice
FEWEST_BATCHES = 4  # for a stream: the first half fills the cache
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 by the golden section: multiples of it are spread most evenly
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shifts and factors of splitmix64
BY_PRODUCT = 1 / 32  # share that is sampled by the product alone; less would show patterns in row numbers
_OFTEN = 64  # lookups of a row that tell its rate, to an eighth

_STEPS_AN_OCTAVE = 32  # of the cached rows where misses are counted
_STRAIGHT = 0.0005  # of the distinct rows: points of the curve no further from the line between others are left out
_PARTS = 4
_SEGMENTS = 32  # of the stream, that the second half is made of; a power of two
_FORGET = 256  # batches whose rows have all been read again


@dataclass
class _Stack:
    """Rows in order of their last batch: an LRU stack whose levels are batches."""

    rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # (S,), rising
    level: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # (S,): the level that a row lies in
    held: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # rows in each level, the last on top

    def read(self, rows: Ints, cached_rows: Floats) -> tuple[int, Floats]:
        """Put a batch's distinct rows (rising) on top. How many were new, and how many of the others missed in a cache of so many
        rows of those that lie here."""
        place = np.searchsorted(self.rows, rows)
        known = place < len(self.rows)
        known[known] = self.rows[place[known]] == rows[known]
        again = np.bincount(self.level[place[known]], minlength=len(self.held))
        above, hits = (np.concatenate([[0], np.cumsum(one[::-1])]) for one in (self.held, again))
        missed = hits[-1] - np.interp(cached_rows, above, hits)

        self.held = np.append(self.held - again, len(rows))
        self.level[place[known]] = len(self.held) - 1
        if not known.all():
            self.rows = np.insert(self.rows, place[~known], rows[~known])
            self.level = np.insert(self.level, place[~known], len(self.held) - 1)
        used = np.flatnonzero(self.held)
        if len(self.held) > len(used) + _FORGET:
            self.level, self.held = np.searchsorted(used, self.level), self.held[used]
        return int((~known).sum()), missed

    def of(self, kept: NDArray[np.bool_] | Ints) -> Self:
        """Some of the rows, by places that rise, or by a mask."""
        return type(self)(self.rows[kept], self.level[kept], np.bincount(self.level[kept], minlength=len(self.held)))


@dataclass
class _Segment:
    """What some batches in a row counted, all rows of a table and a sum over batches; before them the stream had read so many."""

    read: float
    batches: int
    distinct: float
    new: float
    missed: Floats

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.read,
            self.batches + other.batches,
            self.distinct + other.distinct,
            self.new + other.new,
            self.missed + other.missed,
        )


class AccessCounter:
    """Counts the lookups of one table, batch by batch.

    `rows` are those of the table. At most `tracked_rows` of them are followed. What is added is also counted by `hot_rows`.
    """

    def __init__(
        self, rows: int, tracked_rows: int = TRACKED_ROWS, where: str = "", hot_rows: HotRows | None = None
    ) -> None:
        self.rows, self.tracked_rows, self.where, self.hot_rows = rows, tracked_rows, where, hot_rows
        self.batch_size = self.batches = self.lookups = 0
        self.sampled = 1.0
        self._stack = _Stack()
        self._counts = np.empty(0, dtype=np.int64)  # lookups of each row of the stack
        self._bins = np.zeros(REUSE_BINS)
        self._segments: list[_Segment] = []
        self._parts: list[_Stack] = []
        octaves = np.log2(max(rows, 5))
        self._cached_rows: Floats = 2.0 ** np.arange(2, octaves, 1 / _STEPS_AN_OCTAVE)
        self._missed_of_parts = np.zeros((_PARTS, len(self._cached_rows)))
        self._distinct_of_parts = 0.0

    def add(self, indices: Ints, samples: int) -> None:
        """Count one batch: the row numbers of its lookups (N,), in any order. Raises InvalidInput for a row that the table lacks,
        and for a batch with another number of samples than the first."""
        if self.batches and samples != self.batch_size:
            raise InvalidInput(
                f"{self.where}: batch {self.batches} has {samples:,} samples, but those before had {self.batch_size:,}; "
                "leave it out"
            )
        rows, counts = np.unique(np.asarray(indices, dtype=np.int64), return_counts=True)
        if len(rows) and not 0 <= rows[0] <= rows[-1] < self.rows:
            wrong = int(rows[0] if rows[0] < 0 else rows[-1])
            raise InvalidInput(
                f"{self.where}: row {wrong:,} is looked up, but the table has rows 0 to {self.rows - 1:,}"
            )
        self.batch_size, self.batches, self.lookups = samples, self.batches + 1, self.lookups + len(indices)
        self._bins += np.bincount(np.searchsorted(2 ** np.arange(REUSE_BINS - 1), counts), minlength=REUSE_BINS)
        self._count(rows, counts)
        if self.hot_rows is not None:
            self.hot_rows.add(rows, counts)

    def _count(self, rows: Ints, counts: Ints) -> None:
        distinct = float(len(rows))
        kept = sampled_places(rows, self.sampled)
        rows, counts = rows[kept], counts[kept]
        place = np.searchsorted(self._stack.rows, rows)
        known = place < len(self._stack.rows)
        known[known] = self._stack.rows[place[known]] == rows[known]
        read = len(self._stack.rows) / self.sampled
        new, missed = self._stack.read(rows, self._cached_rows * self.sampled)
        self._counts[place[known]] += counts[known]
        self._counts = np.insert(self._counts, place[~known], counts[~known])
        self._segments.append(_Segment(read, 1, distinct, new / self.sampled, missed / self.sampled))
        self._merge_segments()

        part = _part(rows) if self._parts else None
        for number, stack in enumerate(self._parts):
            share = self.sampled / _PARTS
            _, missed = stack.read(rows[part == number], self._cached_rows * share)
            self._missed_of_parts[number] += missed / share
        if self._parts:
            self._distinct_of_parts += distinct
        while len(self._stack.rows) > self.tracked_rows:
            self._sample_half()

    def _sample_half(self) -> None:
        self.sampled /= 2
        kept = sampled_places(self._stack.rows, self.sampled)
        self._counts, self._stack = self._counts[kept], self._stack.of(kept)
        part = _part(self._stack.rows)
        self._parts = [self._stack.of(part == number) for number in range(_PARTS)]

    def _merge_segments(self) -> None:
        """Neighbours become one where there are too many; all but the last are as long as the first."""
        last, length = self._segments[-1], self._segments[0].batches
        if len(self._segments) > 1 and self._segments[-2].batches < length:
            self._segments[-2:] = [self._segments[-2] + last]
        if len(self._segments) == _SEGMENTS and self._segments[-1].batches == length:
            pairs = zip(self._segments[::2], self._segments[1::2], strict=True)
            self._segments = [first + second for first, second in pairs]

    @property
    def said(self) -> str:
        """What was counted, in a few words."""
        return f"{self.batches:,} batches of {self.batch_size:,} samples"

    @property
    def pooling_factor(self) -> float:
        """Mean lookups a sample."""
        return self.lookups / (self.batches * self.batch_size) if self.batches else 0.0

    @property
    def reuse_bins(self) -> tuple[float, ...]:
        """Of the rows that a batch reads, the mean over the batches."""
        return tuple((self._bins / max(self._bins.sum(), 1.0)).tolist())

    def fields(self, order: Order | Sampled, source: str = "") -> dict[str, Any]:
        """Fields of `Table` by what was counted: pooling_factor, reuse_bins, reuse_batch_size, access (None where no row was
        read).

        Raises InvalidInput where there are no batches."""
        if not self.batches:
            raise InvalidInput(f"{self.where}: there are no batches to count; give at least one")
        return {
            "pooling_factor": self.pooling_factor,
            "reuse_bins": self.reuse_bins,
            "reuse_batch_size": self.batch_size,
            "access": self.curve(order, source),
        }

    def curve(self, order: Order | Sampled, source: str = "") -> AccessCurve | None:
        """The access curve; without a stream where there are fewer than 4 batches, or gaps between them, None where no row was
        read, or none that is in the sample."""
        if not self.lookups or not len(self._counts):
            return None
        rows, rates = self._groups()
        return AccessCurve(
            source=source,
            batch_size=self.batch_size,
            group_rows=_short(rows),
            lookups_per_row=_short(rates),
            stream=None if order == "sampled" or self.batches < FEWEST_BATCHES else self._stream(order),
        )

    def _groups(self) -> tuple[Floats, Floats]:
        """Rows (G,) and mean lookups of one in a batch (G,), hottest first.

        Rows of few lookups tell little each by itself: the rates of all such rows are fitted to how many of them there are.
        """
        often = self._counts > _OFTEN
        octaves = np.round(4 * np.log2(np.maximum(self._counts[often], 1))).astype(np.int64)
        rows = np.bincount(octaves)
        lookups = np.bincount(octaves, self._counts[often])
        hot = np.flatnonzero(rows)[::-1]
        few = self._counts[~often]
        bins = np.bincount(np.searchsorted(2 ** np.arange(REUSE_BINS - 1), few), minlength=REUSE_BINS) / max(
            len(few), 1
        )
        rates, shares = fitted_rates(tuple(bins.tolist()))
        group_rows = np.concatenate([rows[hot], few.sum() * shares / rates if len(rates) else []]) / self.sampled
        each = np.minimum.accumulate(np.concatenate([lookups[hot] / rows[hot], rates]) / self.batches)
        if self.sampled < 1 and len(each):
            group_rows, each = _as_hot(group_rows, each, self.sampled, self.lookups / self.batches)
        return _no_more_rows(group_rows, each, float(self.rows), self.lookups / self.batches)

    def _stream(self, order: Order) -> StreamMisses:
        counted = self._last_half()
        total = sum(counted[1:], start=counted[0])
        distinct = min(total.distinct / total.batches, self.lookups / self.batches)  # its first half may have had fewer
        tracked = min(len(self._stack.rows) / self.sampled, float(self.rows))
        inside = self._cached_rows < tracked
        cached = np.concatenate([[0.0], self._cached_rows[inside], [tracked]])
        shares = _missed_shares(counted, self._cached_rows)
        missed = np.minimum.accumulate(np.concatenate([[1.0], shares[:-1][inside], shares[-1:]])) * distinct
        new = float(missed[-1])
        missed = missed - new
        kept = _corners(cached, missed, _STRAIGHT * distinct)
        return StreamMisses(
            order=order,
            batches=self.batches,
            distinct_rows=distinct,
            first_touches=new,
            cached_rows=_short(cached[kept]),
            missed_rows=_short(missed[kept]),
            sampled=self.sampled,
            error=self._error(),
            varies=_varies(counted, self._useful()),
        )

    def _last_half(self) -> list[_Segment]:
        """The segments of the last half of the stream, or of a little less; at least one."""
        kept = [self._segments[-1]]
        for segment in self._segments[-2::-1]:
            if sum(one.batches for one in kept) + segment.batches > self.batches - self.batches // 2:
                break
            kept.insert(0, segment)
        return kept

    def _useful(self) -> NDArray[np.bool_]:
        """The caches that hold the distinct rows of a batch."""
        total = sum(self._segments[1:], start=self._segments[0])
        return self._cached_rows >= min(total.distinct / total.batches, self._cached_rows[-1])

    def _error(self) -> float:
        """The standard error of misses by the four quarters of the sample, as a share of the distinct rows: of the cache of at
        least a batch's distinct rows where it is largest."""
        if not self._distinct_of_parts:
            return 0.0
        missed = self._missed_of_parts[:, self._useful()] / self._distinct_of_parts
        return _digits(float(missed.std(axis=0, ddof=1).max()) / math.sqrt(_PARTS))


def counted_table(
    table: Table,
    counter: AccessCounter,
    order: Order | Sampled,
    names: Sequence[str] = (),
    lookups: Sequence[float] | Any = (),
    source: str = "",
) -> Table:
    """The table with what was counted, whole or by feature where these are known; else features keep their shares. Batches that
    are parts of a trainer's (sampled) say nothing of how often one of its own reads a row: its reuse bins are the curve's."""
    fields = counter.fields(order, source or counter.said)
    each = (
        table.resized(table.rows, table.dim, fields["pooling_factor"]).model_dump()["features"]
        if table.features
        else []
    )
    if len(names) > 1:
        total = counter.batches * counter.batch_size
        each = [{"name": name, "pooling_factor": n / total} for name, n in zip(names, lookups, strict=True)]
    said = table.model_dump() | {name: value for name, value in fields.items() if value is not None}
    said["features"] = each
    if fields["access"] is None:
        said.pop("access", None)
    elif order == "sampled":
        said |= {"reuse_bins": None, "reuse_batch_size": table.reuse_batch_size}
    return Table.parse(said, f"table {table.name!r}")


def _missed_shares(segments: list[_Segment], cached_rows: Floats) -> Floats:
    """Of the distinct rows of the batches that fill a cache of so many rows (K,), the share that it missed, first touches and
    others; and of the last half of them the share of first touches, which is what a cache of all rows misses: (K + 1,).

    Before the stream has read so many rows, a row that is new may be one that the cache would hold. So a cache is counted on the
    segments before which as many rows had been read as it has, and on the last half of them at least.
    """
    batches = np.cumsum([one.batches for one in segments])
    last = int(np.searchsorted(batches, batches[-1] / 2, side="right"))
    read = np.maximum.accumulate([one.read for one in segments])
    first = np.append(np.minimum(np.searchsorted(read, cached_rows), last), last)
    missed = np.array([np.append(one.missed, 0.0) + one.new for one in segments])
    distinct = np.array([one.distinct for one in segments])
    missed, distinct = (np.cumsum(of[::-1], axis=0)[::-1] for of in (missed, distinct))  # from a segment on
    shares: Floats = missed[first, np.arange(len(first))] / np.maximum(distinct[first], 1e-9)
    return shares


def _varies(segments: list[_Segment], useful: NDArray[np.bool_]) -> float:
    """The standard deviation of the share of distinct rows that is missed, over the quarters of the segments, where it is
    largest."""
    quarters = [segments[len(segments) * n // 4 : len(segments) * (n + 1) // 4] for n in range(4)]
    shares = [
        sum(one.missed[useful] + one.new for one in some) / sum(one.distinct for one in some)
        for some in quarters
        if sum(one.distinct for one in some)
    ]
    return _digits(float(np.array(shares).std(axis=0, ddof=1).max())) if len(shares) > 1 else 0.0


def _corners(x: Floats, y: Floats, most: float) -> NDArray[np.intp]:
    """Places of the points that a curve needs so that lines between them are at most so far from all others (Douglas-Peucker)."""
    kept, spans = {0, len(x) - 1}, [(0, len(x) - 1)]
    while spans:
        first, last = spans.pop()
        off = np.abs(y[first:last] - np.interp(x[first:last], x[[first, last]], y[[first, last]]))
        place = first + int(off.argmax())
        if off.max() > most:
            kept.add(place)
            spans += [(first, place), (place, last)]
    return np.array(sorted(kept))


def _digits(share: float) -> float:
    """Three digits of a share."""
    return float(f"{min(share, 1.0):.3g}")


def _as_hot(rows: Floats, each: Floats, sampled: float, lookups: float) -> tuple[Floats, Floats]:
    """The groups of a sample with about all lookups of a batch. What is lacking or too much is the few hottest rows': none of
    them is in the sample, or one that stands for many. So a row is added that has the rest, or hot groups get fewer rows, no
    fewer than are in the sample."""
    lacking = lookups - float(rows @ each)
    if lacking > each[0]:
        return np.concatenate([[1.0], rows]), np.concatenate([[lacking], each])
    rows = rows.copy()
    for place in range(len(rows)):
        fewer = min(-lacking / each[place], rows[place] * (1 - sampled))
        if fewer <= 0:
            break
        rows[place] -= fewer
        lacking += fewer * each[place]
    return rows, each


def _no_more_rows(rows: Floats, each: Floats, most: float, lookups: float) -> tuple[Floats, Floats]:
    """The groups with no more rows than the table has, and with all lookups of a batch: the last groups share the rows left."""
    before = np.concatenate([[0.0], np.cumsum(rows)])
    if before[-1] > most:
        of_groups = rows * each
        for place in range(len(rows) - 1, -1, -1):
            left, rate = most - before[place], of_groups[place:].sum() / max(most - before[place], 1e-9)
            if left > 0 and (place == 0 or rate <= each[place - 1]):
                rows, each = np.append(rows[:place], left), np.append(each[:place], rate)
                break
    return rows, each * (lookups / float(rows @ each))


def _short(numbers: Floats) -> tuple[float, ...]:
    """Six digits, which keep files small."""
    return tuple(float(f"{one:.6g}") for one in numbers)


def sampled_places(rows: Ints, share: float) -> Ints:
    """Places (S,) of the rows (N,) that are in a sample of this share, a power of two. Smaller samples lie in larger ones.

    The first halvings are by a multiplication, which spreads even neighbours and costs little; later ones by `_mixed`, of the few
    rows that are left.
    """
    if share >= 1:
        return np.arange(len(rows))
    whole = np.ascontiguousarray(rows, dtype=np.int64).view(np.uint64)
    places = np.flatnonzero(whole * np.uint64(GOLDEN) < np.uint64(int(max(share, BY_PRODUCT) * 2**64)))
    if share < BY_PRODUCT:
        places = places[(_mixed(whole[places]) >> np.uint64(2)) < np.uint64(int(share / BY_PRODUCT * 2**62))]
    return places


def _mixed(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of row numbers (N,): the finalizer of splitmix64."""
    mixed = rows + np.uint64(GOLDEN)
    for shift, factor in MIXING:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _part(rows: Ints) -> NDArray[np.uint64]:
    return _mixed(rows.view(np.uint64)) & np.uint64(_PARTS - 1)
