"""Row-wise tables are tried where nobody says which may be so, and found only where they are worth it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from helpers.refusals import refused
from helpers.row_wise import HEAVY, split
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.moves import moves
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.given import Given, GivenCosts
from neuroshard.files.constraints import ConstraintsFile, with_flags
from neuroshard.orders.search import SearchOrder
from neuroshard.search import algorithms
from neuroshard.search.run import run, search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.watch import Watch

pytestmark = pytest.mark.slow

TRIES = SearchSettings(rounds=20, try_row_wise=True)


@pytest.fixture
def heavy(make_task) -> ShardingTask:
    return make_task(HEAVY, [1.0] * 4)


def test_a_table_that_outweighs_all_else_is_split_row_wise_though_nobody_asked(heavy, model):
    plan = search(heavy, model, TRIES)
    assert split(plan) == {"t0"}
    assert plan.task == heavy
    assert plan.cost_ms < 0.9 * search(heavy, model, replace(TRIES, try_row_wise=False)).cost_ms
    assert plan.lower_bound_ms <= plan.cost_ms


@pytest.mark.parametrize("seed", range(3))
def test_where_rows_save_nothing_a_plan_is_as_cheap_as_that_of_a_column_wise_search(make_task, seed):
    rng = np.random.default_rng(seed)
    shapes = [(int(10 ** rng.uniform(4, 6)), int(rng.choice([32, 64, 128])), rng.uniform(1, 20)) for _ in range(40)]
    task, model = make_task(shapes, [4.0] * 4), analytic_model("h100", 65536)
    tried, plain = (search(task, model, replace(TRIES, seed=seed, try_row_wise=so)) for so in (True, False))
    assert tried.cost_ms == pytest.approx(plain.cost_ms, rel=2e-3)
    assert split(plain) == set()


def test_column_wise_plans_are_improved_before_row_wise_ones_are_made(make_task, model, monkeypatch):
    class Made(Exception):
        pass

    def making(*_):
        raise Made

    costs_ms: list[float] = []
    monkeypatch.setattr(algorithms, "row_wise_plans", making)
    shapes = [(1000 * n, 64, 1.0 + n % 7) for n in range(1, 40)]
    with pytest.raises(Made):
        search(
            make_task(shapes, [8.0] * 4), model, TRIES, watch=Watch(on_improvement=lambda _, ms: costs_ms.append(ms))
        )
    assert len(costs_ms) > 1


def test_a_task_that_fits_only_with_rows_split_has_a_plan(make_task, model):
    task = make_task([(40_000_000, 4, 5.0), (1000, 16, 5.0)], [0.5] * 4)
    with refused(Infeasible, "--row-wise"):
        search(task, model, replace(TRIES, try_row_wise=False))
    assert "t0" in split(search(task, model, TRIES))


def test_from_a_plan_with_rows_split_they_stay_so(heavy, model):
    old = search(heavy, model, TRIES)
    same = search(heavy, model, replace(TRIES, move_budget_bytes=1), previous=old)
    assert moves(old, same) == ()
    assert split(same) == {"t0"}
    assert split(search(heavy, model, TRIES, previous=old)) == {"t0"}


def test_a_table_that_had_no_rows_for_blocks_on_all_devices_and_has_them_now_may_be_split(heavy, model):
    few, more = (heavy.tables[0].model_copy(update={"rows": rows, "name": "few"}) for rows in (3, 10))
    before, after = (heavy.model_copy(update={"tables": (table, *heavy.tables)}) for table in (few, more))
    old = search(before.with_copies(["few"]), model, replace(TRIES, rounds=1))
    assert "few" in search(after, model, replace(TRIES, rounds=1), previous=old).by_table()


def test_tables_pooled_by_mean_are_named_and_stay(heavy, model):
    tables = (heavy.tables[0].model_copy(update={"pooling": "mean"}), *heavy.tables[1:])
    task, named = heavy.model_copy(update={"tables": tables}), "1 table pooled by mean not split row-wise (t0): "
    allowed = task.model_copy(update={"constraints": Constraints(row_wise=True)})
    for plan in (search(task, model, TRIES), search(allowed, model, SearchSettings(rounds=4))):
        assert "t0" not in split(plan)
        assert any(note.startswith(named) for note in plan.provenance.notes)
    assert not any("by mean" in note for note in search(task, model, SearchSettings(rounds=4)).provenance.notes)


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(max_shards=2),
        Constraints(tables=(TableRule(table="t0", row_wise=False),)),
        Constraints(tables=(TableRule(table="t0", max_shards=1),)),
        Constraints(tables=(TableRule(table="t0", devices=(0, 1, 2)),)),
        Constraints(together=(("t0", "t1"),)),
    ],
)
def test_rules_that_keep_a_table_from_it_hold(heavy, model, constraints):
    assert split(search(heavy.model_copy(update={"constraints": constraints}), model, TRIES)) == set()


def test_where_rules_allow_some_tables_no_others_are_tried(heavy, model):
    some = Constraints(tables=(TableRule(table="t1", row_wise=True),))
    assert "t0" not in split(search(heavy.model_copy(update={"constraints": some}), model, TRIES))


@pytest.mark.parametrize("algorithm", ["neuroshard-2023", "size"])
def test_other_algorithms_try_no_rows_and_do_not_mention_it(heavy, model, algorithm):
    plan = search(heavy, model, replace(TRIES, algorithm=algorithm))
    assert plan.provenance.notes == ()
    assert plan.task == heavy


def test_given_costs_are_of_whole_tables_and_no_rows_are_tried(heavy):
    costs = [{"name": table.name, "cost_ms": table.pooling_factor} for table in heavy.tables]
    model = Given(GivenCosts.parse({"tables": costs, "fixed_ms": 3.0}, "test"), heavy.batch_size)
    assert split(search(heavy, model, TRIES)) == set()


def test_from_files_rows_are_tried_unless_the_constraints_say_otherwise(tmp_path, heavy):
    (tmp_path / "tables.json").write_text(json.dumps({"tables": [table.model_dump() for table in heavy.tables]}))

    def found(constraints: ConstraintsFile) -> set[str]:
        given = {"devices": 4, "memory": "24GiB", "batch_size": 65536, "rounds": 8}  # a step of t0 takes 16 GiB
        order = replace(SearchOrder.of(given), constraints=constraints)
        return split(run(tmp_path / "tables.json", "analytic:h100", tmp_path / "plan.json", order))

    assert found(ConstraintsFile()) == {"t0"}
    assert found(ConstraintsFile(min_dim=8)) == {"t0"}
    assert found(with_flags(ConstraintsFile(), no_row_wise=True)) == set()
    assert found(ConstraintsFile(row_wise=False)) == set()
    assert found(with_flags(ConstraintsFile(), row_wise=["t1*"])) <= {"t1", "t10", "t11", "t12"}


def test_row_wise_and_no_row_wise_contradict_each_other():
    with refused(UsageError, "--row-wise", "'t*'", "--no-row-wise"):
        with_flags(ConstraintsFile(), row_wise=["t*"], no_row_wise=True)
