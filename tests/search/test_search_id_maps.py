"""Searches around tables that give rows to ids as they train."""

import random

import pytest

from helpers.refusals import refused
from neuroshard.core.errors import Infeasible
from neuroshard.core.id_map import IdMap
from neuroshard.core.moves import moves
from neuroshard.core.plan import Plan
from neuroshard.core.release import Release
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.deploy.gate import Gate, decide
from neuroshard.orders.options import PUBLISHED
from neuroshard.report.moves import diff_json, diff_text
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

BATCH = 4096
MODEL = analytic_model("h100", BATCH)
NONE = SearchSettings(rounds=3, try_row_wise=True)
MAP = IdMap(kind="mch", bytes_per_row=24, bytes_per_lookup=20.0, bytes_per_rank=8224)


def drawn(seed: int, devices: int, plain: int, mapped: int, memory: int = 2**31) -> ShardingTask:
    draw = random.Random(seed)
    tables = [
        Table(
            name=f"t{n}",
            rows=draw.choice([1000, 50_000, 10**6]),
            dim=draw.choice([16, 64, 128]),
            pooling_factor=draw.choice([1.0, 5.0, 20.0]),
        )
        for n in range(plain)
    ]
    maps = [
        Table(
            name=f"m{n}",
            rows=draw.choice([4001, 10**6]),
            dim=draw.choice([32, 64]),
            pooling_factor=3.0,
            pooling=draw.choice(["sum", "mean", "none"]),
            module="mapped",
            id_map=MAP,
        )
        for n in range(mapped)
    ]
    return ShardingTask(
        tables=tuple(draw.sample(tables + maps, plain + mapped)),
        device_memory_bytes=(memory,) * devices,
        batch_size=BATCH,
        pipeline=draw.choice([None, "none", "sparse-dist"]),
    )


def check(plan: Plan) -> None:
    """Its tables with id maps are on all devices, and it costs what its shards are priced at, and no less than its bound."""
    task, shards = plan.held, plan.by_table()
    for table in task.mapped:
        assert [shard.device for shard in shards[table.name]] == list(range(task.devices))
    prices = price_shards(MODEL, task, plan.shards)
    assert prices is not None
    priced = prices.compute_ms + prices.forward_collective_ms + prices.backward_collective_ms
    assert plan.predicted_ms == pytest.approx(priced.tolist(), rel=1e-9)
    assert plan.cost_ms is not None
    assert (plan.lower_bound_ms or 0) <= plan.cost_ms * (1 + 1e-9)
    assert any("id maps take up to" in note for note in plan.provenance.notes)


@pytest.mark.parametrize(("seed", "devices", "plain", "mapped"), [(0, 1, 2, 1), (2, 4, 4, 1), (4, 4, 0, 2)])
def test_others_are_placed_around_them(seed, devices, plain, mapped):
    task, quick = drawn(seed, devices, plain, mapped), SearchSettings(rounds=3)
    found, published = (search(task, MODEL, one) for one in (quick, SearchSettings(algorithm=PUBLISHED)))
    best = search(task, MODEL, SearchSettings(rounds=3, try_row_wise=True, try_data_parallel=plain > 1))
    again = search(task, MODEL, quick, previous=found)
    for plan in (found, published, best, again):
        check(plan)
    # a bound is below every plan with these rules
    assert (found.lower_bound_ms or 0) <= published.cost_ms * (1 + 1e-9)
    assert [again.by_table()[t.name] for t in task.mapped] == [best.by_table()[t.name] for t in task.mapped]


def over_hosts(memory: int = 2**34) -> ShardingTask:
    """Small tables, and one that gives rows to ids, over two hosts with a slow network: copies of all small ones are best."""
    small = [Table(name=f"t{n}", rows=100 * n, dim=64, pooling_factor=5.0) for n in range(1, 5)]
    mapped = Table(name="m", rows=10**6, dim=64, pooling_factor=3.0, module="mapped", id_map=MAP)
    return ShardingTask(
        tables=(*small, mapped),
        device_memory_bytes=(memory,) * 8,
        batch_size=BATCH,
        pipeline="sparse-dist",
        topology=Topology(domain=4, local_world_size=4, network_bytes_per_s=10e9, network_latency_ms=0.03),
    )


def test_every_table_beside_them_may_be_copied():
    task, names = over_hosts(), {"t1", "t2", "t3", "t4"}
    auto = SearchSettings(rounds=3, try_row_wise=True, try_data_parallel=True)
    without, plan, named = search(task, MODEL, NONE), search(task, MODEL, auto), search(task.with_copies(names), MODEL)
    check(plan)
    assert plan.held.constraints.data_parallel == names
    assert plan.cost_ms == named.cost_ms < without.cost_ms * 0.9
    assert plan.task.dense_optimizer == named.task.dense_optimizer == "adam"
    for one in (plan, named):
        assert any(note.startswith("4 tables data-parallel") for note in one.provenance.notes)
    assert not moves(plan, search(task, MODEL, auto, previous=plan))


def test_blocks_and_copies_that_do_not_fit_together_are_reported():
    task = over_hosts(memory=35 * 2**20)
    with refused(Infeasible, "1 table that give rows to ids", "4 data-parallel tables", "device 0"):
        search(task.with_copies({"t1", "t2", "t3", "t4"}), MODEL)


def test_ids_that_cannot_keep_their_rows_are_said():
    given = search(drawn(4, 4, 0, 2), MODEL)
    plans = {devices: search(drawn(4, devices, 0, 2), MODEL, previous=given) for devices in (1, 2, 3, 4, 8)}
    release = Release(model="m", number=1, plan_digest=given.digest(), action="deploy", time="2026-01-01T00:00:00Z")
    for said in (
        lambda plan: str(plan.provenance.notes),
        lambda plan: " ".join(diff_text(given, plan, diff_json(given, plan)).split()),
        lambda plan: decide(plan, Gate(), release, given).why,
    ):
        lost = {devices: "cannot have these ids" in said(plan) for devices, plan in plans.items()}
        assert lost == {1: False, 2: True, 3: True, 4: False, 8: True}


def test_blocks_that_no_device_has_room_for_are_reported():
    with refused(Infeasible, "1 table that give rows to ids", "device 0", "fewer rows"):
        search(drawn(1, 2, 1, 1, memory=2**16), MODEL)
