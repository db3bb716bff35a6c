"""Where two features meet: copies and a move budget, domains and limits, a plan to start from and today's rules."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.drawn import drawn_tables
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import moved_bytes
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.infeasible.feasibility import feasible
from neuroshard.search.infeasible.packing import GaveUp, pack
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

FEW = SearchSettings(rounds=2)
MIB = 2**20


def task_of(some: Sequence[Table], mib: list[int], domain: int | None = None, /, **constraints: object) -> ShardingTask:
    topology = domain and Topology(domain=domain, local_world_size=domain, network_bytes_per_s=12.5e9)
    given = {"tables": some, "device_memory_bytes": tuple(one * MIB for one in mib), "batch_size": 1024}
    return ShardingTask.parse({**given, "topology": topology, "constraints": Constraints(**constraints)}, "task")


def table(name: str, rows: int, dim: int = 16) -> Table:
    return Table(name=name, rows=rows, dim=dim, pooling_factor=4.0)


def test_a_plan_found_under_a_limit_of_shards_can_be_read_again() -> None:
    """Over a domain rows may be split into as many shards as are allowed, if not over all devices."""
    giant = table("giant", 400_000, dim=64)
    task = task_of([giant, table("small", 100)], [20] * 16, 8, max_shards=8, min_dim=64)
    plan = search(task, Analytic("h100", 1024), SearchSettings(rounds=2, try_row_wise=True))
    assert len(plan.by_table()["giant"]) == 8
    assert Plan.from_json(plan.canonical_json(), "again") == plan
    limited = task.model_copy(update={"constraints": Constraints(max_shards=7, min_dim=64)})
    with refused(Infeasible, "'giant'"):
        search(limited, Analytic("h100", 1024), SearchSettings(rounds=2, try_row_wise=True))


def test_a_table_does_not_stay_row_wise_in_a_way_that_is_forbidden_today() -> None:
    tables = [table("rows", 10_000), table("b", 1000), table("c", 1000)]
    model = Analytic("h100", 1024)
    before = search(task_of(tables, [8] * 4, 2, tables=[TableRule(table="rows", row_wise=True)]), model, FEW)
    shards = [s for s in before.shards if s.table != "rows"]
    rows = [Shard(table="rows", row_offset=2500 * d, rows=2500, dim=16, device=d) for d in range(4)]
    before = before.model_copy(update={"shards": (*rows, *shards)})
    rule = TableRule(table="rows", row_wise=True)
    today = task_of(tables, [8] * 4, 2, tables=[rule], sharding_types=("column-wise", "table-row-wise"))
    with refused(Infeasible, "cannot stay as it is"):
        search(today, model, SearchSettings(rounds=0, move_budget_bytes=1), previous=before)
    plan = search(today, model, FEW, previous=before)
    assert len(plan.by_table()["rows"]) < 4


def test_of_very_many_tables_not_every_way_to_place_them_is_tried() -> None:
    """Each is more than half of a device, and one more than there are devices."""
    tables = [table(f"t{i}", 1000, dim=4) for i in range(1101)]
    task = task_of(tables, [1], tables=[])
    each = tables[0].memory_bytes
    task = task.model_copy(update={"device_memory_bytes": tuple([each * 3 // 2] * 1100)})
    with pytest.raises(GaveUp):
        pack(feasible(task, AnalyticModel(1024)))


def test_copies_take_of_the_move_budget() -> None:
    tables = [table("copy", 1000), table("a", 20_000), table("b", 20_000)]
    model, mib = AnalyticModel(1024), [8] * 4
    before = search(task_of(tables, mib), model, FEW)
    task = task_of(tables, mib, tables=[TableRule(table="copy", data_parallel=True)])
    arriving = 3 * tables[0].rows * tables[0].dim * tables[0].element_bytes  # their state begins anew
    with refused(Infeasible, "--move-budget"):
        search(task, model, SearchSettings(rounds=2, move_budget_bytes=arriving - 1), previous=before)
    after = search(task, model, SearchSettings(rounds=2, move_budget_bytes=arriving), previous=before)
    assert moved_bytes(before, after) == arriving


def test_where_nothing_may_move_no_table_becomes_a_copy() -> None:
    tables = drawn_tables(np.random.default_rng(0), 30, rows=(1, 7))
    task = task_of(tables, [2**16] * 16, 8).model_copy(update={"batch_size": 65536})
    model = Analytic("h100", 65536)
    before = search(task, model, SearchSettings(algorithm="size"))
    auto = SearchSettings(rounds=1, try_data_parallel=True)
    assert search(task, model, auto, previous=before).held.constraints.data_parallel
    plan = search(task, model, replace(auto, move_budget_bytes=0), previous=before)
    assert moved_bytes(before, plan) == 0


def test_other_copies_than_before_are_no_new_tables() -> None:
    tables = [table("a", 1000), table("b", 1000), table("c", 20_000)]
    model = AnalyticModel(1024)
    one, other = (task_of(tables, [8] * 2, tables=[TableRule(table=name, data_parallel=True)]) for name in "ab")
    before = search(one, model, FEW)
    after = search(other, model, FEW, previous=before)
    assert not any("new since" in note for note in after.provenance.notes)


def test_a_search_may_start_from_a_plan_of_nothing_but_todays_copies() -> None:
    tables, model = [table("a", 1000), table("b", 1000)], AnalyticModel(1024)
    before = search(task_of(tables[:1], [8] * 2), model, FEW)
    task = task_of(tables, [8] * 2, tables=[TableRule(table="a", data_parallel=True)])
    assert search(task, model, FEW, previous=before).by_table().keys() == {"a", "b"}


def test_a_copy_adds_what_its_lookups_would_beside_the_sharded_tables() -> None:
    """The costs of devices are without copies: to subtract one would be to price less than nothing."""
    hot = table("copy", 1000).model_copy(update={"pooling_factor": 400.0})
    tables = [hot, table("a", 20_000), table("b", 20_000)]
    task, model = task_of(tables, [8] * 2, tables=[TableRule(table="copy", data_parallel=True)]), Analytic("h100", 1024)
    whole = [Shard(table=name, rows=20_000, dim=16, device=device) for device, name in enumerate("ab")]
    copies = [Shard(table="copy", rows=1000, dim=16, device=device) for device in range(2)]
    prices = price_shards(model, task, (*whole, *copies))
    assert prices is not None
    copy, *sharded = model.part_vectors([Part.of(hot, copies=2), *map(Part.of, tables[1:])])
    added = [model.compute_ms(one + copy) - model.compute_ms(one) for one in sharded]
    np.testing.assert_allclose(prices.adds_ms[2:], added, rtol=1e-6)


def test_spans_that_need_more_than_a_device_has_leave_no_room_and_end() -> None:
    """`with_less_memory` may ask for more than there is, where a device has less memory than it had."""
    problem = feasible(task_of([table("a", 1000), table("b", 1000)], [1, 1]), AnalyticModel(1024))
    assert problem.with_less_memory(np.array([2 * MIB, 0])).memory.tolist() == [0, MIB]


def test_a_table_that_may_not_be_cut_and_is_wider_than_was_measured_is_placed_whole() -> None:
    model = AnalyticModel(1024)
    model.max_dim = 128
    task = task_of([table("wide", 1000, dim=160), table("b", 1000)], [1, 1], min_dim=96)
    problem = feasible(task, model)
    wide = next(g for g in range(len(problem.tables)) if any(t.name == "wide" for t in problem.tables[g]))
    assert problem.max_units[wide] == problem.all_units[wide]
    assert pack(problem) is not None


def test_no_proof_is_claimed_where_wider_shards_were_not_tried() -> None:
    model = AnalyticModel(1024)
    model.max_dim = 64
    task = task_of([table("a", 2000, dim=128), table("b", 2000, dim=128)], [1, 1])
    task = task.model_copy(update={"device_memory_bytes": (1_100_000, 990_000)})
    with refused(Infeasible, "no packing found"):
        search(task, model, FEW)
