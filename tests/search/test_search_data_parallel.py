"""Tables of which every device has a copy: placed by rule, priced apart, and what cannot be copied refused."""

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible, InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.pricing import copies_ms, price_shards
from neuroshard.search.run import SearchSettings, search

SHAPES = [(100_000, 16, 30.0), (50_000, 32, 5.0), (20, 8, 1.0), (7, 64, 2.0), (80_000, 8, 12.0)]
COPIED = ("t2", "t3")
FEW = SearchSettings(rounds=2)


def copied(task: ShardingTask, *names: str) -> ShardingTask:
    rules = tuple(TableRule(table=name, data_parallel=True) for name in names)
    return ShardingTask.parse({**task.model_dump(), "constraints": Constraints(tables=rules)}, "task")


@pytest.mark.parametrize("model", [AnalyticModel(), Analytic("h100", 65536)], ids=["test", "h100"])
def test_every_device_has_a_copy_and_the_plan_costs_what_its_shards_are_priced_at(make_task, model):
    task = copied(make_task(SHAPES, [1] * 3), *COPIED)
    plan = search(task, model, FEW)
    tables = {table.name: table for table in task.tables}
    prices = price_shards(model, task, plan.shards)

    for name in COPIED:
        assert sorted((s.device, s.rows, s.dim) for s in plan.by_table()[name]) == [
            (device, tables[name].rows, tables[name].dim) for device in range(3)
        ]
    np.testing.assert_allclose(plan.predicted_ms, prices.total_ms, rtol=1e-9)
    assert plan.lower_bound_ms <= plan.cost_ms
    assert Plan.from_json(plan.canonical_json(), "again") == plan


def test_the_other_tables_lie_as_without_the_copied_ones_and_all_costs_are_as_much_more(make_task):
    model = AnalyticModel()
    task = copied(make_task(SHAPES, [1] * 3), *COPIED)
    others = [shape for place, shape in enumerate(SHAPES) if f"t{place}" not in COPIED]
    alone, plan = search(make_task(others, [1] * 3), model, FEW), search(task, model, FEW)
    more = copies_ms(model, [table for table in task.tables if table.name in COPIED], task).total_ms

    assert more > 0
    assert plan.cost_ms == pytest.approx(alone.cost_ms + more)
    assert plan.lower_bound_ms == pytest.approx(alone.lower_bound_ms + more)
    assert [b.cost_ms for b in plan.baselines] == pytest.approx([b.cost_ms + more for b in alone.baselines])
    assert sorted(s.device for s in plan.shards if s.table not in COPIED) == sorted(s.device for s in alone.shards)


def test_a_copy_takes_weights_state_and_a_dense_gradient_of_every_device(make_task):
    task = copied(make_task([(1000, 16, 3.0), (1000, 8, 1.0)], [1, 1]), "t1")
    plan, copy = search(task, AnalyticModel(), FEW), task.tables[1]
    others = sum(task.tables[0].shard_bytes(shard.rows, shard.dim) for shard in plan.by_table()["t0"])
    assert sum(plan.memory_bytes()) - others == 2 * (copy.memory_bytes + copy.rows * copy.dim * 4)


def test_a_search_may_start_from_a_plan_in_which_the_table_was_not_copied_yet(make_task):
    model = AnalyticModel()
    task = make_task(SHAPES, [1] * 3)
    before = search(task, model, FEW)
    after = search(copied(task, *COPIED), model, FEW, previous=before)
    back = search(task, model, FEW, previous=after)
    assert {s.table for s in after.shards} == {s.table for s in back.shards} == {t.name for t in task.tables}
    assert len(back.by_table()["t2"]) == 1


def test_copies_that_fit_no_device_or_leave_nothing_to_place_are_refused(make_task):
    task = make_task([(10_000_000, 64, 1.0), (1000, 8, 1.0)], [1, 1])
    with refused(Infeasible, "data-parallel", "1.0 GiB"):
        search(copied(task, "t0"), AnalyticModel(), FEW)
    with refused(Infeasible, "every table"):
        search(copied(make_task([(1000, 8, 1.0)], [1, 1]), "t0"), AnalyticModel(), FEW)


def test_a_sequence_a_pin_or_company_cannot_be_copied(make_task):
    task = make_task(SHAPES, [1] * 3)
    sequence = task.tables[2].model_copy(update={"pooling": "none"})
    with refused(InvalidInput, "'t2'", "sequence"):
        copied(task.model_copy(update={"tables": (*task.tables[:2], sequence)}), "t2")
    for rules in (
        {"tables": [{"table": "t0", "data_parallel": True, "devices": [0]}]},
        {"tables": [{"table": "t0", "data_parallel": True, "row_wise": True}]},
        {"tables": [{"table": "t0", "data_parallel": True}], "together": [["t0", "t1"]]},
    ):
        with refused(InvalidInput, "'t0'", "data-parallel"):
            ShardingTask.parse({**task.model_dump(), "constraints": rules}, "task")


def test_a_plan_with_too_few_copies_is_refused(make_task):
    plan = search(copied(make_task(SHAPES, [1] * 3), "t2"), AnalyticModel(), FEW)
    one = plan.by_table()["t2"][1]
    for shards in ([shard for shard in plan.shards if shard != one], (*plan.shards, one)):
        with refused(InvalidInput, "data-parallel"):
            Plan.parse({**plan.model_dump(), "shards": shards}, "plan")
