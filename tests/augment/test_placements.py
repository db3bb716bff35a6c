"""Random all-to-alls: from balanced to lopsided, from few dims to all, with delays and without."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.augment.draw import draw_all_to_all

DIMS = np.full(26, 128)


def all_to_alls(dims=DIMS, devices: int = 4, max_delay_ms: float = 20.0, count: int = 1000):
    rng = np.random.default_rng(0)
    drawn = [draw_all_to_all(np.array(dims), devices, max_delay_ms, rng) for _ in range(count)]
    return np.array([one.device_dims for one in drawn]), np.array([one.start_delays_ms for one in drawn])


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(2, 64), st.integers(0, 2**32))
def test_dims_are_multiples_of_4_that_the_tables_have(quarters, devices, seed):
    dims = 4 * np.array(quarters)
    device_dims, delays = draw_all_to_all(dims, devices, 20.0, np.random.default_rng(seed))
    assert len(device_dims) == len(delays) == devices
    assert all(dim >= 0 and dim % 4 == 0 for dim in device_dims)
    assert dims.min() <= sum(device_dims) <= dims.sum()
    assert min(delays) == 0.0
    assert max(delays) <= 20.0


@pytest.mark.parametrize(("tables", "devices"), [(26, 4), (100, 8), (2000, 96)])
def test_all_to_alls_go_from_balanced_to_twice_as_much_on_one_device(tables, devices):
    dims, _ = all_to_alls(np.full(tables, 128), devices, count=400)
    lopsided = dims.max(axis=1) / dims.mean(axis=1)
    whole = lopsided[dims.sum(axis=1) == 128 * tables]
    assert np.quantile(whole, 0.05) < 1.1
    assert np.quantile(whole, 0.97) > 1.6


def test_half_the_all_to_alls_are_of_all_tables_and_the_others_of_fewer():
    totals = all_to_alls()[0].sum(axis=1) / DIMS.sum()
    assert 0.45 < (totals == 1).mean() < 0.6
    assert (totals < 0.2).mean() > 0.05


def test_a_device_may_stay_empty():
    dims, _ = all_to_alls()
    assert 0.001 < (dims == 0).any(axis=1).mean() < 0.3


def test_a_fifth_start_together_and_the_others_within_the_longest_delay():
    _, delays = all_to_alls()
    latest = delays.max(axis=1)
    assert 0.15 < (latest == 0).mean() < 0.25
    assert 15 < latest.max() <= 20
    assert 3 < np.median(latest) < 8


def test_without_delays_all_start_together():
    assert not all_to_alls(max_delay_ms=0.0, count=50)[1].any()
    assert not all_to_alls(max_delay_ms=-0.0, count=50)[1].any()


def test_one_table_is_an_all_to_all_too():
    dims, _ = all_to_alls([4], devices=2, count=20)
    assert sorted(set(map(tuple, dims.tolist()))) == [(0, 4), (4, 0)]
