"""Tables beyond HBM: all but the operator's run on a GPU. Its cache is simulated as FBGEMM's sources have it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from helpers.fbgemm_bytes import allocated, common
from helpers.fbgemm_cache import LruCache
from helpers.refusals import refused
from neuroshard.augment.settings import AugmentSettings
from neuroshard.augment.tiers import CASE_BYTES, MISSED_SHARES, draw_tiers
from neuroshard.core.case import TierCase
from neuroshard.core.cost import TierCost
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.tiers import TIERS, WAYS, Cache, Tier, TierBytes
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.timing import beyond_hbm
from neuroshard.measure.timing.beyond_hbm import APART, ROOM, TieredSteps, stream_of, time_tiers
from neuroshard.measure.timing.fbgemm import TableBatchedEmbedding
from neuroshard.measure.timing.table_sets import TableSets, TimeBeyondHbm

SETTINGS = MeasureSettings(batch_size=256, warmup=1, repeats=3)
GiB = 2**30


def drawn(rows: int, lookups: int, seed: int = 0) -> np.ndarray:
    """Lookups of which some rows are read often."""
    return np.random.default_rng(seed).zipf(1.3, lookups) % rows


@pytest.mark.parametrize("share", MISSED_SHARES)
@pytest.mark.parametrize("rows", [3_000, 100_003])
def test_a_stream_misses_the_share_that_is_asked_for_once_it_has_been_round(share: float, rows: int) -> None:
    stream = stream_of(drawn(rows, 20_000), np.ones(20_000, dtype=np.int64), rows, share)
    cache = LruCache(stream.cache_sets * WAYS)
    for number in range(stream.blocks + 1):
        cache.read(stream.batch(number))
    for number in range(stream.blocks + 1, stream.blocks + 4):
        distinct, missed, conflicts = cache.read(stream.batch(number))
        assert distinct == stream.distinct_rows
        assert missed / distinct == pytest.approx(share, abs=0.005)
        assert conflicts <= 0.005 * distinct


def test_batches_of_a_stream_read_rows_as_often_as_the_drawn_one_and_cold_rows_come_back_last() -> None:
    indices = drawn(5_000, 10_000)
    stream = stream_of(indices, np.ones(10_000, dtype=np.int64), 5_000, 0.2)
    counts = sorted(np.unique(indices, return_counts=True)[1].tolist())
    batches = [stream.batch(number) for number in range(stream.blocks)]
    for batch in batches:
        assert sorted(np.unique(batch, return_counts=True)[1].tolist()) == counts
        assert 0 <= batch.min() <= batch.max() < stream.rows
    cold = [set(batch[stream.cold == 1].tolist()) for batch in batches]
    hot = set(batches[0][stream.cold == 0].tolist())
    assert len(set.union(*cold)) == sum(map(len, cold)) == stream.blocks * len(cold[0])
    assert hot.isdisjoint(set.union(*cold))
    assert np.array_equal(stream.batch(stream.blocks), batches[0])
    assert (stream.blocks - 1) * len(cold[0]) >= APART * stream.distinct_rows
    assert stream.cache_sets * WAYS >= ROOM * stream.distinct_rows


def test_a_table_too_small_for_its_batches_gets_the_rows_that_they_need() -> None:
    stream = stream_of(np.arange(100), np.ones(100, dtype=np.int64), 100, 1.0)
    assert (stream.rows, stream.blocks) == (500, 5)
    nothing = stream_of(np.empty(0, dtype=np.int64), np.zeros(4, dtype=np.int64), 7, 0.5)
    assert (nothing.rows, nothing.distinct_rows, nothing.cache_sets) == (7, 0, 1)


def test_rows_that_are_read_alike_are_not_neighbours() -> None:
    stream = stream_of(np.repeat(np.arange(1000), 2), np.ones(2000, dtype=np.int64), 10**6, 0.0)
    apart = np.diff(np.sort(stream.batch(0)[::2]))
    assert apart.min() > 100


class Meta:
    """A device that holds tensors without values."""

    torch = torch.device("meta")

    def flush(self) -> None: ...

    def release(self) -> None: ...


def on_meta(monkeypatch: pytest.MonkeyPatch, optimizer: str = "rowwise_adagrad") -> TableBatchedEmbedding:
    """What measures on a GPU, but for the GPU: its operators are FBGEMM's, of its own arguments, on the meta device."""
    monkeypatch.setattr("neuroshard.measure.timing.fbgemm.open_device", lambda *_: Meta())
    monkeypatch.setattr("neuroshard.measure.timing.fbgemm.host_share_bytes", lambda: GiB)
    settings = MeasureSettings(batch_size=256, optimizer=optimizer)
    return TableBatchedEmbedding("cuda", 0, settings, None, 0, 0)


