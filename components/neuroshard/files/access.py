"""How a table's rows are accessed: reuse bins from lookups, and access rates of rows from reuse bins.

`count_bins` counts the 17 reuse bins of real lookups. `row_groups` inverts them: it finds groups of rows, each with a rate of
lookups, whose lookups have the table's bins again.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.reuse import REUSE_BINS, expected_bins
from neuroshard.core.table import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bins = tuple[float, ...]

# Candidate rates of a group: lookups of one row in the batch that the bins were counted on. Below 1/16 a batch touches a row
# once or not at all, so octaves suffice; above 2^17 everything is bin 16. Steps finer than a third of an octave fit no better.
_RATES = 2.0 ** np.concatenate([np.arange(-30.0, -4.0), np.arange(-4.0, 17.01, 1 / 3)])
_FIT_STEPS = 100
_NEVER = 1e-200  # lookups of a batch below which a table counts as never read, so that divisions stay finite


def count_bins(indices: Ints) -> Bins:
    """Reuse bins of the lookups of one batch in one table: 17 shares of the touched rows, all 0 where there are none."""
    if not len(indices):
        return (0.0,) * REUSE_BINS
    # counting into an array is 20 times as fast as sorting, but it must not need much more memory
    dense = int(indices.max()) < 2 * len(indices)
    counts = np.bincount(indices) if dense else np.unique(indices, return_counts=True)[1]
    counts = counts[counts > 0]
    places = np.searchsorted(2 ** np.arange(REUSE_BINS - 1), counts)
    shares: list[float] = (np.bincount(places, minlength=REUSE_BINS) / len(counts)).tolist()
    return tuple(shares)


class RowGroups(NamedTuple):
    """Groups of rows of a table, the most accessed first: rows (G,) and shares of the table's lookups (G,).

    Within a group every row is equally likely. Numbers of rows may be fractions; their sum is from 1 to the table's rows.
    """

    rows: Floats
    lookup_shares: Floats


def row_groups(table: Table) -> RowGroups:
    """Groups of rows whose lookups have the table's reuse bins when counted on `reuse_batch_size` samples.

    The rates follow from the bins alone, and the number of rows at each rate from the pooling factor. If that is more rows than
    the table has, the least accessed groups share the rows that are left. A table without bins is accessed uniformly.
    """
    rates, lookup_shares = fitted_rates(table.reuse_bins)
    lookups = table.reuse_batch_size * table.pooling_factor
    if lookups < _NEVER or not len(rates):
        return RowGroups(np.array([float(table.rows)]), np.array([1.0]))
    rows = lookups * lookup_shares / rates
    rows_before = np.concatenate([[0.0], np.cumsum(rows)])
    if rows_before[-1] <= table.rows:
        return RowGroups(rows * max(1.0, 1.0 / rows_before[-1]), lookup_shares)

    # The groups from some place on are merged, so their rows are accessed more often than before. The place is the last one at
    # which the merged group is not accessed more often than the group before it.
    shares_left = np.cumsum(lookup_shares[::-1])[::-1]
    rows_left = table.rows - rows_before[:-1]
    merged_rates = np.divide(lookups * shares_left, rows_left, out=np.full(len(rates), np.inf), where=rows_left > 0)
    place = int(np.flatnonzero(merged_rates <= np.concatenate([[np.inf], rates[:-1]]))[-1])
    return RowGroups(np.append(rows[:place], rows_left[place]), np.append(lookup_shares[:place], shares_left[place]))


def rows_at_rates(table: Table) -> float:
    """Rows that a table needs for its bins: with fewer, rows are accessed more often than the bins say.

    Rows accessed less than once in four batches count as proportionally fewer rows accessed once in four: the bins hardly change.
    """
    rates, lookup_shares = fitted_rates(table.reuse_bins)
    lookups = table.reuse_batch_size * table.pooling_factor
    return float(np.sum(lookups * lookup_shares / np.maximum(rates, 0.25)))


@lru_cache(maxsize=16384)
def fitted_rates(bins: Bins) -> tuple[Floats, Floats]:
    """Access rates that explain these bins, highest first, and the share of the lookups at each: two (G,), empty for zero bins.

    Rows are accessed independently, so the count of a row is Poisson with its rate as the mean, and the bins are a mixture of
    zero-truncated Poisson distributions. Expectation-maximization finds its weights (Laird 1978); 100 steps take about 0.7 ms.
    """
    seen = np.array(bins)
    if not seen.any():
        return np.empty(0), np.empty(0)
    bins_of_rate, touched = _bins_of_rates()
    used = bins_of_rate @ seen > 0
    bins_of_rate, touched, rates = bins_of_rate[used], touched[used], _RATES[used]
    weights = np.full(len(rates), 1.0 / len(rates))  # of the touched rows
    for _ in range(_FIT_STEPS):
        expected = weights @ bins_of_rate
        weights *= bins_of_rate @ np.divide(seen, expected, out=np.zeros(REUSE_BINS), where=expected > 0)
        weights /= weights.sum()
    lookups = weights * rates / touched
    lookups /= lookups.sum()
    kept = np.flatnonzero(lookups > 1e-9)[::-1]
    return rates[kept], lookups[kept] / lookups[kept].sum()


@lru_cache(maxsize=1)
def _bins_of_rates() -> tuple[Floats, Floats]:
    """For each of R rates: the bins of a row, given that it is touched (R, 17), and the probability that it is (R,)."""
    return np.array([expected_bins([(1.0, rate)]) for rate in _RATES.tolist()]), -np.expm1(-_RATES)


def spreading_step(rows: int) -> int:
    """A number coprime with `rows`: multiplying by it modulo `rows` spreads neighbours evenly over the table.

    Near the golden section of the rows, as far as products of it stay below 2^63.
    """
    step = max(min(int(rows * 0.6180339887), 2**62 // rows), 1)
    while math.gcd(step, rows) != 1:
        step -= 1
    return step
