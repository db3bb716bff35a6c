"""What stands beside tiers that a search chooses: tiers that rules name, other rules, and copies of tables."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.moves import moved_bytes
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import Tier
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.asked import Asked
from neuroshard.search.notes import more_in_hbm_cost
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tiers import search as tiers_search
from neuroshard.search.tiers import toggle
from neuroshard.search.tiers.options import DIVIDED
from neuroshard.search.tiers.search import search_tiers
from neuroshard.search.watch import Watch
from search.test_tiers import drawn

FEW = SearchSettings(rounds=4)
DRAWN = [(0, 12, 2, 0.3), (1, 16, 4, 0.1)]  # seed, tables, devices, share of HBM
Named = dict[str, tuple[Tier | None, int | None]]


def planned(task: ShardingTask, settings: SearchSettings = FEW) -> Plan:
    """The plan, which a Plan checks: rules, HBM of each device, memory of each host. Its price is that of its shards, and its
    tables are beyond HBM."""
    model = analytic_model("h100", task.batch_size)
    plan = search(task, model, settings)
    prices = price_shards(model, plan.held, plan.shards)
    assert plan.cost_ms == pytest.approx(float(prices.total_ms.max()))
    assert plan.lower_bound_ms <= plan.cost_ms
    assert plan.held.constraints.beyond_hbm
    return plan


def tiers(plan: Plan) -> Named:
    return {name: (rule.tier, rule.cached_rows) for name, rule in plan.task.constraints.rules().items()}


def some_named(task: ShardingTask) -> Named:
    """A tier of each kind; of the tables with least lookups a byte the smallest is in HBM, and one with most is not."""
    by_use = sorted(task.tables, key=lambda table: table.memory_bytes / table.pooling_factor)
    rarely = min(by_use[len(by_use) // 2 :], key=lambda table: table.memory_bytes)
    return {by_use[0].name: ("host", None), by_use[1].name: ("cached", 64), rarely.name: ("hbm", None)}


def with_a_hot_table() -> ShardingTask:
    """A small table that is read so often that no device should have it alone."""
    task = drawn(2, 10, 4, 0.5)
    hot = Table(name="hot", rows=500, dim=8, pooling_factor=8000.0)
    return task.model_copy(update={"tables": (*task.tables, hot)})


@pytest.mark.parametrize(("seed", "count", "devices", "share"), DRAWN)
def test_tiers_that_rules_name_stand_and_the_search_chooses_the_others(seed, count, devices, share):
    task = drawn(seed, count, devices, share)
    named = some_named(task)
    plan = planned(task.with_tiers(named))
    found = tiers(plan)
    assert {name: found[name] for name in named} == named
    assert len(plan.held.constraints.beyond_hbm) > 2


@pytest.mark.parametrize(("seed", "count", "devices", "share"), DRAWN)
def test_what_the_search_sees_of_a_plan_with_named_tiers_is_what_it_costs(seed, count, devices, share):
    task = drawn(seed, count, devices, share).with_tiers({"t0": ("host", None), "t1": ("cached", 512)})
    model = analytic_model("h100", task.batch_size)
    found = search_tiers(Asked.of(task, model, FEW, Watch()))
    prices = price_shards(model, task.with_tiers(found.plan.tiers), found.plan.shards)
    assert prices.total_ms.max() == pytest.approx(found.plan.cost)
    assert 0.97 * found.plan.cost <= found.plan.state.cost <= found.plan.cost * (1 + 1e-6)


def test_a_named_tier_may_be_cut_pinned_and_kept_together():
    task = drawn(3, 12, 4, 0.3)
    rules = (
        TableRule(table="t0", tier="host", devices=(1, 2)),
        TableRule(table="t1", tier="cached", cached_rows=320, max_shards=2),
        TableRule(table="t2", tier="host"),
    )
    plan = planned(
        task.model_copy(update={"constraints": Constraints(tables=rules, together=(("t2", "t3"), ("t4", "t5")))})
    )
    found = tiers(plan)
    assert (found["t0"], found["t1"], found["t2"]) == (("host", None), ("cached", 320), ("host", None))


def test_tables_kept_together_go_beyond_hbm_together_with_no_device_too_full():
    """Two sets that no device's HBM holds."""
    task = drawn(0, 12, 2, 0.2)
    by_size = sorted(task.tables, key=lambda table: -table.memory_bytes)
    sets = tuple(tuple(table.name for table in by_size[n : n + 3]) for n in (0, 3))
    plan = planned(task.model_copy(update={"constraints": Constraints(together=sets)}))
    beyond = plan.held.constraints.beyond_hbm
    assert all(name in beyond for name in sets[0])


def test_where_all_tiers_are_named_nothing_is_left_to_choose():
    task = drawn(0, 8, 2, 0.3)
    named: Named = {table.name: ("hbm", None) for table in task.tables}
    with pytest.raises(Exception, match="short"):
        search(task.with_tiers(named), analytic_model("h100", task.batch_size), FEW)


@pytest.mark.parametrize(("seed", "count", "devices", "share"), DRAWN)
def test_a_data_parallel_table_is_in_hbm_on_every_device_beside_tables_beyond_it(seed, count, devices, share):
    task = drawn(seed, count, devices, share)
    smallest = min(task.tables, key=lambda table: table.memory_bytes).name
    task = task.with_copies([smallest])
    plan = planned(task)
    assert [shard.device for shard in plan.shards if shard.table == smallest] == list(range(devices))
    assert smallest not in plan.held.constraints.beyond_hbm
    assert any("1 table data-parallel" in note for note in plan.provenance.notes)
    assert min(np.array(plan.task.usable_bytes) - plan.memory_bytes()) >= 0


