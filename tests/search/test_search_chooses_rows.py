"""A search that chooses which tables to deal over row blocks, and which to hold in two parts, by their row orders."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.moves import moved_bytes, moves
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan, shardings_of
from neuroshard.core.row_order import RowOrder
from neuroshard.core.sharding import ShardingTypeName
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.pricing import price_shards
from neuroshard.models.open import open_cost_model
from neuroshard.search import rows_by_access, run
from neuroshard.search.rows_by_access import AS_HELD, NONE_HELD, NONE_WORTH, TRIAL_ROUNDS, WORTH
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

BATCH = 8192
MODEL = open_cost_model("analytic:h100", BATCH)
NONE = SearchSettings(rounds=2, try_row_wise=True)
AUTO = replace(NONE, try_rows_by_access=True)
DIGEST = "1" * 64


def ordered(table: Table, *, listed: int = 0, share: Any = None) -> Table:
    """The table with an order of its ids as they are, or of so many listed ones."""
    hot = listed or table.rows // 2
    points = tuple((rows, table.hottest_share(rows)) for rows in (2**n for n in range(6, 20, 2)) if rows < hot)
    order = RowOrder(
        ids_digest=DIGEST if listed else "",
        rows=table.rows,
        hot_rows=hot,
        lookup_share=table.hottest_share(hot),
        points=points,
        time="2025-11-20T12:00:00Z",
    )
    return table.model_copy(update={"row_order": order})


def task_of(large: Table, memory: int, devices: int = 4, **more: Any) -> ShardingTask:
    small = tuple(Table(name=f"small{n}", rows=1000 * n, dim=32, pooling_factor=2.0 * n) for n in range(1, 5))
    return ShardingTask(
        tables=(large, *small),
        device_memory_bytes=(memory,) * devices,
        batch_size=BATCH,
        pipeline="sparse-dist",
        **more,
    )


def sorted_ids(kind: ShardingTypeName = "row-wise") -> ShardingTask:
    """A table too large for one device of two domains that may be split so alone, and whose ids are in the order of access."""
    large = Table(name="large", rows=4_000_000, dim=128, pooling_factor=40.0, access="zipf:1.1")
    rules = Constraints(row_wise=True, sharding_types=(kind,), min_dim=64 if kind == "grid" else 128)
    return task_of(ordered(large), 1200 * 2**20, constraints=rules, topology=Topology(domain=2, local_world_size=2))


def beyond_hbm(*, listed: int = 100_000) -> ShardingTask:
    """A wide table that HBM does not hold, much of whose lookups are of few rows."""
    large = Table(name="large", rows=4_000_000, dim=256, pooling_factor=40.0, access="zipf:1.2")
    return task_of(ordered(large, listed=listed), 260 * 2**20, devices=2, host_memory_bytes=2**40)


def sequence() -> ShardingTask:
    """A sequence that sends most of what the devices do, and whose lookups are of few rows."""
    large = Table(name="large", rows=2_000_000, dim=256, pooling_factor=100.0, access="zipf:1.3", pooling="none")
    return task_of(ordered(large, listed=20_000), 20 * 2**30)


def found(task: ShardingTask, settings: SearchSettings = AUTO, previous: Plan | None = None) -> Plan:
    plan = search(task, MODEL, settings, previous=previous)
    prices = price_shards(MODEL, plan.held, plan.shards)
    assert prices is not None
    assert plan.predicted_ms == pytest.approx(prices.total_ms.tolist())
    assert plan.lower_bound_ms is None or plan.lower_bound_ms <= ms(plan)
    assert plan.task.tables == task.tables
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    return plan


def ms(plan: Plan) -> float:
    assert plan.cost_ms is not None
    return plan.cost_ms


def held(plan: Plan) -> dict[str, RowsByAccess]:
    return plan.held.constraints.rows_by_access


def cheaper(task: ShardingTask) -> Plan:
    """The plan with the large table held by access, which costs less than the one without and says what its bound is of."""
    without, plan = found(task, NONE), found(task)
    assert held(without) == {}
    assert held(plan).keys() == {"large"}
    assert ms(plan) < ms(without) * (1 - WORTH)
    assert AS_HELD in plan.bound_assumptions
    assert [note for note in plan.provenance.notes if "by access: that saves" in note]
    return plan


@pytest.mark.parametrize("kind", ["row-wise", "table-row-wise", "grid"])
def test_row_blocks_are_dealt_where_ids_follow_access(kind: ShardingTypeName) -> None:
    plan = cheaper(sorted_ids(kind))
    assert held(plan) == {"large": RowsByAccess(dealt=True)}
    assert shardings_of(plan)["large"].name == kind


def test_hot_rows_lie_in_hbm_and_cold_ones_beyond() -> None:
    plan = cheaper(beyond_hbm())
    assert (held(plan)["large"].hot_rows or 0) <= 100_000
    rules = plan.parted.constraints.beyond_hbm
    assert "large/cold" in rules
    assert "large/hot" not in rules
    assert not any(rule.tier == "hbm" for rule in plan.task.constraints.tables)  # nothing is named but what was chosen


def test_hot_rows_of_sequences_are_copied() -> None:
    plan = cheaper(sequence())
    assert shardings_of(plan)["large/hot"].copied
    assert plan.task.dense_optimizer is None


def test_tables_without_an_order_are_planned_as_without_the_option_and_a_note_says_how_to_count() -> None:
    task = sequence()
    plain = task.model_copy(update={"tables": tuple(t.model_copy(update={"row_order": None}) for t in task.tables)})
    plan, without = found(plain), found(plain, NONE)
    assert plan.shards == without.shards
    more = {*plan.provenance.notes} - {*without.provenance.notes}
    assert ["--row-orders" in said for said in more] == [True]
    assert len(plan.provenance.notes) == len(without.provenance.notes) + 1


def test_where_it_gains_nothing_tables_stay_as_they_are() -> None:
    large = ordered(Table(name="large", rows=400_000, dim=64, pooling_factor=2.0, access="zipf:1.1"), listed=10_000)
    task = task_of(large, 2**30)
    without, plan = found(task, NONE), found(task)
    assert held(plan) == {}
    assert plan.shards == without.shards
    assert plan.bound_assumptions == without.bound_assumptions
    assert set(plan.provenance.notes) - set(without.provenance.notes) == {NONE_WORTH}
    assert plan.bound_assumptions[-1] == NONE_HELD  # also where none are tried: one might cost less than the bound


def test_a_rule_of_the_table_stays() -> None:
    task = sorted_ids()
    asked = RowsByAccess(hot_rows=5_000)
    rules = task.constraints.model_copy(update={"tables": (TableRule(table="large", rows_by_access=asked),)})
    assert held(found(task.model_copy(update={"constraints": rules}))) == {"large": asked}


def test_from_a_plan_tables_stay_as_they_are_held() -> None:
    task = sequence()
    before = found(task)
    again = found(task, previous=before)
    assert held(again) == held(before)
    assert not moves(before, again)
    kept = found(task, replace(AUTO, move_budget_bytes=0), previous=before)
    assert held(kept) == held(before)
    plain = found(task, NONE)
    assert held(found(task, replace(AUTO, move_budget_bytes=0), previous=plain)) == {}


def test_rows_that_are_hot_by_both_orders_count_as_such() -> None:
    task, hot = sequence(), 5_000
    apart = TableRule(table="large", rows_by_access=RowsByAccess(hot_rows=hot))
    rules = {"tables": (apart, TableRule(table="large/hot", data_parallel=True))}
    then = task.model_copy(update={"constraints": task.constraints.model_copy(update=rules)})
    large, *small = task.tables
    order = large.row_order.model_copy(update={"ids_digest": "2" * 64})
    now = then.model_copy(update={"tables": (large.model_copy(update={"row_order": order}), *small)})
    before = found(then, NONE)
    listed = np.random.default_rng(0).permutation(large.rows)[: order.hot_rows]
    stay = replace(NONE, move_budget_bytes=0)
    again = search(now, MODEL, stay, previous=before, read=lambda order: listed)  # one list, made twice
    assert moved_bytes(before, again, {"large": hot}) == 0
    with refused(Infeasible, "0 B", "--move-budget"):
        search(now, MODEL, stay, previous=before)


def in_two(task: ShardingTask, hot_rows: int) -> Plan:
    """A plan with so many hot rows of the large table."""
    rules = (TableRule(table="large", rows_by_access=RowsByAccess(hot_rows=hot_rows)),)
    plan = found(task.model_copy(update={"constraints": task.constraints.model_copy(update={"tables": rules})}), NONE)
    assert held(plan)["large"].hot_rows == hot_rows
    return plan


def test_another_number_of_hot_rows_is_taken_where_that_is_worth_moving() -> None:
    task = beyond_hbm()
    few, best = in_two(task, 64), found(task)
    again = found(task, previous=few)
    assert (held(again)["large"].hot_rows or 0) > 64
    assert ms(again) < ms(few) * (1 - WORTH)
    assert any("of the plan found with tables held as before" in note for note in again.provenance.notes)
    near = in_two(task, (held(best)["large"].hot_rows or 0) * 99 // 100)
    assert held(found(task, previous=near)) == held(near)
    assert held(found(task, budget(0), previous=few)) == held(few)


def test_a_table_is_whole_again_where_hbm_holds_it_by_now() -> None:
    before, task = found(beyond_hbm()), beyond_hbm()
    roomy = task.model_copy(update={"device_memory_bytes": (8 * 2**30,) * 2})
    again = found(roomy, previous=before)
    assert held(again) == {}
    assert any("1 table no longer apart (large)" in note for note in again.provenance.notes)


def budget(nbytes: int) -> SearchSettings:
    return replace(AUTO, move_budget_bytes=nbytes)


def test_where_a_trial_gains_nothing_there_is_no_other_search(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = list[int]()

    def searched(*args: Any) -> Plan:
        rounds.append(args[2].most_rounds)
        return before(*args)

    before = run._searched
    monkeypatch.setattr(run, "_searched", searched)
    monkeypatch.setattr(rows_by_access, "_worth_dealing", lambda *args: ["large"])  # an estimate that hopes too much
    large = ordered(Table(name="large", rows=400_000, dim=64, pooling_factor=2.0, access="zipf:1.1"))
    plan = found(task_of(large, 2**30), replace(AUTO, rounds=9))
    assert held(plan) == {}
    assert rounds == [9, TRIAL_ROUNDS]


def test_only_local_search_chooses() -> None:
    with pytest.raises(UsageError, match="only local-search"):
        search(sequence(), MODEL, replace(AUTO, algorithm="size"))
