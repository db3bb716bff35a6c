"""Once a pooled table is cut, TorchRec puts all outputs of its collection into order: what a search does about that."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.analytic import AnalyticModel
from helpers.exhaustive import memory_of_devices, optimum_ms, pipelines, tiny_tables
from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import Infeasible
from neuroshard.core.launches import launches
from neuroshard.core.moves import moved_bytes
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search import algorithms
from neuroshard.search.algorithms import WITHOUT_CUTS, find
from neuroshard.search.asked import Asked
from neuroshard.search.bound.lower_bound import least_with_cuts_ms
from neuroshard.search.infeasible.feasibility import any_plan, feasible
from neuroshard.search.problem.state import State
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.watch import Watch


class Reordering(AnalyticModel):
    """The same, where putting outputs into order takes a while."""

    def __init__(self, reorder_ms: float) -> None:
        super().__init__(1024)
        self.reorder_ms = reorder_ms


@given(data=st.data(), reorder_ms=st.sampled_from([1e-4, 1e-2, 1.0]))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_the_optimum_or_near_it_and_its_bound_is_not_above(data: st.DataObject, reorder_ms: float) -> None:
    tables = tuple(data.draw(st.lists(tiny_tables, min_size=1, max_size=4)))
    devices, pipeline = data.draw(st.integers(2, 3)), data.draw(pipelines)
    memory = memory_of_devices(data.draw, tables, [1.0] * devices, 1024, pipeline)  # type: ignore[arg-type]
    task = ShardingTask(tables=tables, device_memory_bytes=memory, batch_size=1024, pipeline=pipeline)
    model = Reordering(reorder_ms)
    best = optimum_ms(task, model)
    if best == np.inf:
        with pytest.raises(Infeasible):
            search(task, model)
        return
    plan = search(task, model, SearchSettings(simplicity=0))
    assert plan.cost_ms == pytest.approx(best, rel=0.02)
    assert plan.lower_bound_ms is not None
    assert plan.lower_bound_ms <= best * (1 + 1e-6)
    whole = task.model_copy(update={"constraints": Constraints(max_shards=1)})
    if all(table.pooling != "none" for table in tables) and best < optimum_ms(whole, model) * (1 - 1e-9):
        problem = feasible(task, model)
        dear = State(*any_plan(problem))
        assert least_with_cuts_ms(problem, dear) <= best * (1 + 1e-6)


def even_tables(count: int) -> tuple[Table, ...]:
    """Tables that weigh the same."""
    return tuple(Table(name=f"t{i}", rows=100_000, dim=128, pooling_factor=20.0) for i in range(count))


def test_tables_stay_whole_where_cuts_gain_less_than_they_cost() -> None:
    """Five tables on two devices: with one of them cut they are even."""
    task = ShardingTask(tables=even_tables(5), device_memory_bytes=(2**34,) * 2, batch_size=1024)
    free, dear = (search(task, Reordering(ms), SearchSettings(simplicity=0)) for ms in (0.0, 1.0))
    assert len(free.shards) == 6
    assert len(dear.shards) == 5
    assert dear.cost_ms < free.cost_ms + 5 * 128 * 1.0 / 2


def test_a_table_that_outweighs_all_others_is_cut_all_the_same() -> None:
    heavy = Table(name="heavy", rows=1_000_000, dim=128, pooling_factor=200.0)
    task = ShardingTask(tables=(heavy, *even_tables(6)), device_memory_bytes=(2**34,) * 4, batch_size=65536)
    plan = search(task, Analytic("h100", 65536))
    assert len([shard for shard in plan.shards if shard.table == "heavy"]) > 1


@pytest.mark.parametrize("data_parallel", [False, True])
def test_a_plan_costs_what_its_shards_are_priced_at(data_parallel: bool) -> None:
    small = Table(name="small", rows=16, dim=32, pooling_factor=1.0)
    heavy = Table(name="heavy", rows=1_000_000, dim=128, pooling_factor=200.0)
    task = ShardingTask(tables=(small, heavy, *even_tables(6)), device_memory_bytes=(2**34,) * 4, batch_size=65536)
    model = Analytic("h100", 65536)
    plan = search(task, model, SearchSettings(try_data_parallel=data_parallel, try_row_wise=True))
    prices = price_shards(model, plan.held, plan.shards)
    assert prices is not None
    assert plan.cost_ms == pytest.approx(prices.total_ms.max())
    counted = launches(task, plan.shards)
    assert counted.reordered > 0


def test_tables_kept_together_count_in_their_own_collections() -> None:
    """Cutting `heavy` puts 16 columns into order, not those of the other collection too."""
    shapes = [("heavy", 12, "a"), ("wide", 128, "b"), ("other", 128, "b"), ("beside", 4, "a")]
    tables = tuple(Table(name=name, rows=10, dim=dim, pooling_factor=1.0, module=of) for name, dim, of in shapes)
    rules = Constraints(together=(("other", "beside"),))
    task = ShardingTask(tables=tables, device_memory_bytes=(2**30,) * 2, batch_size=1024, constraints=rules)
    assert feasible(task, Reordering(0.01)).launches.least_reorder_ms() == pytest.approx((12 + 4) * 0.01 / 2)


def test_without_cuts_the_narrowest_shard_of_a_pooled_table_is_the_whole() -> None:
    task = ShardingTask(tables=even_tables(3), device_memory_bytes=(2**34,) * 2, batch_size=1024)
    problem = feasible(task, Reordering(1.0))
    assert (problem.narrowest < problem.whole).all()
    uncut = problem.uncut()
    assert uncut is not None
    assert (uncut.narrowest == uncut.whole).all()


def test_where_no_pooled_table_may_be_cut_plans_without_cuts_are_not_searched_a_second_time() -> None:
    task = ShardingTask(
        tables=even_tables(5), device_memory_bytes=(2**34,) * 2, batch_size=1024, constraints=Constraints(max_shards=1)
    )
    free, dear = Reordering(0.0), Reordering(1.0)
    for model in (free, dear):
        find(feasible(task, model), Asked.of(task, model, SearchSettings(simplicity=0.0), Watch()))
    assert free.asked == dear.asked


@pytest.mark.parametrize(("count", "searches"), [(12, [WITHOUT_CUTS]), (11, [WITHOUT_CUTS, "search"])])
def test_plans_with_cuts_are_not_searched_where_all_are_proven_dearer_than_one_without(
    monkeypatch: pytest.MonkeyPatch, count: int, searches: list[str]
) -> None:
    """Twelve equal tables are even on two devices, eleven are not. Either kind of first plan is hardly dearer than the other."""
    asked, search_from = list[str](), algorithms._improved

    def told(*args: Any) -> State:
        asked.append(args[4] if len(args) > 4 else "search")
        return search_from(*args)

    monkeypatch.setattr(algorithms, "_improved", told)
    task = ShardingTask(tables=even_tables(count), device_memory_bytes=(2**34,) * 2, batch_size=1024)
    search(task, Reordering(1e-5), SearchSettings(rounds=2))
    assert asked == searches


def test_from_a_plan_with_cuts_one_without_is_found_where_it_is_worth_moving_for() -> None:
    """Undoing one of many cuts gains nothing: outputs are put into order until the last one is gone."""
    r = random.Random(41)
    count, reorder_ms = r.choice([6, 8, 12]), r.choice([3e-4, 1e-3, 3e-3])
    tables = tuple(
        Table(name=f"t{i}", rows=100_000, dim=8 * r.randint(1, 16), pooling_factor=float(r.randint(1, 200)))
        for i in range(count)
    )
    need = sum(table.memory_bytes for table in tables)
    task = ShardingTask(tables=tables, device_memory_bytes=(int(need * r.choice([0.4, 0.6, 2])),) * 4, batch_size=1024)
    place, shards = [r.randrange(4) for _ in tables], list[Shard]()
    for i, table in enumerate(tables):
        parts = 2 if r.random() < 0.5 or i == 0 else 1
        dim = table.dim // parts
        shards += [
            Shard(table=table.name, rows=table.rows, dim=dim, column_offset=part * dim, device=(place[i] + part) % 4)
            for part in range(parts)
        ]
    budget, model = int(need * r.choice([0.2, 0.4, 0.7])), Reordering(reorder_ms)
    free = search(task, model, SearchSettings(rounds=5))
    cut = free.model_copy(update={"shards": tuple(shards)})
    plan = search(task, model, SearchSettings(rounds=5, move_budget_bytes=budget), previous=cut)
    assert len(plan.shards) == count
    assert moved_bytes(cut, plan) <= budget
    assert plan.cost_ms < 0.25
