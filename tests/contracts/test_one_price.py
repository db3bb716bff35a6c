"""A plan has one price: what a search says of a plan is what `price_shards` says of its shards, and what it needs is what fits.

A search prices arrays, `price_shards` shards. Here both price the same plans, drawn of every way to hold a table and of all
mixtures. What TorchRec launches and holds for such plans is in tests/client/test_launches.py.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.costs import random_model
from helpers.drawn import drawn_shards
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import moves
from neuroshard.core.plan import Plan, Provenance, Shard, sharding_of
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.sharding import GRID, SHARDINGS, TABLE_ROW_WISE, Sharding
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.orders.options import ALGORITHMS
from neuroshard.report.facts import cards
from neuroshard.report.numbers import fullest_step
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tuning import TUNING

BATCH_SIZE, TIGHTLY = 65536, 1e-9
FP16 = CollectivePrecision(forward="fp16", backward="bf16")
PLANS = 12  # of each cost model
STAYS = SearchSettings(
    rounds=0, simplicity=0.0, move_budget_bytes=0, tuning=replace(TUNING, greedy=False, row_wise=False)
)


class Reordering(AnalyticModel):
    """Outputs that are put into order take a while."""

    reorder_ms = 0.05


MODELS: dict[str, CostModel] = {
    "test": Reordering(BATCH_SIZE),
    "h100": Analytic("h100", BATCH_SIZE),
    "gloo": Analytic("cpu", BATCH_SIZE),
    "nets": random_model(2, 3, 4, 8, seed=2),
}


def drawn_tables(rng: np.random.Generator) -> tuple[Table, ...]:
    """Of some modules: sums, means, weighted tables, sequences of one width, and one too wide for the operator. Of every second
    it is known how often rows are read."""
    made = []
    for number in range(rng.integers(3, 9)):
        module = str(rng.choice(["", "user", "item"]))
        pooling = str(rng.choice(["sum", "sum", "sum", "mean", "none"]))
        wide = number == 0 and pooling != "none" and rng.random() < 0.5
        features = [
            {"name": f"f{number}-{one}", "pooling_factor": float(np.exp(rng.uniform(-1, 5)))}
            for one in range(rng.integers(1, 4))
        ]
        made.append(
            Table.parse(
                {
                    "name": f"t{number}",
                    "module": module,
                    "rows": int(10 ** rng.uniform(1.5, 5)),
                    "dim": 32 if pooling == "none" else 4096 if wide else 8 * int(rng.integers(1, 9)),
                    "pooling": pooling,
                    "weighted": pooling != "none" and rng.random() < 0.3,
                    "element_bytes": int(rng.choice([2, 4])),
                    "optimizer_bytes_per_row": int(rng.choice([0, 4])),
                    "features": features,
                    "access": "zipf:1.1" if number % 2 else None,
                },
                "the test",
            )
        )
    return tuple(made)


def drawn_plan(seed: int, *, knows_tasks: bool) -> Plan:
    """On devices of unequal memory. Cost models that do not know tasks know no domains and price fp32 alone."""
    rng = np.random.default_rng(seed)
    devices = int(rng.choice([1, 2, 3, 4, 4, 8, 8]))
    domain = int(rng.choice([2, devices // 2])) if devices >= 4 and knows_tasks else devices
    tables = drawn_tables(rng)
    copied = [table.name for table in tables if table.pooling != "none" and table.dim <= 64 and rng.random() < 0.15]
    copied = copied[: len(tables) - 1]
    shards = []
    for table in tables:
        if table.name in copied:
            shards += [Shard(table=table.name, rows=table.rows, dim=table.dim, device=d) for d in range(devices)]
        else:
            shards += drawn_shards(table, devices, domain, rng)
    bytes_per_s = float(10 ** rng.uniform(8, 11))
    task = ShardingTask(
        tables=tables,
        device_memory_bytes=tuple(rng.integers(2**37, 2**40, devices).tolist()),
        batch_size=BATCH_SIZE,
        constraints=Constraints(
            tables=tuple(TableRule(table=name, data_parallel=True) for name in copied), row_wise=devices > 1
        ),
        pipeline=rng.choice([None, "none", "sparse-dist", "prefetch"]),
        step_ledger=1 if seed % 3 else None,
        topology=Topology(
            domain=domain, local_world_size=domain, network_bytes_per_s=bytes_per_s, network_latency_ms=0.1
        )
        if domain < devices
        else None,
        collective_precision=[None, FP16][int(rng.integers(2)) * knows_tasks],
        dense_optimizer=rng.choice([None, "adam"]),
    )
    return Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def check_price(model: CostModel, plan: Plan) -> None:
    prices = price_shards(model, plan.held, plan.shards)
    assert prices is not None
    assert plan.predicted is not None
    said = [(one.compute_ms, one.forward_collective_ms, one.backward_collective_ms) for one in plan.predicted]
    np.testing.assert_allclose(np.transpose(said), prices[:3], rtol=TIGHTLY)
    np.testing.assert_allclose(plan.predicted_ms, prices.total_ms, rtol=TIGHTLY)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_that_stays_as_it_is_costs_what_its_shards_do(name: str) -> None:
    """Also while it is searched, as `State.cost`, which counts several shards of a table on a device as one."""
    model, held, several = MODELS[name], Counter[Sharding](), 0
    for seed in range(PLANS):
        plan = drawn_plan(seed, knows_tasks=name != "test")
        found = search(plan.task, model, STAYS, previous=plan)
        assert not moves(plan, found)
        check_price(model, found)
        of_device = Counter((shard.table, shard.device) for shard in found.shards)
        several += max(of_device.values()) > 1
        if found.improvements and max(of_device.values()) == 1:
            assert found.improvements[-1].cost_ms == pytest.approx(found.cost_ms, rel=TIGHTLY)
        shards = found.by_table()
        held.update(sharding_of(found.held, table, shards[table.name]) for table in found.task.tables)
    assert several
    assert held.keys() == set(SHARDINGS) - ({TABLE_ROW_WISE, GRID} if name == "test" else set())


def test_all_that_say_which_device_is_fullest_say_the_same() -> None:
    """Of what is not reserved, which is unlike shares of devices of unequal memory."""
    for seed in range(PLANS):
        task = (drawn := drawn_plan(seed, knows_tasks=True)).task
        rules = task.constraints.model_copy(update={"reserve_bytes": 2**36})
        plan = drawn.model_copy(update={"task": task.model_copy(update={"constraints": rules})})
        used, usable, (device, *both) = plan.memory_bytes(), plan.task.usable_bytes, plan.fullest
        assert both == [used[device], usable[device]]
        assert used[device] / usable[device] == max(np.divide(used, usable))
        room = f"{format_bytes(used[device])} of {format_bytes(usable[device])}"
        assert str(plan).endswith(f"device {device} is fullest, {room}")
        assert cards(plan, None, None, None, True)[4].note == f"device {device}: {room}, computed"
        left, row = usable[device] - used[device], plan.to_frame("devices").iloc[device]
        assert row.memory_limit_bytes - row.reserve_bytes - row.memory_bytes == left
        said = fullest_step(plan) or f"device {device} is fullest, {format_bytes(left)} of"
        assert said.startswith(f"device {device} is fullest, {format_bytes(left)} of")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_algorithms_plan_costs_what_its_shards_do_and_what_others_say_it_costs(name: str) -> None:
    model, said = MODELS[name], 0
    for seed in range(0, PLANS, 6):
        task = drawn_plan(seed, knows_tasks=name != "test").task
        baselines: dict[str, tuple[float, ...]] = {}
        for algorithm in ALGORITHMS:
            with suppress(Infeasible):
                plan = search(task, model, SearchSettings(algorithm, rounds=0))
                check_price(model, plan)
                baselines |= {one.algorithm: one.predicted_ms for one in plan.baselines if one.predicted_ms is not None}
                if algorithm in baselines:
                    assert plan.predicted_ms == pytest.approx(baselines[algorithm], rel=TIGHTLY)
                    said += 1
    assert said
