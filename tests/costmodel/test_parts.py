"""A plan with a table by access costs what its parts cost as tables, and what the trainer's wrapper takes."""

import math
from pathlib import Path
from typing import Any, cast

import pytest

from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.launches import launches
from neuroshard.core.parts import RowsByAccess, hot_and_cold
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.release import Release
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.pricing import MAP_MS, map_ms, price_shards
from neuroshard.deploy.gate import Gate, decide
from neuroshard.deploy.run import price
from neuroshard.models.open import open_cost_model

ROWS, HOT, BATCH = 1_000_000, 20_000, 8192
ORDER = RowOrder(
    ids_digest="a" * 64,
    rows=ROWS,
    hot_rows=HOT,
    lookup_share=0.8,
    points=((HOT // 2, 0.7),),
    time="2025-11-20T12:00:00Z",
)
ADS = Table(name="ads", rows=ROWS, dim=64, pooling_factor=20.0, row_order=ORDER, access="zipf:1.05")
USER = Table(name="user", rows=5_000, dim=32, pooling_factor=2.0)
MODEL = open_cost_model("analytic:h100", BATCH)
IN_TWO = (
    TableRule(table="ads", rows_by_access=RowsByAccess(hot_rows=HOT)),
    TableRule(table="ads/hot", data_parallel=True),
    TableRule(table="ads/cold", tier="host"),
)
DEALT = (TableRule(table="ads", rows_by_access=RowsByAccess(dealt=True)),)


def task(*rules: TableRule, ads: Table = ADS, **more: Any) -> ShardingTask:
    return ShardingTask(
        tables=(ads, USER),
        device_memory_bytes=(2**30,) * 2,
        batch_size=BATCH,
        host_memory_bytes=2**32,
        constraints=Constraints(tables=rules),
        **more,
    )


def plan(of: ShardingTask, *held: tuple[str, int, int, int]) -> Plan:
    shards = [Shard(table=table, row_offset=at, rows=rows, dim=64, device=on) for table, at, rows, on in held]
    user = Shard(table="user", rows=5_000, dim=32, device=1)
    by = Provenance(
        neuroshard_version="0", algorithm="by hand", cost_model="analytic:h100", cost_model_backend="analytic"
    )
    prices = price_shards(MODEL, of, [*shards, user])
    assert prices is not None
    return Plan(task=of, shards=(*shards, user), provenance=by, predicted_ms=tuple(prices.total_ms.tolist()))


COLD = ROWS - HOT
PARTS = (
    ("ads/hot", 0, HOT, 0),
    ("ads/hot", 0, HOT, 1),
    ("ads/cold", 0, COLD // 2, 0),
    ("ads/cold", COLD // 2, COLD // 2, 1),
)
BLOCKS = ("ads", 0, ROWS // 2, 0), ("ads", ROWS // 2, ROWS // 2, 1)


@pytest.mark.parametrize("pipeline", ["none", "sparse-dist"])
def test_a_table_in_two_parts_costs_as_two_tables_and_the_map_and_the_joined_outputs(pipeline: str) -> None:
    of = task(*IN_TWO, pipeline=pipeline)
    parted = of.parted
    # the same tables in a task that knows of no parts: their copy is one, and their host memory too
    plain = ShardingTask.model_validate(parted.model_dump())
    found, expected = (price_shards(MODEL, each, plan(of, *PARTS).shards) for each in (of, plain))
    assert found is not None
    assert expected is not None
    each = MAP_MS["cuda"]
    mapped_ms = 20 * BATCH / 2 * (43 * each.passed + each.compared * math.log2(1 + HOT))
    assert map_ms(MODEL, of) == pytest.approx(mapped_ms + (43 * each.kernel if pipeline == "none" else 0))
    joined_ms = (64 + 32) * MODEL.reorder_ms / 2  # on each of the two devices, of all pooled outputs of the collection
    more = map_ms(MODEL, of) + joined_ms
    assert found.total_ms == pytest.approx(expected.total_ms + more)
    counted, others = (launches(each, plan(of, *PARTS).shards) for each in (of, plain))
    assert (counted.operators, counted.outputs, counted.inputs) == (others.operators, others.outputs, others.inputs)
    assert counted.reordered == others.reordered + 96


@pytest.mark.parametrize("name", ["analytic:cpu", "analytic:h100"])
def test_ids_that_are_in_order_cost_no_search_in_a_list(name: str) -> None:
    in_order = ADS.model_copy(update={"row_order": ORDER.model_copy(update={"ids_digest": ""})})
    model = open_cost_model(name, BATCH)
    each = MAP_MS["cpu" if name == "analytic:cpu" else "cuda"]
    for rules, kernels in ((DEALT, 10), (IN_TWO, 31)):
        listed, ordered = (map_ms(model, task(*rules, ads=ads, pipeline="none")) for ads in (ADS, in_order))
        lookups = 20 * BATCH / 2
        assert ordered == pytest.approx(lookups * kernels * each.passed + kernels * each.kernel)
        of_list_ms = lookups * (12 * each.passed + each.compared * math.log2(1 + HOT))
        assert listed - ordered == pytest.approx(of_list_ms + 12 * each.kernel)


def test_blocks_of_sorted_ids_are_priced_by_their_own_lookups_and_dealt_ones_are_even() -> None:
    in_order = ADS.model_copy(update={"row_order": ORDER.model_copy(update={"ids_digest": ""})})
    by_id, dealt = plan(task(ads=in_order), *BLOCKS), plan(task(*DEALT, ads=in_order), *BLOCKS)
    unknown = plan(task(ads=ADS.model_copy(update={"row_order": None})), *BLOCKS)
    prices = price_shards(MODEL, by_id.held, by_id.shards)
    assert prices is not None
    assert prices.compute_ms[0] > 1.1 * prices.compute_ms[1]
    # user lies on device 1, which is the fuller one where blocks are even
    assert unknown.cost_ms is not None
    assert dealt.cost_ms == pytest.approx(unknown.cost_ms + map_ms(MODEL, dealt.task) + 96 * MODEL.reorder_ms / 2)
    assert by_id.cost_ms is not None
    assert by_id.cost_ms > unknown.cost_ms


def test_the_gate_prices_a_live_plan_in_its_own_parts_on_tables_of_today() -> None:
    live, new = plan(task(*IN_TWO), *PARTS), plan(task(), ("ads", 0, ROWS, 0))
    today = ADS.model_copy(update={"row_order": None})
    without_order = plan(task(ads=today), ("ads", 0, ROWS, 0))
    for now in (new, without_order):
        assert price(live, now, MODEL) == pytest.approx(live.cost_ms)
        assert price(now, live, MODEL) == pytest.approx(now.cost_ms)
    gate = Gate(price=lambda other, today: price(other, today, MODEL))
    for one, other in ((live, new), (new, live), (live, without_order)):
        decision = decide(one, gate, _release(other), other)
        assert decision.faults == ()
        assert decision.live_cost_ms == pytest.approx(other.cost_ms)


def test_a_plan_whose_hot_rows_have_fewer_lookups_now_costs_more() -> None:
    live, new = plan(task(*IN_TWO), *PARTS), plan(task(), ("ads", 0, ROWS, 0))
    fewer = ORDER.model_copy(update={"points": (), "lookup_share": 0.3})
    tables = (ADS.model_copy(update={"row_order": fewer}), USER)
    drifted = live.model_copy(update={"task": live.task.model_copy(update={"tables": tables})})
    now_ms, made_ms = (price(one, new, MODEL) for one in (drifted, live))
    assert now_ms is not None
    assert made_ms is not None
    assert now_ms > 1.1 * made_ms  # more rows are read from host memory
    hot, cold = hot_and_cold(tables[0], HOT)
    assert (hot.pooling_factor, cold.pooling_factor) == pytest.approx((6.0, 14.0))
    assert hot.access is not None
    assert hot.access.lookups / hot.access.batch_size == pytest.approx(6.0)


def _release(of: Plan) -> Release:
    return cast(Any, Release).model_construct(number=1, plan_digest=of.digest())


def test_every_command_reads_a_plan_with_parts(tmp_path: Path, neuroshard: Any) -> None:
    whole, parts, dealt = plan(task(), ("ads", 0, ROWS, 0)), plan(task(*IN_TWO), *PARTS), plan(task(*DEALT), *BLOCKS)
    for name, one in (("whole", whole), ("parts", parts), ("dealt", dealt)):
        (tmp_path / name).with_suffix(".json").write_bytes(one.canonical_json())
    shown = " ".join(neuroshard("show", tmp_path / "parts.json").stdout.split())
    assert (
        "2 tables in 5 shards (0 cuts, 1 table row-wise, 1 table data-parallel, 1 in host memory, 1 table in two"
        in shown
    )
    assert "ads: in two parts, 20,000 of 1,000,000 rows hot, with" in shown
    assert "(ads/hot data-parallel and ads/cold row-wise)" in shown
    assert "156.2 KiB for maps of ids to rows by access" in shown
    assert "for copies of hot rows, with a gradient" in shown
    assert "ads: rows dealt over its blocks by access" in neuroshard("show", tmp_path / "dealt.json").stdout
    assert f"{parts.cost_ms:.3f} ms" in neuroshard("price", tmp_path / "parts.json", "--model", "analytic:h100").stdout
    moved = neuroshard("diff", tmp_path / "whole.json", tmp_path / "parts.json", "--model", "analytic:h100").stdout
    assert "ads/cold" in moved
    assert "1 table in another tier" in moved
    out = tmp_path / "r.html"
    for new, live in (("parts", "whole"), ("whole", "parts"), ("dealt", "parts")):
        neuroshard(
            "report",
            tmp_path / f"{new}.json",
            "--live",
            tmp_path / f"{live}.json",
            "--model",
            "analytic:h100",
            "-o",
            out,
        )
        assert ("ads/cold" in out.read_text()) == (new == "parts")
