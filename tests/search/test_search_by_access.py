"""A search of a task whose rules have sequences in two parts: its plan is of that task, with what it chose for parts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import neuroshard as ns
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan, shardings_of
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import sha256
from neuroshard.costmodel.pricing import price_shards
from neuroshard.files.row_orders import bytes_of_ids, ids_path, write_ids
from neuroshard.files.tables import write_tables
from neuroshard.models.open import open_cost_model
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

MODEL = open_cost_model("analytic:h100", 8192)
ROWS = 500_000
ORDER = RowOrder(ids_digest="", rows=ROWS, hot_rows=50_000, lookup_share=0.9, time="2025-11-20T12:00:00Z")


def found(*rules: TableRule, memory: int = 2**28, **more: Any) -> Plan:
    large = Table(
        name="large", rows=ROWS, dim=64, pooling_factor=30.0, access="zipf:1.1", pooling="none", row_order=ORDER
    )
    small = tuple(Table(name=f"small{n}", rows=1000 * n, dim=32, pooling_factor=5.0 * n) for n in range(1, 5))
    task = ShardingTask(
        tables=(large, *small),
        device_memory_bytes=(memory,) * 4,
        batch_size=8192,
        constraints=Constraints(tables=rules),
        **more,
    )
    plan = search(task, MODEL, SearchSettings(rounds=2))
    prices = price_shards(MODEL, plan.held, plan.shards)
    assert prices is not None
    assert plan.predicted_ms == pytest.approx(prices.total_ms.tolist())
    assert plan.lower_bound_ms is None or (plan.cost_ms is not None and plan.lower_bound_ms <= plan.cost_ms)
    assert plan.task.tables == task.tables
    assert plan.held.constraints.rows_by_access == task.constraints.rows_by_access
    return plan


def rule(table: str = "large", **fields: Any) -> TableRule:
    return TableRule(table=table, **fields)


IN_TWO = rule(rows_by_access=RowsByAccess(hot_rows=20_000))


def test_parts_are_placed_as_tables_are() -> None:
    plan = found(IN_TWO, rule("large/hot", data_parallel=True), rule("large/cold", row_wise=True, max_shards=4))
    assert shardings_of(plan)["large/hot"].copied
    assert plan.task.dense_optimizer is None  # only the wrapper trains copies
    assert not any("dense optimizer" in note for note in plan.provenance.notes)


def test_the_tiers_that_a_search_chooses_for_parts_are_rules_of_theirs() -> None:
    plan = found(IN_TWO, memory=20 * 2**20, host_memory_bytes=2**32)
    beyond = plan.parted.constraints.beyond_hbm
    assert beyond.keys() <= {table.name for table in plan.parted.tables}
    assert "large/cold" in beyond
    assert plan.held.constraints.rules()["large/cold"].tier == beyond["large/cold"].tier


@pytest.mark.parametrize(
    ("pooling", "how", "why"), [("sum", {"hot_rows": 1000}, "pooled"), ("none", {"dealt": True}, "dealt")]
)
def test_what_no_new_plan_does_is_refused_with_the_way_out(pooling: str, how: dict[str, Any], why: str) -> None:
    order = ORDER.model_dump(mode="json")
    table = {"name": "user", "rows": ROWS, "dim": 64, "pooling_factor": 4, "pooling": pooling, "row_order": order}
    usual: Any = {"devices": 2, "memory": "1GiB", "batch_size": 64, "rounds": 1, "quiet": True}
    rules = {"format_version": 1, "tables": [{"match": "user", "rows_by_access": how}]}
    with refused(InvalidInput, "'user'", why, "rows_by_access", "0.1.0", "host_memory"):
        ns.search([table], "analytic:h100", constraints=rules, **usual)


@pytest.mark.parametrize("more", [{}, {"host_memory": "1TiB"}])
def test_one_table_alone_may_be_held_by_access(more: dict[str, Any]) -> None:
    order = {"ids_digest": "", "rows": 1_000_000, "hot_rows": 1000, "lookup_share": 0.9, "time": "2026-11-01T00:00:00Z"}
    for pooling in ("sum", "none"):
        table = {
            "name": "user",
            "rows": 1_000_000,
            "dim": 64,
            "pooling_factor": 4,
            "pooling": pooling,
            "row_order": order,
        }
        usual: Any = {
            "devices": 4,
            "memory": "96MiB" if more else "1GiB",
            "batch_size": 65536,
            "rounds": 1,
            "allocator_share": 0,
            "quiet": True,
        }
        plan = ns.search([table], "analytic:h100", rows_by_access="auto", **usual, **more)
        prices = price_shards(open_cost_model("analytic:h100", 65536), plan.task, [])
        assert prices is not None
        assert prices.total_ms.max() < (plan.cost_ms or 0.0)


def test_what_a_plan_says_of_itself_is_of_the_plan_that_is_returned() -> None:
    order = {"rows": 500_000, "hot_rows": 50_000, "lookup_share": 0.9, "time": "2026-11-01T00:00:00Z"}
    sequence = {"name": "sequence", "rows": 500_000, "dim": 256, "pooling_factor": 50.0, "pooling": "none"}
    by_id = {"lookups_by_id": [0.7, 0.1, 0.1, 0.1]}
    tables = [{**sequence, **by_id, "row_order": {**order, "ids_digest": "0" * 64}}]
    usual: Any = {"devices": 4, "domain": 2, "memory": "2GiB", "batch_size": 8192, "rounds": 5, "quiet": True}
    plan = ns.search(tables, "analytic:h100", rows_by_access="auto", **usual)
    assert plan.held.constraints.rows_by_access
    (network,) = (note for note in plan.provenance.notes if "two racks" in note)
    assert network.endswith(f"not {plan.cost_ms:.3f}")
    assert plan.provenance.rounds == 5


def test_a_search_puts_the_lists_beside_its_plan(tmp_path: Path, capfd: Any) -> None:
    data = bytes_of_ids(np.arange(20_000) * 5)
    order = ORDER.model_copy(update={"ids_digest": sha256(data), "hot_rows": 20_000, "points": ()})
    table = Table(
        name="large", rows=ROWS, dim=64, pooling_factor=30.0, access="zipf:1.1", pooling="none", row_order=order
    )
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    write_tables(tmp_path / "in" / "tables.json", (table,))
    rules = {"format_version": 1, "tables": [{"match": "large", "rows_by_access": {"hot_rows": 1000}}]}
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    usual: Any = {"devices": 2, "memory": "1GiB", "batch_size": 64, "rounds": 1}

    def searched(**more: Any) -> str:
        plan = tmp_path / "out" / "plan.json"
        ns.search(tmp_path / "in" / "tables.json", "analytic:h100", out=plan, **usual, **more)
        return capfd.readouterr().err

    there = ids_path(tmp_path / "out" / "rows", order)
    note = f"note: the lists of hot rows of large are not in {tmp_path / 'out' / 'rows'}; put them there before"
    assert note not in searched()  # of a plan that needs none
    assert note in searched(constraints=tmp_path / "rules.json")
    write_ids(tmp_path / "in" / "rows", [data])
    assert note not in searched(constraints=tmp_path / "rules.json")
    assert there.read_bytes() == data
    ids_path(tmp_path / "in" / "rows", order).write_bytes(data[:-1])
    with pytest.raises(InvalidInput, match="cut off or changed"):
        searched(constraints=tmp_path / "rules.json")


def test_from_a_plan_tables_keep_its_row_orders_until_newer_ones_are_worth_moving_rows(tmp_path: Path) -> None:
    lists = [bytes_of_ids(ids) for ids in (np.arange(20_000), np.arange(20_000)[::-1], 30_000 + np.arange(20_000))]
    (tmp_path / "rules.json").write_text(
        json.dumps({"format_version": 1, "tables": [{"match": "large", "rows_by_access": {"hot_rows": 20_000}}]})
    )
    plans = list[Plan]()
    for day, data in enumerate(lists, 20):
        same = {"ids_digest": sha256(data), "hot_rows": 20_000, "points": (), "time": f"2025-11-{day}T12:00:00Z"}
        order = ORDER.model_copy(update=same)
        table = Table(
            name="large", rows=ROWS, dim=64, pooling_factor=30.0, access="zipf:1.1", pooling="none", row_order=order
        )
        (folder := tmp_path / str(day)).mkdir()
        write_tables(folder / "tables.json", (table,))
        write_ids(folder / "rows", [data])
        before: Any = {"previous": tmp_path / "20" / "plan.json"} if plans else {}
        usual: Any = {"devices": 2, "memory": "1GiB", "batch_size": 64, "rounds": 1, "quiet": True}
        rules: Any = {"constraints": tmp_path / "rules.json"}
        plan = ns.search(folder / "tables.json", "analytic:h100", out=folder / "plan.json", **usual, **rules, **before)
        plans.append(plan)
        assert ids_path(folder / "rows", plan.held.orders["large"]).exists()
    times = [plan.held.orders["large"].time[:10] for plan in plans]
    assert times == ["2025-11-20", "2025-11-20", "2025-11-22"]
    assert any("has a new row order, and its rows move" in note for note in plans[2].provenance.notes)
