"""What tables beyond HBM take: what of it a trainer that prefetches hides, reckoned by hand."""

from typing import Any

import numpy as np
import pytest

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import Tier
from neuroshard.costmodel.analytic import DATASHEETS, Analytic
from neuroshard.costmodel.cache import miss_curve
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.pricing import price_shards

BATCH = 4096
SHEET = DATASHEETS["h100"]
CACHED = Table(name="cached", rows=200_000, dim=64, pooling_factor=8.0, access="zipf:1.0", optimizer_bytes_per_row=4)
HOST = Table(name="host", rows=100_000, dim=32, pooling_factor=2.0, access="zipf:0.8", optimizer_bytes_per_row=4)
ROWS = 128_000  # of the cached table: more than three times those that a batch reads


def task(**fields: Any) -> ShardingTask:
    asked = ShardingTask(
        tables=(CACHED, HOST),
        device_memory_bytes=(2**34,),
        batch_size=BATCH,
        host_memory_bytes=2**40,
        **{"pipeline": "prefetch", **fields},
    )
    return asked.with_tiers({"cached": ("cached", ROWS), "host": ("host", None)})


def cost_ms(asked: ShardingTask) -> float:
    shards = [
        Shard(table=t.name, row_offset=0, rows=t.rows, column_offset=0, dim=t.dim, device=0) for t in asked.tables
    ]
    prices = price_shards(Analytic("h100", BATCH), asked, shards)
    assert prices is not None
    return float(prices.total_ms.sum())


def fetched_ms() -> float:
    """By hand: every lookup is sorted and looked for, and each missed row of 256 B comes over the bus."""
    curve = miss_curve(CACHED, BATCH)
    assert 3 * curve.distinct_rows < ROWS
    missed = float(curve.missed(ROWS))
    return BATCH * 8 * SHEET.lookup_ms + missed * 256 / (SHEET.bus * SHEET.fetch_share)


def test_dense_layers_hide_what_is_fetched_meanwhile_and_nothing_else() -> None:
    waiting, fetched = cost_ms(task()), fetched_ms()
    assert 0.01 * waiting < fetched < 0.9 * waiting
    for dense_ms in (fetched / 3, fetched, 2 * fetched, 1e5):
        assert cost_ms(task(dense_ms=dense_ms)) == pytest.approx(waiting - min(dense_ms, fetched), rel=1e-5)


def test_without_a_dense_time_prefetching_hides_nothing() -> None:
    assert cost_ms(task()) == pytest.approx(cost_ms(task(pipeline="sparse-dist")))


def test_a_longer_dense_time_never_costs_more_and_each_device_hides_its_own() -> None:
    rng = np.random.default_rng(0)
    model = for_task(Analytic("h100", BATCH), task(dense_ms=0.2))
    sums = rng.uniform(0, 1, (50, 7))
    costs = []
    for dense_ms in np.linspace(0.01, 1.2, 20):
        model = for_task(Analytic("h100", BATCH), task(dense_ms=float(dense_ms)))
        costs.append(model.compute_ms(sums))
        waited = np.maximum(sums[:, 6] - dense_ms, 0.0)
        assert costs[-1] == pytest.approx(model.inner.compute_ms(sums[:, :5]) + sums[:, 5] + waited)  # type: ignore[attr-defined]
        step = 1e-7 * np.eye(7)
        slope = (model.compute_ms(sums[:, None] + step) - costs[-1][:, None]) / 1e-7
        assert model.compute_slope(sums) == pytest.approx(slope, abs=1e-4)
    assert (np.diff(costs, axis=0) <= 0).all()


def test_state_of_elements_moves_once_however_many_rows_are_cached() -> None:
    """It lies in host memory whatever the tier. A crowded cache leaves rows there too, but moves their state no second time."""
    adam, sgd = (
        CACHED.model_copy(update={"optimizer_bytes_per_row": 0, "optimizer_bytes_per_element": of}) for of in (8, 0)
    )
    crowded = 1.5 * miss_curve(CACHED, BATCH).distinct_rows

    def more_ms(table: Table, cached_rows: int | None) -> float:
        asked = ShardingTask(tables=(table,), device_memory_bytes=(2**34,), batch_size=BATCH, host_memory_bytes=2**40)
        tier: Tier = "host" if cached_rows is None else "cached"
        model = for_task(Analytic("h100", BATCH), asked.with_tiers({"cached": (tier, cached_rows)}))
        return float(model.of_parts([Part.of(table)]).sum())  # type: ignore[attr-defined]

    moved = [more_ms(adam, rows) - more_ms(sgd, rows) for rows in (None, ROWS, int(0.8 * crowded), int(0.2 * crowded))]
    assert moved[0] > 0.1 * more_ms(sgd, None)
    assert moved == pytest.approx([moved[0]] * 4, rel=1e-6)


def test_blocks_of_a_table_fetch_their_share() -> None:
    model = for_task(Analytic("h100", BATCH), task(dense_ms=1.0))
    halves = [Part(CACHED, CACHED.rows // 2, CACHED.dim, 2)] * 2
    terms, whole = model.of_parts(halves).sum(axis=0), model.of_parts([Part.of(CACHED)])[0]  # type: ignore[attr-defined]
    assert terms[1] == pytest.approx(whole[1], rel=0.05)


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"dense_ms": -1.0}, ["dense_ms", "-1.0"]),
        ({"dense_ms": 0.0}, ["dense_ms", "0.0"]),
        ({"dense_ms": float("nan")}, ["dense_ms", "nan"]),
        ({"dense_ms": 2e6}, ["dense_ms", "2000000.0"]),
        ({"dense_ms": 5.0, "pipeline": "sparse-dist"}, ["5 ms", "sparse-dist", "--pipeline prefetch", "--dense-time"]),
        ({"dense_ms": 5.0, "pipeline": None}, ["5 ms", "not said", "--pipeline prefetch"]),
        ({"dense_ms": 5.0, "host_memory_bytes": None}, ["5 ms", "--host-memory", "--dense-time"]),
    ],
)
def test_a_dense_time_that_is_none_or_would_be_ignored_is_refused(fields: dict[str, Any], facts: list[str]) -> None:
    given = {"tables": (CACHED,), "device_memory_bytes": (2**30,), "batch_size": 64, "host_memory_bytes": 2**40}
    with refused(InvalidInput, *facts):
        ShardingTask.parse({**given, "pipeline": "prefetch", **fields}, "the task")


def test_tasks_without_a_dense_time_have_the_digest_that_they_had() -> None:
    without, stated = task(), task(dense_ms=12.5)
    assert "dense_ms" not in without.model_dump(mode="json")
    assert stated.model_dump(mode="json") == {**without.model_dump(mode="json"), "dense_ms": 12.5}
    assert ShardingTask.parse(stated.model_dump(mode="json"), "the task") == stated
    assert without.digest() != stated.digest()
