"""How far devices can be into the dips of a cost: never further than found, against all devices there are."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from helpers.costs import bent_both_ways, random_model
from neuroshard.search.bound.lower_bound import reach
from neuroshard.search.problem.problem import Problem


@pytest.fixture
def problem(make_task):
    drawn = random_model(2, 4)
    model = replace(drawn, nets=replace(drawn.nets, compute=bent_both_ways(drawn.nets.compute)))
    problem = Problem(make_task([(1000, 12, 20.0), (10_000, 8, 3.0), (500, 16, 40.0), (200, 4, 1.0)], [1] * 2), model)
    problem.price(np.arange(len(problem.group)))
    return problem


def all_devices(problem, possible):
    """Sums of vectors (N, K) of every choice of one possible part, or none, of each item."""
    choices = [[0, *np.flatnonzero(possible & (problem.group == i) & (problem.units > 0))] for i in range(4)]
    return np.array([problem.vectors[list(chosen)].sum(axis=0) for chosen in product(*choices)])


def test_no_device_is_further_into_a_dip_and_some_are_as_far(problem):
    possible = (problem.units > 0) & (problem.units != 2)
    dips = problem.model.dips
    depths = all_devices(problem, possible) @ dips.weight + dips.bias

    low, high = reach(problem, possible, False, dips)

    assert low == pytest.approx(depths.min(axis=0), abs=1e-3)
    assert high == pytest.approx(depths.max(axis=0), abs=1e-3)


def test_devices_that_can_hold_nothing_are_nowhere_but_at_the_start(problem):
    dips = problem.model.dips

    low, high = reach(problem, problem.units < 0, False, dips)

    assert low == pytest.approx(dips.bias)
    assert high == pytest.approx(dips.bias)
