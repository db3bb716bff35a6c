"""DLRMv4 of MLPerf Training (mlcommons/training@a4f3e775, recommendation/): what its makers say that ranks hold and steps take,
beside what is counted and priced of the same plans."""

import pytest

from bench.dlrmv4 import in_rows, of_torchrec, priced, task_of
from neuroshard.core.plan import device_memory
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.files.importers.presets import preset

pytestmark = pytest.mark.filterwarnings("ignore")  # of TorchRec's planner, about its own defaults
RANKS, HBM_BYTES, CAP_BYTES = 8, 288_000_000_000, 90 * 2**30
HELD_GIB = (73.7, 71.1, 69.7, 69.2, 95.9, 80.6, 65.3, 37.4)
TABLES = preset("mlperf-dlrmv4")


def test_ranks_hold_what_the_makers_of_dlrmv4_say() -> None:
    shards = of_torchrec(TABLES, RANKS, HBM_BYTES, told=False)
    cuts = {table.name: sum(shard.table == table.name for shard in shards) for table in TABLES}
    assert {name for name, count in cuts.items() if count == 4} == {"user_x_artist", "user_x_album", "item_x_hour"}
    held = [one.weights + one.optimizer for one in device_memory(task_of(TABLES, RANKS, "mi350x"), shards)]
    assert [nbytes / 2**30 for nbytes in held] == [pytest.approx(gib, rel=0.05) for gib in HELD_GIB]


@pytest.mark.parametrize(("ranks", "before_ms", "after_ms"), [(8, 941.6, 805.7), (16, 1108.0, 818.0)])
def test_dedup_saves_what_the_makers_measured(ranks: int, before_ms: float, after_ms: float) -> None:
    """Steps on one and two hosts of 8 MI350X, by train/gin/yambda_5b.gin: row-wise, fp16. Dense time is in both."""
    of, shards = task_of(TABLES, ranks, "mi350x"), [shard for one in TABLES for shard in in_rows(one, ranks)]
    every, once = (priced(known, shards, "mi350x").ms for known in (of, of.with_dedup([one.name for one in TABLES])))
    assert every - once == pytest.approx(before_ms - after_ms, rel=1 / 3)


def test_kinds_keep_the_order_that_the_makers_measured() -> None:
    """8 MI350X took 654.2 ms a step, 64.8 of them in exchanges; 8 B200, of which tables had 90 GiB each, 631.7 and 31.4: each by
    TorchRec's plan for them. Priced without what was measured of either."""
    found = {}
    for sheet, hbm in (("mi350x", HBM_BYTES), ("b200", CAP_BYTES)):
        task = task_of(TABLES, RANKS, sheet)
        prices = price_shards(analytic_model(sheet, task.batch_size), task, of_torchrec(TABLES, RANKS, hbm, told=False))
        assert prices is not None
        exchanges = prices.forward_collective_ms + prices.backward_collective_ms
        found[sheet] = float(exchanges.max()), float(prices.total_ms.max())
    assert found["mi350x"][0] / found["b200"][0] == pytest.approx(64.8 / 31.4, rel=1 / 3)
    assert found["mi350x"][1] > found["b200"][1]