def test_a_search_copies_a_table_that_no_device_should_have_alone_and_chooses_tiers_beside_it():
    task = with_a_hot_table()
    without, with_some = (planned(task, replace(FEW, try_data_parallel=auto)) for auto in (False, True))
    assert "hot" in with_some.held.constraints.data_parallel
    assert with_some.cost_ms < 0.8 * without.cost_ms
    assert not with_some.held.constraints.data_parallel.intersection(with_some.held.constraints.beyond_hbm)
    assert with_some.improvements[-1].cost_ms == pytest.approx(with_some.cost_ms)


def test_where_copies_save_nothing_the_plan_is_the_one_without():
    task = drawn(0, 12, 2, 0.3)
    auto, without = planned(task, replace(FEW, try_data_parallel=True)), planned(task)
    assert auto.task == without.task
    assert auto.shards == without.shards


def test_a_plan_with_copies_and_tiers_is_started_from(monkeypatch):
    """Its copies stay where nothing may move, and where those beside them do not pay."""
    task = with_a_hot_table()
    live, model = planned(task.with_copies(["hot"])), analytic_model("h100", task.batch_size)
    stays = replace(FEW, try_data_parallel=True, move_budget_bytes=0)
    again = search(task, model, stays, previous=live)
    assert "hot" in again.held.constraints.data_parallel
    assert moved_bytes(live, again) == 0
    assert again.cost_ms <= live.cost_ms * (1 + 1e-9)

    largest, copied = sorted(task.tables, key=lambda table: table.memory_bytes)[-3:], SimpleNamespace(copied=True)
    relaxed = None, SimpleNamespace(problem=SimpleNamespace(spread_as={table.name: copied for table in largest}))
    monkeypatch.setattr("neuroshard.search.tiers.plan.relaxation", lambda *_: relaxed)
    again = search(task, model, replace(FEW, try_data_parallel=True), previous=live)
    assert again.held.constraints.data_parallel == live.held.constraints.data_parallel
    assert again.cost_ms <= live.cost_ms * (1 + 1e-9)


@pytest.mark.parametrize("factors", [(0.5, 0.8, 1.2, 1.5), (0.8, 0.8, 0.8, 1.6)])
def test_devices_may_have_different_memory(factors):
    """What the search sees of a plan is what it costs, also where a device has three times the HBM of another."""
    task = drawn(1, 12, 4, 0.25)
    memory = tuple(int(factor * task.device_memory_bytes[0]) for factor in factors)
    task = task.model_copy(update={"device_memory_bytes": memory})
    planned(task)
    model = analytic_model("h100", task.batch_size)
    plan = search_tiers(Asked.of(task, model, FEW, Watch())).plan
    in_level = plan.choice > DIVIDED  # which may cache more or less once devices divide what they have
    assert 0.97 * plan.cost <= plan.state.cost
    assert in_level.any() or plan.state.cost <= plan.cost * (1 + 1e-6)


def one_large(seed: int) -> ShardingTask:
    """A table that HBM does not hold, beside small ones that are read by other devices, which have room."""
    rng = np.random.default_rng(seed)
    tables = tuple(
        Table(
            name=f"t{number}",
            rows=int(10 ** (rng.uniform(1, 4.5) if number else rng.uniform(6, 7.5))),
            dim=int(rng.choice([16, 64, 128])),
            pooling_factor=float(rng.integers(1, 20)),
            access=f"zipf:{rng.uniform(0.6, 1.3):.2f}",
        )
        for number in range(7)
    )
    return ShardingTask(
        tables=tables,
        device_memory_bytes=(int(sum(table.memory_bytes for table in tables) * rng.choice([0.5, 0.2, 0.1])),) * 8,
        host_memory_bytes=2**40,
        batch_size=8192,
        pipeline="sparse-dist",
        topology=Topology(domain=1, local_world_size=1),
        constraints=Constraints(tables=(TableRule(table="t0", max_shards=1),)),
    )


@pytest.mark.parametrize("simplicity", [0.0, 0.005])
@pytest.mark.parametrize("seed", [6, 10])
def test_small_tables_off_the_critical_path_are_in_hbm_where_it_has_room(seed, simplicity, monkeypatch):
    monkeypatch.setattr(toggle, "MOST_TOGGLES", 24)
    task = one_large(seed)
    model, settings = analytic_model("h100", task.batch_size), replace(FEW, rounds=1, simplicity=simplicity)
    plan = search(task, model, settings)
    assert plan.held.constraints.beyond_hbm.keys() == {"t0"}
    monkeypatch.setattr(tiers_search, "fewest_beyond", lambda problems, found, *_: found)
    assert plan.cost_ms <= search(task, model, settings).cost_ms * (1 + simplicity)


@pytest.mark.parametrize(("share", "said"), [(0.0, False), (0.5, True)])
def test_what_more_tables_in_hbm_cost_is_said(share, said):
    lines = more_in_hbm_cost(5, 2.0, 3, 2.0 * (1 + share))
    assert bool(lines) == said
    assert all("3 tables beyond HBM instead of 5" in line and "50.00%" in line for line in lines)
