"""How often a batch touches the same row: the 17 reuse bins of a table, from a stated access distribution.

`reuse_bins[i]` is the share of the touched rows that a batch touches (2^(i-1), 2^i] times: exactly once in bin 0, twice
in bin 1, 3-4 times in bin 2, … more than 32,768 times in bin 16. Meta's `dlrm_datasets` (2021) come with the same bins.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache

REUSE_BINS = 17
REFERENCE_BATCH_SIZE = 65536  # the batch of Meta's dlrm_datasets and of the paper

# Touches of a row in each bin: the middle of (2^(i-1), 2^i]. The last bin has no upper end; four times its lower end is used.
BIN_TOUCHES = (1.0, 2.0, *(0.75 * 2.0**i + 0.5 for i in range(2, REUSE_BINS - 1)), 2.0**REUSE_BINS)


def poisson_at_most(count: int, mean: float) -> float:
    """P(X <= count) for a Poisson X. Exact sums for small means, Wilson-Hilferty (error < 0.002) for larger ones."""
    if count < 0:
        return 0.0
    if mean < 24:
        terms = min(count, 150) + 1  # beyond, all terms together are below 1e-60
        return math.exp(-mean) * math.fsum(math.exp(k * math.log(mean) - math.lgamma(k + 1)) for k in range(terms))
    # X <= count exactly when a Gamma(count + 1) is above the mean, and a Gamma's cube root is nearly normal
    shape = count + 1
    z = 3 * math.sqrt(shape) * ((mean / shape) ** (1 / 3) - 1 + 1 / (9 * shape))
    return 0.5 * math.erfc(z / math.sqrt(2))


@lru_cache(maxsize=65536)
def _touched_by_bin(mean: float) -> tuple[float, ...]:
    """For a row looked up `mean` times a batch: the probability of each bin (their sum is the chance to be touched)."""
    below = poisson_at_most(0, mean)
    shares = []
    for i in range(REUSE_BINS - 1):
        at_most = poisson_at_most(2**i, mean)
        shares.append(max(at_most - below, 0.0))
        below = max(at_most, below)
    return (*shares, max(1.0 - below, 0.0))


def expected_bins(groups: Iterable[tuple[float, float]]) -> tuple[float, ...]:
    """Reuse bins of a table whose rows come in groups of (number of rows, mean lookups of one row in a batch).

    Returns 17 shares that sum to 1, or all zeros where nothing is ever looked up.
    """
    touched = expected_touches(groups)
    total = math.fsum(touched)
    return tuple(t / total for t in touched) if total > 0 else (0.0,) * REUSE_BINS


def expected_touches(groups: Iterable[tuple[float, float]]) -> list[float]:
    """The rows of each bin that a batch touches, of groups of (number of rows, mean lookups of one row in a batch)."""
    touched = [0.0] * REUSE_BINS
    for rows, mean in groups:
        if rows > 0 and mean > 0:
            # 3 digits of the mean keep the cache small; the bins are powers of two wide
            for i, share in enumerate(_touched_by_bin(float(f"{max(mean, 1e-12):.3g}"))):
                touched[i] += rows * share
    return touched


def distinct_rows(rows: float, lookups: float, bins: Sequence[float], ratio: float) -> float:
    """An estimate of how many rows a batch touches with so many `lookups` of a table, `ratio` times as large as the one that its
    reuse bins were counted on: a touch of that batch is in a smaller one with this probability. In a larger one, rows that it
    touched once are those of which more are found."""
    counted = lookups / ratio / max(math.fsum(map(operator.mul, bins, BIN_TOUCHES)), 1.0)
    left = 1 - min(ratio, 1.0)
    found = counted * math.fsum(share * (1 - left**touches) for share, touches in zip(bins, BIN_TOUCHES, strict=True))
    new = counted * bins[0] * max(ratio - 1, 0.0)
    return min(found + new, rows, lookups)


def uniform_bins(rows: int, pooling_factor: float, batch_size: int = REFERENCE_BATCH_SIZE) -> tuple[float, ...]:
    """Reuse bins where every row is equally likely."""
    return expected_bins([(rows, batch_size * pooling_factor / rows)])


def zipf_bins(
    rows: int, pooling_factor: float, exponent: float, batch_size: int = REFERENCE_BATCH_SIZE, shift: float = 0.0
) -> tuple[float, ...]:
    """Reuse bins where the k-th most popular row is looked up in proportion to (k + shift)^-exponent.

    Ranks are taken one by one up to 32 and then in groups a quarter wide, inside which popularity changes little.
    """
    groups = zipf_groups(rows, exponent, alone=32, width=4, shift=shift)
    mass = math.fsum(count * weight for count, weight in groups)
    lookups = batch_size * pooling_factor
    return expected_bins((count, lookups * weight / mass) for count, weight in groups)


def zipf_groups(rows: int, exponent: float, alone: int, width: int, shift: float = 0.0) -> list[tuple[int, float]]:
    """Ranks 1 … rows as groups (number of rows, mean of (rank + shift)^-exponent): below `alone` of one, then 1 / `width`."""
    groups = []
    low = 1
    while low <= rows:
        high = min(rows, low if low < alone else low + low // width)
        groups.append((high - low + 1, _power_mean(low + shift, high + shift, exponent)))
        low = high + 1
    return groups


def _power_mean(low: float, high: float, exponent: float) -> float:
    """Mean of k^-exponent over the ranks low … high, by the integral (midpoint rule at the ends)."""
    if low == high:
        return float(low**-exponent)
    a, b = low - 0.5, high + 0.5
    area = math.log(b / a) if abs(exponent - 1) < 1e-9 else (b ** (1 - exponent) - a ** (1 - exponent)) / (1 - exponent)
    return area / (high - low + 1)
