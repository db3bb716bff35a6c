"""Improvement in small steps, packing, and the heuristics' keys."""

import numpy as np
import pytest

from neuroshard.search.baselines import KEYS, baseline
from neuroshard.search.improve import improve, merge
from neuroshard.search.problem import Placement, Problem
from neuroshard.search.splits import halves, pack


def place_whole(problem: Problem, devices: list[int]) -> Placement:
    return Placement(problem.whole, np.array(devices))


def test_improvement_balances_what_lies_all_on_one_device(make_task, model):
    problem = Problem(make_task([(1000, 64, 20.0)] * 8, [1, 1]), model)
    lopsided = place_whole(problem, [0] * 8)
    even = place_whole(problem, [0, 1] * 4)
    assert problem.worst_ms([improve(problem, [lopsided], 100)])[0] == pytest.approx(problem.worst_ms([even])[0])


def test_improvement_never_makes_a_plan_worse_nor_overfills_a_device(make_task, model):
    rng = np.random.default_rng(0)
    shapes = [(int(rng.integers(1, 1000)) * 100, int(rng.integers(1, 33)) * 4, rng.uniform(0, 100)) for _ in range(12)]
    for _ in range(20):
        devices = [0, 1, 2, *rng.integers(0, 3, 9).tolist()]
        loose = Problem(make_task(shapes, [1] * 3), model)
        used = loose.sums(place_whole(loose, devices))[2]
        problem = Problem(make_task(shapes, (used * 1.05 / 2**30).tolist()), model)
        start = place_whole(problem, devices)
        better = improve(problem, [start], 50)
        assert problem.worst_ms([better])[0] <= problem.worst_ms([start])[0]
        assert (problem.sums(better)[2] <= problem.memory).all()
        columns = np.bincount(problem.table[better.shards], weights=problem.dims[better.shards])
        assert columns.tolist() == [table.dim for table in problem.task.tables]


def test_more_steps_are_never_worse(make_task, model):
    rng = np.random.default_rng(4)
    shapes = [(1000, int(rng.integers(1, 33)) * 4, rng.uniform(0, 100)) for _ in range(20)]
    problem = Problem(make_task(shapes, [1] * 4), model)
    start = place_whole(problem, rng.integers(0, 4, 20).tolist())
    costs = [problem.worst_ms([improve(problem, [start], steps)])[0] for steps in (0, 1, 5, 50)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[1] > costs[-1]


def test_shards_of_one_table_on_one_device_become_one(make_task, model):
    problem = Problem(make_task([(1000, 64, 5.0), (1000, 32, 5.0)], [1, 1]), model)
    left, right = halves(problem, problem.whole)
    split = Placement(np.concatenate([left, right]), np.array([0, 1, 0, 0]))
    merged = merge(problem, split)
    assert sorted(zip(problem.dims[merged.shards].tolist(), merged.devices.tolist(), strict=True)) == [
        (16, 0),
        (16, 1),
        (64, 0),
    ]


def test_shards_are_not_merged_beyond_what_the_cost_model_has_seen(make_task, model):
    problem = Problem(make_task([(1000, 256, 5.0)], [1, 1]), model)
    left, right = halves(problem, problem.whole)
    split = Placement(np.concatenate([left, right]), np.array([0, 0]))
    assert problem.dims[merge(problem, split).shards].tolist() == [128, 128]


def test_shards_are_not_merged_where_that_would_cost_more(make_task, model):
    model.compute_ms = lambda sums: sums[..., 0] ** 2 - sums[..., 2]  # the more tables, the better
    problem = Problem(make_task([(1000, 64, 5.0)], [1, 1]), model)
    left, right = halves(problem, problem.whole)
    split = Placement(np.concatenate([left, right]), np.array([0, 0]))
    assert problem.dims[merge(problem, split).shards].tolist() == [32, 32]


@pytest.mark.parametrize(("units", "expected"), [(1, (4, 0)), (3, (8, 4)), (5, (12, 8)), (9, (20, 16)), (32, (64, 64))])
def test_halves_are_as_even_as_steps_of_4_allow(make_task, model, units, expected):
    problem = Problem(make_task([(10, 4 * units, 1.0)], [1]), model)
    left, right = halves(problem, problem.whole)
    assert (problem.dims[left][0], problem.dims[right][0]) == expected


def test_packing_falls_back_to_filling_devices_where_halving_fails(make_task, model):
    task = make_task([(3000, 4, 1.0), (3000, 4, 1.0)] + [(2000, 4, 1.0)] * 3, [1, 1])
    full = task.model_copy(update={"device_memory_bytes": (120_000, 120_000)})
    assert pack(Problem(full, model)).fits


@pytest.mark.parametrize(
    ("name", "first"),
    [("size", "t0"), ("dim", "t1"), ("lookup", "t2"), ("size-lookup", "t3")],
)
def test_a_heuristic_places_the_table_of_the_largest_key_first(make_task, model, name, first):
    tables = [(900_000, 16, 1.0), (10, 64, 1.0), (10, 32, 40.0), (100_000, 32, 15.0)]
    problem = Problem(make_task(tables, [1, 1]), model)
    shard = baseline(problem, name, np.random.default_rng(0)).shards[0]
    assert problem.task.tables[problem.table[shard]].name == first


def test_the_heuristics_keys_are_those_of_the_paper(make_task, model):
    problem = Problem(make_task([(1000, 16, 3.0), (10, 64, 0.5)], [1]), model)
    rng = np.random.default_rng(0)
    keys = {name: key(problem, problem.whole, rng).tolist() for name, key in KEYS.items() if name != "random"}
    assert keys == {
        "size": [1000 * (16 * 4 + 4), 10 * (64 * 4 + 4)],
        "dim": [16, 64],
        "lookup": [48, 32],
        "size-lookup": [48 * 3, 32],
    }
