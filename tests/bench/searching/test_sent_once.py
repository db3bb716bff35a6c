"""Sequences whose ids are sent once stand as tables with fewer lookups: as many as are drawn."""

import random
from typing import Any

import pytest

from helpers.refusals import refused
from neuroshard.core.dedup import sent_once
from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.skew import largest_block
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import map_ms, price_shards
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

RANKS, BATCH = 4, 256
TRYING = SearchSettings(rounds=2, try_row_wise=True, try_index_dedup=True)


def table(name: str = "t", **more: Any) -> Table:
    fields = {"name": name, "rows": 1_000, "dim": 64, "pooling_factor": 50.0, "pooling": "none", "access": "zipf:1.1"}
    return Table.parse(fields | more, name)


def task(*tables: Table, **more: Any) -> ShardingTask:
    fields = {"tables": tables, "device_memory_bytes": (2**33,) * RANKS, "batch_size": BATCH}
    return ShardingTask(**fields | {"step_ledger": 1, "pipeline": "none"} | more)


def whole(name: str, device: int) -> Shard:
    return Shard(table=name, rows=1_000, dim=64, device=device)


@pytest.mark.parametrize("access", ["zipf:1.1", "uniform"])
def test_as_many_ids_are_sent_as_are_distinct_on_each_rank(access: str) -> None:
    one, drawn, seen = table(access=access), random.Random(0), 0
    exponent = 1.1 if access != "uniform" else 0.0
    weights = [(n + 1) ** -exponent for n in range(one.rows)]
    for _ in range(RANKS):
        seen += len(set(drawn.choices(range(one.rows), weights, k=int(50 * BATCH / RANKS))))
    once = sent_once(one, BATCH, RANKS)
    assert once.pooling_factor * BATCH == pytest.approx(seen, rel=0.03)
    assert (once.every_lookup, once.rows, Part.of(once).vectors) == (50.0, 1_000, pytest.approx(seen / BATCH, rel=0.04))


def test_hot_rows_make_no_hot_blocks_where_each_rank_sends_them_once() -> None:
    one = table(rows=100_000, access="zipf:1.6")
    every, once = (largest_block((of.loads,), RANKS).expected for of in (one, sent_once(one, BATCH, RANKS)) if of.loads)
    assert every > 1.5 / RANKS > 1.1 / RANKS > once


def test_ids_that_never_come_again_cost_more_if_they_are_sent_once() -> None:
    far, model = table(rows=2**40, access="uniform"), analytic_model("h100", BATCH)
    shards = [Shard(table="t", rows=2**40, dim=64, device=0)]
    both = [price_shards(model, task(far, index_dedup=how), shards) for how in (None, True)]
    every, once = (float(prices.total_ms.max()) for prices in both if prices)
    assert every < once


@pytest.mark.parametrize(("kind", "ns"), [("h100", 0.12), ("cpu", 25.0)])
def test_each_rank_finds_the_distinct_ids_among_all_of_its_own(kind: str, ns: float) -> None:
    every, once = (map_ms(analytic_model(kind, BATCH), task(table(), index_dedup=how).parted) for how in (None, True))
    assert (every, once * 1e6) == (0.0, pytest.approx(ns * 50 * BATCH / RANKS))


def test_a_plan_says_that_ids_are_sent_once_and_is_weighed_and_priced_so() -> None:
    asked = task(table(rows=10**6), table("o", pooling="sum"))
    plan = search(asked, analytic_model("h100", BATCH), TRYING)
    assert [(one.table, one.index_dedup) for one in plan.holdings] == [("t", True)]
    assert plan.task == asked
    assert Plan.from_json(plan.canonical_json(), "plan").memory_bytes() == plan.memory_bytes()
    off = search(asked, analytic_model("h100", BATCH), SearchSettings(rounds=2, try_row_wise=True))
    assert off.holdings == ()
    assert plan.cost_ms is not None
    assert off.cost_ms is not None
    assert plan.cost_ms < off.cost_ms
    again = search(asked, analytic_model("h100", BATCH), TRYING, previous=plan)
    assert again.held.sent_once == {"t"}
    assert again.cost_ms is not None
    assert again.cost_ms <= plan.cost_ms


@pytest.mark.parametrize(("kind", "access"), [("cpu", "zipf:1.1"), ("h100", None)])
def test_repeats_are_left_where_nothing_is_known_of_them_or_no_kernel_finds_them(kind: str, access: str | None) -> None:
    plan = search(task(table(access=access, rows=10**6)), analytic_model(kind, BATCH), TRYING)
    assert plan.holdings == ()


def test_only_sequences_are_sent_once() -> None:
    pooled = task(table(pooling="sum"))
    held = [{"table": "t", "index_dedup": True}]
    fields = {"format_version": 7, "task": pooled.model_dump(), "task_digest": pooled.digest(), "holdings": held}
    by = Provenance(neuroshard_version="0", algorithm="by hand").model_dump()
    with refused(ValueError, "'t'", "index_dedup"):
        Plan.model_validate({**fields, "shards": [whole("t", 0).model_dump()], "provenance": by})


def test_ids_are_sent_once_also_where_no_time_is_left_to_search() -> None:
    settings = SearchSettings(time_budget_s=1e-6, try_row_wise=True, try_index_dedup=True)
    plan = search(task(table(rows=10**6)), analytic_model("h100", BATCH), settings)
    assert plan.held.sent_once == {"t"}


def test_a_plan_for_cpus_says_that_they_lack_the_kernel() -> None:
    plan = search(task(table(), index_dedup=True), analytic_model("cpu", BATCH), SearchSettings(rounds=1))
    assert any("CPUs lack" in note for note in plan.provenance.notes)


def test_where_no_step_fits_and_nobody_knows_of_repeats_counting_is_a_way_out() -> None:
    long = task(table(rows=10**6, pooling_factor=5_000.0, access=None), device_memory_bytes=(2**28,) * RANKS)
    with refused(Infeasible, "in a step", "--access-from"):
        search(long, analytic_model("h100", BATCH), TRYING)