def nbytes(operator: Any) -> TierBytes:
    found = {"hbm": 0, "host": 0}
    for name, tensor in [*operator.named_parameters(), *operator.named_buffers()]:
        size = tensor.numel() * tensor.element_size()
        if size >= 100:  # the others have a number a table
            found["host" if name in operator._uvm_tensors_log else "hbm"] += size
    return TierBytes(**found)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("seed", range(6))
def test_the_operators_of_a_case_are_fbgemms_in_their_tier(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, seed: int
) -> None:
    """Built on the meta device: where weights lie, the sets of the cache, and all bytes."""
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    tables = [
        Table(name=f"t{place}", rows=2_000 * (place + 1), dim=16 * (place + 1), pooling_factor=1.0 + place)
        .model_copy(update={"optimizer_bytes_per_row": per_row, "optimizer_bytes_per_element": per_element})
        for place in range(3)
    ]  # fmt: skip
    settings = AugmentSettings(
        compute_cases=0, collective_cases=0, devices=(1,), memory_bytes=GiB, tier_cases=6, batch_sizes=(256,), seed=seed
    )
    for case in draw_tiers(tables, settings):
        for tier in (case.tier, "hbm"):
            steps = TieredSteps(on_meta(monkeypatch, optimizer), case, tier)
            if case.tier == "cached":
                assert len(steps.operators) == len(case.tables)
                assert steps.distinct_rows == tuple(float(stream.distinct_rows) for stream in steps.streams)
            expected = common.EmbeddingLocation[TIERS[tier].place]
            for operator, held in zip(steps.operators, groups_of(case, steps), strict=True):
                assert [spec[2] for spec in operator.embedding_specs] == [expected] * len(held)
                assert not operator.gather_uvm_cache_stats
                assert operator.optimizer.name == {"sgd": "EXACT_SGD"}.get(optimizer, f"EXACT_{optimizer.upper()}")
                rows = sum(table.rows for table, _ in held)
                sets = operator.lxu_cache_state.shape[0] if tier == "cached" else 0
                if tier == "cached":
                    assert sets == steps.streams[steps.operators.index(operator)].cache_sets
                    assert operator.uvm_cache_stats.numel() > 1  # there is room to count
                cache = Cache((sets * WAYS + 0.5) / rows) if tier == "cached" else None
                assert nbytes(operator) == allocated(held, optimizer, cache)


def groups_of(case: TierCase, steps: TieredSteps) -> list[list[tuple[Table, Tier]]]:
    """The tables of each operator with the rows that they got."""
    streams = iter(steps.streams)
    each = [[table] for table in case.tables] if case.tier == "cached" else [list(case.tables)]
    return [
        [(table.model_copy(update={"rows": next(streams).rows}), steps.tier) for table in tables] for tables in each
    ]


