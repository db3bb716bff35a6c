"""What a cache misses, by its access curve: against exact sums, a simulation of FBGEMM's cache, and a linear programme."""

import numpy as np
import pytest
from scipy.optimize import linprog

from helpers.fbgemm_cache import simulated
from neuroshard.core.access import AccessCurve
from neuroshard.core.part import Part
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.costmodel.cache import Caches, MissCurve, convex_hull, miss_curve

BATCH = 1000
ROWS = 20_000


def table(access: object = "zipf:0.9", rows: int = ROWS, **fields: object) -> Table:
    return Table.parse({"name": "t", "rows": rows, "dim": 64, "pooling_factor": 1.0, "access": access, **fields}, "t")


def probabilities(exponent: float, rows: int = ROWS) -> np.ndarray:
    weights = np.arange(1, rows + 1.0) ** -exponent
    return weights / weights.sum()


def exact_misses(probability: np.ndarray, lookups: float, cached_rows: float) -> tuple[float, float]:
    """Che's approximation by bisection over every row: misses a batch, and the LRU time."""
    low, high = 0.0, 1e9
    for _ in range(100):
        middle = (low + high) / 2
        full = -np.expm1(-lookups * probability * middle).sum() >= cached_rows
        low, high = (low, middle) if full else (middle, high)
    touched = -np.expm1(-lookups * probability)
    return float(touched @ np.exp(-lookups * probability * low)), low


@pytest.mark.parametrize("exponent", [0, 0.6, 1.05, 1.3])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_misses_and_warm_up_are_those_of_sums_over_all_rows(exponent: float, share: float) -> None:
    curve = miss_curve(table(f"zipf:{exponent}"), BATCH, ways=0)
    missed, time = exact_misses(probabilities(exponent), BATCH, share * ROWS)
    assert curve.missed(share * ROWS) == pytest.approx(missed, abs=0.002 * curve.distinct_rows)
    assert curve.warm_up(share * ROWS) == pytest.approx(time, rel=0.02)
    assert curve.rows_touched(time) == pytest.approx(share * ROWS, rel=0.01)


@pytest.mark.parametrize("access", ["uniform", "zipf:0.4", "zipf:1.4", "zipf:3"])
@pytest.mark.parametrize("ways", [0, 32])
def test_misses_fall_and_each_row_saves_no_more_than_the_one_before(access: str, ways: int) -> None:
    curve = miss_curve(table(access), BATCH, ways)
    slopes = np.diff(curve.missed_rows) / np.maximum(np.diff(curve.cached_rows), 1e-9)
    seen = np.diff(curve.cached_rows) > 1e-3
    assert (slopes <= 1e-9).all()
    assert (np.diff(slopes[seen]) >= -1e-6).all()
    assert curve.missed(0) == curve.distinct_rows
    assert curve.missed(ROWS) == 0
    assert curve.missed(np.array([0, ROWS])).tolist() == [curve.distinct_rows, 0]


