"""How far nets are off where it counts: on the device sets of plans, of heuristics, of the published search and of ours."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.searching.scoring import Row, rows_of, sums
from bench.searching.tasks import BATCH_SIZE, paper_protocol
from neuroshard.core.errors import Infeasible
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import CostModel, device_costs
from neuroshard.measure.formula import Formula
from neuroshard.search.proposers.baselines import KEYS
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

METHODS = {"heuristics": tuple(KEYS), "neuroshard-2023": ("neuroshard-2023",), "local-search": ("local-search",)}
FIRST = 100  # task of the protocol: none of those that `make bench-search` asks


def errors_on_plans(
    model: TrainedCostModel, devices: int, tasks: int, folder: Path, rounds: int = 20
) -> Iterator[tuple[str, dict[str, float]]]:
    """By kind of planner: errors of its devices, of the slowest, and of the plan's cost."""
    drawn = [paper_protocol(devices, FIRST + index, folder).task for index in range(tasks)]
    for kind, algorithms in METHODS.items():
        found = [
            _errors(model, task, rows)
            for task in drawn
            for algorithm in algorithms
            if (rows := _plan(task, model, algorithm, rounds)) is not None
        ]
        if found:
            off, slowest, plan = (np.concatenate(some) for some in zip(*found, strict=True))
            yield (
                kind,
                {
                    "plans": float(len(plan)),
                    "mape": float(np.abs(off).mean()),
                    "signed": float(off.mean()),
                    "slowest": float(slowest.mean()),
                    "cost": float(plan.mean()),
                    "worst_cost": float(plan[np.abs(plan).argmax()]),
                },
            )


def _plan(task: ShardingTask, model: CostModel, algorithm: str, rounds: int) -> list[Row] | None:
    try:
        return rows_of(search(task, model, SearchSettings(algorithm=algorithm, rounds=rounds)))
    except Infeasible:
        return None


def _errors(model: TrainedCostModel, task: ShardingTask, rows: Sequence[Row]) -> tuple[np.ndarray, ...]:
    truth = Formula(BATCH_SIZE)
    said, columns = sums(model, task, rows)
    true, _ = sums(truth, task, rows)
    held = columns > 0
    predicted, measured = model.compute_ms(said[held]), truth.compute_ms(true[held])
    costs = [np.sum(device_costs(of, vectors, columns), axis=0).max() for of, vectors in ((model, said), (truth, true))]
    off = predicted / measured - 1
    return off, off[[measured.argmax()]], np.array([costs[0] / costs[1] - 1])
