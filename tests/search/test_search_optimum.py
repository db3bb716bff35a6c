"""Tiny tasks against their exact optimum: a MILP under given costs, every placement under a cost model with a head."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from helpers.analytic import AnalyticModel
from helpers.costs import bent_both_ways, random_model
from helpers.exhaustive import optimum_ms
from helpers.parts import cut_to, wholes
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.part import Part
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.compute_net import THRESHOLDS, Layer
from neuroshard.costmodel.given import Given, GivenCosts
from neuroshard.costmodel.protocol import Bending, CostModel
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings


def tiny(seed: int, tables: int, devices: int, tightness: float) -> ShardingTask:
    rng = np.random.default_rng(seed)
    some = tuple(
        Table(
            name=f"t{i}",
            rows=int(10 ** rng.uniform(3, 5)),
            dim=int(rng.choice([4, 8, 16])),
            pooling_factor=float(rng.uniform(1, 60)),
            optimizer_bytes_per_row=0,
        )
        for i in range(tables)
    )
    memory = tightness * sum(t.memory_bytes for t in some) / devices * rng.uniform(0.8, 1.2, devices)
    return ShardingTask(tables=some, device_memory_bytes=tuple(int(m) for m in memory), batch_size=4096)


def given_costs(task: ShardingTask, seed: int) -> Given:
    rng = np.random.default_rng(seed)
    costs = [{"name": t.name, "cost_ms": float(rng.uniform(1, 20))} for t in task.tables]
    return Given(GivenCosts.parse({"tables": costs, "fixed_ms": 3.0}, "test"), task.batch_size)


def milp_optimum_ms(task: ShardingTask, model: Given) -> float | None:
    """Units of 4 columns of each table on each device, integer; the slowest device as low as memory lets it be."""
    tables, devices = len(task.tables), task.devices
    units = np.array([t.dim // 4 for t in task.tables])
    unit_ms = model.part_vectors(cut_to(task.tables, np.full(tables, 4)))[:, 0]
    unit_bytes = np.array([Part(t, t.rows, 4).memory().total for t in task.tables])
    on_device = np.kron(np.ones(tables), np.eye(devices)).reshape(devices, tables * devices)
    load = np.hstack([on_device * np.repeat(unit_ms, devices), -np.ones((devices, 1))])
    stored = np.hstack([on_device * np.repeat(unit_bytes, devices), np.zeros((devices, 1))])
    whole = np.hstack([np.kron(np.eye(tables), np.ones(devices)), np.zeros((tables, 1))])
    solved = milp(
        c=np.append(np.zeros(tables * devices), 1.0),
        integrality=np.append(np.ones(tables * devices), 0),
        bounds=Bounds(0, np.append(np.repeat(units, devices), np.inf)),
        constraints=[
            LinearConstraint(load, ub=0.0),
            LinearConstraint(stored, ub=np.array(task.device_memory_bytes, dtype=float)),
            LinearConstraint(whole, lb=units, ub=units),
        ],
    )
    return None if solved.x is None else float(solved.fun) + model.costs.fixed_ms


@pytest.mark.slow
def test_under_given_costs_plans_are_within_half_a_percent_of_the_exact_optimum() -> None:
    """On average, and none further off than what one unlucky task was off (of 60: 2.6 %)."""
    gaps = []
    for seed in range(12):
        task = tiny(seed, tables=6, devices=3, tightness=1.3)
        model = given_costs(task, seed)
        optimum = milp_optimum_ms(task, model)
        assert optimum is not None
        gaps.append(search(task, model).cost_ms / optimum - 1)
    assert min(gaps) >= -1e-9
    assert float(np.mean(gaps)) <= 0.005
    assert max(gaps) <= 0.03


def exhaustive_ms(task: ShardingTask, model: CostModel) -> float:
    """The least cost of all ways to deal out each table's columns, at most one shard of a table on a device."""
    tables, devices = len(task.tables), task.devices
    best = np.inf
    deals = [[d for d in product(range(t.dim // 4 + 1), repeat=devices) if sum(d) == t.dim // 4] for t in task.tables]
    vectors = [
        np.pad(model.part_vectors(cut_to([t] * (t.dim // 4), np.arange(4, t.dim + 1, 4))), ((1, 0), (0, 0)))
        for t in task.tables
    ]
    for deal in product(*deals):
        units = np.array(deal)
        nbytes = sum(units[i] * Part(t, t.rows, 4).memory().total for i, t in enumerate(task.tables))
        if (nbytes > task.device_memory_bytes).any():
            continue
        sums = sum(vectors[i][units[i]] for i in range(tables))
        dims = 4.0 * units.sum(axis=0)
        compute = np.where(dims > 0, model.compute_ms(sums), 0.0)
        ready = compute + model.backward_collective_ms(dims)
        best = min(best, float((ready + model.forward_collective_ms(dims, ready - ready.min())).max()))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_with_a_head_and_an_all_to_all_a_plan_is_within_one_percent_of_the_best_of_all_placements(seed: int) -> None:
    task = tiny(seed, tables=3, devices=2, tightness=1.5)
    model = AnalyticModel(task.batch_size)
    optimum = exhaustive_ms(task, model)
    plan = search(task, model)
    assert optimum * (1 - 1e-9) <= plan.cost_ms <= optimum * 1.01


def with_dips(task: ShardingTask, seed: int, rates: bool = False) -> tuple[ShardingTask, CostModel]:
    """The task for random nets whose compute cost bends down and up about where its devices lie; and these.
    With `rates` also by the rows of a device."""
    drawn = random_model(task.devices, 4, seed=seed, rates=len(THRESHOLDS) if rates else 0)
    task = task.model_copy(update={"batch_size": drawn.batch_size})
    vectors = drawn.part_vectors(wholes(task.tables))
    bent = bent_both_ways(drawn.nets.compute, seed)
    of_a_device = (vectors.mean(axis=0) @ bent.mean.weight).reshape(bent.head.bias.shape)
    bent = replace(bent, head=Layer(bent.head.weight, -1.0 * of_a_device))  # so it bends there
    return task, replace(drawn, nets=replace(drawn.nets, compute=bent))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rates", [False, True])
def test_where_costs_bend_both_ways_the_bound_is_below_the_best_of_all_placements(seed: int, rates: bool) -> None:
    task, model = with_dips(tiny(seed, tables=3, devices=2, tightness=1.8), seed, rates)

    optimum, plan = (
        exhaustive_ms(task, model),
        search(task, model, SearchSettings(algorithm="size")),
    )  # dearer: no bound is above its plan

    assert model.bounded
    assert isinstance(model, Bending)
    assert len(model.dips.bias)
    assert plan.lower_bound_ms is not None
    assert 0.1 * optimum < plan.lower_bound_ms <= optimum * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("bends", ["not", "dips", "rates"])
def test_where_tables_may_be_row_wise_the_bound_is_below_the_best_of_all_plans(seed: int, bends: str) -> None:
    """From few rows on, so that last blocks are smaller; and for one of three tasks the heaviest table stays column-wise."""
    rng, free = np.random.default_rng(seed), tiny(seed, tables=3, devices=2 + seed % 2, tightness=1.6)
    tables = [
        t.model_copy(update={"rows": int(10 ** rng.uniform(1, 5)), "pooling_factor": float(np.exp(rng.uniform(0, 7)))})
        for t in free.tables
    ]
    heaviest = max(tables, key=lambda t: t.pooling_factor)
    allowed = tuple(TableRule(table=t.name, row_wise=t != heaviest or seed % 3 > 0) for t in tables)
    memory = int(max(1.6 * sum(t.memory_bytes for t in tables) / free.devices, max(t.memory_bytes for t in tables)))
    task = free.model_copy(
        update={
            "tables": tuple(tables),
            "device_memory_bytes": (memory,) * free.devices,
            "constraints": Constraints(tables=allowed),
        }
    )
    task, model = (task, AnalyticModel(task.batch_size)) if bends == "not" else with_dips(task, seed, bends == "rates")
    optimum = optimum_ms(task, model)
    for algorithm in ("local-search", "random"):
        plan = search(task, model, SearchSettings(algorithm=algorithm, rounds=2))
        assert plan.lower_bound_ms is not None
        assert 0.1 * optimum < plan.lower_bound_ms <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_where_memory_is_nearly_full_the_bound_knows_what_cuts_take(seed: int) -> None:
    """Each column shard repeats what the optimizer keeps of a row, so few tables can be cut."""
    rng, free = np.random.default_rng(seed), tiny(seed, tables=3, devices=2 + seed % 2, tightness=100)
    kept = rng.choice([4, 64], 3).tolist()
    tables = [t.model_copy(update={"optimizer_bytes_per_row": of}) for t, of in zip(free.tables, kept, strict=True)]
    free = free.model_copy(update={"tables": tuple(tables), "constraints": Constraints(row_wise=True)})
    memory = int(free.need_bytes / free.devices / rng.uniform(0.95, 1.0))
    task, model = (
        free.model_copy(update={"device_memory_bytes": (memory,) * free.devices}),
        AnalyticModel(free.batch_size),
    )

    tight, loose = (search(one, model, SearchSettings(rounds=2)).lower_bound_ms or 0.0 for one in (task, free))

    assert loose < 0.99 * tight
    assert tight <= optimum_ms(task, model) * (1 + 1e-9)
