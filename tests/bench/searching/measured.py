"""Plans measured again on this CPU: cost nets from what this CPU measured, plans by several methods, and the device sets of all
plans of a task run as `neuroshard evaluate` runs those of one, in turns.

Only compute is compared: all-to-alls between more processes than cores say more of the machine than of a plan.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np

from bench.searching import tasks
from neuroshard.augment.run import run as augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import Cases, ComputeCase
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.bundle import TrainedCostModel, load_cost_model
from neuroshard.files.tables import write_tables
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.evaluate import device_tables
from neuroshard.measure.hardware import cpu
from neuroshard.measure.run import run as measure
from neuroshard.pretrain.run import run as pretrain
from neuroshard.search.run import SearchSettings, search

DEVICES, TABLES, BATCH_SIZE = 4, 16, 1024
MOST_ROWS, MOST_POOLING = 30_000, 60.0  # what a CPU does in milliseconds, and holds
DIMS = (16, 32, 64, 128)
TIGHTNESS = 1.3
ROUNDS = 5  # of all devices of all plans of a task


def drawn(count: int, seed: int, folder: Path) -> tuple[Table, ...]:
    """Production tables, small enough for this CPU."""
    rng = np.random.default_rng([7, seed])
    pool = tasks.pool("meta", folder)
    some = [pool[i].with_dim(int(rng.choice(DIMS))) for i in rng.choice(len(pool), size=count, replace=False)]
    return tuple(
        t.model_copy(
            update={"rows": min(t.rows, MOST_ROWS), "pooling_factor": max(min(t.pooling_factor, MOST_POOLING), 1.0)}
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


def plans(model: TrainedCostModel, seed: int, folder: Path) -> dict[str, Plan]:
    """Ours, the published search's, and of the heuristics the one that the nets like best."""
    tables = drawn(TABLES, seed, folder)
    memory = int(TIGHTNESS * sum(t.memory_bytes for t in tables) / DEVICES)
    memory = max(memory, max(t.memory_bytes for t in tables))
    task = ShardingTask(tables=tables, device_memory_bytes=(memory,) * DEVICES, batch_size=BATCH_SIZE)
    ours = search(task, model)
    costs = {b.algorithm: b.cost_ms for b in ours.baselines if b.cost_ms is not None}
    found = {"local-search": ours, "neuroshard-2023": search(task, model, SearchSettings(algorithm="neuroshard-2023"))}
    if costs:
        found["best heuristic"] = search(
            task, model, SearchSettings(algorithm=min(costs, key=lambda name: costs[name]))
        )
    return found


def compute_ms(found: Mapping[str, Plan], model: TrainedCostModel) -> dict[str, tuple[float, float]]:
    """Compute of the slowest device of each plan, measured here and predicted.

    Devices of all plans are measured in turns, in ms of the same calm as the labels that the cost nets learned from: what a run
    of its own takes for calm differs from another's by more than plans do.
    """
    cases = {
        name: [ComputeCase(tables=tuple(tables)) for tables in device_tables(plan) if tables]
        for name, plan in found.items()
    }
    steps = [case for of_plan in cases.values() for case in of_plan]
    tables = next(iter(found.values())).task.tables
    drawn = Cases(tables=tables, compute=tuple(dict.fromkeys(steps)), collective=(), max_dim=max(DIMS), seed=0)
    opened = cpu(drawn, MeasureSettings(batch_size=BATCH_SIZE), model.manifest.bench)
    try:
        rounds = [opened.compute_many([(case, round_) for case in steps]) for round_ in range(ROUNDS)]
    finally:
        opened.close()
    taken = {case.case_id: median(costs[place].total_ms for costs in rounds) for place, case in enumerate(steps)}
    return {
        name: (
            max(taken[case.case_id] for case in of_plan),
            max(cost.compute_ms for cost in found[name].predicted or ()),
        )
        for name, of_plan in cases.items()
    }
