"""A search that chooses the sequences whose hot rows are copied to every rank, by their row orders."""

from dataclasses import replace
from typing import Any

import pytest

from neuroshard.core.constraints import TableRule
from neuroshard.core.errors import UsageError
from neuroshard.core.moves import moves
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan, device_memory, shardings_of
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.pricing import price_shards
from neuroshard.models.open import open_cost_model
from neuroshard.search.rows_by_access import AS_HELD, NONE_HELD, NONE_WORTH, WORTH
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


def sequence(memory: int = 20 * 2**30, lookups: float = 100.0, **more: Any) -> ShardingTask:
    """A sequence that sends most of what the devices do, and whose lookups are of few rows."""
    large = Table(name="large", rows=2_000_000, dim=256, pooling_factor=lookups, access="zipf:1.3", pooling="none")
    return task_of(ordered(large, listed=20_000), memory, **more)


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
    assert [note for note in plan.provenance.notes if "copied (large): that saves" in note]
    return plan


def test_hot_rows_of_sequences_are_copied() -> None:
    plan = cheaper(sequence())
    assert shardings_of(plan)["large/hot"].copied
    assert plan.task.dense_optimizer is None


def test_hot_rows_are_copied_beside_a_table_beyond_hbm_where_hbm_has_room() -> None:
    task = sequence(6 * 2**30, host_memory_bytes=2**40)
    beyond = Table(name="beyond", rows=20_000_000, dim=512, pooling_factor=1.0)
    both = task.model_copy(update={"tables": (*task.tables, beyond)})
    plan = found(both)
    assert "beyond" in plan.parted.constraints.beyond_hbm
    assert all(
        room.total <= most for room, most in zip(device_memory(plan.held, plan.shards), both.usable_bytes, strict=True)
    )


def test_tables_without_an_order_are_planned_as_without_the_option_and_a_note_says_how_to_count() -> None:
    task = sequence()
    plain = task.model_copy(update={"tables": tuple(t.model_copy(update={"row_order": None}) for t in task.tables)})
    plan, without = found(plain), found(plain, NONE)
    assert plan.shards == without.shards
    more = {*plan.provenance.notes} - {*without.provenance.notes}
    assert ["--row-orders" in said for said in more] == [True]
    assert len(plan.provenance.notes) == len(without.provenance.notes) + 1


def test_where_it_gains_nothing_tables_stay_as_they_are() -> None:
    large = ordered(
        Table(name="large", rows=400_000, dim=64, pooling_factor=0.1, access="zipf:1.1", pooling="none"), listed=10_000
    )
    task = task_of(large, 2**30)
    without, plan = found(task, NONE), found(task)
    assert held(plan) == {}
    assert plan.shards == without.shards
    assert plan.bound_assumptions == without.bound_assumptions
    assert set(plan.provenance.notes) - set(without.provenance.notes) == {NONE_WORTH}
    assert plan.bound_assumptions[-1] == NONE_HELD  # also where none are tried: one might cost less than the bound


def test_a_rule_of_the_table_stays() -> None:
    task = sequence()
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


def test_another_number_of_hot_rows_is_taken_where_that_is_worth_moving() -> None:
    task = sequence()
    best = found(task)
    few, near = with_hot(task, 64), with_hot(task, (held(best)["large"].hot_rows or 0) * 99 // 100)
    again = found(task, previous=few)
    assert (held(again)["large"].hot_rows or 0) > 64
    assert ms(again) < ms(few) * (1 - WORTH)
    assert any("of the plan found with tables held as before" in note for note in again.provenance.notes)
    assert held(found(task, previous=near)) == held(near)
    assert held(found(task, replace(AUTO, move_budget_bytes=0), previous=few)) == held(few)


def with_hot(task: ShardingTask, hot_rows: int) -> Plan:
    """A plan with copies of so many hot rows of the large table."""
    apart = TableRule(table="large", rows_by_access=RowsByAccess(hot_rows=hot_rows))
    rules = {"tables": (apart, TableRule(table="large/hot", data_parallel=True))}
    return found(task.model_copy(update={"constraints": task.constraints.model_copy(update=rules)}), NONE)


def test_a_table_is_whole_again_where_copies_gain_nothing_any_more() -> None:
    again = found(sequence(lookups=0.1), previous=found(sequence()))
    assert held(again) == {}
    assert any("1 sequence are no longer copied (large)" in note for note in again.provenance.notes)


def test_only_local_search_chooses() -> None:
    with pytest.raises(UsageError, match="only local-search"):
        search(sequence(), MODEL, replace(AUTO, algorithm="size"))
