"""Sequences beside pooled tables: where one is cut, its collection has collectives of its own, and the search knows it."""

import numpy as np
import pytest

from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.launches import launches
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings


def model_with_sequences(seed: int) -> tuple[Table, ...]:
    rng = np.random.default_rng(seed)
    pooled = [
        Table(
            name=f"t{i}",
            module=str(rng.choice(["user", "item"])),
            rows=int(10 ** rng.uniform(1, 6)),
            dim=int(rng.choice([16, 32, 64])),
            pooling_factor=float(rng.uniform(1, 10)),
        )
        for i in range(6)
    ]
    read = [
        Table(name=f"s{i}", module="seq", rows=20_000, dim=64, pooling_factor=float(rng.uniform(2, 20)), pooling="none")
        for i in range(2)
    ]
    return (*pooled, *read)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rows", [False, True])
def test_no_heuristic_finds_a_cheaper_plan(seed: int, rows: bool) -> None:
    """A batch so small that launches weigh as much as bytes."""
    model, devices = Analytic("h100", 8192), 2 + seed % 3
    task = ShardingTask(tables=model_with_sequences(seed), device_memory_bytes=(2**34,) * devices, batch_size=8192)
    plan = search(task, model, SearchSettings(rounds=10, try_row_wise=rows))
    prices = price_shards(model, task, plan.shards)
    assert prices is not None
    assert plan.cost_ms == pytest.approx(prices.total_ms.max())
    assert plan.lower_bound_ms is not None
    assert plan.lower_bound_ms <= plan.cost_ms
    assert plan.cost_ms <= min(one.cost_ms for one in plan.baselines if one.cost_ms is not None) * (1 + 1e-9)


def drawn(seed: int) -> ShardingTask:
    """A few sequences of one width, and as many pooled tables, for small batches."""
    rng = np.random.default_rng(seed)
    devices, count, dim = int(rng.choice([4, 8])), int(rng.integers(6, 16)), int(rng.choice([64, 128, 256]))

    def some(name: str, **more: object) -> list[dict[str, object]]:
        lookups = np.exp(rng.uniform(0, 4.5, count))
        rows = (10 ** rng.uniform(2, 7, count)).astype(int)
        return [
            {"name": f"{name}{i}", "rows": rows[i], "dim": dim, "pooling_factor": lookups[i], **more}
            for i in range(count)
        ]

    return ShardingTask.parse(
        {
            "tables": [*some("seq", pooling="none", module="seq"), *some("t")],
            "device_memory_bytes": (2**36,) * devices,
            "batch_size": 1024 * devices,
        },
        "task",
    )


@pytest.mark.parametrize("seed", [2, 3, 8])
def test_once_a_sequence_is_cut_all_are_where_that_saves_an_operator_of_their_own(seed: int) -> None:
    task = drawn(seed)
    plan = search(task, Analytic("h100", task.batch_size), SearchSettings(rounds=8))
    counted = launches(task, plan.shards)
    assert counted.outputs == 2
    sequences = [len(shards) for name, shards in plan.by_table().items() if name.startswith("seq")]
    assert len(set(sequences)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_equal_shards_makes_no_plan_dearer_than_halves(seed: int) -> None:
    task, settings = drawn(seed), SearchSettings(rounds=3, simplicity=0.0, try_row_wise=False)
    names = [table.name for table in task.tables if table.pooling == "none"]
    rules = Constraints(tables=tuple(TableRule(table=name, max_shards=2) for name in names))
    model, in_two = Analytic("h100", task.batch_size), task.model_copy(update={"constraints": rules})
    plan, halves = search(task, model, settings), search(in_two, model, settings)
    assert plan.lower_bound_ms <= plan.cost_ms <= halves.cost_ms
    assert plan.cost_ms == pytest.approx(price_shards(model, task, plan.shards).total_ms.max())
    cut = [plan.by_table()[name] for name in names]
    assert len({shard.dim for shards in cut for shard in shards if len(shards) > 1}) == 1


def test_a_note_on_row_wise_sequences_speaks_of_no_sums() -> None:
    read = Table(name="s", module="seq", rows=10**6, dim=64, pooling_factor=300.0, pooling="none")
    rules = (TableRule(table="s", row_wise=True),)
    task = ShardingTask(
        tables=(read, *model_with_sequences(0)[:3]),
        device_memory_bytes=(2**27,) * 4,
        batch_size=8192,
        constraints=Constraints(tables=rules),
    )
    plan = search(task, Analytic("h100", 8192), SearchSettings(rounds=1))
    (note,) = (note for note in plan.provenance.notes if "row-wise" in note)
    assert "1 table of 4" in note
    assert "sums" not in note
