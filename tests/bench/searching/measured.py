"""Plans measured again on this CPU: cost nets from what this CPU measured, plans by several methods, and the device sets of all
plans of a task run in turns (bench/gpu_day/stages.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.gpu_day.stages import slowest_ms
from bench.searching import peers_torchrec, tasks
from bench.searching.scoring import Row, cost_ms, rows_of
from helpers.parts import wholes
from neuroshard.augment.run import run as augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.bundle import TrainedCostModel, load_cost_model
from neuroshard.costmodel.protocol import Floats
from neuroshard.files.tables import write_tables
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.run import run as measure
from neuroshard.pretrain.run import run as pretrain
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

DEVICES, TABLES, BATCH_SIZE = 4, (16, 60), 1024
MOST_ROWS, MOST_POOLING = 30_000, 60.0  # what a CPU does in milliseconds, and holds
DIMS = (16, 32, 64, 128)
TIGHTNESS = 1.3
ROUNDS = 5  # of all devices of all plans of a task


@dataclass(frozen=True)
class Measured:
    """Plans of a task, by who made them: ms of the slowest device in each round, and as the nets predict it."""

    rounds_ms: dict[str, Floats]
    predicted_ms: dict[str, float]


def drawn(count: int, seed: int, folder: Path) -> tuple[Table, ...]:
    """Production tables, small enough for this CPU."""
    rng = np.random.default_rng([7, seed])
    pool = tasks.pool("meta", folder)
    some = [pool[i].with_dim(int(rng.choice(DIMS))) for i in rng.choice(len(pool), size=count, replace=False)]
    return tuple(
        t.model_copy(
            update={
                "rows": min(t.rows, MOST_ROWS),
                "pooling_factor": max(min(t.pooling_factor, MOST_POOLING), 1.0),
                "features": (),
            }
        )
        for t in some
    )


def cost_nets(folder: Path, out: Path, compute_cases: int, collective_cases: int, budget_s: float) -> TrainedCostModel:
    """Of this CPU, measured for so long at most."""
    write_tables(out / "tables.json", drawn(200, 0, folder))
    augment(
        out / "tables.json",
        out / "cases",
        AugmentSettings(
            compute_cases=compute_cases,
            collective_cases=collective_cases,
            devices=(DEVICES,),
            memory_bytes=2 * 2**30,
            max_dim=max(DIMS),
            seed=0,
        ),
    )
    measure(
        out / "cases", out / "costs", "cpu", MeasureSettings(batch_size=BATCH_SIZE, budget_seconds=budget_s, seed=0)
    )
    pretrain(out / "costs", out / "model", seed=0)
    return load_cost_model(out / "model")


def measured(model: TrainedCostModel, seed: int, folder: Path) -> Measured:
    """The plans of one task, run here."""
    low, high = TABLES
    tables = drawn(int(np.random.default_rng([8, seed]).integers(low, high + 1)), seed, folder)
    memory = int(TIGHTNESS * sum(t.memory_bytes for t in tables) / DEVICES)
    memory = max(memory, max(t.memory_bytes for t in tables))
    task = ShardingTask(tables=tables, device_memory_bytes=(memory,) * DEVICES, batch_size=BATCH_SIZE)
    found = plans(task, model)
    sets = {
        name: [
            [Part(tables[t], count, dim).as_table() for t, dim, device, count in rows if device == here]
            for here in range(DEVICES)
        ]
        for name, rows in found.items()
    }
    settings = MeasureSettings(batch_size=BATCH_SIZE, seed=seed)
    taken = slowest_ms(tables, sets, "cpu", settings, ROUNDS, model.manifest.bench)
    return Measured(taken, {name: _compute_ms(model, held) for name, held in sets.items()})


def plans(task: ShardingTask, model: TrainedCostModel) -> dict[str, list[Row]]:
    """Ours, the published search's, and by the nets the best of TorchRec's planner and of the heuristics."""
    ours = search(task, model)
    costs = {b.algorithm: b.cost_ms for b in ours.baselines if b.cost_ms is not None}
    wanted = {"neuroshard-2023": "neuroshard-2023"}
    if costs:
        wanted["best heuristic"] = min(costs, key=lambda name: costs[name])
    found = {"local-search": rows_of(ours)}
    for name, algorithm in wanted.items():
        try:
            found[name] = rows_of(search(task, model, SearchSettings(algorithm=algorithm)))
        except Infeasible:
            continue
    theirs = [peers_torchrec.plan(task, width, peers_torchrec.COLUMN_TYPES)[0] for width in peers_torchrec.WIDTHS]
    if some := [rows for rows in theirs if rows is not None]:
        found["TorchRec's planner"] = min(some, key=lambda rows: cost_ms(model, task, rows))
    return found


def _compute_ms(model: TrainedCostModel, sets: Sequence[Sequence[Table]]) -> float:
    """Predicted compute of the slowest device."""
    vectors = [model.part_vectors(wholes(held)).sum(axis=0) for held in sets if held]
    return float(max(model.compute_ms(each) for each in vectors))
