"""First plans: greedy placements by the cost model, under several caps on columns."""

from dataclasses import replace

import numpy as np
import pytest

from neuroshard.costmodel.analytic import Analytic
from neuroshard.search import algorithms
from neuroshard.search.algorithms import find
from neuroshard.search.asked import Asked
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.problem.column_shards import Placement
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.greedy import first_plans
from neuroshard.search.proposers.lockstep import costliest_first, place_lists
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tuning import TUNING
from neuroshard.search.watch import Watch


@pytest.mark.parametrize(("devices", "alone"), [(4, 1), (8, 1), (8, 2), (5, 0)])
def test_beside_pieces_that_outweigh_all_else_the_other_devices_hold_as_few_columns_as_they_can(
    make_task, model, devices, alone
):
    small = [(1000, 16, 1.0 + number % 7) for number in range(12 * devices)]
    problem = Problem(make_task([(1000, 4, 4000.0 + number) for number in range(alone)] + small, [8] * devices), model)

    plan = first_plans(problem, 1)[0]

    holders = plan.widths[:alone].argmax(axis=1)
    assert len(set(holders.tolist())) == alone
    assert plan.dims[holders].tolist() == [4] * alone
    assert plan.dims.max() < 12 * devices * 16 / (devices - alone) + 16  # less than a table above their mean


def test_first_plans_of_few_shards_ask_once_about_all(make_task, model, monkeypatch):
    asked = list[int]()
    part_vectors = type(model).part_vectors
    monkeypatch.setattr(type(model), "part_vectors", lambda *args: asked.append(len(args[1])) or part_vectors(*args))
    problem = Problem(make_task([(1000, 64, 1.0)] * 30, [8] * 4), model)

    first_plans(problem, 1)

    assert asked == [30 * 64 // 4]


def test_first_plans_of_many_shards_ask_of_no_widths_but_those_that_they_try(make_task, model):
    problem = Problem(make_task([(1000, 64, 1.0)] * 100, [8] * 4), model)

    first_plans(problem, 1)

    assert problem.vectors[problem.whole].all(axis=1).all()
    assert not problem.vectors[problem.first + 3].any()  # 12 of 64 columns: no halves
    problem.price_rest()
    assert problem.vectors[problem.first + 3].all(axis=1).all()


def test_first_plans_differ_and_come_cheapest_first(make_task, model):
    problem = Problem(make_task([(1000, 64, 9.0 * i) for i in range(30)], [8] * 4), model)

    plans = first_plans(problem, 3)

    costs = [plan.cost for plan in plans]
    assert len({plan.widths.tobytes() for plan in plans}) == 3
    assert costs == sorted(costs)


def test_first_plans_are_there_where_no_device_may_hold_more_than_its_share_of_columns(make_task, model):
    problem = Problem(make_task([(1000, 128, 1.0)] * 3, [8] * 2), model)

    plan = first_plans(problem, 1)[0]

    assert plan.widths.sum(axis=1).tolist() == [32] * 3
    assert np.abs(np.diff(plan.dims)) <= 64


def test_of_many_equal_tables_none_is_halved(make_task, model):
    """All would be halved together, six times: plans of 16,000 shards, each of which takes half a minute to improve."""
    problem = Problem(make_task([(1000, 64, 1.0)] * 90, [8] * 9), model)
    assert all(plan.cuts == 0 for plan in first_plans(problem, 6))
    few = Problem(make_task([(1000, 64, 1.0)] * 11, [8] * 9), model)
    assert any(plan.cuts for plan in first_plans(few, 6))


def test_plans_counted_together_are_what_each_is_by_itself(make_task, model):
    problem = Problem(make_task([(1000, 64, 9.0 * i) for i in range(30)], [8] * 4), model)
    widths = [plan.widths for plan in first_plans(problem, 3)]

    together, alone = State.each(problem, widths), [State(problem, one) for one in widths]

    for name in ("cost", "sums", "dims", "free", "compute", "forward", "backward", "shards"):
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-12)


def test_a_list_of_shards_costs_as_much_placed_as_the_plan_that_it_makes(make_task):
    """The costliest tables are the narrowest: the slowest device of one all-to-all is not that of the other."""
    model = Analytic("h100", 65536)
    problem = Problem(make_task([(1000, 4 * 2**i, 400.0 / 2**i) for i in range(6)], [8] * 3), model)
    lists = costliest_first(problem, [problem.whole])
    placed, costs = place_lists(problem, lists, np.array([np.inf]))
    assert costs[0, 0] == pytest.approx(State(problem, problem.widths(Placement(lists[0], placed.devices[0, 0]))).cost)


@pytest.mark.parametrize(("cells", "alone"), [(TUNING.lockstep_cells, False), (1, True)])
def test_where_plans_are_improved_one_by_one_a_search_starts_from_the_cheapest(
    make_task, model, monkeypatch, cells, alone
):
    rng, counts = np.random.default_rng(0), []

    class Told(LocalSearch):
        def __init__(self, starts, *args, **kwargs):
            counts.append(len(starts))
            super().__init__(starts, *args, **kwargs)

    monkeypatch.setattr(algorithms, "LocalSearch", Told)
    shapes = [(1000, int(rng.integers(1, 17)) * 4, rng.uniform(0, 30)) for _ in range(12)]
    task = make_task(shapes, [8] * 4)
    problem = Problem(task, model, replace(TUNING, lockstep_cells=cells))
    find(problem, Asked.of(task, model, SearchSettings(rounds=0), Watch()))
    assert (max(counts) == 1) == alone
