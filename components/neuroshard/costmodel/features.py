"""Tables cut to widths -> the numbers that the compute net sees.

They are the paper's 20 features of a table (dim, rows, pooling factor, 17 reuse bins), sizes as log2; products of the first
three, since kernels cost by bytes and the net would need an exponential to form them; and what the paper kept constant: batch
size, element type, pooling mode, weighted lookups. The net ignores a feature that never varied in training.

Reuse bins go in cumulated, as the share of lookups of rows that a batch touches at most 2^i times. Two tables whose rows fall
into neighbouring bins are nearly the same to a kernel: their cumulated shares are close, while the bins themselves are not.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from neuroshard.core import reuse
from neuroshard.core.part import Part
from neuroshard.core.reuse import REUSE_BINS
from neuroshard.costmodel.protocol import Floats, Ints

# Written into each bundle. Any change below needs a new version; so does the oldest, unless features are only added at the end: a
# net ignores what it does not know.
FEATURE_VERSION: Final = 4
OLDEST_FEATURES: Final = 2

# The last is 1, or 0: never read.
SHARE_FEATURES: Final = tuple(f"lookups_of_rows_touched_up_to_2^{i}" for i in range(REUSE_BINS))
FEATURES: Final = (
    "log2_dim",
    "log2_rows",
    "log2_pooling_factor",  # of 1 + pooling factor
    *SHARE_FEATURES,
    "log2_weight_bytes",
    "log2_distinct_rows",  # of 1 + rows that a batch touches
    "million_lookups",  # a batch
    "million_distinct_rows",
    "gib_looked_up",  # read from memory if no lookup hits a cache
    "gib_distinct",  # read from memory if every lookup but a row's first hits a cache
    "gib_pooled",  # bytes written, fp32: a vector a feature, or a lookup of a sequence
    "log2_batch_size",
    "log2_element_bytes",
    "mean_pooling",  # 1, 0 where rows are summed, -1 where nothing is pooled
    "weighted",  # 1 where each lookup has a weight of its own
    "shared",  # 1 where several features read the table: FBGEMM's backward on a CPU then takes 4 times as long
)
FEWEST_FEATURES: Final = FEATURES.index("shared")  # of OLDEST_FEATURES
SHARE_COLUMNS: Final = slice(3, 3 + REUSE_BINS)
_POOLING: Final = {"sum": 0.0, "mean": 1.0, "none": -1.0}
_PLACE: Final = {name: place for place, name in enumerate(FEATURES)}
ROW_COLUMN: Final = _PLACE["log2_rows"]
TOUCHED_COLUMN: Final = _PLACE["gib_distinct"]
# The features that depend on the width that a table is cut to
BY_WIDTH: Final = [
    _PLACE[name] for name in ("log2_dim", "log2_weight_bytes", "gib_looked_up", "gib_distinct", "gib_pooled")
]

BIN_TOUCHES: Final = np.array(reuse.BIN_TOUCHES)


@dataclass(frozen=True)
class SplitFeatures:
    """Features of N parts, split: those of the T distinct tables, or rows of them, and those that depend on the width.

    A search asks about the same table at all its widths, so most features are computed once a table.
    """

    fixed: Floats  # (T, len(FEATURES)), zeros in the columns BY_WIDTH
    index: NDArray[np.intp]  # (N,): which of these each part has
    by_width: Floats  # (N, len(BY_WIDTH))

    def joined(self) -> Floats:
        """(N, len(FEATURES))."""
        features = self.fixed[self.index]
        features[:, BY_WIDTH] = self.by_width
        return features


def part_features(parts: Sequence[Part], batch_size: int | Ints) -> Floats:
    """Features of N parts of tables: (N, len(FEATURES)). `batch_size` is in samples: one for all, or one each (N,)."""
    return split_features(parts, batch_size).joined()


def split_features(parts: Sequence[Part], batch_size: int | Ints) -> SplitFeatures:
    """The same, split. What does not depend on the width is computed once for a Table object, rows, copies and batch size."""
    distinct, index = but_for_widths(parts, np.broadcast_to(batch_size, len(parts)).tolist())
    tables = [part.table for part in distinct.values()]
    (rows, pooling, vectors, element_bytes, counted_on), bins = facts_of(distinct.values())
    batch = np.array([batch for *_, batch in distinct], dtype=np.float64)
    lookups = pooling * batch
    touched = distinct_rows(rows, pooling, bins, counted_on, batch)
    lookups_a_bin = bins * BIN_TOUCHES
    log_rows = np.log2(rows)

    fixed = np.zeros((len(distinct), len(FEATURES)))
    columns = {
        "log2_rows": log_rows,
        "log2_pooling_factor": np.log2(1 + pooling),
        "log2_distinct_rows": np.log2(1 + touched),
        "million_lookups": lookups / 1e6,
        "million_distinct_rows": touched / 1e6,
        "log2_batch_size": np.log2(batch),
        "log2_element_bytes": np.log2(element_bytes),
        "mean_pooling": np.array([_POOLING[table.pooling] for table in tables]),
        "weighted": np.array([table.weighted for table in tables]),
        "shared": np.array([len(table.features) > 1 for table in tables]),
    }
    for name, column in columns.items():
        fixed[:, _PLACE[name]] = column
    shares = lookups_a_bin.cumsum(axis=1)
    shares /= np.maximum(lookups_a_bin.sum(axis=1, keepdims=True), 1.0)
    fixed[:, SHARE_COLUMNS] = shares

    dim = widths_of(parts)
    row_bytes = dim * element_bytes[index]
    by_width = np.empty((len(index), len(BY_WIDTH)))
    by_width[:, 0] = np.log2(dim)
    by_width[:, 1] = np.log2(row_bytes) + log_rows[index]
    by_width[:, 2] = lookups[index] * row_bytes / 2**30
    by_width[:, 3] = touched[index] * row_bytes / 2**30
    by_width[:, 4] = (batch * vectors)[index] * dim * 4 / 2**30
    return SplitFeatures(fixed, index, by_width)


def but_for_widths(parts: Sequence[Part], *more: Iterable[Any]) -> tuple[dict[tuple[Any, ...], Part], NDArray[np.intp]]:
    """Parts that differ in more than their width, or in `more` of each of N parts, which their keys end with; and which of them
    each part is: (N,).

    A search asks for a table at all its widths, so this loops over the parts in C alone.
    """
    tables, *others = (map(attrgetter(name), parts) for name in ("table", "rows", "copies", "lookup_share"))
    keys = list(zip(map(id, tables), *others, *more, strict=True))
    distinct = dict(zip(keys, parts, strict=True))
    place = dict(zip(distinct, range(len(distinct)), strict=True))
    return distinct, np.fromiter(map(place.__getitem__, keys), dtype=np.intp, count=len(keys))


def facts_of(parts: Collection[Part]) -> tuple[Floats, Floats]:
    """Rows, pooling factor, vectors a sample, bytes of an element, and the batch that the reuse bins were counted on, of N parts:
    (5, N); and the bins: (N, 17)."""
    facts = [
        (part.rows, part.pooling_factor, part.vectors, part.table.element_bytes, part.table.reuse_batch_size)
        for part in parts
    ]
    bins = [part.table.reuse_bins for part in parts]
    return np.array(facts, dtype=np.float64).reshape(-1, 5).T, np.array(bins, dtype=np.float64).reshape(-1, REUSE_BINS)


def widths_of(parts: Sequence[Part]) -> Floats:
    """The columns of N parts: (N,)."""
    return np.fromiter(map(attrgetter("dim"), parts), dtype=np.float64, count=len(parts))


def rounded_up(amount: Floats | Ints, unit: int) -> Floats:
    """The least multiples of `unit`, such as whole sectors of memory, that hold `amount`."""
    return np.asarray(np.ceil(amount / unit) * unit, dtype=np.float64)


def distinct_rows(rows: Floats, pooling: Floats, bins: Floats, counted_on: Floats, batch_size: int | Floats) -> Floats:
    """An estimate of how many distinct rows a batch touches, from the reuse bins: (T,), (T,), (T, 17), (T,) -> (T,).

    `counted_on` is the batch size that the bins were counted on. In a smaller batch each touch is left with a
    probability, the ratio of the sizes. A larger one also touches rows that the counted one did not: so many as Chao and Jost
    (Ecology 93, 2012) expect from how many rows were touched once and twice.
    """
    counted = pooling * counted_on / np.maximum(bins @ BIN_TOUCHES, 1.0)
    ratio = np.broadcast_to(batch_size / counted_on, counted.shape)
    found = counted * (bins * (1 - (1 - np.minimum(ratio, 1.0))[:, None] ** BIN_TOUCHES)).sum(axis=1)
    once, twice = counted * bins[:, 0], counted * bins[:, 1]
    unseen = np.maximum(once**2 / np.maximum(2 * twice, 1.0), 1.0)
    estimate: Floats = found + unseen * (1 - np.exp(-once * np.maximum(ratio - 1, 0.0) / unseen))
    estimate = np.minimum(estimate, rows)
    return np.minimum(estimate, pooling * batch_size)
