"""A search from a plan that holds tables otherwise by access: what must move is counted by the rows that devices have."""

from collections.abc import Sequence
from typing import Any

import pytest

from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import changed_state, moved_bytes
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.models.open import open_cost_model
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

BATCH, ROWS, HOT, DIM = 8192, 400_000, 20_000, 64
MODEL = open_cost_model("analytic:h100", BATCH)
ORDER = RowOrder(ids_digest="1" * 64, rows=ROWS, hot_rows=50_000, lookup_share=0.9, time="2025-11-20T12:00:00Z")
ADS = Table(name="ads", rows=ROWS, dim=DIM, pooling_factor=20.0, access="zipf:1.1", pooling="none", row_order=ORDER)
SMALL = tuple(Table(name=f"small{n}", rows=1000 * n, dim=32, pooling_factor=2.0 * n) for n in range(1, 5))
ROW = DIM * 4 + 4
DEALT: dict[str, Any] = {"rows_by_access": RowsByAccess(dealt=True), "row_wise": True}


def rule(table: str = "ads", **fields: Any) -> TableRule:
    return TableRule(table=table, **fields)


def in_two(hot_rows: int = HOT) -> TableRule:
    return rule(rows_by_access=RowsByAccess(hot_rows=hot_rows))


def task(*rules: TableRule, ads: Table = ADS, **more: Any) -> ShardingTask:
    memory = 70 * 2**20 if any(rule.row_wise for rule in rules) else 2**30  # no device has room for all rows
    fields = {"tables": (ads, *SMALL), "device_memory_bytes": (memory,) * 2, "batch_size": BATCH, **more}
    return ShardingTask(constraints=Constraints(tables=rules, sharding_types=("row-wise",)), **fields)


