"""An access curve: how often the rows of a table are read, hottest first, and what an LRU cache missed on a stream of batches.

A `Table` may carry one. `{"access": "zipf:1.05"}` in tables.json states it in a word; counted ones come from batches
(files/count_access.py). costmodel/cache.py predicts from it what a cache in HBM misses.
"""

import math
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from neuroshard.core.errors import UsageError
from neuroshard.core.reuse import expected_bins, zipf_groups
from neuroshard.core.value import Number, Source, SparseValue, Value, Whole, shown

MOST_GROUPS = 4096
MOST_POINTS = 4096
MOST_LOOKUPS_A_BATCH = 1e18
MAX_EXPONENT = 10.0
STEADY = 0.02  # `varies` up to which a stream's misses are near enough to the 1.5 points that prediction leaves anyway
LOOSE = 1e-4  # how far sums may be off, as numbers are written with six digits
# Zipf ranks below 8 are groups of their own, later groups are a third wide: 0.1 points of misses
FEWEST_EXACT, WIDTH = 8, 3

Count = Annotated[Number, Field(ge=0, le=2.0**40)]


def access_law(access: str) -> tuple[float, float]:
    """The exponent a and the shift q of `"zipf:a"` or `"zipf:a+q"`, by which the k-th most popular row is read in proportion to
    (k + q)^-a; (0, 0) of `"uniform"`, which is the same as zipf:0. Raises UsageError."""
    number = r"([0-9]{1,12}(?:\.[0-9]{1,20})?)"
    match = re.fullmatch(rf"uniform|zipf:{number}(?:\+{number})?", access)
    if match is None or float(match.group(1) or 0) > MAX_EXPONENT:
        raise UsageError(
            f"{shown(access)} is not an access distribution; write uniform, or zipf:EXPONENT with an exponent from 0 to "
            f"{MAX_EXPONENT:g}, as in zipf:1.05, and a shift of the ranks, if there is one, as in zipf:1.6+12"
        )
    return float(match.group(1) or 0), float(match.group(2) or 0)


class StreamMisses(Value):
    """Rows a batch that an LRU cache of a table missed, by cached rows, counted on a stream of batches by stack distances.

    The cache works as FBGEMM's does: by batch, no row of a batch is evicted while the batch is read. Any row may lie in any slot.
    `missed_rows` were read before and evicted since; `first_touches` are rows a batch that the stream had never read before. Both
    are of its last half; first touches, and caches that the first half does not fill, of the last quarter, or of as much as there
    is once the cache is full. `order` is "shuffled" where batches did not come as they are trained: then nothing is known of
    locality in time. `sampled` is the share of rows that were counted, 1 for all; `error` the standard error that this makes, and
    `varies` the standard deviation between the quarters of what was counted, both as shares of the distinct rows.
    """

    order: Literal["time", "shuffled"]
    batches: Annotated[Whole, Field(ge=2, le=2**40)]
    distinct_rows: Count
    first_touches: Count
    cached_rows: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MOST_POINTS)]
    missed_rows: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MOST_POINTS)]
    sampled: Annotated[Number, Field(gt=0, le=1)] = 1.0
    error: Annotated[Number, Field(ge=0, le=1)] = 0.0
    varies: Annotated[Number, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.cached_rows) != len(self.missed_rows):
            raise ValueError(f"has {len(self.cached_rows)} cached_rows, but {len(self.missed_rows)} missed_rows")
        check_order("cached_rows", self.cached_rows, rising=True)
        check_order("missed_rows", self.missed_rows, rising=False)
        missed = self.missed_rows[0] + self.first_touches
        if missed > self.distinct_rows * (1 + LOOSE) + LOOSE:
            raise ValueError(
                f"misses {missed:g} rows a batch, but a batch has {self.distinct_rows:g} distinct rows; count the stream again"
            )
        if self.sampled == 1:  # else both are estimates
            self._check_hits()
        return self

    def _check_hits(self) -> None:
        """Raise ValueError where a cache has more hits a batch than rows."""
        for cached, missed in zip(self.cached_rows, self.missed_rows, strict=True):
            hits = self.distinct_rows - self.first_touches - missed
            if hits > cached + LOOSE * (self.distinct_rows + 1):
                raise ValueError(
                    f"has {hits:g} hits a batch in a cache of {cached:g} rows, which has one a row at most; count the stream "
                    "again"
                )

    def of_rows(self, share: float) -> Self:
        """The same of a share of the table's rows, spread evenly over it, as a block of rows is where ids are hashed."""
        fields = {name: getattr(self, name) * share for name in ("distinct_rows", "first_touches")}
        lists = {name: tuple(one * share for one in getattr(self, name)) for name in ("cached_rows", "missed_rows")}
        return self.model_copy(update={**fields, **lists})


