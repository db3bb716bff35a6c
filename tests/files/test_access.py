"""Reuse bins counted from lookups, computed from a distribution, and turned back into groups of rows."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.core.reuse import REUSE_BINS
from neuroshard.core.table import Table
from neuroshard.files.access import count_bins, row_groups, rows_at_rates


def test_bins_are_counted_by_how_often_a_row_is_touched():
    lookups = np.repeat([0, 1, 2, 3, 4, 5], [1, 1, 2, 3, 4, 5])
    assert count_bins(lookups) == (2 / 6, 1 / 6, 2 / 6, 1 / 6, *[0.0] * 13)


@pytest.mark.parametrize(
    ("count", "place"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (32768, 15), (32769, 16), (10**6, 16)]
)
def test_the_upper_end_of_a_bin_belongs_to_it(count, place):
    assert np.flatnonzero(count_bins(np.zeros(count, dtype=np.int64))).tolist() == [place]


def test_rows_far_apart_are_counted_as_rows_close_together():
    lookups = np.array([5, 5, 7])
    assert count_bins(lookups) == count_bins(lookups * 10**9)


def test_no_lookups_have_bins_of_zeros():
    assert count_bins(np.empty(0, dtype=np.int64)) == (0.0,) * REUSE_BINS


any_bins = st.lists(st.integers(0, 10), min_size=REUSE_BINS, max_size=REUSE_BINS).map(
    lambda counts: tuple(c / sum(counts) if any(counts) else 0.0 for c in counts)
)


@given(any_bins, st.integers(1, 2**40), st.floats(0, 1e4), st.integers(1, 2**20))
def test_groups_of_any_table_have_its_rows_at_most_and_all_its_lookups(bins, rows, pooling, batch):
    table = Table(name="a", rows=rows, dim=4, pooling_factor=pooling, reuse_bins=bins, reuse_batch_size=batch)
    groups = row_groups(table)
    assert math.fsum(groups.lookup_shares) == pytest.approx(1.0)
    assert 1 - 1e-9 <= math.fsum(groups.rows) <= rows * (1 + 1e-9)
    assert (groups.rows > 0).all()
    assert (groups.lookup_shares >= 0).all()
    rates = groups.lookup_shares / groups.rows
    assert (np.diff(rates) <= 1e-6 * rates[:-1]).all()


def test_a_table_read_uniformly_and_often_is_read_in_all_its_rows():
    table = Table(name="a", rows=1000, dim=4, pooling_factor=2.0)
    # a bin is an octave wide, so the rates in it, and with them the rows, are known to some per cent only
    assert math.fsum(row_groups(table).rows) == pytest.approx(1000, rel=0.1)
    assert rows_at_rates(table) == pytest.approx(1000, rel=0.1)


def test_rows_asked_for_grow_with_the_pooling_factor():
    table = Table(name="a", rows=1000, dim=4, pooling_factor=2.0)
    twice = table.model_copy(update={"pooling_factor": 4.0})
    assert rows_at_rates(twice) == pytest.approx(2 * rows_at_rates(table))
    assert rows_at_rates(table.model_copy(update={"pooling_factor": 0.0})) == 0.0