def plan(of: ShardingTask, *held: tuple[str, int, int, int]) -> Plan:
    """Shards as (table, first row, rows, device), at full width; and the small tables on device 0."""
    shards = [Shard(table=t, row_offset=at, rows=rows, dim=DIM, device=on) for t, at, rows, on in held]
    shards += [Shard(table=t.name, rows=t.rows, dim=t.dim, device=0) for t in SMALL]
    return Plan(task=of, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def found(of: ShardingTask, before: Plan, budget: int | None = None, **more: Any) -> Plan:
    return search(of, MODEL, SearchSettings(rounds=2, move_budget_bytes=budget, **more), previous=before)


def on(plan: Plan, table: str) -> list[int]:
    return [shard.device for shard in plan.by_table()[table]]


def blocks(of: ShardingTask) -> Plan:
    return plan(of, ("ads", 0, ROWS // 2, 0), ("ads", ROWS // 2, ROWS // 2, 1))


WHOLE = plan(task(), ("ads", 0, ROWS, 1))
COPIED = plan(
    task(in_two(), rule("ads/hot", data_parallel=True)),
    ("ads/hot", 0, HOT, 0), ("ads/hot", 0, HOT, 1), ("ads/cold", 0, ROWS - HOT, 1),
)  # fmt: skip
APART = plan(task(in_two()), ("ads/hot", 0, HOT, 0), ("ads/cold", 0, ROWS - HOT, 1))


def test_both_parts_of_a_table_stay_where_it_was() -> None:
    new = found(task(in_two()), WHOLE, budget=0)
    assert (on(new, "ads/hot"), on(new, "ads/cold")) == ([1], [1])
    assert moved_bytes(WHOLE, new) == 0
    assert not any("no longer" in note for note in found(task(in_two()), APART).provenance.notes)
    assert not [note for note in new.provenance.notes if "new since" in note or "no longer there" in note]


def test_a_table_stays_where_its_cold_part_and_a_copy_of_the_hot_one_were() -> None:
    new = found(task(), COPIED, budget=0)
    assert on(new, "ads") == [1]
    assert any("no longer (ads): sequences" in note for note in new.provenance.notes)
    assert moved_bytes(COPIED, new) == 0


@pytest.mark.parametrize(
    ("before", "today", "least"),
    [
        (APART, (), HOT * ROW),
        (APART, (in_two(HOT // 2),), HOT // 2 * ROW),
        (APART, (in_two(2 * HOT),), HOT * ROW),
        (WHOLE, (in_two(), rule("ads/hot", data_parallel=True)), HOT * ROW),
        (blocks(task(rule(**DEALT))), (rule(row_wise=True),), ROWS // 2 * ROW),
    ],
    ids=["parts to whole", "fewer hot", "more hot", "whole to copies", "dealt to blocks"],
)
def test_a_move_budget_counts_the_rows_that_change_their_device(
    before: Plan, today: Sequence[TableRule], least: int
) -> None:
    of = task(*today)
    new = found(of, before, budget=least)
    assert 0 < moved_bytes(before, new) <= least
    with pytest.raises(Infeasible, match="more than the budget"):
        found(of, before, budget=least - 1)


@pytest.mark.parametrize("auto", [False, True])
def test_a_plan_of_a_pooled_table_in_two_parts_is_replaced_by_one_without(auto: bool) -> None:
    pooled = ADS.model_copy(update={"pooling": "sum"})
    before = APART.model_copy(update={"task": task(in_two(), ads=pooled)})
    new = found(task(ads=pooled), before, try_rows_by_access=auto)
    assert new.task.constraints.rows_by_access == {}
    assert any("1 table held by access" in note and "no pooled table" in note for note in new.provenance.notes)
    with pytest.raises(Infeasible, match="more than the budget"):  # it cannot stay as it is
        found(task(ads=pooled), before, budget=0, try_rows_by_access=auto)


def test_parts_keep_the_column_cuts_of_their_table() -> None:
    cuts: dict[str, Any] = {"constraints": Constraints()}
    halves = [Shard(table="ads", rows=ROWS, dim=DIM // 2, column_offset=at, device=at // 32) for at in (0, 32)]
    cut = WHOLE.model_copy(update={"shards": (*halves, *WHOLE.shards[1:])})
    both = task().model_copy(update=cuts).with_rows_by_access({"ads": RowsByAccess(hot_rows=HOT)})
    new = found(both, cut, budget=0, keep_optimizer_state=True)
    assert {(s.column_offset, s.dim) for s in new.shards if s.table == "ads/hot"} == {(0, 32), (32, 32)}
    assert moved_bytes(cut, new) == 0
    assert changed_state(cut, new) == ()
    back = found(task().model_copy(update=cuts), new, budget=0, keep_optimizer_state=True)
    assert moved_bytes(new, back) == 0
    assert changed_state(new, back) == ()


def test_the_cold_part_of_a_table_stays_in_its_tier() -> None:
    host: dict[str, Any] = {"host_memory_bytes": 2**40, "device_memory_bytes": (70 * 2**20,) * 2}
    before = plan(task(rule(tier="host"), **host), ("ads", 0, ROWS, 1))
    new = found(task(in_two(), **host), before, budget=0)
    assert moved_bytes(before, new) == 0
    assert "ads/cold" in new.parted.constraints.beyond_hbm


def test_state_that_parts_cannot_keep_is_named() -> None:
    halves = [
        Shard(table="ads/cold", rows=ROWS - HOT, dim=DIM // 2, column_offset=at, device=at // 32) for at in (0, 32)
    ]
    rest = [shard for shard in APART.shards if shard.table != "ads/cold"]
    uneven = APART.model_copy(update={"shards": (*rest, *halves)})
    assert changed_state(uneven, found(task(), uneven)) == ("ads",)
    of = task(in_two()).model_copy(update={"constraints": Constraints()})
    new = found(of, uneven, keep_optimizer_state=True)
    said = "the optimizer state of 1 table (ads) does not carry over exactly: a hot and a cold part are not cut"
    assert any(note.startswith(said) for note in new.provenance.notes)
    same = found(of.with_rows_by_access({"ads": RowsByAccess(hot_rows=HOT)}), WHOLE, keep_optimizer_state=True)
    assert not any("not cut" in note for note in same.provenance.notes)