def mixture(rng: np.random.Generator) -> AccessCurve:
    """Three groups of rows, the hottest first."""
    rows = rng.integers(50, ROWS // 3, size=3)
    shares = np.sort(rng.random(3))[::-1]
    each = np.sort(shares / rows)[::-1]
    each *= BATCH / (each @ rows)
    return AccessCurve(batch_size=BATCH, group_rows=tuple(rows.tolist()), lookups_per_row=tuple(each.tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_cache_of_fbgemm_misses_what_is_predicted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mixed = mixture(rng)
    by_row = np.repeat(mixed.lookups_per_row, np.array(mixed.group_rows, dtype=int)) / BATCH
    exponent = rng.uniform(0.6, 1.3)
    for access, probability in ((f"zipf:{exponent}", probabilities(exponent)), (mixed, by_row)):
        curve = miss_curve(table(access), BATCH)
        ids = rng.permutation(ROWS)
        for share in rng.uniform(0.05, 0.97, size=3):
            cached = int(share * len(probability)) // 32 * 32
            warm_up = int(1.5 * curve.warm_up(cached)) + 5
            if cached < 1.5 * curve.distinct_rows or warm_up > 400:
                continue
            batches = (ids[rng.choice(len(probability), size=BATCH, p=probability)] for _ in range(warm_up + 40))
            counted = simulated(batches, cached, warm_up)
            assert curve.missed(cached) / curve.distinct_rows == pytest.approx(counted.miss_rate, abs=0.015)
            assert curve.distinct_rows == pytest.approx(counted.distinct, rel=0.02)


def test_rows_hashed_to_sets_miss_although_the_cache_could_hold_them_all() -> None:
    rng = np.random.default_rng(1)
    cached = ROWS * 31 // 32
    counted = simulated((rng.integers(ROWS, size=ROWS // 4) for _ in range(40)), cached, 30)
    hashed, free = (miss_curve(table("uniform"), ROWS // 4, ways) for ways in (32, 0))
    assert hashed.missed(cached) / hashed.distinct_rows == pytest.approx(counted.miss_rate, abs=0.01)
    assert free.missed(cached) / free.distinct_rows < counted.miss_rate - 0.04


def test_a_row_block_misses_its_share_and_a_column_shard_as_many_rows() -> None:
    whole = table("zipf:1.05")
    curve = miss_curve(whole, BATCH)
    block = miss_curve(Part(whole, ROWS // 4, 64).as_table(), BATCH)
    columns = miss_curve(whole.with_dim(16), BATCH)
    assert block.distinct_rows == pytest.approx(curve.distinct_rows / 4)
    assert block.missed(500) == pytest.approx(float(curve.missed(2000)) / 4, rel=0.01)
    assert columns.missed(2000) == curve.missed(2000)


def test_reuse_bins_stand_in_where_there_is_no_curve() -> None:
    bins = Table.parse({"name": "t", "rows": ROWS, "dim": 64, "pooling_factor": 1.0, "reuse_batch_size": BATCH,
                        "reuse_bins": zipf_bins(ROWS, 1.0, 0.6, BATCH)}, "t")  # fmt: skip
    curve, exact = miss_curve(bins, BATCH), miss_curve(table("zipf:0.6"), BATCH)
    assert curve.distinct_rows == pytest.approx(exact.distinct_rows, rel=0.02)
    assert curve.missed(5000) / curve.distinct_rows == pytest.approx(
        float(exact.missed(5000)) / exact.distinct_rows, abs=0.05
    )
    uniform = Table.parse({"name": "t", "rows": ROWS, "dim": 64, "pooling_factor": 1.0}, "t")
    assert miss_curve(uniform, BATCH).missed(8000) == pytest.approx(
        float(miss_curve(table("uniform"), BATCH).missed(8000))
    )


def test_a_table_that_is_never_read_misses_nothing() -> None:
    for access in (None, "zipf:1.05"):
        curve = miss_curve(table(access, pooling_factor=0.0), BATCH)
        assert (curve.distinct_rows, float(curve.missed(5)), float(curve.missed(ROWS))) == (0, 0, 0)


def stream_of(curve: MissCurve, batch: int, **more: object) -> dict[str, object]:
    """A curve's own misses as if they had been counted on a stream."""
    places = np.unique(np.searchsorted(curve.cached_rows, np.geomspace(1, curve.cached_rows[-1], 150)))
    kept = [p for p in [0, *places] if p == 0 or curve.cached_rows[p] > curve.cached_rows[p - 1]]
    return {
        "order": "time", "batches": 1000, "distinct_rows": curve.distinct_rows, "first_touches": 0.0,
        "cached_rows": curve.cached_rows[kept].tolist(), "missed_rows": curve.missed_rows[kept].tolist(), **more,
    }  # fmt: skip


@pytest.mark.parametrize("times", [0.25, 1, 2, 8])
def test_misses_of_a_stream_are_known_at_other_batch_sizes(times: float) -> None:
    by_rates = table("zipf:0.9", reuse_batch_size=BATCH)
    stated = miss_curve(by_rates, BATCH, ways=0)
    curve = by_rates.access.model_dump() | {"stream": stream_of(stated, BATCH)}
    asked = int(BATCH * times)
    counted, exact = miss_curve(table(curve), asked, ways=0), miss_curve(by_rates, asked, ways=0)
    assert counted.distinct_rows == pytest.approx(exact.distinct_rows, rel=0.01)
    for share in (0.05, 0.2, 0.5):
        cached = share * ROWS
        assert counted.missed(cached) / exact.distinct_rows == pytest.approx(
            float(exact.missed(cached)) / exact.distinct_rows, abs=0.01 if times >= 1 else 0.025
        )
        assert counted.warm_up(cached) == pytest.approx(float(exact.warm_up(cached)), rel=0.05)


def test_what_a_stream_reads_for_the_first_time_no_cache_holds_but_the_whole_table() -> None:
    access = {"batch_size": BATCH, "group_rows": [ROWS], "lookups_per_row": [BATCH / ROWS], "stream": {
        "order": "time", "batches": 9, "distinct_rows": 500.0, "first_touches": 100.0,
        "cached_rows": [0, 1000, 4000], "missed_rows": [400.0, 150.0, 0.0],
    }}  # fmt: skip
    curve = miss_curve(table(access), BATCH, ways=0)
    assert [float(curve.missed(k)) for k in (0, 1000, 4000, ROWS)] == [500, 250, 100, 0]
    assert curve.first_touches == 100


@pytest.mark.parametrize("batch", [BATCH, 3 * BATCH])
def test_a_cache_is_warm_when_all_rows_that_a_stream_reads_are_in_it(batch: int) -> None:
    stream = {
        "order": "time", "batches": 9, "distinct_rows": 850.0, "first_touches": 0.0,
        "cached_rows": [0, 850, 880, 900], "missed_rows": [850.0, 20.0, 10.0, 0.0],
    }  # fmt: skip
    access = {"batch_size": BATCH, "group_rows": [900], "lookups_per_row": [BATCH / 900], "stream": stream}
    curve = miss_curve(table(access), batch)
    assert 1 < curve.warm_up(900) < 100
    assert curve.warm_up(0.5 * ROWS) == curve.warm_up(ROWS) == curve.warm_up(900)


def test_the_hull_goes_below_a_kink_and_nothing_else() -> None:
    x, y = np.array([0.0, 1, 2, 3, 4]), np.array([10.0, 9, 2, 1, 0])
    assert convex_hull(x, y).tolist() == [0, 2, 4]
    curve = MissCurve(4.0, x, y, x).hull()
    assert (curve.cached_rows.tolist(), curve.missed_rows.tolist()) == ([0, 2, 4], [10, 2, 0])


def drawn_caches(seed: int) -> tuple[Caches, list[MissCurve], list[int]]:
    rng = np.random.default_rng(seed)
    curves = [
        miss_curve(table(f"zipf:{rng.uniform(0.5, 1.4)}", rows=int(rng.integers(100, ROWS))), BATCH) for _ in range(6)
    ]
    row_bytes = rng.choice([32, 128, 512], size=6).tolist()
    return Caches(curves, row_bytes), curves, row_bytes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.03, 0.3, 0.8])
def test_hbm_is_shared_as_well_as_a_linear_programme_does(seed: int, share: float) -> None:
    caches, curves, row_bytes = drawn_caches(seed)
    hbm = share * sum(curve.rows * (b + 16) for curve, b in zip(curves, row_bytes, strict=True))
    saves, costs, limits = [], [], []
    for curve, b in zip(curves, row_bytes, strict=True):
        hull = curve.hull()
        rows = np.diff(hull.cached_rows)
        saves += (np.diff(hull.missed_rows) / rows * b).tolist()
        costs += [b + 16] * len(rows)
        limits += rows.tolist()
    best = linprog(saves, A_ub=[costs], b_ub=[hbm], bounds=[(0, limit) for limit in limits])
    shared = caches.with_hbm(hbm)
    assert shared.missed_bytes == pytest.approx(caches.distinct_bytes + best.fun, rel=1e-6, abs=1e-6)
    assert shared.hbm_bytes <= hbm * (1 + 1e-9)
    again = caches.for_misses(shared.missed_bytes / caches.distinct_bytes)
    assert again.hbm_bytes == pytest.approx(shared.hbm_bytes, rel=1e-6)
    assert again.cached_rows == pytest.approx(shared.cached_rows, rel=1e-6)


def test_no_hbm_misses_all_and_enough_misses_nothing() -> None:
    caches, curves, _ = drawn_caches(7)
    assert caches.with_hbm(0).missed_bytes == pytest.approx(caches.distinct_bytes)
    assert caches.for_misses(1.0).hbm_bytes == 0
    assert caches.with_hbm(1e15).missed_bytes == pytest.approx(0, abs=1e-9)
    assert caches.for_misses(0.0).cached_rows == pytest.approx([curve.rows for curve in curves])
