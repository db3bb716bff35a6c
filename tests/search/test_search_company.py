"""Devices that hold next to nothing: nets are taken to predict them too fast, and plans are tried that give them a part more."""

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from neuroshard.search import choice as trust
from neuroshard.search.choice import trusted
from neuroshard.search.problem.problem import Placement, Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers import columns as by_columns
from neuroshard.search.proposers import company
from neuroshard.search.proposers.company import TIMES, accompanied
from neuroshard.search.run import search

LIGHT = [(1000, 4, 0.01 + 0.001 * place) for place in range(8)]
SHAPES = [(1_000_000, 64, 4000.0), (1_000_000, 64, 3990.0), *LIGHT]
HEAVY_ALONE = [0, 1, *[2] * len(LIGHT)]


@pytest.fixture
def nets(model, monkeypatch) -> AnalyticModel:
    """A model that counts as nets, and says that it may be 2 % off."""
    for module in (company, trust):
        monkeypatch.setattr(module, "TrainedCostModel", AnalyticModel)
    model.spread_ms = lambda sums, dims: 0.02 * np.where(dims > 0, model.compute_ms(sums), 0.0)
    return model


def whole(problem: Problem, devices: list[int]) -> State:
    return State(problem, problem.widths(Placement(problem.whole, np.array(devices))))


def test_late_devices_that_hold_one_part_get_the_lightest_there_are_each_time_one_more(make_task, nets):
    state = whole(Problem(make_task(SHAPES, [1] * 3), nets), HEAVY_ALONE)
    found = accompanied(state)
    assert [np.count_nonzero(one.widths, axis=0).tolist() for one in found] == [[2, 2, 6], [3, 3, 4]]
    for one, light in zip(found, ([2, 3], [2, 3, 4, 5]), strict=True):
        assert np.flatnonzero(one.widths[:, :2].any(axis=1)).tolist() == [0, 1, *light]
        assert one.widths.sum(axis=1).tolist() == state.widths.sum(axis=1).tolist()
        assert state.cost < one.cost < 1.002 * state.cost


def test_nothing_moves_to_where_there_is_no_room_or_it_may_not_lie_or_from_where_little_lies(make_task, nets):
    full = make_task([(2**20, 64, 4000.0), *LIGHT], [(64 * 4 + 4) / 2**10, 1])
    free = make_task([(2**20, 64, 4000.0), *LIGHT], [1, 1])
    assert accompanied(whole(Problem(full, nets), [0, *[1] * 8])) == []
    assert len(accompanied(whole(Problem(free, nets), [0, *[1] * 8]))) == TIMES
    pinned = Problem(free, nets)
    pinned.allowed[1:, 0] = False
    assert accompanied(whole(pinned, [0, *[1] * 8])) == []
    assert accompanied(whole(Problem(make_task(SHAPES[:5], [1] * 3), nets), HEAVY_ALONE[:5])) == []


def test_devices_that_are_done_early_stay_alone(make_task, nets):
    problem = Problem(make_task([SHAPES[0], (1_000_000, 64, 2000.0), *LIGHT], [1] * 3), nets)
    assert np.flatnonzero(accompanied(whole(problem, HEAVY_ALONE))[0].widths[:, 1]).tolist() == [1]


def test_of_plans_about_as_cheap_the_one_is_taken_whose_late_devices_hold_more_parts(make_task, nets):
    state = whole(Problem(make_task(SHAPES, [1] * 3), nets), HEAVY_ALONE)
    one, two = accompanied(state)
    assert trusted([state, one, two]) is two
    assert trusted([state], one) is one
    nets.spread_ms = lambda sums, dims: np.zeros(dims.shape)
    assert trusted([state, one, two]) is state


def test_a_search_gives_heavy_tables_company_by_nets_alone(make_task, nets, monkeypatch):
    task = make_task(SHAPES, [1] * 3)
    # the published search's plan, which is the same, would be kept for a little more
    monkeypatch.setattr(by_columns, "BEAM_AT_MOST", 0)

    def fewest() -> int:
        on = [shard.device for shard in search(task, nets, rounds=1).shards]
        return min(map(on.count, range(3)))

    assert fewest() > 1
    for module in (company, trust):
        monkeypatch.setattr(module, "TrainedCostModel", type(None))
    assert fewest() == 1
