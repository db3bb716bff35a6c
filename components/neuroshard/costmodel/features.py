"""Tables cut to widths -> the numbers that the compute net sees.

The paper's 20 features of a table (dim, rows, pooling factor, 17 reuse bins), sizes as log2; those that follow from them and
spare the net an exponential, since what a kernel costs grows with bytes, and bytes are products of the first three; and what the
paper held fixed: batch size, element type, pooling mode, weighted lookups. A net ignores a feature that never varied in training.

The reuse bins go in summed up, as the share of lookups that go to rows touched at most 2^i times: two tables whose rows fall into
neighbouring bins have then nearly the same features, which the bins themselves never have.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from neuroshard.core.reuse import REUSE_BINS
from neuroshard.core.table import Table
from neuroshard.costmodel.protocol import Floats, Ints

FEATURE_VERSION: Final = 2  # a bundle keeps the version it was trained with; any change below is a new version

SHARES: Final = tuple(
    f"lookups_of_rows_touched_up_to_2^{i}" for i in range(REUSE_BINS)
)  # the last is 1, or 0: never read
FEATURES: Final = (
    "log2_dim",
    "log2_rows",
    "log2_pooling_factor",  # of 1 + pooling factor
    *SHARES,
    "log2_weight_bytes",
    "log2_distinct_rows",  # of 1 + rows that a batch touches
    "million_lookups",  # a batch
    "million_distinct_rows",
    "gib_looked_up",  # bytes read if no lookup hit a cache
    "gib_distinct",  # bytes read if every lookup after a row's first did
    "gib_pooled",  # bytes written, fp32
    "log2_batch_size",
    "log2_element_bytes",
    "mean_pooling",  # 1, or 0 where rows are summed
    "weighted",  # 1 where each lookup has a weight of its own
)
SHARE_COLUMNS: Final = slice(3, 3 + REUSE_BINS)

# Touches of a row in each bin: the middle of (2^(i-1), 2^i]. Bin 16 is open; twice its lower end stands for it.
_BIN_TOUCHES: Final = np.array([1.0, 2.0, *(0.75 * 2.0**i + 0.5 for i in range(2, REUSE_BINS - 1)), 2.0**REUSE_BINS])


def table_features(tables: Sequence[Table], dims: Ints, batch_size: int | Ints) -> Floats:
    """Features of `tables[i]` cut to `dims[i]` columns, read by a batch of `batch_size` samples, of all or of each (N,):
    (N,) -> (N, len(FEATURES)).

    What does not depend on the width is computed once for each distinct Table object and batch size, so that asking for one
    table at all its widths costs little more than asking once: 64,000 pairs of 2,000 tables take about 0.1 s.
    """
    batches = np.broadcast_to(np.asarray(batch_size, dtype=np.int64), (len(tables),))
    keys = list(zip(map(id, tables), batches.tolist(), strict=True))
    distinct = dict(zip(keys, tables, strict=True))
    place = {key: index for index, key in enumerate(distinct)}
    index = np.fromiter((place[key] for key in keys), dtype=np.intp, count=len(keys))

    rows, pooling, element_bytes, counted_on, weighted = (
        np.array([getattr(t, name) for t in distinct.values()], dtype=np.float64)
        for name in ("rows", "pooling_factor", "element_bytes", "reuse_batch_size", "weighted")
    )
    bins = np.array([t.reuse_bins for t in distinct.values()], dtype=np.float64).reshape(-1, REUSE_BINS)
    mean_pooling = np.array([t.pooling == "mean" for t in distinct.values()], dtype=np.float64)
    batch = np.array([batch for _, batch in distinct], dtype=np.float64)
    lookups = pooling * batch
    touched = distinct_rows(rows, pooling, bins, counted_on, batch)

    lookups_a_bin = bins * _BIN_TOUCHES
    shares = lookups_a_bin.cumsum(axis=1) / np.maximum(lookups_a_bin.sum(axis=1, keepdims=True), 1.0)
    log_rows, log_pooling, log_touched = np.log2(rows), np.log2(1 + pooling), np.log2(1 + touched)
    dim = np.asarray(dims, dtype=np.float64)
    row_bytes = dim * element_bytes[index]
    columns = (
        np.log2(dim),
        log_rows[index],
        log_pooling[index],
        *shares[index].T,
        np.log2(row_bytes) + log_rows[index],
        log_touched[index],
        lookups[index] / 1e6,
        touched[index] / 1e6,
        lookups[index] * row_bytes / 2**30,
        touched[index] * row_bytes / 2**30,
        batch[index] * dim * 4 / 2**30,
        np.log2(batch)[index],
        np.log2(element_bytes)[index],
        mean_pooling[index],
        weighted[index],
    )
    return np.stack(columns, axis=1)


def distinct_rows(rows: Floats, pooling: Floats, bins: Floats, counted_on: Floats, batch_size: int | Floats) -> Floats:
    """How many different rows a batch touches, told from the reuse bins: (T,), (T,), (T, 17), (T,) -> (T,).

    A row touched c times in the batch that the bins were counted on is touched at least once in one of another size with
    probability 1 - exp(-c * ratio of the sizes).
    """
    counted = pooling * counted_on / np.maximum(bins @ _BIN_TOUCHES, 1.0)
    hit = 1 - np.exp(-np.outer(batch_size / counted_on, _BIN_TOUCHES))
    same = batch_size == counted_on
    estimate: Floats = counted * np.where(same, 1.0, (bins * hit).sum(axis=1))
    estimate = np.minimum(estimate, rows)
    return np.minimum(estimate, pooling * batch_size)
