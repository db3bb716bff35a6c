"""Tables split row-wise over all devices, where they may be: better plans, which fit where columns do not, and a bound below."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.analytic import AnalyticModel
from helpers.costs import random_model
from helpers.exhaustive import check_against_optimum, memory_of_devices, optimum_ms, pipelines, tiny_tables
from helpers.parts import wholes
from helpers.refusals import refused
from helpers.row_wise import HEAVY, split
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.launches import launches
from neuroshard.core.moves import moved_bytes, moves
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.compute_net import THRESHOLDS
from neuroshard.costmodel.features import FEATURES
from neuroshard.costmodel.given import Given, GivenCosts
from neuroshard.costmodel.pricing import launch_ms, price_shards
from neuroshard.costmodel.protocol import CostModel, device_costs
from neuroshard.files.constraints import ConstraintsFile, resolve, with_flags
from neuroshard.measure.formula import Formula
from neuroshard.models.open import open_cost_model
from neuroshard.search.notes import caveats
from neuroshard.search.problem.layout import lay_out
from neuroshard.search.problem.problem import Problem
from neuroshard.search.proposers.greedy import first_plans
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

MIXED = [(10_000 * (i % 7 + 1), 4 * (i % 5 + 1) * 4, 3.0 * i) for i in range(20)]


def row_wise(task: ShardingTask, *names: str, **rules: object) -> ShardingTask:
    """The task with permission to split these tables row-wise, or all."""
    if names:
        rules["tables"] = tuple(TableRule(table=name, row_wise=True) for name in names)
    else:
        rules["row_wise"] = True
    return ShardingTask(**{**dict(task), "constraints": Constraints(**rules)})


def plainly(plan: Plan, model: CostModel) -> np.ndarray:
    """Ms of each device, from the plan's rectangles as tables of their own."""
    by_name = {table.name: table for table in plan.task.tables}
    parts = [Part(by_name[shard.table], shard.rows, shard.dim).as_table() for shard in plan.shards]
    dims, devices = np.array([s.dim for s in plan.shards]), [s.device for s in plan.shards]
    vectors = model.part_vectors(wholes(parts))
    sums, columns = np.zeros((plan.task.devices, vectors.shape[1])), np.zeros(plan.task.devices)
    np.add.at(sums, devices, vectors)
    np.add.at(columns, devices, dims)
    counted = launches(plan.held, plan.shards)
    operators, outputs = counted.kinds_of_operators - 1, counted.outputs - 1
    launched = launch_ms(model, plan.task.devices, operators, outputs, reordered=counted.reordered)
    return np.sum(device_costs(model, sums, columns), axis=0) + launched.total_ms


def test_a_table_that_outweighs_all_else_is_split_row_wise_and_the_plan_costs_a_fraction(make_task, model):
    task = make_task(HEAVY, [1] * 8)
    plan, columns = (
        search(row_wise(task), model, SearchSettings(rounds=5)),
        search(task, model, SearchSettings(rounds=5)),
    )
    assert split(plan) == {"t0"}
    assert plan.cost_ms < 0.5 * columns.cost_ms
    assert plan.cost_ms < columns.lower_bound_ms
    assert [(s.device, s.row_offset, s.rows, s.column_offset, s.dim) for s in plan.by_table()["t0"]] == [
        (device, 12_500 * device, 12_500, 0, 16) for device in range(8)
    ]


def test_a_part_that_lies_beside_the_blocks_of_a_table_row_wise_is_bounded_with_them(make_task, model):
    shapes = [(100_000, 16, 2000.0), (1000, 4, 1500.0), *[(1000, 4, 5.0)] * 12]
    plan = search(row_wise(make_task(shapes, [1] * 8), "t0"), model, SearchSettings(rounds=5))
    assert split(plan) == {"t0"}
    assert plan.gap < 0.001


