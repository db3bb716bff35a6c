"""Plans for all-to-alls in another precision than fp32: what it saves over a network, and what it costs inside a domain."""

from typing import Any

import numpy as np
import pytest

from helpers.costs import random_model
from helpers.drawn import drawn_tables
from helpers.exhaustive import optimum_ms
from helpers.parts import cut_to
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import UsageError
from neuroshard.core.precision import parse_precision
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology, topology_of
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.given import Given, GivenCosts
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.pricing import copies_ms, price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.models.open import open_cost_model
from neuroshard.search.problem.kinds import OVER_DOMAIN
from neuroshard.search.problem.plans import Plans
from neuroshard.search.problem.problem import Problem
from neuroshard.search.proposers.greedy import first_plans
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

pytestmark = pytest.mark.slow

BATCH_SIZE = 65536
MODELS = [Analytic("h100", BATCH_SIZE), random_model(2, 4, seed=3)]


def tables(seed: int, count: int, dims: tuple[int, ...] = (16, 32, 64)) -> tuple[Table, ...]:
    return drawn_tables(np.random.default_rng(seed), count, rows=(3, 5), dims=dims)


def task_of(
    words: str, devices: int = 4, *, network: float | None = None, some: Any = None, **more: Any
) -> ShardingTask:
    topology = None if network is None else Topology(domain=2, local_world_size=2, network_bytes_per_s=network)
    given = {"tables": some or tables(1, 8), "device_memory_bytes": (2**34,) * devices, "batch_size": BATCH_SIZE}
    return ShardingTask.parse(
        {
            **given,
            "topology": topology,
            "collective_precision": parse_precision(words),
            "constraints": Constraints(**more),
        },
        "task",
    )


@pytest.mark.parametrize(("words", "share"), [("fp16", 0.5), ("bf16", 0.5), ("int8", 0.3125), ("fp16:fp32", 0.75)])
def test_over_a_slow_network_bytes_are_what_takes_time(words: str, share: float) -> None:
    model, columns = Analytic("h100", BATCH_SIZE), np.full(4, 100.0)
    slow = 1e8
    ms = []
    for text in ("fp32", words):
        priced = for_task(model, task_of(text, network=slow))
        ms.append((priced.forward_collective_ms(columns, columns * 0) + priced.backward_collective_ms(columns)).max())
    assert ms[1] == pytest.approx(share * ms[0], rel=0.01)


@pytest.mark.parametrize("model", MODELS, ids=["sheet", "nets"])
def test_input_and_dense_gradients_travel_as_they_are(model: CostModel) -> None:
    some = tables(2, 4)
    for words in ("fp16", "int8"):
        quantised, plain = (task_of(text, network=1e9, some=some) for text in (words, "fp32"))
        dims = np.array([table.dim for table in some])
        vectors = [for_task(model, task).part_vectors(cut_to(some, dims)) for task in (quantised, plain)]
        assert vectors[0] == pytest.approx(vectors[1])  # with what a device waits for its input
        assert copies_ms(model, some[:1], quantised) == pytest.approx(copies_ms(model, some[:1], plain))


def test_a_plan_says_whether_it_pays() -> None:
    model = Analytic("h100", BATCH_SIZE)
    over_network = search(task_of("fp16", network=1e9), model, SearchSettings(rounds=5))
    inside = search(task_of("fp16"), model, SearchSettings(rounds=5))
    for plan, says in ((over_network, "which saves"), (inside, "which costs")):
        note = next(note for note in plan.provenance.notes if note.startswith("all-to-alls in fp16"))
        assert says in note
        assert "qcomms(plan)" in note
    plain = search(task_of("fp32", network=1e9), model, SearchSettings(rounds=5))
    assert not any("all-to-alls in" in note for note in plain.provenance.notes)
    assert over_network.cost_ms is not None
    assert plain.cost_ms is not None
    assert over_network.cost_ms < plain.cost_ms


@pytest.mark.parametrize("model", MODELS, ids=["sheet", "nets"])
@pytest.mark.parametrize("words", ["fp16", "int8:fp16"])
def test_a_plan_costs_what_its_shards_are_priced_at(model: CostModel, words: str) -> None:
    """Column-wise, row-wise and table-row-wise, with copies."""
    for more in ({"row_wise": True}, {"tables": (TableRule(table="t0", data_parallel=True),)}):
        plan = search(task_of(words, network=1e9, **more), model, SearchSettings(rounds=4))
        prices = price_shards(model, plan.held, plan.shards)
        assert prices is not None
        assert plan.predicted_ms == pytest.approx(prices.total_ms)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("words", ["fp16", "int8"])
def test_a_bound_holds_against_the_best_of_all_plans(seed: int, words: str) -> None:
    model = random_model(2, 4, seed=seed) if seed % 2 else Analytic("h100", BATCH_SIZE)
    more = {"row_wise": True} if seed % 3 else {}
    task = task_of(words, network=1e9, some=tables(seed, 3, (4, 8)), **more)
    optimum = optimum_ms(task, model)
    plan = search(task, model, SearchSettings(rounds=10, simplicity=0.0))
    assert plan.lower_bound_ms is not None
    assert plan.lower_bound_ms <= optimum * (1 + 1e-9)
    assert optimum * (1 - 1e-9) <= plan.cost_ms <= optimum * 1.03


def test_given_costs_do_not_tell_what_another_precision_saves() -> None:
    task = task_of("fp16")
    costs = GivenCosts.parse({"tables": [{"name": table.name, "cost_ms": 1.0} for table in task.tables]}, "here")
    with refused(UsageError, "given", "fp16", "--collective-precision"):
        search(task, Given(costs, BATCH_SIZE))


def test_plans_of_other_row_wise_tables_are_each_priced_by_their_own_all_to_alls() -> None:
    tables = tuple(Table(name=f"t{i}", rows=10_000, dim=64, pooling_factor=10.0 * (i + 1)) for i in range(6))
    task = ShardingTask(
        tables=tables,
        device_memory_bytes=(2**34,) * 8,
        batch_size=65536,
        topology=topology_of(8, 4, 4, "25GB/s"),
        collective_precision=parse_precision("fp16"),
        constraints=Constraints(row_wise=True),
    )
    problem = Problem(task, for_task(open_cost_model("analytic:h100", task.batch_size), task))
    states = []
    for group, first in ((0, 0), (1, 4)):
        place = problem.options.place_of(OVER_DOMAIN, first)
        split = problem.with_spread(np.array([group]), np.array([place]))
        assert split is not None
        states += first_plans(split, 1)
    plans = Plans(states)
    every, devices = np.repeat([0, 1], 8), np.tile(np.arange(8), 2)
    plans.put(every, devices, plans.sums[every, devices], plans.dims[every, devices], plans.compute[every, devices])
    assert plans.cost == pytest.approx([state.cost for state in states], rel=1e-12)
