"""Plans of the same task, measured in turns: the compute of the slowest device, and the interval of the difference.

Only compute is compared. All-to-alls between more processes than devices depend more on the machine than on the plan.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from neuroshard.core.case import Cases, ComputeCase
from neuroshard.core.cost import Bench
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import Table
from neuroshard.costmodel.protocol import Floats
from neuroshard.measure.backends import MeasureSettings, open_backend

DRAWS, INTERVAL = 2000, 0.95  # of the bootstrap
DeviceTables = Sequence[Sequence[Table]]  # by device: its shards as tables


@dataclass(frozen=True)
class Gain:
    """How much longer the slowest device of another plan takes than of ours, as a share; mean over tasks, and its interval."""

    mean: float
    low: float
    high: float
    worst: float  # of a task

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


def slowest_ms(
    tables: Sequence[Table],
    plans: Mapping[str, DeviceTables],
    backend: str,
    settings: MeasureSettings,
    rounds: int,
    begun: Bench | None = None,
) -> dict[str, Floats]:
    """Ms of the slowest device of each plan of a task with these tables, in each round: by plan, (rounds,).

    Devices of all plans are measured in turns, so that drift of the machine affects them alike. With `begun`, the bench of costs
    measured here before, labels are scaled to the same calm times as those. Raises MeasureError, also for a table set that fails.
    """
    cases = {name: [ComputeCase(tables=tuple(held)) for held in devices if held] for name, devices in plans.items()}
    sets = list({case.case_id: case for of_plan in cases.values() for case in of_plan}.values())
    widest = max(table.dim for case in sets for table in case.tables)
    drawn = Cases(tables=tuple(tables), compute=tuple(sets), collective=(), max_dim=widest, seed=settings.seed)
    taken: dict[str, list[float]] = {case.case_id: [] for case in sets}
    with closing(open_backend(backend, drawn, settings, begun)) as opened:
        for round_ in range(rounds):
            left = [(case, round_) for case in sets[:: 1 if round_ % 2 == 0 else -1]]
            while left:
                some, left = left[: opened.concurrency], left[opened.concurrency :]
                for (case, _), cost in zip(some, opened.compute_many(some), strict=True):
                    if cost.error:
                        raise MeasureError(f"a device of a plan could not be measured: {cost.error}")
                    taken[case.case_id].append(cost.total_ms)
    return {name: np.max([taken[case.case_id] for case in of_plan], axis=0) for name, of_plan in cases.items()}


def gain(tasks: Sequence[Mapping[str, Floats]], ours: str, other: str, seed: int = 0) -> Gain:
    """The gain of `ours` over `other`, from the `slowest_ms` of some tasks. The interval is a bootstrap over tasks and rounds."""
    rng = np.random.default_rng(seed)
    pairs = [(np.asarray(task[other]), np.asarray(task[ours])) for task in tasks if other in task and ours in task]
    if not pairs:
        raise ValueError(f"no task has plans of {ours} and {other}")

    each = [float(np.median(one) / np.median(its)) - 1 for one, its in pairs]
    drawn = np.array([_drawn(one, rng) / _drawn(its, rng) - 1 for one, its in pairs])
    tasks_drawn = rng.integers(len(pairs), size=(len(pairs), DRAWS))
    low, high = np.quantile(drawn[tasks_drawn, np.arange(DRAWS)].mean(axis=0), [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return Gain(float(np.mean(each)), float(low), float(high), min(each))


def _drawn(ms: Floats, rng: np.random.Generator) -> Floats:
    """Medians of resampled rounds: (rounds,) -> (DRAWS,)."""
    medians: Floats = np.median(ms[rng.integers(len(ms), size=(len(ms), DRAWS))], axis=0)
    return medians
