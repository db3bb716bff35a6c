"""Random sets: all sizes equally likely, never over a device's memory; varied tables stay true to their reuse bins."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.table_strategies import some_tables
from neuroshard.augment.pools import Choice, Pool, SetSizes, draw_set, varied
from neuroshard.core.reuse import uniform_bins
from neuroshard.core.table import MAX_ROWS, Table
from neuroshard.files.access import count_bins, rows_at_rates
from neuroshard.files.traces import draw_lookups


@settings(deadline=None)
@given(some_tables, st.floats(0.1, 30), st.integers(1, 15), st.floats(0, 1), st.integers(0, 2**32))
def test_every_set_fits_the_device(tables, room, max_tables, vary_share, seed):
    memory = int(room * min(table.with_dim(4).memory_bytes for table in tables)) + 1
    pool = Pool.of(tables, 32, memory)
    if not pool.choices:
        return
    rng = np.random.default_rng(seed)
    for _ in range(5):
        drawn = draw_set(pool, sizes=SetSizes(max_tables), memory_bytes=memory, vary_share=vary_share, rng=rng)
        assert 1 <= len(drawn) <= max_tables
        assert sum(shard.memory_bytes for shard in drawn) <= memory


def drawn_sets(memory: int, count: int = 3000, vary_share: float = 0.0) -> list[tuple[Table, ...]]:
    tables = [Table(name=f"t{i}", rows=1000 * 4**i, dim=32, pooling_factor=2.0) for i in range(6)]
    pool, rng = Pool.of(tables, 64, memory), np.random.default_rng(0)
    return [draw_set(pool, sizes=SetSizes(), memory_bytes=memory, vary_share=vary_share, rng=rng) for _ in range(count)]


@pytest.mark.parametrize("memory", [2**40, 2**28])
def test_all_sizes_are_equally_likely_even_if_memory_is_tight(memory):
    sizes = np.bincount([len(drawn) for drawn in drawn_sets(memory)], minlength=16)
    assert sizes[0] == 0
    assert sizes[1:].min() > 140
    assert sizes[1:].max() < 260


def test_all_tables_and_widths_are_equally_likely_if_memory_is_ample():
    counts = np.unique([(s.name, s.dim) for drawn in drawn_sets(2**40) for s in drawn], axis=0, return_counts=True)[1]
    assert len(counts) == 6 * 16
    assert counts.min() > 0.7 * counts.mean()
    assert counts.max() < 1.3 * counts.mean()


def test_where_memory_is_tight_devices_are_filled():
    used = np.array([sum(s.memory_bytes for s in drawn) for drawn in drawn_sets(2**28)]) / 2**28
    assert np.quantile(used, 0.8) > 0.6


def test_more_tables_than_fit_at_their_narrowest_are_never_drawn():
    table = Table(name="a", rows=1000, dim=8, pooling_factor=1.0)
    memory = 3 * table.with_dim(4).memory_bytes - 1
    pool, rng = Pool.of([table], 8, memory), np.random.default_rng(0)
    sets = [draw_set(pool, sizes=SetSizes(), memory_bytes=memory, vary_share=0.0, rng=rng) for _ in range(200)]
    assert {tuple(s.dim for s in drawn) for drawn in sets} == {(4,), (8,), (4, 4), (4, 8)}


def test_a_set_is_sorted_so_that_its_order_does_not_matter():
    for drawn in drawn_sets(2**40, count=50, vary_share=0.5):
        assert list(drawn) == sorted(drawn, key=lambda s: (s.name, s.dim, s.rows, s.pooling_factor))


def test_a_share_of_the_tables_is_varied():
    shards = [s for drawn in drawn_sets(2**40, count=500, vary_share=0.5) for s in drawn]
    own = sum(s.rows == 1000 * 4 ** int(s.name[1:]) and s.pooling_factor == 2.0 for s in shards)
    assert 0.4 < own / len(shards) < 0.6


@settings(deadline=None)
@given(st.integers(1, MAX_ROWS), st.floats(0, 1e4), st.integers(0, 2**32), st.floats(1, 3))
def test_a_varied_table_stays_within_its_limits(rows, pooling, seed, ample):
    base = Table(name="a", rows=rows, dim=8, pooling_factor=pooling, reuse_bins=(0.5, 0.5, *[0.0] * 15))
    room = int(base.memory_bytes * ample)
    one = varied(Choice(base, rows_at_rates(base)), room, np.random.default_rng(seed))
    assert (one.name, one.dim, one.reuse_bins) == (base.name, base.dim, base.reuse_bins)
    assert isinstance(one.rows, int)
    assert max(math.floor(rows / 8), 1) <= one.rows <= min(2 * rows, MAX_ROWS)
    assert one.memory_bytes <= room
    assert pooling / 4 * (1 - 1e-9) <= one.pooling_factor <= pooling * 4 * (1 + 1e-9)
    assert one.pooling_factor >= min(pooling, 1) * (1 - 1e-9) or pooling < 1


@pytest.mark.parametrize(
    ("rows", "pooling"), [(40_000_000, 3.0), (39_060, 2.0), (1000, 1.0), (5000, 30.0), (200_000, 1.0)]
)
def test_lookups_of_a_varied_table_still_have_its_bins(rows, pooling):
    base = Table(name="a", rows=rows, dim=8, pooling_factor=pooling, reuse_bins=uniform_bins(rows, pooling))
    choice, rng = Choice(base, rows_at_rates(base)), np.random.default_rng(0)
    for _ in range(8):
        one = varied(choice, 2 * base.memory_bytes, rng)
        drawn = draw_lookups(one, one.reuse_batch_size, rng)
        apart = np.abs(np.subtract(count_bins(drawn.indices), base.reuse_bins)).sum() / 2
        assert apart < 0.2, (one.rows, one.pooling_factor)


def test_a_fifth_of_the_sets_is_larger_where_devices_hold_more():
    sizes, rng = SetSizes.for_plans(tables=2000, devices=4), np.random.default_rng(0)
    drawn = np.array([sizes.draw(10**6, rng) for _ in range(4000)])
    assert sizes.largest == 650
    assert abs(np.mean(drawn > 15) - 0.2) < 0.02
    large = drawn[drawn > 15]
    assert (large.min(), large.max()) == (16, pytest.approx(650, rel=0.03))
    assert np.median(large) == pytest.approx(math.sqrt(16 * 650), rel=0.15)
    assert max(sizes.draw(40, rng) for _ in range(1000)) == 40  # no more than there is room for


def test_sets_are_as_ever_where_devices_hold_few():
    few, plain = (np.random.default_rng(0) for _ in range(2))
    sizes = SetSizes.for_plans(tables=26, devices=4)
    assert [sizes.draw(99, few) for _ in range(100)] == [SetSizes().draw(99, plain) for _ in range(100)]
