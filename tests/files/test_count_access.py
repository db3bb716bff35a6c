"""Access curves counted on streams of batches: exact ones, sampled ones, and what they say of a later part."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from helpers.fbgemm_cache import simulated
from helpers.streams import Batch, cycles, drifting, independent, sessions, zipf
from neuroshard.core.access import AccessCurve
from neuroshard.core.errors import InvalidInput
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.costmodel.cache import miss_curve
from neuroshard.files.count_access import TRACKED_ROWS, AccessCounter, _as_hot

ROWS, LOOKUPS = 6000, 400
STREAMS = {
    "sessions": lambda rng: sessions(ROWS, LOOKUPS, rng, active=300, stay=8),
    "drifting": lambda rng: drifting(ROWS, LOOKUPS, rng, a_batch=4),
    "cycles": lambda rng: cycles(ROWS, LOOKUPS, rng, length=2000),
    "independent": lambda rng: independent(zipf(ROWS, 1.0), LOOKUPS, rng),
}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counted(batches: list[Batch], rows: int = ROWS, tracked_rows: int = TRACKED_ROWS) -> AccessCounter:
    counter = AccessCounter(rows, tracked_rows)
    for batch in batches:
        counter.add(batch, samples=LOOKUPS)
    return counter


def table_of(counter: AccessCounter, order: str = "time") -> Table:
    return Table.parse({"name": "t", "rows": counter.rows, "dim": 16, **counter.fields(order)}, "t")  # type: ignore[arg-type]


def test_stack_distances_of_a_stream_are_those_counted_by_hand() -> None:
    #            0       1       2       3       4       5       6       7
    batches = [[0, 1], [2, 3], [0, 0], [4, 5], [1, 4], [0, 2], [0, 4], [0, 0]]
    curve = counted([np.array(batch) for batch in batches], rows=10).curve("time")
    stream = curve.stream
    # Of the last half: in batch 4, row 1 lies below 0, 2, 3, 4 and 5, alone in its batch now; 4 is one of two on top.
    # Batch 5: 0 lies below 1, 4 and 5; 2 is one of two (with 3) below 0 too. Batch 6: 0 is one of two on top, 4 one of two below.
    # Batch 7: 0 is one of two on top.
    ranges = [(5, 6), (0, 2), (3, 4), (4, 6), (0, 2), (2, 4), (0, 2)]
    missed = [sum(1 - np.clip((k - above) / (below - above), 0, 1) for above, below in ranges) / 4
              for k in stream.cached_rows]  # fmt: skip
    assert stream.missed_rows == pytest.approx(missed, abs=1e-5)
    assert (stream.distinct_rows, stream.first_touches, stream.batches) == (1.75, 0.0, 8)
    assert (stream.sampled, stream.error) == (1.0, 0.0)
    assert stream.cached_rows[0] == 0
    assert stream.cached_rows[-1] == 6


def test_a_row_of_the_batch_before_hits_any_cache_that_holds_a_batch() -> None:
    stream = counted([np.arange(100)] * 8).curve("time").stream
    assert np.interp([0, 32, 64, 100], stream.cached_rows, stream.missed_rows).tolist() == pytest.approx(
        [100, 68, 36, 0]
    )
    assert len(stream.cached_rows) == 2  # a straight line


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("seed", range(2))
def test_misses_of_a_later_part_are_those_counted_on_an_earlier_one(name: str, seed: int) -> None:
    batches = list(islice(STREAMS[name](rng(seed)), 600))
    table = table_of(counted(batches[:400]))
    curve = miss_curve(table, LOOKUPS)
    tried = 0
    for share in (0.1, 0.2, 0.3, 0.5, 0.7):
        cached = int(share * ROWS) // 32 * 32
        if cached >= 1.5 * curve.distinct_rows and curve.warm_up(cached) < 200:
            tried += 1
            rate = simulated(batches, cached, 400).miss_rate
            assert curve.missed(cached) / curve.distinct_rows == pytest.approx(rate, abs=0.015)
    assert tried > 1


@pytest.mark.parametrize("exponent", [0.6, 1.1])
def test_caches_that_the_first_half_does_not_fill_are_counted_on_the_batches_that_fill_them(exponent: float) -> None:
    rows, access = 60_000, f"zipf:{exponent}"
    table = table_of(counted(list(islice(independent(zipf(rows, exponent), 2000, rng(7)), 80)), rows))
    stated = Table.parse(
        {"name": "t", "rows": rows, "dim": 16, "pooling_factor": 2000 / LOOKUPS, "access": access}, "t"
    )
    ours, exact = (miss_curve(one, LOOKUPS, ways=0) for one in (table, stated))
    cached = np.linspace(exact.rows_touched(40), exact.rows_touched(75), 6)
    off = ours.missed(cached) / ours.distinct_rows - exact.missed(cached) / exact.distinct_rows
    assert np.abs(off).max() < 0.02


@pytest.mark.parametrize("name", ["sessions", "drifting"])
def test_caches_of_more_rows_than_a_stream_read_miss_what_a_longer_stream_shows(name: str) -> None:
    batches = list(islice(STREAMS[name](rng(1)), 600))
    some, every = (table_of(counted(part)) for part in (batches[:60], batches))
    short, long = (miss_curve(table, LOOKUPS, ways=0) for table in (some, every))
    cached = np.linspace(some.access.stream.cached_rows[-1], 0.9 * every.access.stream.cached_rows[-1], 6)
    off = short.missed(cached) / short.distinct_rows - long.missed(cached) / long.distinct_rows
    assert np.abs(off).max() < 0.05


def test_locality_in_time_is_lost_where_batches_are_shuffled() -> None:
    batches = list(islice(STREAMS["sessions"](rng()), 300))
    lookups = rng(1).permutation(np.concatenate(batches)).reshape(300, -1)
    in_time, shuffled = table_of(counted(batches)), table_of(counted(list(lookups)), "shuffled")
    assert in_time.access.stream.order == "time"
    assert shuffled.access.stream.order == "shuffled"
    of_time, of_shuffled = (miss_curve(one, LOOKUPS) for one in (in_time, shuffled))
    assert of_time.missed(1500) < 0.5 * of_shuffled.missed(1500)


@pytest.mark.parametrize("name", ["sessions", "independent"])
def test_a_sample_of_the_rows_says_the_same_within_its_error_and_never_tracks_more(name: str) -> None:
    batches = list(islice(STREAMS[name](rng(3)), 200))
    exact, sampled = counted(batches), counted(batches, tracked_rows=1500)
    assert len(sampled._stack.rows) <= 1500 < len(exact._stack.rows)
    assert sampled.sampled < 1
    stream = table_of(sampled).access.stream
    assert 0 < stream.error < 0.06
    whole, some = (miss_curve(table_of(one), LOOKUPS) for one in (exact, sampled))
    cached = np.linspace(700, 4000, 12)
    off = np.abs(whole.missed(cached) - some.missed(cached)) / whole.distinct_rows
    assert off.max() < 3 * stream.error
    assert some.distinct_rows == whole.distinct_rows  # counted on all rows


def test_a_long_stream_is_counted_over_its_last_half_and_forgets_its_first() -> None:
    def moving() -> Iterator[Batch]:
        yield from islice(independent(zipf(2000, 0.2), LOOKUPS, rng()), 600)
        yield from islice(independent(zipf(2000, 1.3), LOOKUPS, rng(1)), 700)

    both, last = counted(list(moving())), counted(list(islice(independent(zipf(2000, 1.3), LOOKUPS, rng(1)), 700)))
    assert len(both._segments) < 32
    assert len(both._stack.held) <= np.count_nonzero(both._stack.held) + 257 < 1100
    assert both.curve("time").stream.distinct_rows == pytest.approx(last.curve("time").stream.distinct_rows, rel=0.02)


def test_how_much_a_stream_varies_is_said() -> None:
    steady = counted(list(islice(independent(zipf(2000, 0.8), LOOKUPS, rng()), 100)))
    changing = counted([*islice(independent(zipf(2000, 0.8), LOOKUPS, rng()), 75),
                        *islice(independent(zipf(2000, 1.6), LOOKUPS, rng()), 25)])  # fmt: skip
    assert steady.curve("time").stream.varies < 0.03 < 0.1 < changing.curve("time").stream.varies


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.3])
def test_groups_of_rows_are_those_of_the_distribution(exponent: float) -> None:
    counter = counted(list(islice(independent(zipf(2000, exponent), LOOKUPS, rng()), 300)), rows=2000)
    curve = counter.curve("time")
    assert curve.lookups == pytest.approx(LOOKUPS, rel=1e-4)
    assert 1500 < curve.rows <= 2000 * (1 + 1e-4)
    alone = curve.model_copy(update={"stream": None})
    table = Table.parse({"name": "t", "rows": 2000, "dim": 4, "pooling_factor": 1.0, "access": alone.model_dump()}, "t")
    stated = Table.parse(
        {"name": "t", "rows": 2000, "dim": 4, "pooling_factor": 1.0, "access": f"zipf:{exponent}"}, "t"
    )
    ours, exact = miss_curve(table, LOOKUPS), miss_curve(stated, LOOKUPS)
    for cached in (700, 1000, 1500):
        assert ours.missed(cached) / exact.distinct_rows == pytest.approx(
            exact.missed(cached) / exact.distinct_rows, abs=0.02
        )


def test_rows_of_a_hundred_thousand_lookups_keep_a_rate_of_their_own() -> None:
    hot = [np.concatenate([np.zeros(20_000), np.ones(2_000), rng(n).integers(2, 500, size=400)]) for n in range(6)]
    counter = AccessCounter(500)
    for batch in hot:
        counter.add(batch, 100)
    curve = counter.curve("time")
    assert curve.lookups_per_row[0] == pytest.approx(20_000, rel=0.01)
    assert curve.group_rows[0] == 1


def test_other_fields_of_the_table_are_counted_too() -> None:
    batches = list(islice(independent(zipf(ROWS, 0.9), 3 * LOOKUPS, rng()), 20))
    fields = counted(batches).fields("time", "20 batches")
    assert (fields["pooling_factor"], fields["reuse_batch_size"]) == (3.0, LOOKUPS)
    np.testing.assert_allclose(fields["reuse_bins"], zipf_bins(ROWS, 3.0, 0.9, LOOKUPS), atol=0.02)
    assert fields["access"].source == "20 batches"


def test_a_few_batches_are_a_distribution_without_a_stream_and_none_is_read_is_no_curve() -> None:
    few = counted([rng(n).integers(ROWS, size=LOOKUPS) for n in range(3)])
    assert few.curve("time").stream is None
    assert isinstance(few.curve("time"), AccessCurve)
    unread = counted([np.empty(0, dtype=np.int64)] * 5)
    assert unread.fields("time")["access"] is None
    assert unread.fields("time")["pooling_factor"] == 0


@pytest.mark.parametrize(
    ("lookups", "rows", "each"),
    [
        (150.0, [1, 10, 100], [50, 5, 0.5]),  # one row that is not in the sample has what is lacking
        (103.0, [10, 100], [5, 0.5]),
        (80.0, [6, 100], [5, 0.5]),  # 4 of the rows that the 5 in the sample stand for
        (70.0, [5, 90], [5, 0.5]),
    ],
)
def test_hot_rows_make_up_for_what_a_sample_lacks_or_has_too_much(
    lookups: float, rows: list[float], each: list[float]
) -> None:
    """10 rows that are read 5 times a batch and 100 read every second one, of a sample of half the rows: 100 lookups."""
    found = _as_hot(np.array([10.0, 100.0]), np.array([5.0, 0.5]), 0.5, lookups)
    assert [one.tolist() for one in found] == [rows, each]


def test_lookups_that_cannot_be_are_refused() -> None:
    counter = AccessCounter(10, where="user")
    with pytest.raises(InvalidInput, match="user: there are no batches"):
        counter.fields("time")
    for wrong in (10, -1):
        with pytest.raises(InvalidInput, match=rf"user: row {wrong} is looked up, but the table has rows 0 to 9"):
            counter.add(np.array([3, wrong]), 2)
    counter.add(np.array([3]), 2)
    with pytest.raises(InvalidInput, match="batch 1 has 3 samples, but those before had 2"):
        counter.add(np.array([3]), 3)