def test_drawn_cases_are_of_all_kinds_and_the_same_for_a_seed() -> None:
    tables = [Table(name=f"t{n}", rows=10 ** (3 + n), dim=64, pooling_factor=5.0 * n) for n in range(6)]
    settings = AugmentSettings(
        compute_cases=0, collective_cases=0, devices=(1,), memory_bytes=80 * GiB, tier_cases=48, seed=3
    )
    cases = draw_tiers(tables, settings)
    assert cases == draw_tiers(tables, settings)
    assert len({case.case_id for case in cases}) == 48
    kinds = {(case.tier, case.missed_share, case.split == "train") for case in cases}
    assert {(tier, train) for tier, _, train in kinds} == {(t, s) for t in ("cached", "host") for s in (True, False)}
    assert {share for tier, share, train in kinds if tier == "cached" and train} == set(MISSED_SHARES)
    assert {len(case.tables) for case in cases} == {1, 2, 3, 4}
    assert all(table.pooling_factor > 0 for case in cases for table in case.tables)
    for case in cases:
        assert sum(t.rows * t.dim * t.element_bytes for t in case.tables) <= CASE_BYTES
        assert sum(6 * 65536 * t.pooling_factor * t.dim * t.element_bytes for t in case.tables) <= 1.01 * CASE_BYTES
    assert draw_tiers([table.model_copy(update={"pooling_factor": 0.0}) for table in tables], settings) == ()


