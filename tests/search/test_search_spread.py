"""Spread options: what an enumerator makes is what its sharding type says, and costs what its shards are priced at."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.plan import sharding_of
from neuroshard.core.sharding import DATA_PARALLEL, GRID, ROW_WISE, TABLE_ROW_WISE
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.infeasible.packing import quick_plan
from neuroshard.search.problem.kinds import OVER_DOMAIN
from neuroshard.search.problem.layout import lay_out
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.greedy import first_plans
from neuroshard.search.proposers.spread import row_wise_plans
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tuning import TUNING

BATCH = 4096


def task_of(rng: np.random.Generator, pipeline: str, precision: str | None) -> ShardingTask:
    tables = [
        {
            "name": f"t{i}",
            "rows": int(10 ** rng.uniform(2, 5)),
            "dim": int(rng.choice([16, 32, 64])),
            "pooling_factor": float(rng.uniform(1, 20)),
            "pooling": str(rng.choice(["sum", "sum", "none"])),
            "module": str(rng.choice(["a", "b"])),
            "optimizer_bytes_per_row": 4,
        }
        for i in range(8)
    ]
    given = {"forward": precision, "backward": precision} if precision else None
    topology = Topology(domain=2, local_world_size=2, network_bytes_per_s=12.5e9)
    fields = {"tables": tables, "device_memory_bytes": (2**32,) * 8, "batch_size": BATCH, "topology": topology}
    more = {"pipeline": pipeline, "collective_precision": given, "dense_optimizer": "adam"}
    return ShardingTask.parse({**fields, **more, "constraints": Constraints(row_wise=True)}, "task")


def problem_of(task: ShardingTask) -> Problem:
    model = for_task(Analytic("h100", BATCH), task)
    may_copy = frozenset(table.name for table in task.tables if table.pooling != "none")
    return Problem(task, model, may={DATA_PARALLEL: may_copy})


def test_a_kind_is_made_of_shards_of_its_sharding_type() -> None:
    task = task_of(np.random.default_rng(0), "sparse-dist", None)
    options = problem_of(task).options
    assert [kind.sharding for kind in options.kinds] == [ROW_WISE, TABLE_ROW_WISE, GRID, GRID, DATA_PARALLEL]
    for position, table in enumerate(options.tables):
        for place, (way, start) in enumerate(options.places):
            if options.allowed[position, way]:
                kind, shards = options.kinds[way], options.shards(table, place)
                copied = [table.name] if kind.sharding.copied else []
                assert sharding_of(task.with_copies(copied), table, shards) is kind.sharding
                assert sorted(shard.device for shard in shards) == list(range(start, start + kind.devices))


@pytest.mark.parametrize(("local_world_size", "per_row", "grids"), [(2, 4, True), (1, 0, True), (1, 4, False)])
def test_a_search_makes_no_grid_that_torchrec_cannot_train(local_world_size: int, per_row: int, grids: bool) -> None:
    """Over domains of several hosts, of tables with optimizer state per row."""
    given = task_of(np.random.default_rng(0), "sparse-dist", None)
    tables = [table.model_copy(update={"optimizer_bytes_per_row": per_row}) for table in given.tables]
    topology = Topology(domain=2, local_world_size=local_world_size, network_bytes_per_s=12.5e9)
    asked = Constraints(row_wise=True, sharding_types=("grid",))
    task = given.model_copy(update={"tables": tuple(tables), "topology": topology, "constraints": asked})
    options = problem_of(task).options
    kinds = {options.kinds[way].sharding for _, way in np.argwhere(options.allowed)}
    assert (GRID in kinds) is grids
    notes = search(task, Analytic("h100", BATCH), SearchSettings(rounds=2)).provenance.notes
    assert any("8 tables cannot be in a grid" in note for note in notes) is not grids


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_of_any_mixture_costs_what_its_shards_are_priced_at(seed: int) -> None:
    rng = np.random.default_rng(seed)
    task = task_of(rng, ["none", "sparse-dist"][seed % 2], [None, "fp16", "bf16"][seed % 3])
    problem = problem_of(task)
    options = problem.options
    chosen = [
        (group, int(rng.choice(np.flatnonzero(options.allowed[position][options.way_of]))))
        for position, group in enumerate(options.groups.tolist())
        if rng.random() < 0.6
    ]
    groups, places = np.array(chosen, dtype=np.int64).reshape(-1, 2).T
    there = problem.with_spread(groups, places)
    assert there is not None
    state = first_plans(there, 1)[0]
    assert_priced_alike(problem, cut_more(state, rng))


def cut_more(state: State, rng: np.random.Generator) -> State:
    """The plan with a table that lies whole cut over two devices, if there is one."""
    problem, widths = state.problem, state.widths.copy()
    for group in rng.permutation(np.flatnonzero(state.shards == 1)).tolist():
        half = int(problem.all_units[group]) // 2
        if problem.min_units[group] <= half:
            widths[group] = 0
            widths[group, [1, 5]] = half, problem.all_units[group] - half
            return State(problem, widths)
    return state


def assert_priced_alike(problem: Problem, state: State) -> None:
    shards = lay_out(state)
    options = state.problem.options
    ways = options.way_of[state.problem.places]
    copied = [problem.tables[group][0].name for group in state.problem.spread[ways == options.copied].tolist()]
    task = problem.task.with_copies(copied)
    prices = price_shards(Analytic("h100", BATCH), task, shards)
    assert prices is not None
    total = prices.compute_ms + prices.forward_collective_ms + prices.backward_collective_ms
    assert state.cost == pytest.approx(total.max(), rel=1e-9)


def test_not_every_table_may_be_a_copy() -> None:
    task = task_of(np.random.default_rng(0), "sparse-dist", None)
    tables = tuple(table for table in task.tables if table.pooling != "none")
    problem = problem_of(task.model_copy(update={"tables": tables}))
    place = problem.options.place_of(problem.options.copied)
    assert problem.with_spread(problem.options.groups, np.full(len(tables), place)) is None
    assert problem.with_spread(problem.options.groups[1:], np.full(len(tables) - 1, place)) is not None


def test_a_copy_more_or_less_is_priced_as_the_sets_differ() -> None:
    problem = problem_of(task_of(np.random.default_rng(1), "sparse-dist", None))
    groups = problem.options.groups[problem.options.allowed[:, problem.options.copied]]
    place = problem.options.place_of(problem.options.copied)

    def copying(some: np.ndarray) -> Problem:
        there = problem.with_spread(some, np.full(len(some), place))
        assert there is not None
        return there

    two, three = copying(groups[:2]), copying(groups[:3])
    more = three.copies_ms.total_ms - two.copies_ms.total_ms
    assert more > 0
    assert two.copying_ms(groups[2:3])[0] == pytest.approx(more, rel=1e-12)
    assert three.copying_ms(groups[2:3])[0] == pytest.approx(-more, rel=1e-12)


def test_the_set_of_row_wise_tables_is_sought_for_all_columns_of_a_table_wider_than_any_shard(make_task) -> None:
    """With a quarter of its columns the two heaviest would be the best set. The net has seen 128 columns."""
    heavy, others = (100_000, 64, 255.0), [(100_000, 96, pooling) for pooling in (119.0, 16.0, 10.0)]
    task = make_task([(1000, 512, 9.0), heavy, *others], [1] * 4)
    rules = tuple(TableRule(table=table.name, row_wise=True) for table in task.tables[1:])
    problem = Problem(task.model_copy(update={"constraints": Constraints(tables=rules)}), AnalyticModel())
    problem.tuning = replace(TUNING, row_sets=1)
    assert [state.problem.spread.tolist() for state in row_wise_plans(problem)] == [[1]]


def test_two_tables_that_fill_most_of_a_domain_each_are_packed_on_two(make_task) -> None:
    """Two domains of two devices, and a table has at most two shards."""
    task = make_task([(1_000_000, 128, 1.0)] * 2, [0.3] * 4)
    two = {
        "topology": Topology(domain=2, local_world_size=2),
        "constraints": Constraints(row_wise=True, max_shards=2, min_dim=128),
    }
    problem = Problem(task.model_copy(update=two), Analytic("h100", 65536))
    found = quick_plan(problem)
    assert found is not None
    assert [problem.options.places[place] for place in found[0].places] == [(OVER_DOMAIN, 0), (OVER_DOMAIN, 2)]
