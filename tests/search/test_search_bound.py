"""The bound that every plan carries: it is below the optimum, and says what it rests on."""

import numpy as np

from helpers.work import python_steps
from neuroshard.report.text import plan_text
from neuroshard.search.bound.lower_bound import NOT_BOUNDED
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings


def test_equal_tables_that_divide_evenly_are_proven_optimal_and_not_perturbed(make_task, model, monkeypatch):
    monkeypatch.setattr(LocalSearch, "_perturbed", None)
    plan = search(make_task([(1000, 64, 20.0)] * 8, [1] * 4), model, SearchSettings(rounds=3))
    assert plan.lower_bound_ms == plan.cost_ms or abs(plan.gap) < 1e-9
    assert "at most 0.0% to gain" in plan_text(plan)


def test_a_table_that_may_not_be_cut_is_a_bound_by_itself(make_task, model):
    task = make_task([(1000, 128, 200.0), (1000, 4, 0.1)], [1] * 2)
    whole = task.model_copy(update={"constraints": task.constraints.model_copy(update={"max_shards": 1})})
    plan, free = search(whole, model, SearchSettings(rounds=3)), search(task, model, SearchSettings(rounds=3))
    assert free.cost_ms < plan.lower_bound_ms
    assert plan.gap < 0.2


def test_a_table_that_outweighs_all_others_is_a_bound_with_its_share_of_both_all_to_alls(make_task, model):
    shapes = [(1000, 4, 9000.0), *[(1000, 32, 5.0)] * 24]
    plan = search(make_task(shapes, [1] * 8), model, SearchSettings(rounds=3))
    assert plan.gap < 0.001


def test_cutting_a_heavy_table_finer_than_pays_is_no_way_out(make_task, model):
    """Every part has all the lookups of the whole: parts that are short enough are too many for all devices together."""
    shapes = [(1000, 64, 4000.0), *[(1000, 16, 30.0)] * 40]
    plan = search(make_task(shapes, [1] * 4), model, SearchSettings(rounds=5))
    assert plan.gap < 0.03


def test_the_gap_is_small_where_there_is_much_to_balance(make_task, model):
    rng = np.random.default_rng(0)
    shapes = [(1000, int(rng.integers(1, 17)) * 4, rng.uniform(0, 30)) for _ in range(40)]
    assert search(make_task(shapes, [1] * 4), model, SearchSettings(rounds=10)).gap < 0.03


def test_of_a_model_that_is_not_known_to_grow_nothing_is_claimed(make_task, model):
    model.bounded = False
    plan = search(make_task([(1000, 64, 20.0)] * 8, [1] * 4), model, SearchSettings(rounds=0))
    assert (plan.lower_bound_ms, plan.gap, plan.bound_assumptions) == (None, None, (NOT_BOUNDED,))
    assert NOT_BOUNDED in plan_text(plan)


def test_one_device_leaves_nothing_to_gain(make_task, model):
    plan = search(make_task([(1000, 64, 20.0), (10, 8, 1.0)], [1]), model)
    assert plan.gap < 1e-9


def test_a_table_of_2048_columns_on_64_devices_does_not_hold_up_the_bound(make_task, model):
    rng = np.random.default_rng(0)
    shapes = [(1000, 4 * width, rng.uniform(1, 100)) for width in (*range(480, 513), *range(1, 64))]
    task = make_task(shapes, [16] * 64)
    found = []
    steps = python_steps(lambda: found.append(search(task, model, SearchSettings(algorithm="size"))))
    assert steps < 1_000_000  # 0.1 million today; many more where every limit on parts is counted for every width
    [plan] = found
    assert 0 < plan.lower_bound_ms < plan.cost_ms
