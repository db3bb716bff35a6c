"""A plan, run for real: what its device sets and its all-to-all cost, beside what was predicted.

    neuroshard evaluate plan.json --backend cpu

The devices' tables are run one device after another on one device of this machine, in rounds, so that all see the same drift.
The all-to-all is measured where as many processes (cpu) or GPUs (cuda) can be had as the plan has devices.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import CollectiveCost, ComputeCost
from neuroshard.core.errors import MeasureError, UsageError
from neuroshard.core.plan import DeviceCost, Plan
from neuroshard.core.table import Table
from neuroshard.core.text import counted
from neuroshard.costmodel.protocol import device_costs
from neuroshard.files.disk import check_can_write, write_bytes
from neuroshard.files.plan import read_plan
from neuroshard.measure.backends import Backend, Settings, open_backend
from neuroshard.measure.evaluation import DeviceEvaluation, Evaluation
from neuroshard.measure.formula import TERMS, Formula
from neuroshard.measure.run import measure
from neuroshard.measure.schedule import Step
from neuroshard.progress import progress

ROUNDS = 3  # of all devices, one after another; the median of a device counts
MOST_PROCESSES = 8  # of an all-to-all on CPUs; more of them tell of this machine's cores rather than of the plan


def evaluate(
    plan: Plan,
    backend: str,
    settings: Settings,
    *,
    rounds: int = ROUNDS,
    most_processes: int = MOST_PROCESSES,
) -> Evaluation:
    """Run the plan's device sets, and its all-to-all among at most `most_processes` devices. The batch is the plan's.

    On the synthetic backend these are the formula's exact costs. Raises UsageError, MeasureError as a backend does; what goes
    wrong with a device's tables, like too little memory, is its error.
    """
    if rounds < 1:
        raise UsageError(f"rounds must be at least 1, not {rounds}")
    sets = device_tables(plan)
    dims = [sum(table.dim for table in tables) for tables in sets]
    by_device = [ComputeCase(tables=tuple(tables)) if tables else None for tables in sets]
    cases = tuple(case for case in by_device if case)
    together = CollectiveCase(device_dims=tuple(dims), start_delays_ms=(0.0,) * len(dims)) if len(dims) > 1 else None
    if together and backend != "synthetic" and len(dims) > most_processes:
        together = None
    opened = open_backend(
        backend,
        Cases(
            tables=plan.task.tables,
            compute=cases,
            collective=(together,) if together else (),
            max_dim=max(t.dim for case in cases for t in case.tables),
            seed=settings.seed,
        ),
        settings,
    )
    try:
        if together and opened.most_devices is not None and len(dims) > opened.most_devices:
            together = None
        if backend == "synthetic":
            measured: list[DeviceCost | str] = list(_by_formula(sets, dims, settings.batch_size))
            rounds_differ = None
        else:
            measured, rounds_differ = _by_measuring(by_device, together, opened, rounds)
    finally:
        opened.close()
    if any(isinstance(cost, str) for cost in measured):
        together = None  # which device would begin when is not known
    shards = plan.shards_by_device()
    by, rows = plan.provenance, {table.name: table.rows for table in plan.task.tables}
    return Evaluation(
        plan_digest=plan.digest(),
        bench=opened.bench,
        exact=backend == "synthetic",
        all_to_all_measured=together is not None or len(dims) == 1,
        rounds_differ=rounds_differ,
        row_wise_tables=len({shard.table for shard in plan.shards if shard.rows < rows[shard.table]}),
        plan_notes=by.notes,
        predicted_for=f"{by.cost_model_backend or 'an unknown backend'} ({by.cost_model_device or 'unknown device'})",
        devices=tuple(
            DeviceEvaluation(
                device=device,
                shards=shards[device],
                dim=dims[device],
                measured=cost if isinstance(cost, DeviceCost) else None,
                predicted=plan.predicted[device] if plan.predicted else None,
                error=cost if isinstance(cost, str) else None,
            )
            for device, cost in enumerate(measured)
        ),
    )


def device_tables(plan: Plan) -> list[list[Table]]:
    """The shards of each device as tables of their own; of a table's rows a shard has its share of the lookups."""
    tables = {table.name: table for table in plan.task.tables}
    sets: list[list[Table]] = [[] for _ in range(plan.task.devices)]
    for shard in plan.shards:
        sets[shard.device].append(tables[shard.table].part(shard.rows, shard.dim))
    return sets


