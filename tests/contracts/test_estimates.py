"""What a search chooses by is what it stands for: estimates of toggles, where a cost model is linear, and points of tiers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.states import whole
from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.sharding import DATA_PARALLEL, SHARDINGS
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import WAYS
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.tiers import with_tiers
from neuroshard.search.improve import toggle
from neuroshard.search.improve.toggle import toggled
from neuroshard.search.problem.objective import Objective, SoftMaximum
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.points import PartPoints
from neuroshard.search.tuning import TUNING

DEVICES, TABLES = 4, 8


class Linear(AnalyticModel):
    """Traffic and lookups take their times one after the other."""

    def compute_ms(self, vector_sums: Floats) -> Floats:
        return np.asarray(vector_sums.sum(axis=-1))

    def compute_slope(self, vector_sums: Floats) -> Floats:
        return np.ones_like(vector_sums)


def task_of(shapes: Sequence[tuple[int, int, float]]) -> ShardingTask:
    """Of tables of so many rows, columns and lookups."""
    tables = tuple(Table(name=f"t{i}", rows=r, dim=d, pooling_factor=p) for i, (r, d, p) in enumerate(shapes))
    return ShardingTask(tables=tables, device_memory_bytes=(2**30,) * DEVICES, batch_size=65536)


def drawn(seed: int) -> State:
    """A plan in which two of the tables are spread: row-wise, in grids of some kind, or copied."""
    rng = np.random.default_rng(seed)
    shapes = [(int(10 ** rng.uniform(3, 6)), 4 * int(rng.integers(1, 17)), rng.uniform(1, 100)) for _ in range(TABLES)]
    task = task_of(shapes)
    names = {table.name for table in task.tables}
    problem = Problem(task, Linear(), TUNING, may=dict.fromkeys((*SHARDINGS, DATA_PARALLEL), names))
    at = whole(problem, rng.integers(0, DEVICES, TABLES).tolist())
    groups, places = toggle._at_each(problem, np.array([0, 1]))
    chosen = [int(rng.choice(np.flatnonzero(groups == group))) for group in (0, 1)]
    there = problem.with_spread(groups[chosen], places[chosen])
    assert there is not None
    widths = at.widths.copy()
    widths[[0, 1]] = 0
    return State(there, widths)


def objective_ms(state: State, soft: SoftMaximum) -> float:
    """What a plan adds to the objective of another, by that one's scales, and what its copies take."""
    amounts = np.stack([soft.objective.load(state.compute, state.dims), state.dims])[:, :, None]
    return float(soft.added(amounts, np.zeros(1, dtype=np.int64))[0]) + state.problem.copies_ms.total_ms


def changed(state: State, spread: dict[int, int], widths: dict[int, np.ndarray]) -> State:
    """The plan with these groups spread at these places, and these cut so."""
    there = state.problem.with_spread(np.array([*spread], dtype=np.int64), np.array([*spread.values()], dtype=np.int64))
    assert there is not None
    cut = state.widths.copy()
    cut[[*spread]] = 0
    for group, units in widths.items():
        cut[group] = units
    return State(there, cut)


@pytest.mark.parametrize("seed", range(6))
def test_an_estimate_is_the_change_that_it_stands_for(seed: int) -> None:
    state = drawn(seed)
    problem, objective = state.problem, Objective.of(state.problem)
    soft = SoftMaximum(objective, state.compute[None], state.dims[None])
    estimate = toggle._Linearized(state, soft, problem.model.compute_slope(state.sums))
    spread = dict(zip(problem.spread.tolist(), problem.places.tolist(), strict=True))
    before = objective_ms(state, soft)

    def check(found: Floats, after: Sequence[State]) -> None:
        assert found == pytest.approx([objective_ms(one, soft) - before for one in after], rel=1e-9, abs=1e-9)

    groups, places = toggle._at_each(problem, np.setdiff1d(problem.options.groups, problem.spread))
    each = zip(groups.tolist(), places.tolist(), strict=True)
    check(toggle._spread_change(estimate, groups, places), [changed(state, spread | {g: p}, {}) for g, p in each])

    groups, places = toggle._at_each(problem, problem.spread)
    left = np.array([spread[group] for group in groups.tolist()])
    groups, places, left = (one[places != left] for one in (groups, places, left))
    each = zip(groups.tolist(), places.tolist(), strict=True)
    check(toggle._move_change(estimate, groups, left, places), [changed(state, spread | {g: p}, {}) for g, p in each])

    change, cuts = toggle._join_change(estimate, problem.spread, problem.places)
    others = [{other: place for other, place in spread.items() if other != group} for group in spread]
    check(change, [changed(state, rest, {g: cuts[g]}) for g, rest in zip(spread, others, strict=True)])


def test_the_toggle_that_is_estimated_to_gain_most_is_tried_first() -> None:
    """Without luck: of ten equal tables on one device, that of most lookups is spread."""
    task = task_of([(1000, 64, 1.0)] * 3 + [(1000, 64, 50.0)] + [(1000, 64, 1.0)] * 6)
    names = {table.name for table in task.tables}
    problem = Problem(task, Linear(), TUNING, may={one: names for one in SHARDINGS if one.splits_rows})
    state = whole(problem, [0] * 10)

    class Unlucky(np.random.Generator):
        def exponential(self, *_: object) -> float:  # type: ignore[override]
            return 0.0

    found = toggled(state, Objective.of(problem), Unlucky(np.random.PCG64(0)))
    assert found is not None
    assert found.problem.spread.tolist() == [3]


@pytest.mark.parametrize(("weight", "dense_ms"), [(1.0, 1e-9), (0.0, 1e6)])
def test_a_point_of_a_table_is_what_its_tier_costs_more_than_hbm(weight: float, dense_ms: float) -> None:
    """What is fetched ahead is all waited for, or all hidden."""
    table = Table(name="t", rows=10**6, dim=64, pooling_factor=10.0, access="zipf:1.05")
    memory = {"device_memory_bytes": (2**40,), "host_memory_bytes": 2**40}
    task = ShardingTask(tables=(table,), batch_size=4096, pipeline="prefetch", dense_ms=dense_ms, **memory)
    model, shards = analytic_model("h100", 4096), [Shard(table="t", rows=10**6, dim=64, device=0)]

    def ms(tier: Any, rows: int | None = None) -> float:
        return float(price_shards(model, task.with_tiers({"t": (tier, rows)}), shards).compute_ms[0])

    [points] = PartPoints(task, with_tiers(model), weight)([Part.of(table)])
    cached = [at for at in range(1, len(points.ms) - 1) if points.rows[at] >= WAYS]
    expected = [ms("hbm"), *(ms("cached", int(points.rows[at])) for at in cached), ms("host")]
    assert points.ms[[0, *cached, -1]] == pytest.approx(np.array(expected) - expected[0], rel=1e-4)  # of whole rows