class Simulated:
    """FBGEMM's operator on the CPU, and a simulated cache beside it that counts as FBGEMM's counters do."""

    def __init__(self, operator: Any, cache_sets: int) -> None:
        self.operator, self.cache = operator, LruCache(cache_sets * WAYS) if cache_sets else None
        self.gather_uvm_cache_stats = False
        self.stats = [0] * 6
        self.batches: list[torch.Tensor] = []
        self.counted = 0

    def __call__(self, indices: torch.Tensor, offsets: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        self.batches.append(indices)
        if self.cache is not None:
            read = self.cache.read(indices.numpy())
            if self.gather_uvm_cache_stats:
                self.counted += 1
                for place, count in enumerate((1, len(indices), *read, read[2])):
                    self.stats[place] += count
        output: torch.Tensor = self.operator(indices, offsets, *weights)
        return output

    def reset_uvm_cache_stats(self) -> None:
        self.stats = [0] * 6

    def get_uvm_cache_stats(self) -> torch.Tensor:
        assert self.gather_uvm_cache_stats, "as FBGEMM asserts"
        return torch.tensor(self.stats)

    def split_embedding_weights(self) -> list[torch.Tensor]:
        return [weights.detach() for weights in self.operator.split_embedding_weights()]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> tuple[TableSets, list[Simulated]]:
    """The worker of table sets, whose cached operators are simulated."""
    sets = TableSets("cpu", 0, SETTINGS, None, 2**26, 2**26)
    made: list[Simulated] = []
    real = sets.sets.operator

    def operator(tables: Any, rows: Any, tier: Tier = "hbm", cache_sets: int = 0) -> Simulated:
        made.append(Simulated(real(tables, rows), cache_sets if tier == "cached" else 0))
        return made[-1]

    monkeypatch.setattr(sets.sets, "operator", operator)
    monkeypatch.setattr(sets.sets, "buffers", None)
    monkeypatch.setattr(beyond_hbm, "has_tiers", lambda device: True)
    return sets, made


def timed(sets: TableSets, case: TierCase, round_: int = 0, repeats: int = 3) -> TierCost:
    cost = sets(TimeBeyondHbm(case, round_, repeats))
    assert isinstance(cost, TierCost)
    return cost


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_a_cached_case_is_timed_warm_with_its_misses_counted_apart(
    simulated: tuple[TableSets, list[Simulated]], table: Callable[..., Table], share: float
) -> None:
    sets, made = simulated
    tables = (table("a", rows=4000, pooling_factor=8.0), table("b", rows=50_000, dim=32, weighted=True))
    case = TierCase(tables=tables, tier="cached", missed_share=share)
    cost = timed(sets, case, 2)
    assert cost.error is None
    assert (cost.case_id, cost.round) == (case.case_id, 2)
    assert min(cost.times_ms) > 0
    distinct, missed = np.array(cost.distinct_rows), np.array(cost.missed_rows)
    assert missed / distinct == pytest.approx(share, abs=0.03)
    beyond, hbm = made[:2], made[2:]
    assert [one.cache is None for one in made] == [False, False, True, True]
    for cached, in_hbm in zip(beyond, hbm, strict=True):
        assert not cached.gather_uvm_cache_stats
        rounds = len(cached.batches) - cached.counted
        assert cached.counted > 1
        assert rounds >= cached.counted + 1 + 3  # to fill, warm-up, and repeats: nothing counts there
        assert torch.equal(cached.batches[0], in_hbm.batches[0])
        assert all(weights.unique().tolist() != [0.0] for weights in cached.split_embedding_weights())
    differ = not torch.equal(beyond[0].batches[-1], beyond[0].batches[-2])
    assert differ == (share > 0)


def test_a_case_in_host_memory_reads_other_rows_in_every_batch(
    simulated: tuple[TableSets, list[Simulated]], table: Callable[..., Table]
) -> None:
    sets, made = simulated
    tables = (table("w", weighted=True), table("a", pooling_factor=4.0), table("b", rows=9000))
    cost = timed(sets, TierCase(tables=tables, tier="host"))
    assert cost.missed_rows == (0.0, 0.0, 0.0)
    assert len(made) == 4  # an operator of the weighted table and one of the others, in both tiers
    lookups = len(sets.sets.lookups.of(tables[1], 1000, SETTINGS.batch_size)[0])  # those of a, which come first
    before, after = (set(batch[:lookups].tolist()) for batch in made[1].batches[-2:])
    assert before.isdisjoint(after)
    of_w, of_a, of_b = cost.distinct_rows
    assert of_w == len(made[0].batches[0].unique())
    assert of_a > 0
    assert of_b > 0


def test_a_cache_with_conflicts_is_an_error_that_says_so(
    simulated: tuple[TableSets, list[Simulated]], table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beyond_hbm, "ROOM", 0.3)
    case = TierCase(tables=(table("a", rows=50_000, pooling_factor=8.0),), tier="cached", missed_share=1.0)
    cost = timed(simulated[0], case)
    assert "found no slot" in (cost.error or "")


def test_a_case_that_runs_out_of_memory_is_a_row(
    simulated: tuple[TableSets, list[Simulated]], table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")

    monkeypatch.setattr(simulated[0].sets, "operator", full)
    cost = timed(simulated[0], TierCase(tables=(table("a"),), tier="host"))
    assert (cost.error or "").startswith("out of memory")


def test_a_cpu_does_not_pretend_to_have_a_cache(table: Callable[..., Table]) -> None:
    """There FBGEMM takes MANAGED_CACHING without a word, and holds the table in host memory."""
    sets = TableBatchedEmbedding("cpu", 0, SETTINGS, None, 2**20, 2**20)
    with refused(MeasureError, "a CPU has no tiers"):
        time_tiers(sets, TierCase(tables=(table("a"),), tier="cached"), 1, 3)
    with refused(MeasureError, "a CPU has no tiers"):
        sets.operator([table("a")], [1000], "host")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs an NVIDIA GPU; torch sees none here")
def test_on_a_gpu_missed_rows_cost_and_are_as_many_as_asked_for(table: Callable[..., Table]) -> None:
    sets = TableSets("cuda", 0, MeasureSettings(batch_size=65536), None, 0, 0)
    big = table("a", rows=4_000_000, dim=128, pooling_factor=10.0)
    costs = [timed(sets, TierCase(tables=(big,), tier="cached", missed_share=share), repeats=7) for share in (0.0, 0.5)]
    for cost, share in zip(costs, (0.0, 0.5), strict=True):
        assert cost.error is None
        assert math.isclose(cost.missed_rows[0] / cost.distinct_rows[0], share, abs_tol=0.01)
    hits, misses = (cost.forward_ms for cost in costs)
    assert misses > 1.5 * hits
