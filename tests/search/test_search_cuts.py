"""The price for cuts: of plans about as cheap the one with the fewest, which moves no more than it would without that rule."""

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import UsageError
from neuroshard.core.moves import moved_bytes, moves
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.search.improve import fewer_cuts as fewer_cuts_module
from neuroshard.search.improve.fewer_cuts import fewer_cuts, simplest
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.watch import Watch

CHEAPEST = SearchSettings(rounds=6, simplicity=0)
SIMPLE = SearchSettings(rounds=6)


def cuts(plan: Plan) -> int:
    return len(plan.shards) - len(plan.task.tables)


def drawn(make_task, seed: int, devices: int = 8, tables: int = 16) -> ShardingTask:
    rng = np.random.default_rng(seed)
    shapes = [(int(10 ** rng.uniform(3, 6)), int(rng.integers(1, 33)) * 4, rng.uniform(0, 100)) for _ in range(tables)]
    return make_task(shapes, [4.0] * devices)


@pytest.mark.parametrize("seed", [1, 3, 6, 7])
def test_fewer_cuts_cost_at_most_the_simplicity(make_task, model, seed):
    task = drawn(make_task, seed, tables=24)
    cheapest, simple = (search(task, model, settings) for settings in (CHEAPEST, SIMPLE))
    assert simple.cost_ms <= cheapest.cost_ms * 1.005
    assert simple.cost_ms <= min(one.cost_ms for one in simple.baselines if one.cost_ms is not None)
    assert cuts(simple) < cuts(cheapest)
    assert search(task, model, SIMPLE) == simple


def test_what_fewer_cuts_cost_is_noted(make_task, model):
    task = drawn(make_task, 6, tables=24)
    cheapest, simple = (search(task, model, settings) for settings in (CHEAPEST, SIMPLE))
    assert cheapest.cost_ms < simple.cost_ms
    assert simple.provenance.notes == (
        f"{cuts(simple)} cuts instead of {cuts(cheapest)}, for {simple.cost_ms / cheapest.cost_ms - 1:.2%} more than the "
        "plan that would be taken otherwise (--simplicity 0)",
    )
    assert cheapest.provenance.notes == ()


def test_the_more_cuts_may_cost_the_fewer_there_are(make_task, model):
    task = drawn(make_task, 1, tables=24)
    counts = [cuts(search(task, model, SearchSettings(rounds=6, simplicity=share))) for share in (0, 0.002, 0.02, 0.1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[3]


@pytest.mark.parametrize("budget", [None, 2**22, 2**26])
@pytest.mark.parametrize("seed", range(3))
def test_from_a_plan_in_place_no_more_moves_than_without_the_rule(make_task, model, seed, budget):
    task = drawn(make_task, seed, devices=4, tables=20)
    old = search(task, model, SearchSettings(algorithm="size"))
    cheapest, simple = (
        search(task, model, SearchSettings(rounds=4, move_budget_bytes=budget, simplicity=simplicity), previous=old)
        for simplicity in (0, 0.005)
    )
    assert moved_bytes(old, simple) <= moved_bytes(old, cheapest)
    assert cuts(simple) <= cuts(cheapest)
    assert simple.cost_ms <= cheapest.cost_ms * 1.005


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_that_was_chosen_for_its_few_cuts_is_not_left_for_a_cheaper_one_with_more(make_task, model, seed):
    task = drawn(make_task, seed)
    old = search(task, model, SIMPLE)
    again = search(task, model, SearchSettings(rounds=6, seed=1), previous=old)
    assert moves(old, again) == () or cuts(again) < cuts(old) or again.cost_ms * 1.005 < old.cost_ms


def test_shards_join_within_the_width_memory_and_pins_of_their_table(make_task, model):
    """One table is too large to be whole, one too wide, one may not be on the device with room."""
    task = make_task([(4_000_000, 64, 1.0), (1000, 256, 1.0), (1000, 64, 1.0), (1000, 64, 400.0)], [0.7, 0.7, 4.0])
    rules = (
        TableRule(table="t0", devices=(0, 1)),
        TableRule(table="t2", devices=(0, 1)),
        TableRule(table="t3", devices=(2,), max_shards=1),
    )
    pinned = task.model_copy(update={"constraints": Constraints(tables=rules)})
    model.max_dim = 128
    problem = Problem(pinned, model)
    widths = np.array([[8, 8, 0], [32, 16, 16], [8, 8, 0], [0, 0, 1]])
    ends = fewer_cuts(State(problem, widths), np.inf, np.random.default_rng(0), Watch())
    assert [(one.cuts, one.shards.tolist()) for one in ends][-1] == (2, [2, 2, 1, 1])
    for end in ends:
        assert (end.free >= 0).all()
        assert (end.widths <= problem.max_units[:, None]).all()
        assert not end.widths[~problem.allowed].any()


def test_a_row_wise_table_counts_as_one_cut(make_task, model):
    task = make_task([(1000, 64, 5.0), (1000, 64, 5.0)], [1] * 4)
    problem = Problem(task.model_copy(update={"constraints": Constraints(row_wise=True)}), model)
    there = problem.with_spread(np.array([0]), np.array([0]))
    assert there is not None
    assert State(there, np.array([[0, 0, 0, 0], [8, 8, 0, 0]])).cuts == 2


def test_of_plans_with_as_few_cuts_the_one_that_moves_least_is_taken_then_the_cheapest(make_task, model):
    task = make_task([(1000, 64, 20.0), (1000, 64, 20.01), (1000, 64, 0.01)], [1, 1])
    old = search(task, model, SearchSettings(algorithm="size"))
    problem = Problem(task, model)
    current = CurrentPlacement(problem, old, None)
    there = State(problem, current.widths())
    mirrored, cut = State(problem, there.widths[:, ::-1]), State(problem, np.array([[16, 0], [0, 16], [8, 8]]))
    assert there.cost == mirrored.cost
    assert simplest([mirrored, cut, there], 0.3, current) is there
    assert simplest([cut, mirrored, there], 0.3) is mirrored
    assert simplest([cut, mirrored, there], 0.0) is cut
    assert cut.cost < there.cost


@pytest.mark.parametrize("simplicity", [-0.001, 0.5, float("nan"), float("inf")])
def test_a_price_that_is_none_is_a_usage_error(make_task, simplicity):
    with refused(UsageError, "simplicity", "10%"):
        search(drawn(make_task, 0), AnalyticModel(), SearchSettings(simplicity=simplicity))


def test_with_a_time_budget_some_of_it_is_left_for_cuts(make_task, model, ticking):
    task = drawn(make_task, 2)
    budget = SearchSettings(time_budget_s=1.0)
    cheapest = search(task, model, SearchSettings(time_budget_s=1.0, simplicity=0))
    assert cuts(search(task, model, budget)) < cuts(cheapest)


def test_so_many_joins_as_were_too_many_are_not_tried_again(make_task, model, monkeypatch):
    task, most = drawn(make_task, 1, tables=24), list[int]()
    joined = fewer_cuts_module._joined

    def told(state, joins, count):
        if len(joins) > 1:
            most.append(count)
        return joined(state, joins, count)

    monkeypatch.setattr(fewer_cuts_module, "_joined", told)
    search(task, model, SIMPLE)
    assert most == sorted(most, reverse=True)
    assert most[0] == len(task.tables) > most[-1]
