"""Reuse bins of stated access distributions, against lookups that are really drawn."""

import math

import numpy as np
import pytest

from neuroshard.core.reuse import REUSE_BINS, expected_bins, poisson_at_most, uniform_bins, zipf_bins


def counted(rows: np.ndarray) -> np.ndarray:
    """Shares of the touched rows that are touched once, twice, 3-4 times, …, computed one by one."""
    bins = [0] * REUSE_BINS
    for count in np.unique(rows, return_counts=True)[1].tolist():
        bins[min(math.ceil(math.log2(count)), REUSE_BINS - 1)] += 1
    return np.array(bins) / sum(bins)


@pytest.mark.parametrize("mean", [0.01, 1.0, 10.0, 23.99, 24.0, 1000.0, 1e6])
def test_poisson_probabilities_match_samples(mean):
    samples = np.random.default_rng(0).poisson(mean, 200_000)
    for count in (0, int(mean), int(mean + 2 * math.sqrt(mean)) + 1):
        assert poisson_at_most(count, mean) == pytest.approx((samples <= count).mean(), abs=0.005)


def test_poisson_never_reaches_below_zero_and_ends_at_one():
    assert poisson_at_most(-1, 3.0) == 0.0
    assert poisson_at_most(2**15, 3.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("rows", "pooling"), [(40_000_000, 3), (39_060, 2), (1000, 0.01), (3, 1), (7, 40)])
def test_uniform_bins_match_uniform_lookups(rows, pooling):
    drawn = np.random.default_rng(1).integers(0, rows, int(65536 * pooling))
    np.testing.assert_allclose(uniform_bins(rows, pooling), counted(drawn), atol=0.03)


@pytest.mark.parametrize(("rows", "pooling", "exponent"), [(100_000, 10, 1.05), (10_000, 2, 0.8), (1_000_000, 1, 1.5)])
def test_zipf_bins_match_zipf_lookups(rows, pooling, exponent):
    weights = np.cumsum(np.arange(1, rows + 1) ** -exponent)
    drawn = np.searchsorted(weights / weights[-1], np.random.default_rng(2).random(65536 * pooling))
    np.testing.assert_allclose(zipf_bins(rows, pooling, exponent), counted(drawn), atol=0.02)


def test_zipf_with_exponent_zero_is_uniform():
    np.testing.assert_allclose(zipf_bins(5000, 3, 0.0), uniform_bins(5000, 3), atol=1e-3)


def test_bins_sum_to_one_or_are_zeros():
    assert math.fsum(zipf_bins(2**40, 1e3, 1.05)) == pytest.approx(1.0)
    assert expected_bins([]) == expected_bins([(5, 0.0)]) == (0.0,) * REUSE_BINS


def test_a_row_read_very_often_is_in_the_last_bin():
    assert uniform_bins(1, 10) == (0.0,) * 16 + (1.0,)