def test_without_permission_and_with_it_for_others_the_table_stays_by_columns(make_task, model):
    task = make_task(HEAVY, [1] * 8)
    assert split(search(task, model, SearchSettings(rounds=2))) == set()
    assert "t0" not in split(search(row_wise(task, "t1", "t2"), model, SearchSettings(rounds=2)))
    assert split(search(row_wise(task, "t0"), model, SearchSettings(rounds=2))) == {"t0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [AnalyticModel(), random_model(5), random_model(5, rates=len(THRESHOLDS)), Analytic("h100", 65536), Formula(65536)],
    ids=lambda model: type(model).__name__,
)
def test_a_plan_costs_what_the_model_says_of_its_rectangles_and_is_hardly_worse_than_by_columns(make_task, model):
    task = make_task([(100_000, 16, 400.0), *MIXED], [1] * 5)
    plan, columns = (
        search(row_wise(task), model, SearchSettings(rounds=4)),
        search(task, model, SearchSettings(rounds=4)),
    )
    np.testing.assert_allclose(plan.predicted_ms, plainly(plan, model), rtol=1e-9)
    assert plan.cost_ms <= columns.cost_ms * 1.001
    assert plan.lower_bound_ms is None or plan.lower_bound_ms <= plan.cost_ms
    again = search(row_wise(task), model, SearchSettings(rounds=4))
    assert again.canonical_json() == plan.canonical_json()


def test_where_no_rows_can_be_split_the_plan_is_that_of_columns(make_task, model):
    """One device; and tables with too few rows for a block on each device."""
    for shapes, devices in (([(1000, 16, 9.0)] * 3, 1), ([(9, 16, 900.0), (10, 8, 5.0)], 8)):
        task = make_task(shapes, [1] * devices)
        plan, columns = (
            search(row_wise(task), model, SearchSettings(rounds=2)),
            search(task, model, SearchSettings(rounds=2)),
        )
        assert plan.shards == columns.shards
        assert plan.provenance.notes == columns.provenance.notes
        assert plan.lower_bound_ms == columns.lower_bound_ms


def test_all_tables_may_be_row_wise_at_once(make_task, model):
    plan = search(row_wise(make_task([(10_000, 4, 3000.0)] * 3, [1] * 6)), model, SearchSettings(rounds=3))
    assert split(plan) == {"t0", "t1", "t2"}
    assert len(plan.shards) == 18


def test_the_last_block_is_smaller_and_weighted_half_precision_tables_are_split_but_no_means(model):
    tables = tuple(
        Table(name=pooling, rows=1001, dim=8, pooling_factor=lookups, element_bytes=2, pooling=pooling, weighted=True)
        for pooling, lookups in (("sum", 900.0), ("mean", 300.0))
    )
    task = ShardingTask(tables=tables, device_memory_bytes=(2**30,) * 4, batch_size=65536)
    plan = search(row_wise(task), model, SearchSettings(rounds=3))
    assert split(plan) == {"sum"}
    assert [shard.rows for shard in plan.by_table()["sum"]] == [251, 251, 251, 248]


def test_rows_rescue_what_columns_cannot_fit(make_task, model):
    shapes = [(2**29, 4, 1.0)] * 3
    task = make_task(shapes, [18, 18])
    plan = search(row_wise(task), model, SearchSettings(rounds=1))
    assert max(plan.memory_bytes()) <= 18 * 2**30
    assert split(plan)
    with refused(Infeasible, "'t0'", "--row-wise"):
        search(task, model)
    with refused(Infeasible, "'t0'", "has a shard that no device can hold", "--row-wise"):
        search(make_task([(2**30, 8, 1.0)], [16] * 4), model)
    assert split(search(row_wise(make_task([(2**30, 8, 1.0)], [16] * 4)), model)) == {"t0"}


def test_tables_wider_than_the_model_has_seen_stay_by_columns_and_the_plan_says_so(make_task, model):
    wide = make_task([(100_000, 256, 20.0), *HEAVY], [1] * 8)
    plan = search(row_wise(wide), model, SearchSettings(rounds=1))
    assert split(plan) == {"t1"}
    assert (
        "1 table that may be split row-wise stayed column-wise: wider (up to 256 columns) than the 128 that the cost model has "
        "seen; augment with --max-dim 256, measure and pretrain again"
    ) in plan.provenance.notes
    for task in (wide, row_wise(wide, "t1"), row_wise(make_task(HEAVY, [1] * 8))):
        assert not any(
            "stayed column-wise" in note for note in search(task, model, SearchSettings(rounds=0)).provenance.notes
        )


