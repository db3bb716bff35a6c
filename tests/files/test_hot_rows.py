"""Orders of rows by access, held against exact counts and against the distribution that the lookups were drawn from."""

import tracemalloc
from io import BytesIO

import numpy as np
import pytest

from helpers.streams import zipf
from neuroshard.files.access import Floats, Ints
from neuroshard.files.hot_rows import AS_GOOD, COUNTERS, FEWEST_LOOKUPS, RANGES, HotRows, Ordered

ROWS, LOOKUPS, BATCHES = 100_000, 10_000, 60
TIME = "2026-11-24T09:00:00Z"


def batches_of(shares: Floats, seed: int) -> list[tuple[Ints, Ints]]:
    """Distinct rows and counts of batches whose lookups are drawn from these shares of the rows."""
    rng = np.random.default_rng(seed)
    below = np.cumsum(shares)
    return [
        np.unique(np.searchsorted(below / below[-1], rng.random(LOOKUPS)), return_counts=True) for _ in range(BATCHES)
    ]


def counted(batches: list[tuple[Ints, Ints]], counters: int = COUNTERS, rows: int = ROWS) -> HotRows:
    hot = HotRows(rows, counters)
    for found, counts in batches:
        hot.add(found, counts)
    return hot


def counts_of(batches: list[tuple[Ints, Ints]]) -> Floats:
    return np.sum([np.bincount(rows, counts, ROWS) for rows, counts in batches], axis=0)


def ordered(hot: HotRows) -> Ordered:
    found = hot.order("test", TIME)
    assert found is not None
    return found


def ids_in(found: Ordered) -> Ints:
    ids: Ints = np.load(BytesIO(found.file))
    return ids


@pytest.mark.parametrize("exponent", [0.8, 1.05, 1.3])
@pytest.mark.parametrize("counters", [2**12, 2**14, COUNTERS])
def test_hot_rows_of_shuffled_ids_have_about_what_the_hottest_have_and_no_more_is_said(
    exponent: float, counters: int
) -> None:
    shares = np.random.default_rng(1).permutation(zipf(ROWS, exponent))
    batches = batches_of(shares, 0)
    exact, found = counts_of(batches), ordered(counted(batches, counters))
    ids, hottest = ids_in(found), np.sort(shares)[::-1]
    assert len(ids) == found.order.hot_rows <= counters // 2
    if counters == COUNTERS:  # all rows were counted
        by_count = np.lexsort((np.arange(ROWS), -exact))
        assert ids.tolist() == by_count[exact[by_count] >= FEWEST_LOOKUPS].tolist()
    for most in (64, 1024, len(ids)):
        have = shares[ids[:most]].sum()
        assert have > hottest[:most].sum() - 0.03
        assert have - 0.06 < found.order.share_of(most) < have + 0.006


@pytest.mark.parametrize("counters", [2**12, COUNTERS])
def test_no_row_that_was_read_more_than_its_share_of_the_counters_is_lost_nor_counted_too_often(counters: int) -> None:
    batches = batches_of(np.random.default_rng(1).permutation(zipf(ROWS, 0.8)), 0)
    exact, hot = counts_of(batches), counted(batches, counters)
    hot.order("test", TIME)  # counts what waits
    rows, halves, before = hot._counts
    every = halves.sum(axis=1)
    assert len(rows) <= counters
    assert np.isin(np.flatnonzero(exact > LOOKUPS * BATCHES / counters), rows).all()
    assert (every <= exact[rows]).all()
    assert (exact[rows] <= every + before).all()


@pytest.mark.parametrize("counters", [2**12, COUNTERS])
def test_ids_that_follow_access_need_no_list(counters: int) -> None:
    shares = zipf(ROWS, 1.05)
    found = ordered(counted(batches_of(shares, 0), counters))
    assert (found.file, found.order.ids_digest) == (b"", "")
    for rows in (64, 1024, found.order.hot_rows):
        assert found.order.share_of(rows) == pytest.approx(shares[:rows].sum() / shares.sum(), abs=0.03)


def test_ids_that_almost_follow_access_have_a_list_where_that_loses_more_than_a_little() -> None:
    shares = zipf(ROWS, 1.05)
    shares[[0, -1]] = shares[[-1, 0]]  # the hottest row is the last
    assert shares[-1] / shares.sum() > AS_GOOD
    found = ordered(counted(batches_of(shares, 0)))
    assert ids_in(found)[0] == ROWS - 1


@pytest.mark.parametrize("batches", [batches_of(np.ones(ROWS), 0), batches_of(zipf(ROWS, 1.3), 0)[:1]])
def test_rows_that_are_read_alike_or_in_one_batch_alone_have_no_order(batches: list[tuple[Ints, Ints]]) -> None:
    assert counted(batches).order("test", TIME) is None


def test_rows_that_are_hot_in_one_batch_alone_are_not_said_to_have_its_lookups() -> None:
    # each batch reads 100 rows of its own 50 times, and the same 50 rows 100 times
    batches = [
        (
            np.concatenate([np.arange(50), np.arange(50_000 + n * 100, 50_100 + n * 100)]),
            np.repeat([100, 50], [50, 100]),
        )
        for n in range(60)
    ]
    found = ordered(counted(batches))
    assert found.order.hot_rows == 50 + 60 * 100
    assert found.order.share_of(64) == pytest.approx(0.5, abs=0.001)
    assert found.order.lookup_share == pytest.approx(0.5, abs=0.001)


def test_memory_does_not_grow_with_the_rows_that_are_read() -> None:
    rng, counters = np.random.default_rng(0), 2**14
    hot = HotRows(2**40, counters)
    tracemalloc.start()
    for _ in range(100):
        hot.add(np.unique(rng.integers(0, 2**40, 5000)), np.ones(5000, dtype=np.int64))
    hot.order("test", TIME)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150 * counters


def test_large_ids_take_eight_bytes_and_small_ones_four() -> None:
    small, large = (
        ids_in(ordered(counted([(np.array([row - 1]), np.array([9]))] * 2, rows=2**33))) for row in (2**31, 2**31 + 1)
    )
    assert (small.dtype, large.dtype) == (np.dtype("<i4"), np.dtype("<i8"))


def test_lookups_by_id_are_shares_of_ranges_where_they_are_uneven_and_counted_enough() -> None:
    rng = np.random.default_rng(0)
    counted, even, few = (HotRows(1_000) for _ in range(3))
    for _ in range(4):
        counted.add(*np.unique(np.minimum(rng.zipf(1.3, 10_000) - 1, 999), return_counts=True))
        even.add(*np.unique(rng.integers(0, 1_000, 10_000), return_counts=True))
        few.add(np.array([0]), np.array([100]))
    shares = counted.lookups_by_id
    assert len(shares) == RANGES
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert shares[0] > 0.5
    assert (even.lookups_by_id, few.lookups_by_id) == ((), ())