def _by_formula(sets: Sequence[Sequence[Table]], dims: Sequence[int], batch_size: int) -> list[DeviceCost]:
    """The exact costs of a device each."""
    model = Formula(batch_size)
    sums = np.stack(
        [
            model.table_vectors(tables, np.array([t.dim for t in tables], dtype=np.int64)).sum(axis=0)
            if tables
            else np.zeros(len(TERMS))
            for tables in sets
        ]
    )
    return [
        DeviceCost(compute_ms=compute, forward_collective_ms=forward, backward_collective_ms=backward)
        for compute, forward, backward in zip(
            *(ms.tolist() for ms in device_costs(model, sums, np.array(dims, dtype=float))), strict=True
        )
    ]


def _by_measuring(
    by_device: Sequence[ComputeCase | None], together: CollectiveCase | None, backend: Backend, rounds: int
) -> tuple[list[DeviceCost | str], float | None]:
    """Measured cost of each device, or its error; and how far a device's slowest round of compute is above its fastest.

    The all-to-all is measured twice: backward, which all start together; then forward, with each device starting when its
    measured compute and backward all-to-all are done.
    """
    steps = [Step(case, round_) for round_ in range(rounds) for case in by_device if case]
    all_to_alls = 2 * rounds if together else 0
    with progress(f"evaluate on {backend.bench.hardware.name}", len(steps) + all_to_alls, "runs") as bar:
        samples: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        slowest_ms = 0.0
        for step, cost in measure(steps, backend):
            if isinstance(cost, ComputeCost) and not cost.error:
                samples.setdefault(step.case.case_id, []).append(cost.total_ms)
                slowest_ms = max(slowest_ms, cost.total_ms)
            else:
                failed[step.case.case_id] = cost.error or ""
            bar.advance(1, f"slowest {slowest_ms:.3f} ms" + (f", {counted(len(failed), 'error')}" if failed else ""))
        compute = [failed.get(case.case_id) or median(samples[case.case_id]) if case else 0.0 for case in by_device]
        errors = [ms for ms in compute if isinstance(ms, str)]
        forward = backward = [0.0] * len(compute)
        if together and not errors:
            backward = _all_to_all_ms(together, backend, rounds, "backward_ms")
            bar.advance(rounds)
            ready = [float(c) + b for c, b in zip(compute, backward, strict=True)]
            delayed = CollectiveCase(
                device_dims=together.device_dims, start_delays_ms=tuple(r - min(ready) for r in ready)
            )
            forward = _all_to_all_ms(delayed, backend, rounds, "forward_ms")
            bar.advance(rounds)
    differ = [max(ms) / min(ms) - 1 for ms in samples.values() if len(ms) > 1 and min(ms)]
    costs: list[DeviceCost | str] = [
        ms if isinstance(ms, str) else DeviceCost(compute_ms=ms, forward_collective_ms=f, backward_collective_ms=b)
        for ms, f, b in zip(compute, forward, backward, strict=True)
    ]
    return costs, median(differ) if differ else None


def _all_to_all_ms(case: CollectiveCase, backend: Backend, rounds: int, which: str) -> list[float]:
    """Median ms of each device over the rounds. Raises MeasureError where the all-to-all fails."""
    costs = [cost for _, cost in measure([Step(case, round_) for round_ in range(rounds)], backend)]
    good = [getattr(cost, which) for cost in costs if isinstance(cost, CollectiveCost) and not cost.error]
    if not good:
        raise MeasureError(f"the all-to-all among {len(case.device_dims)} devices failed: {costs[0].error}")
    return [median(of_device) for of_device in zip(*good, strict=True)]


def run(
    plan_path: Path,
    out: Path | None = None,
    *,
    backend: str,
    rounds: int = ROUNDS,
    most_processes: int = MOST_PROCESSES,
    **settings: object,
) -> Evaluation:
    """Evaluate a plan.json, and write the evaluation to `out` if given. `settings` are those of measure.backends.Settings."""
    if out is not None:
        check_can_write(out)
    plan = read_plan(plan_path)
    chosen = Settings(**{"batch_size": plan.task.batch_size, **settings})  # type: ignore[arg-type]
    evaluation = evaluate(plan, backend, chosen, rounds=rounds, most_processes=most_processes)
    if out is not None:
        write_bytes(out, evaluation.canonical_json())
    return evaluation
