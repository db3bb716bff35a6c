"""Searches that choose tiers and start from a plan: in HBM or in tiers, with a budget to move, with column cuts to keep."""

import functools
from typing import Any

import pytest

from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import changed_state, moved_bytes, moves
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from search.test_tiers import drawn

MIB = 2**20
DRAWN = [(0, 10, 2, 0.3), (3, 14, 4, 0.15)]  # seed, tables, devices, share of HBM


def of(seed: int, count: int, devices: int, share: float) -> ShardingTask:
    """A drawn task whose tables have optimizer state by the row."""
    task = drawn(seed, count, devices, share)
    tables = tuple(table.model_copy(update={"optimizer_bytes_per_row": 4}) for table in task.tables)
    return task.model_copy(update={"tables": tables})


def with_memory(task: ShardingTask, factor: float) -> ShardingTask:
    return task.model_copy(update={"device_memory_bytes": tuple(int(factor * m) for m in task.device_memory_bytes)})


def planned(task: ShardingTask, previous: Plan | None = None, **settings: Any) -> Plan:
    """The plan, whose price is that of its shards and whose bound is below it."""
    model = analytic_model("h100", task.batch_size)
    plan = search(task, model, SearchSettings(rounds=4, **settings), previous=previous)
    prices = price_shards(model, plan.held, plan.shards)
    assert plan.cost_ms == pytest.approx(float(prices.total_ms.max()))
    assert plan.lower_bound_ms <= plan.cost_ms
    return plan


@functools.cache
def live_plan(drawn_as: tuple[int, int, int, float], factor: float = 1) -> Plan:
    """What several tests start from, searched for once."""
    return planned(with_memory(of(*drawn_as), factor))


@pytest.mark.parametrize("drawn_as", DRAWN)
def test_a_plan_in_tiers_stays_where_nothing_changed_and_nothing_may_move(drawn_as):
    task = of(*drawn_as)
    first = live_plan(drawn_as)
    again = planned(task, first, move_budget_bytes=0)
    assert moves(first, again) == ()
    assert again.cost_ms <= first.cost_ms * (1 + 1e-9)


@pytest.mark.parametrize("keep", [False, True], ids=["any cuts", "kept cuts"])
@pytest.mark.parametrize("drawn_as", DRAWN)
def test_tables_that_hbm_no_longer_holds_go_to_host_memory_where_they_are(drawn_as, keep):
    """A live plan in HBM, and today less memory: with nothing to move, only tiers change."""
    task = of(*drawn_as)
    live = live_plan(drawn_as, 100)
    assert not live.held.constraints.beyond_hbm
    plan = planned(task, live, move_budget_bytes=0, keep_optimizer_state=keep)
    assert plan.held.constraints.beyond_hbm
    assert moved_bytes(live, plan) == 0
    assert not changed_state(live, plan)


@pytest.mark.parametrize("drawn_as", DRAWN)
def test_tables_in_tiers_that_fit_today_come_back_to_hbm(drawn_as):
    task = of(*drawn_as)
    live = live_plan(drawn_as)
    plan = planned(with_memory(task, 100), live, move_budget_bytes=0)
    assert not plan.held.constraints.beyond_hbm
    assert moves(live, plan) == ()
    assert plan.cost_ms < live.cost_ms


@pytest.mark.parametrize(("drawn_as", "factor"), list(zip(DRAWN, (1.0, 1.4), strict=True)))
def test_a_move_budget_is_kept_and_a_larger_one_is_no_worse_than_none(drawn_as, factor):
    task = of(*drawn_as)
    live = live_plan(drawn_as, 100)
    task = with_memory(task, factor)
    at_most, nothing = (planned(task, live, move_budget_bytes=budget) for budget in (50 * MIB, 0))
    assert moved_bytes(live, at_most) <= 50 * MIB
    assert at_most.cost_ms <= nothing.cost_ms * 1.01


@pytest.mark.parametrize("drawn_as", DRAWN)
def test_kept_cuts_are_in_one_tier_and_kept(drawn_as):
    """All shards of a table have one tier, also where the search places each as a table of its own."""
    task = of(*drawn_as)
    by_size = sorted(task.tables, key=lambda table: -table.memory_bytes)
    halves = [table for table in by_size if table.dim >= 8][:3]
    live = live_plan(drawn_as)
    shards = [shard for shard in live.shards if shard.table not in {table.name for table in halves}]
    for table in halves:
        for device, offset in ((0, 0), (1, table.dim // 2)):
            shards.append(
                Shard(table=table.name, rows=table.rows, column_offset=offset, dim=table.dim // 2, device=device)
            )
    roomy = with_memory(task, 100)
    cut = Plan(task=roomy, shards=tuple(shards), provenance=live.provenance)
    plan = planned(task, cut, keep_optimizer_state=True)
    assert plan.held.constraints.beyond_hbm
    for table in halves:
        widths = {(s.column_offset, s.dim) for s in plan.shards if s.table == table.name}
        assert widths == {(0, table.dim // 2), (table.dim // 2, table.dim // 2)}
    # of others, neighbours of unequal widths may be together on a device, which the plan says
    assert not {table.name for table in halves}.intersection(changed_state(cut, plan))
    assert bool(changed_state(cut, plan)) == any("does not carry over exactly" in n for n in plan.provenance.notes)


def test_named_tiers_stand_where_cuts_are_kept():
    task = of(0, 12, 2, 0.3)
    table = max(task.tables, key=lambda one: one.dim)
    whole = [Shard(table=one.name, rows=one.rows, dim=one.dim, device=0) for one in task.tables if one != table]
    halves = [
        Shard(table=table.name, rows=table.rows, column_offset=at, dim=table.dim // 2, device=device)
        for device, at in ((0, 0), (1, table.dim // 2))
    ]
    roomy = with_memory(task, 100)
    live = Plan(task=roomy, shards=(*whole, *halves), provenance=planned(roomy).provenance)
    for today in (task, roomy):  # the search chooses the others' tiers, or all fit
        named = today.with_tiers({table.name: ("host", None)})
        plan = planned(named, live, keep_optimizer_state=True)
        assert plan.task.constraints.rules()[table.name].tier == "host"
        assert not changed_state(live, plan)


def test_cuts_that_todays_rules_forbid_are_refused_with_the_way_out():
    task = of(*DRAWN[1])
    live = live_plan(DRAWN[1])
    cut = next(name for name, shards in live.by_table().items() if len({s.column_offset for s in shards}) > 1)
    forbidden = task.model_copy(update={"constraints": Constraints(tables=(TableRule(table=cut, max_shards=1),))})
    with refused(Infeasible, repr(cut), "leave out --keep-optimizer-state"):
        planned(forbidden, live, keep_optimizer_state=True)


def test_a_device_that_is_gone_moves_what_it_had_or_is_refused_with_the_bytes():
    task = of(0, 12, 3, 0.4)
    live = planned(task)
    fewer = task.model_copy(update={"device_memory_bytes": task.device_memory_bytes[:2]})
    with refused(Infeasible, "more than the budget", "--move-budget"):
        planned(fewer, live, move_budget_bytes=0)
    assert {shard.device for shard in planned(fewer, live).shards} == {0, 1}