class AccessCurve(SparseValue):
    """How the rows of a table are read: groups of rows, hottest first, and what is known of their order in time.

    `group_rows[i]` rows (a fraction where they are estimated) are each looked up `lookups_per_row[i]` times in a batch of
    `batch_size` samples, on average. Rows in no group are never read. `stream` is counted at the same batch size.
    """

    UNSAID: ClassVar = ("stream",)

    source: Source = ""
    batch_size: Annotated[Whole, Field(ge=1, le=2**31)]
    group_rows: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MOST_GROUPS)]
    lookups_per_row: Annotated[tuple[Number, ...], Field(min_length=1, max_length=MOST_GROUPS)]
    stream: StreamMisses | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.group_rows) != len(self.lookups_per_row):
            raise ValueError(f"has {len(self.group_rows)} group_rows, but {len(self.lookups_per_row)} lookups_per_row")
        if wrong := [rows for rows in self.group_rows if not rows > 0]:
            raise ValueError(f"group_rows must be above 0, not {wrong[0]:g}; leave such a group out")
        check_order("lookups_per_row", self.lookups_per_row, rising=False)
        if self.lookups_per_row[-1] < 0:
            raise ValueError(f"lookups_per_row must be at least 0, not {self.lookups_per_row[-1]:g}")
        if self.lookups_per_row[0] > MOST_LOOKUPS_A_BATCH:
            raise ValueError(f"lookups_per_row must be at most 1e18, not {self.lookups_per_row[0]:g}")
        if self.stream is not None and self.stream.distinct_rows > self.lookups * (1 + LOOSE) + LOOSE:
            raise ValueError(
                f"stream has {self.stream.distinct_rows:g} distinct rows a batch, but a batch has {self.lookups:g} lookups; "
                "count both on the same batches"
            )
        return self

    @property
    def rows(self) -> float:
        """Rows that are ever read."""
        return math.fsum(self.group_rows)

    @property
    def lookups(self) -> float:
        """Lookups of a batch."""
        return math.fsum(rows * each for rows, each in zip(self.group_rows, self.lookups_per_row, strict=True))

    def reuse_bins(self, batch_size: int) -> tuple[float, ...]:
        """The 17 reuse bins that a batch of this size has (core/reuse.py)."""
        return expected_bins(self.rates(batch_size))

    def rates(self, batch_size: float) -> list[tuple[float, float]]:
        """The rows of each group, and the lookups of one of them in a batch of this size."""
        scale = batch_size / self.batch_size
        return [(n, each * scale) for n, each in zip(self.group_rows, self.lookups_per_row, strict=True)]

    def split(self, rows: float) -> tuple[Self, Self]:
        """The same of the `rows` hottest rows, and of the others: without what is known of their order in time. Where there are
        no others that are ever read, one row that is not stands for them."""
        hot, cold = list[tuple[float, float]](), list[tuple[float, float]]()
        left = float(rows)
        for count, lookups in zip(self.group_rows, self.lookups_per_row, strict=True):
            first = min(count, left)
            left -= first
            hot += [(first, lookups)] if first > 0 else []
            cold += [(count - first, lookups)] if count > first else []
        return self._of_groups(hot), self._of_groups(cold)

    def _of_groups(self, groups: list[tuple[float, float]]) -> Self:
        rows, lookups = zip(*(groups or [(1.0, 0.0)]), strict=True)
        return self.model_copy(update={"group_rows": rows, "lookups_per_row": lookups, "stream": None})

    def times(self, factor: float) -> Self:
        """The same rows, read so many times as often; counts of a stream do not say how."""
        return self._of_groups(
            [(n, each * factor) for n, each in zip(self.group_rows, self.lookups_per_row, strict=True)]
        )

    def of_rows(self, share: float, lookups: float | None = None) -> Self:
        """The same of a share of the table's rows, spread evenly over it, as a block of rows is where ids are hashed. With
        another share of the `lookups`, all of its rows are read so much more, or less; counts of a stream do not say how."""
        stream = None if self.stream is None else self.stream.of_rows(share)
        changed = {"group_rows": tuple(n * share for n in self.group_rows), "stream": stream}
        if lookups is not None and not math.isclose(lookups, share, rel_tol=LOOSE):
            times = lookups / share
            changed |= {"lookups_per_row": tuple(each * times for each in self.lookups_per_row), "stream": None}
        return self.model_copy(update=changed)


def check_order(name: str, numbers: Sequence[float], *, rising: bool) -> None:
    """Raise ValueError unless numbers rise, or never rise."""
    for index in range(1, len(numbers)):
        before, after = numbers[index - 1], numbers[index]
        if after <= before if rising else after > before:
            raise ValueError(
                f"{name}[{index}] is {after:g} after {before:g}; it must "
                + ("rise from point to point" if rising else "never rise: hottest rows and smallest caches come first")
            )


def stated_curve(access: str, rows: int, pooling_factor: float, batch_size: int) -> AccessCurve:
    """The curve of `"uniform"`, `"zipf:EXPONENT"` or `"zipf:EXPONENT+SHIFT"` for a table. Raises UsageError."""
    exponent, shift = access_law(access)
    groups = zipf_groups(rows, exponent, FEWEST_EXACT, WIDTH, shift) if exponent else [(rows, 1.0)]
    mass = math.fsum(count * weight for count, weight in groups)
    each = [float(f"{batch_size * pooling_factor * weight / mass:.8g}") for _, weight in groups]
    return AccessCurve(
        source=access,
        batch_size=batch_size,
        group_rows=tuple(count for count, _ in groups),
        lookups_per_row=tuple(each),
    )