def test_blocks_fit_the_smallest_device_or_are_not_made(make_task, model):
    task = make_task(HEAVY, [1, 1, 1, 1, 1, 1, 1, 0.0005])
    plan = search(row_wise(task), model, SearchSettings(rounds=3))
    assert max(np.array(plan.memory_bytes()) - task.device_memory_bytes) <= 0
    assert split(plan) == set()


@st.composite
def tasks(draw: st.DrawFn) -> ShardingTask:
    """Few tables, some of which may be split row-wise, on two or three devices with little memory to spare, or too little."""
    chosen = draw(st.lists(tiny_tables, min_size=1, max_size=3, unique_by=lambda table: table.name))
    shares = draw(st.lists(st.floats(0.5, 1), min_size=2, max_size=3))
    pipeline = draw(pipelines)
    rules = tuple(
        TableRule(
            table=table.name,
            min_dim=draw(st.none() | st.sampled_from([4, 8])),
            row_wise=draw(st.none() | st.booleans()),
        )
        for table in chosen
    )
    return ShardingTask(
        tables=tuple(chosen),
        device_memory_bytes=memory_of_devices(draw, chosen, shares, 1024, pipeline),
        batch_size=1024,
        pipeline=pipeline,
        constraints=Constraints(tables=rules, row_wise=draw(st.booleans())),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(task=tasks())
def test_a_plan_is_found_wherever_there_is_one_and_the_bound_is_below_the_optimum(task):
    check_against_optimum(task)


@pytest.mark.slow
def test_on_nearly_all_tiny_tasks_the_plan_is_the_optimum(make_task, model):
    rng = np.random.default_rng(0)
    ratios, rows = [], 0
    for _ in range(15):
        devices = int(rng.integers(2, 4))
        shapes = [
            (int(rng.integers(1, 9)) * 10**4, 4 * int(rng.integers(1, 4)), 10 ** rng.uniform(0, 3)) for _ in range(3)
        ]
        gib = sum(t.memory_bytes for t in make_task(shapes, [1]).tables) / devices * rng.uniform(1.2, 2) / 2**30
        task = row_wise(make_task(shapes, [gib] * devices))
        plan = search(task, model, SearchSettings(rounds=40))
        ratios.append(plan.cost_ms / optimum_ms(task, model))
        rows += bool(split(plan))
    assert rows > 5
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1.05
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.7


def test_a_plan_with_rows_says_what_its_costs_rest_on(make_task, model):
    plan = search(row_wise(make_task(HEAVY, [1] * 8)), model, SearchSettings(rounds=1))
    assert (
        "1 table of 13 split row-wise over all 8 devices: costs take all rows of a table to be looked up alike, and the "
        "reduce-scatter of its sums to take as long as an all-to-all of as many bytes"
    ) in plan.provenance.notes
    assert "block of rows" in plan.bound_assumptions[1]


def test_heuristics_and_the_published_search_stay_by_columns_and_say_so(make_task, model):
    task = row_wise(make_task(HEAVY, [1] * 4))
    for algorithm in ("neuroshard-2023", "size"):
        plan = search(task, model, SearchSettings(algorithm=algorithm))
        assert split(plan) == set()
        assert f"{algorithm} splits tables column-wise only, not row-wise" in plan.provenance.notes


def test_given_costs_do_not_tell_of_rows(make_task):
    task = row_wise(make_task(HEAVY, [1] * 4))
    costs = GivenCosts.parse({"tables": [{"name": t.name, "cost_ms": 1.0} for t in task.tables]}, "here")
    with refused(UsageError, "given costs", "--row-wise"):
        search(task, Given(costs, 65536))


@pytest.mark.usefixtures("ticking")
def test_a_time_budget_is_kept_with_the_best_so_far(make_task, model):
    plan = search(row_wise(make_task([*HEAVY, *MIXED], [1] * 8)), model, SearchSettings(time_budget_s=0.3))
    assert "t0" in split(plan)


def test_from_a_plan_with_rows_these_stay_where_they_may_and_are_dealt_out_anew_where_not(make_task, model):
    task = make_task([*HEAVY, *MIXED], [1] * 4)
    old = search(row_wise(task), model, SearchSettings(rounds=1))
    assert "t0" in split(old)
    same = search(row_wise(task), model, SearchSettings(rounds=3, move_budget_bytes=1), previous=old)
    assert moves(old, same) == ()
    assert same.cost_ms <= old.cost_ms * (1 + 1e-12)
    budget = 2**21
    some = search(row_wise(task), model, SearchSettings(rounds=6, move_budget_bytes=budget), previous=old)
    assert moved_bytes(old, some) <= budget

    columns = search(task, model, SearchSettings(rounds=2), previous=old)
    assert split(columns) == set()
    assert any(
        "split row-wise in the plan to start from, and placed anew (" in note for note in columns.provenance.notes
    )
    needed = min(moved_bytes(old, columns), 2**24)
    with refused(Infeasible, "1 B", "--row-wise"):
        search(task, model, SearchSettings(rounds=2, move_budget_bytes=1), previous=old)
    freed = search(task, model, SearchSettings(rounds=2, move_budget_bytes=2**30), previous=old)
    assert needed <= moved_bytes(old, freed) <= 2**30


def test_from_a_plan_by_columns_rows_are_split_within_the_budget(make_task, model):
    task = make_task(HEAVY, [1] * 8)
    old = search(task, model, SearchSettings(rounds=1))
    little = search(row_wise(task), model, SearchSettings(rounds=10, move_budget_bytes=1000), previous=old)
    assert split(little) == set()
    enough = search(row_wise(task), model, SearchSettings(rounds=10, move_budget_bytes=2**24), previous=old)
    assert split(enough) == {"t0"}
    assert 0 < moved_bytes(old, enough) <= 2**24


def test_a_budget_too_small_to_place_all_tables_anew_still_lets_one_be_split_row_wise(make_task, model):
    """Greedy plans place all tables anew, which is above the budget; only a toggle changes one table of the current plan."""
    task = make_task([*HEAVY, *[(20_000, 32, 20.0 + i) for i in range(10)]], [1] * 4)
    old = search(task, model, SearchSettings(rounds=1))
    found = search(row_wise(task), model, SearchSettings(rounds=10, move_budget_bytes=2**23), previous=old)
    assert split(found) == {"t0"}
    assert 0 < moved_bytes(old, found) <= 2**23
    assert found.cost_ms < old.cost_ms / 2


@pytest.mark.parametrize(
    ("rules", "facts"),
    [
        (
            {"tables": [{"table": "t0", "row_wise": True, "devices": [0, 1]}]},
            ["'t0'", "row-wise", "3 devices", "pinned to 2"],
        ),
        ({"tables": [{"table": "t0", "row_wise": True, "max_shards": 1}]}, ["'t0'", "row-wise", "1 shard"]),
        ({"max_shards": 2, "tables": [{"table": "t0", "row_wise": True}]}, ["'t0'", "row-wise", "2 shards"]),
        ({"max_shards": 2, "row_wise": True}, ["all tables", "row-wise", "3 devices", "2 shards"]),
        ({"together": [["t0", "t1"]], "tables": [{"table": "t1", "row_wise": True}]}, ["'t1'", "row-wise", "together"]),
        ({"tables": [{"table": "nobody", "row_wise": True}]}, ["'nobody'"]),
    ],
)
def test_permissions_that_contradict_are_reported_in_one_line(make_task, rules, facts):
    data = {**make_task(HEAVY, [1, 1, 1]).model_dump(), "constraints": rules}
    with refused(InvalidInput, "here", *facts):
        ShardingTask.parse(data, "here")


def test_permission_for_all_yields_to_the_rules_of_single_tables(make_task):
    task = make_task(HEAVY[:6], [1, 1])
    flags = with_flags(ConstraintsFile(), never_split=["t0"], pin=["t1=0"], together=["t2,t3"], row_wise=["*"])
    constraints = resolve(flags, task.tables, "here")
    assert constraints.may_split_rows(task.tables, 2) == ["t4", "t5"]
    assert constraints.may_split_rows(task.tables, 1) == []
    not_t4 = with_flags(ConstraintsFile.parse({"tables": [{"match": "t4", "row_wise": False}]}, "x"), row_wise=["*"])
    assert "t4" not in resolve(not_t4, task.tables, "here").may_split_rows(task.tables, 2)


def test_patterns_that_match_nothing_or_contradict_are_reported(make_task):
    task = make_task(HEAVY[:3], [1, 1])
    with refused(InvalidInput, "here", "'user_*'"):
        resolve(with_flags(ConstraintsFile(), row_wise=["user_*"]), task.tables, "here")
    never = ConstraintsFile.parse({"tables": [{"match": "t*", "row_wise": False}]}, "x")
    with refused(InvalidInput, "here", "'t*'", "'t1'", "row_wise False and True"):
        resolve(with_flags(never, row_wise=["t1"]), task.tables, "here")
    with refused(InvalidInput, "x", "'t0'", "row-wise"):
        ConstraintsFile.parse({"tables": [{"match": "t0", "split": False, "row_wise": True}]}, "x")


def test_what_was_written_before_there_were_rows_keeps_its_digest(make_task):
    task = make_task(HEAVY[:2], [1, 1])
    data = {**task.model_dump(), "constraints": {"tables": [{"table": "t0", "max_shards": 2}], "min_dim": 8}}
    written = json.loads(ShardingTask.parse(data, "here").canonical_json())["constraints"]
    assert "row_wise" not in written
    assert written["tables"][0].keys() == {"table", "devices", "min_dim", "max_shards"}
    read = ShardingTask.parse(json.loads(row_wise(task, "t0").canonical_json()), "here")
    assert read == row_wise(task, "t0")


def test_blocks_unlike_all_that_the_cost_model_saw_are_reported(make_task):
    model = random_model(4)
    seen = replace(model.nets.compute.scale, low=np.full_like(model.nets.compute.scale.low, -100.0))
    low = seen.low.copy()
    low[FEATURES.index("log2_rows")] = np.log2(50_000)
    known = replace(seen, low=low, high=np.full_like(low, 100.0))
    model = replace(model, nets=replace(model.nets, compute=replace(model.nets.compute, scale=known)))
    task = make_task([(60_000, 16, 3.0)] * 8, [1] * 4)
    problem = Problem(row_wise(task), model)
    there = problem.with_spread(np.array([2, 5]), np.array([0, 0]))
    assert there is not None
    by_hand = Provenance(neuroshard_version="0", algorithm="by hand")
    plans = [Plan(task=task, shards=lay_out(first_plans(one, 1)[0]), provenance=by_hand) for one in (problem, there)]
    said = [[note for note in caveats(plan, model) if "have 15,000 rows" in note] for plan in plans]
    assert [len(notes) for notes in said] == [0, 1]
    assert said[1][0].startswith("2 of 8 tables have 15,000 rows")


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_sequence_in_unequal_blocks_costs_what_its_plan_is_priced_at(devices: int) -> None:
    sequence = Table(name="s", rows=2 * devices - 1, dim=128, pooling_factor=20.0, pooling="none")
    pooled = Table(name="p", rows=100_000, dim=64, pooling_factor=3.0)
    task = ShardingTask(
        tables=(sequence, pooled),
        device_memory_bytes=(2**35,) * devices,
        batch_size=8192 * devices,
        constraints=Constraints(tables=(TableRule(table="s", row_wise=True),)),
    )
    model = open_cost_model("analytic:h100", task.batch_size)
    plan = search(task, model)
    prices = price_shards(model, task, plan.shards)
    assert prices is not None
    assert len(plan.by_table()["s"]) == devices
    assert plan.cost_ms == pytest.approx(float(prices.total_ms.max()))
    assert (plan.lower_bound_ms or 0.0) <= plan.cost_ms * (1 + 1e-9)
