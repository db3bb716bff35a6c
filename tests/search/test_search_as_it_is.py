"""From a plan, whatever it holds in copies, tiers and parts: with nothing to move it stays, and no plan is dearer."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.groups import Groups
from neuroshard.core.moves import moved_bytes
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.search.groups import task_of_group
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tiers import toggle
from neuroshard.search.watch import Watch
from search.test_search_id_maps import over_hosts

AUTO = SearchSettings(rounds=1, try_row_wise=True, try_data_parallel=True)
ORDER = {"lookup_share": 0.9, "time": "2025-11-20T12:00:00Z", "ids_digest": "1" * 64}


def found(task: ShardingTask, settings: SearchSettings, previous: Plan | None = None, **changes: Any) -> Plan:
    model = analytic_model("h100", task.batch_size)
    return search(task, model, replace(settings, **changes), previous=previous)


def drawn(seed: int, *, host: bool, domain: int | None, grouped: bool, by_access: bool) -> ShardingTask:
    """Two large tables and a few small ones that are read a lot."""
    rng = np.random.default_rng(seed)
    tables = [
        Table(
            name=f"t{number}",
            rows=int(rng.integers(100_000, 300_000)) if number < 2 else int(rng.integers(2, 400)),
            dim=int(rng.choice([16, 64, 128])),
            pooling_factor=float(rng.integers(1, 4)) if number < 2 else float(rng.integers(1, 40)),
            access=f"zipf:{rng.uniform(0.5, 1.3):.2f}",
            optimizer_bytes_per_row=int(rng.choice([0, 4])),
        )
        for number in range(int(rng.integers(4, 7)))
    ]
    rules: tuple[TableRule, ...] = ()
    if by_access:
        rows = tables[0].rows
        order = RowOrder(rows=rows, hot_rows=9_000, points=((3_000, 0.6),), **ORDER)
        tables[0] = tables[0].model_copy(update={"row_order": order, "pooling": "none"})
        rules = (TableRule(table="t0", rows_by_access=RowsByAccess(hot_rows=3_000)),)
    devices = 8 if grouped else 4
    fields: dict[str, Any] = {"tables": tables, "batch_size": 4096 * devices, "constraints": Constraints(tables=rules)}
    need = ShardingTask(device_memory_bytes=(2**40,) * devices, **fields).parted.need_bytes
    if domain is not None:
        fields["topology"] = {"domain": domain, "local_world_size": domain, "network_bytes_per_s": 1e10}
    memory = int(need * (rng.choice([0.3, 0.6, 0.9]) if host else 2) / (2 if grouped else 1) / 4) + 2**22
    fields |= {"device_memory_bytes": (memory,) * devices, "host_memory_bytes": need if host else None}
    task = ShardingTask(**fields)
    return task_of_group(task, Groups(ranks=8, domain=2, local_world_size=2, contiguous=False), 4) if grouped else task


MIXTURES = {
    "copies": {},
    "copies between domains": {"domain": 2},
    "copies, host memory": {"host": True},
    "copies, host memory, domains": {"host": True, "domain": 1},
    "copies, groups": {"domain": 2, "grouped": True},
    "copies, parts": {"domain": 2, "by_access": True},
    "copies, host memory, parts": {"host": True, "domain": 1, "by_access": True},
}


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_in_any_mixture_a_plan_stays_where_nothing_may_move_and_is_not_left_for_a_dearer_one(mixture, monkeypatch):
    monkeypatch.setattr(toggle, "MOST_TOGGLES", 24)
    task = drawn(0, **{"host": False, "domain": None, "grouped": False, "by_access": False, **mixture})
    plan = found(task, AUTO)
    assert bool(plan.held.copied) == ("domain" in mixture)
    assert bool(plan.parted.constraints.beyond_hbm) == ("host" in mixture)
    for changes in ({"move_budget_bytes": 0}, {"move_budget_bytes": 0, "keep_optimizer_state": True}, {"seed": 1}):
        again = found(task, AUTO, plan, **changes)
        assert "seed" in changes or moved_bytes(plan, again) == 0
        assert again.cost_ms <= plan.cost_ms
        assert set(again.shards) == set(plan.shards) or again.cost_ms < plan.cost_ms * 0.999


def wide_and_copied() -> ShardingTask:
    """A table that no two devices have room for without host memory, and one whose lookups fit only as a copy."""
    wide = {"rows": 600_000, "dim": 256, "pooling_factor": 1.0, "pooling": "mean", "access": "zipf:1.3"}
    tables = (
        Table(name="wide", **wide),
        Table(name="t1", rows=37_000, dim=16, pooling_factor=1.5, access="zipf:0.3"),
        Table(name="t2", rows=2, dim=16, pooling_factor=77),
    )
    return ShardingTask(
        tables=tables,
        device_memory_bytes=(40 * 2**20,) * 8,
        host_memory_bytes=150 * 2**20,
        batch_size=65536,
        pipeline="sparse-dist",
        dense_optimizer="amsgrad",
        topology=Topology(domain=2, local_world_size=1),
    )


def test_a_budget_is_kept_where_only_the_copies_of_the_plan_let_its_tables_stay(monkeypatch):
    monkeypatch.setattr(toggle, "MOST_TOGGLES", 24)
    task = wide_and_copied()
    plan = found(task, AUTO)
    assert plan.held.constraints.data_parallel == {"t2"}
    assert plan.held.constraints.beyond_hbm.keys() == {"wide"}
    assert set(found(task, AUTO, plan, move_budget_bytes=0).shards) == set(plan.shards)
    # and where the tables are not quite those of the plan
    grown = task.model_copy(update={"tables": tuple(t.model_copy(update={"rows": t.rows + 1}) for t in task.tables)})
    more = found(grown, AUTO, plan, move_budget_bytes=2**20)
    assert more.held.constraints.data_parallel == {"t2"}
    assert moved_bytes(plan, more) <= 2**20
    # what today's rules ask for is no reason to keep what they do not
    with refused(Infeasible, "copies of data-parallel tables", "--move-budget"):
        found(task.with_copies({"t1", "t2"}), AUTO, plan, move_budget_bytes=0)


def test_a_plan_with_copies_stays_where_the_search_is_stopped_before_it_tries_any():
    task, stop = drawn(0, host=False, domain=2, grouped=False, by_access=False), threading.Event()
    plan = found(task, AUTO)
    stop.set()
    again = search(task, analytic_model("h100", task.batch_size), AUTO, previous=plan, watch=Watch(stop=stop))
    assert (set(again.shards), again.held.copied) == (set(plan.shards), plan.held.copied)


def test_a_plan_in_which_every_table_that_is_placed_is_a_copy_stays():
    task = over_hosts()
    plan = found(task, AUTO)
    assert not plan.held.placed
    again = found(task, AUTO, plan, move_budget_bytes=0)
    assert (again.task.digest(), set(again.shards)) == (plan.task.digest(), set(plan.shards))


@pytest.mark.parametrize(
    "changed",
    [
        {"try_data_parallel": False},
        {"constraints": Constraints(tables=(TableRule(table="t2", data_parallel=False),))},
        {"constraints": Constraints(tables=(TableRule(table="t2", devices=(1,)),))},
        {"constraints": Constraints(tables=(TableRule(table="t0", tier="host"),)), "host_memory_bytes": 2**40},
    ],
    ids=["copies not asked for", "copy forbidden", "pinned", "in host memory"],
)
def test_what_todays_rules_forbid_does_not_stay_however_cheap_it_is(changed):
    task = drawn(0, host=False, domain=2, grouped=False, by_access=False)
    plan = found(task, AUTO)
    assert "t2" in plan.held.constraints.data_parallel
    settings = {name: changed[name] for name in changed if name == "try_data_parallel"}
    today = task.model_copy(update={name: changed[name] for name in changed if name not in settings})
    again = found(today, AUTO, plan, **settings)
    assert again.cost_ms > plan.cost_ms
    assert "t2" not in again.held.constraints.data_parallel or again.held.constraints.beyond_hbm
