"""A plan, run for real: measured against predicted costs of its device sets and its all-to-all.

    neuroshard evaluate plan.json --backend cpu

On a CPU with a core for each device, memory for all of them, and one thread each (`--threads 1`), all devices take whole steps
at the same time, as in a trainer there. Otherwise their tables run one device after another on one device of this machine, in
rounds, so that drift affects them all. Then the all-to-all is measured if this machine has as many GPUs (cuda) as the plan has
devices, or can run as many processes (cpu, of at most 8 devices unless more are asked for).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost
from neuroshard.core.errors import MeasureError, UsageError
from neuroshard.core.launches import launches
from neuroshard.core.part import Part
from neuroshard.core.plan import DeviceCost, Plan, parts_of, shardings_of
from neuroshard.core.table import Table
from neuroshard.core.text import agreeing, counted, wrapped
from neuroshard.core.units import format_bytes
from neuroshard.core.value import Value
from neuroshard.core.versions import Installed, measured_elsewhere
from neuroshard.costmodel.protocol import all_to_all_costs
from neuroshard.files.disk import check_can_write, write_bytes
from neuroshard.files.plan import read_plan
from neuroshard.measure.backends import Backend, MeasureSettings, open_backend
from neuroshard.measure.formula import TERMS, Formula
from neuroshard.measure.run import measure
from neuroshard.measure.schedule import Step
from neuroshard.measure.workers.processes import WorkerLost
from neuroshard.progress import Bar, progress

ROUNDS = 3  # over all devices; the median of a device counts
# Of an all-to-all on CPUs. With more, the time depends on this machine's cores rather than on the plan.
MOST_PROCESSES = 8


class DeviceEvaluation(Value):
    """One device of a plan: `measured` or `error`. All-to-alls that were not measured are 0 ms in `measured`."""

    device: int
    shards: int
    dim: int  # summed over its shards
    measured: DeviceCost | None = None
    predicted: DeviceCost | None = None
    error: str | None = None


class Evaluation(Value):
    """A plan measured. Without `all_to_all_measured`, only compute was measured, and only compute is compared."""

    plan_digest: str
    bench: Bench
    exact: bool  # the formula's costs, without noise
    all_to_all_measured: bool
    all_to_all_left_out: str = ""  # why, if it was not to be measured here
    predicted_for: str  # backend and device of the plan's cost model
    devices: tuple[DeviceEvaluation, ...]
    # by what share a device's slowest round of compute exceeds its fastest, in the median of devices
    rounds_differ: float | None = None
    at_once: bool = False  # all devices took steps at the same time, not one after another
    row_wise_tables: int = 0  # of the plan
    data_parallel_tables: int = 0  # of the plan
    predicted_precision: str = ""  # of the plan's all-to-alls, if not fp32, in which they are run
    domains: int = 1  # of the plan, all of whose devices are on this machine
    waits_for_input: bool = False  # whether the plan's predictions have the wait for input in them
    plan_notes: tuple[str, ...] = ()  # of the plan on its predictions, such as another batch size
    other_versions: str = ""  # of torch and FBGEMM, that the plan's costs were measured under, and those here

    @property
    def errors(self) -> int:
        return sum(device.error is not None for device in self.devices)

    def ms(self, cost: DeviceCost) -> float:
        """The ms to compare: the total, or only compute."""
        return cost.total_ms if self.all_to_all_measured else cost.compute_ms

    def slowest(self, which: str) -> tuple[int, float] | None:
        """Device and ms of the slowest one, `measured` or `predicted`; None where no device has such a cost."""
        costs = [(d.device, self.ms(getattr(d, which))) for d in self.devices if getattr(d, which) is not None]
        return max(costs, key=lambda cost: cost[1], default=None)

    @property
    def foreign(self) -> bool:
        """Whether the plan was predicted for other hardware than it was run on."""
        here = f"{self.bench.backend} ({self.bench.hardware.name})"
        return any(one.predicted for one in self.devices) and self.predicted_for != here

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        kind = "by the formula, exact" if self.exact else f"measured on {self.bench.hardware.name}"
        yield f"plan {self.plan_digest[:12]} {kind}, batch {self.bench.batch_size:,}"
        yield "device shards    dims    compute  all-to-alls   measured  predicted  ratio"
        yield f"{'(ms; ratio is measured / predicted)':>57}"
        slowest = self.slowest("measured")
        for one in self.devices:
            place = f"{one.device:>6} {one.shards:>6} {one.dim:>7,} "
            if one.measured is None:
                yield place + f"error: {one.error}"
                continue
            all_to_alls = one.measured.total_ms - one.measured.compute_ms if self.all_to_all_measured else None
            predicted = self.ms(one.predicted) if one.predicted else None
            cells = [_ms(one.measured.compute_ms), _ms(all_to_alls), _ms(self.ms(one.measured)), _ms(predicted)]
            ratio = f"{self.ms(one.measured) / predicted:6.2f}" if predicted else f"{'-':>6}"
            yield place + " ".join([*cells, ratio]) + (" slowest" if slowest and slowest[0] == one.device else "")
        yield from self._verdict()
        for note in self._notes():
            yield from wrapped(f"note: {note}")

    def _verdict(self) -> Iterator[str]:
        measured, predicted = self.slowest("measured"), self.slowest("predicted")
        if measured is None:
            return
        line = f"slowest device: {measured[0]}, {measured[1]:.3f} ms {'exact' if self.exact else 'measured'}"
        if predicted is not None and measured[1] > 0:
            line += f"; predicted: {predicted[0]}, {predicted[1]:.3f} ms"
            line += "" if self.foreign else f" ({predicted[1] / measured[1] - 1:+.1%})"
        yield line

    def _notes(self) -> Iterator[str]:
        if self.rounds_differ is not None:
            yield f"rounds of a device's compute differ by {self.rounds_differ:.1%} (median): smaller differences are noise"
        if self.at_once:
            yield "all devices ran at the same time, each on a core, as ranks of a trainer on this CPU do"
        if not self.all_to_all_measured:
            why = "not every device's tables could be run" if self.errors else self.all_to_all_left_out
            yield f"the all-to-all among {len(self.devices)} devices was not measured: {why}"
        if self.row_wise_tables:
            yield (
                f"{counted(self.row_wise_tables, 'table')} split row-wise: run as if all rows were looked up equally often, and "
                "with an all-to-all of as many columns in place of the trainer's reduce-scatter"
            )
        yield from self._only_predicted()
        if self.bench.capped_tables:
            yield (
                f"{agreeing(len(self.bench.capped_tables), 'table', 'was', 'were')} run with fewer rows, so that each device's "
                f"fit {format_bytes(self.bench.memory_limit_bytes or 0)}"
            )
        for note in self.plan_notes:
            yield f"the plan says: {note}"
        if self.other_versions:
            yield f"predicted by costs measured under {self.other_versions}: some of the difference may be theirs"
        if self.foreign:
            yield f"predicted for {self.predicted_for}: compare the devices with each other, not the ms"

    def _only_predicted(self) -> Iterator[str]:
        """What predictions of all-to-alls have in them and no run has. Where all-to-alls are not compared, neither is this."""
        if not self.all_to_all_measured or len(self.devices) == 1 or not any(one.predicted for one in self.devices):
            return
        if self.data_parallel_tables:
            yield (
                f"{counted(self.data_parallel_tables, 'table')} data-parallel: the all-reduce of gradients is predicted, and not "
                "measured"
            )
        if self.predicted_precision:
            yield f"all-to-alls are measured in fp32, and predicted in the plan's precision, {self.predicted_precision}"
        if self.domains > 1:
            yield (
                f"all devices are on one machine: the all-to-all between {self.domains} domains is predicted over their network, "
                "and measured without"
            )
        if self.waits_for_input:
            yield "the wait for input is predicted, and not measured"


def _ms(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:10.3f}"


def evaluate(
    plan: Plan,
    backend: str,
    settings: MeasureSettings,
    *,
    rounds: int = ROUNDS,
    most_processes: int = MOST_PROCESSES,
) -> Evaluation:
    """Run the tables of each device, and the plan's all-to-all, on CPUs only if it has at most `most_processes` devices.

    The batch is the plan's, whatever the settings say.

    On the synthetic backend the costs are the formula's, without noise. Raises UsageError, and MeasureError as a backend does.
    What goes wrong with the tables of one device, such as too little memory, is that device's error.
    """
    if rounds < 1:
        raise UsageError(f"rounds must be at least 1, not {rounds}")
    settings = replace(settings, batch_size=plan.task.batch_size)
    sets, kinds = device_tables(plan), shardings_of(plan)
    dims = tuple(round(sum(Part.of(t).sent_columns for t in tables if not kinds[t.name].copied)) for tables in sets)
    by_device = [ComputeCase(tables=tuple(tables)) if tables else None for tables in sets]
    all_to_all, left_out = _all_to_all(dims, backend, most_processes)
    rounds_differ, at_once = None, False
    with closing(open_backend(backend, _cases(plan, by_device, all_to_all, settings.seed), settings)) as opened:
        if all_to_all and opened.most_devices is not None and len(dims) > opened.most_devices:
            all_to_all = None
            left_out = f"this machine can run {counted(opened.most_devices, 'device')} at once; evaluate on one for {len(dims)}"
        if backend == "synthetic":
            measured: list[DeviceCost | str] = list(_by_formula(sets, dims, settings.batch_size))
        elif all_to_all is not None and (in_steps := _in_steps(by_device, all_to_all, opened, rounds)):
            (measured, rounds_differ), at_once = in_steps, True
        else:
            measured, rounds_differ = _by_measuring(by_device, all_to_all, opened, rounds)
        if all_to_all is not None:
            measured = _with_reordering(measured, plan, opened.bench)
    # after an error it is not known when that device would start its all-to-all
    complete = not any(isinstance(cost, str) for cost in measured)
    precision = plan.task.collective_precision
    return Evaluation(
        plan_digest=plan.digest(),
        bench=opened.bench,
        exact=backend == "synthetic",
        all_to_all_measured=(complete and all_to_all is not None) or len(dims) == 1,
        all_to_all_left_out=left_out,
        rounds_differ=rounds_differ,
        at_once=at_once,
        row_wise_tables=sum(kind.splits_rows for kind in kinds.values()),
        data_parallel_tables=sum(kind.copied for kind in kinds.values()),
        predicted_precision=precision.text if precision else "",
        domains=plan.task.topology.domains(plan.task.devices) if plan.task.topology else 1,
        waits_for_input=plan.task.waits_for_input and plan.provenance.cost_model_backend != "given",
        plan_notes=plan.provenance.notes,
        other_versions=measured_elsewhere(
            plan.provenance.cost_model_versions, Installed.here(opened.bench.versions.get)
        ),
        predicted_for=_predicted_for(plan),
        devices=_device_evaluations(plan, dims, measured),
    )


def _all_to_all(dims: tuple[int, ...], backend: str, most_processes: int) -> tuple[CollectiveCase | None, str]:
    """The all-to-all of devices that hold `dims` columns, all starting together; or None, and why it is left out."""
    if backend == "cpu" and len(dims) > most_processes:
        return None, (
            f"on a CPU it is run for at most {most_processes} devices, as with more it depends on this machine's cores; "
            f"--processes {len(dims)} runs it"
        )
    return (CollectiveCase(device_dims=dims, start_delays_ms=(0.0,) * len(dims)) if len(dims) > 1 else None), ""


def _cases(plan: Plan, by_device: Sequence[ComputeCase | None], all_to_all: CollectiveCase | None, seed: int) -> Cases:
    """All that is run of the plan."""
    compute = tuple(case for case in by_device if case)
    return Cases(
        tables=plan.parted.tables,
        compute=compute,
        collective=(all_to_all,) if all_to_all else (),
        max_dim=max(table.dim for case in compute for table in case.tables),
        seed=seed,
    )


def _with_reordering(measured: Sequence[DeviceCost | str], plan: Plan, bench: Bench) -> list[DeviceCost | str]:
    """The costs, and what putting outputs into order takes: the bench's ms of a column times the columns of the plan."""
    launched = launches(plan.held, plan.shards)
    each_way = launched.reordered * (bench.reorder_ms or 0.0) / plan.task.devices / 2
    return [
        cost
        if isinstance(cost, str)
        else cost.model_copy(
            update={
                "forward_collective_ms": cost.forward_collective_ms + each_way,
                "backward_collective_ms": cost.backward_collective_ms + each_way,
            }
        )
        for cost in measured
    ]


def _predicted_for(plan: Plan) -> str:
    by = plan.provenance
    return f"{by.cost_model_backend or 'an unknown backend'} ({by.cost_model_device or 'unknown device'})"


def _device_evaluations(
    plan: Plan, dims: Sequence[int], measured: Sequence[DeviceCost | str]
) -> tuple[DeviceEvaluation, ...]:
    shards = plan.shards_by_device()
    return tuple(
        DeviceEvaluation(
            device=device,
            shards=shards[device],
            dim=dims[device],
            measured=cost if isinstance(cost, DeviceCost) else None,
            # averaging replicas of groups is not run
            predicted=plan.predicted[device].model_copy(update={"averaging_ms": 0.0}) if plan.predicted else None,
            error=cost if isinstance(cost, str) else None,
        )
        for device, cost in enumerate(measured)
    )


def device_tables(plan: Plan) -> list[list[Table]]:
    """The shards of each device as tables. A row-wise shard has its share of the table's lookups."""
    sets: list[list[Table]] = [[] for _ in range(plan.task.devices)]
    for shard, part in zip(plan.shards, parts_of(plan.held, plan.shards), strict=True):
        sets[shard.device].append(part.as_table())
    return sets


def _by_formula(sets: Sequence[Sequence[Table]], dims: Sequence[int], batch_size: int) -> list[DeviceCost]:
    """The formula's cost of each device. One that holds only data-parallel tables sends nothing (`dims`), but looks them up."""
    model = Formula(batch_size)
    sums = np.stack(
        [
            model.part_vectors(list(map(Part.of, tables))).sum(axis=0) if tables else np.zeros(len(TERMS))
            for tables in sets
        ]
    )
    compute = np.where([bool(tables) for tables in sets], model.compute_ms(sums), 0.0)
    forward, backward = all_to_all_costs(model, compute, np.array(dims, dtype=float))
    return [
        DeviceCost(compute_ms=c, forward_collective_ms=f, backward_collective_ms=b)
        for c, f, b in zip(compute.tolist(), forward.tolist(), backward.tolist(), strict=True)
    ]


def _in_steps(
    by_device: Sequence[ComputeCase | None], all_to_all: CollectiveCase, backend: Backend, rounds: int
) -> tuple[list[DeviceCost | str], float | None] | None:
    """What each device takes in steps of all at the same time, the median of the rounds; and by what share the slowest round of
    compute exceeds the fastest (median).

    None where they cannot, or where a worker is lost: measured one after another, the devices then show which is at fault.
    """
    taken: list[list[DeviceCost]] = []
    try:
        costs = backend.steps(by_device, all_to_all)
        if costs is None:
            return None
        with progress(f"evaluate on {backend.bench.hardware.name}", rounds, "rounds") as bar:
            while costs is not None:
                taken.append(costs)
                bar.advance(1, f"slowest {max(cost.total_ms for cost in costs):.3f} ms")
                costs = backend.steps(by_device, all_to_all) if len(taken) < rounds else None
    except WorkerLost:
        return None
    parts = DeviceCost.model_fields
    devices = [list(of_rounds) for of_rounds in zip(*taken, strict=True)]
    middle = [DeviceCost(**{part: median(getattr(one, part) for one in each) for part in parts}) for each in devices]
    compute = [[one.compute_ms for one in each] for each, case in zip(devices, by_device, strict=True) if case]
    return list(middle), _rounds_differ(compute)


def _rounds_differ(compute_ms: Iterable[Sequence[float]]) -> float | None:
    """By what share the slowest round exceeds the fastest, in the median of devices with their ms by round; None of one round."""
    differ = [max(ms) / min(ms) - 1 for ms in compute_ms if len(ms) > 1 and min(ms)]
    return median(differ) if differ else None


def _by_measuring(
    by_device: Sequence[ComputeCase | None], all_to_all: CollectiveCase | None, backend: Backend, rounds: int
) -> tuple[list[DeviceCost | str], float | None]:
    """Measured cost of each device, or its error; and by what share the slowest round of compute exceeds the fastest (median).

    The all-to-all is measured twice: backward with all devices starting together, then forward with each device starting when
    its measured compute and backward all-to-all are done.
    """
    runs = rounds * (sum(case is not None for case in by_device) + (2 if all_to_all else 0))
    with progress(f"evaluate on {backend.bench.hardware.name}", runs, "runs") as bar:
        compute, differ = _compute_ms(by_device, backend, rounds, bar)
        forward = backward = [0.0] * len(compute)
        if all_to_all and not any(isinstance(ms, str) for ms in compute):
            backward = _all_to_all_ms(all_to_all, backend, rounds, "backward_ms")
            bar.advance(rounds)
            ready = [float(c) + b for c, b in zip(compute, backward, strict=True)]
            delays = tuple(ms - min(ready) for ms in ready)
            delayed = CollectiveCase(device_dims=all_to_all.device_dims, start_delays_ms=delays)
            forward = _all_to_all_ms(delayed, backend, rounds, "forward_ms")
            bar.advance(rounds)
    costs: list[DeviceCost | str] = [
        ms if isinstance(ms, str) else DeviceCost(compute_ms=ms, forward_collective_ms=f, backward_collective_ms=b)
        for ms, f, b in zip(compute, forward, backward, strict=True)
    ]
    return costs, differ


def _compute_ms(
    by_device: Sequence[ComputeCase | None], backend: Backend, rounds: int, bar: Bar
) -> tuple[list[float | str], float | None]:
    """Median ms of each device over the rounds, or its error; and how far rounds of a device differ, in the median."""
    samples: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    slowest_ms = 0.0
    for step, cost in measure([Step(case, round_) for round_ in range(rounds) for case in by_device if case], backend):
        if isinstance(cost, ComputeCost) and not cost.error:
            samples.setdefault(step.case.case_id, []).append(cost.total_ms)
            slowest_ms = max(slowest_ms, cost.total_ms)
        else:
            failed[step.case.case_id] = cost.error or ""
        bar.advance(1, f"slowest {slowest_ms:.3f} ms" + (f", {counted(len(failed), 'error')}" if failed else ""))
    compute = [failed.get(case.case_id) or median(samples[case.case_id]) if case else 0.0 for case in by_device]
    return compute, _rounds_differ(samples.values())


def _all_to_all_ms(case: CollectiveCase, backend: Backend, rounds: int, which: str) -> list[float]:
    """Median ms of each device over the rounds. Raises MeasureError where the all-to-all fails."""
    costs = [cost for _, cost in measure([Step(case, round_) for round_ in range(rounds)], backend)]
    good = [getattr(cost, which) for cost in costs if isinstance(cost, CollectiveCost) and not cost.error]
    if not good:
        raise MeasureError(f"the all-to-all among {len(case.device_dims)} devices failed: {costs[0].error}")
    return [median(of_device) for of_device in zip(*good, strict=True)]


def run(
    plan_path: Path,
    out: Path | None,
    backend: str,
    settings: MeasureSettings,
    *,
    rounds: int = ROUNDS,
    most_processes: int = MOST_PROCESSES,
) -> Evaluation:
    """Evaluate a plan.json, and write the evaluation to `out` if given."""
    if out is not None:
        check_can_write(out)
    plan = read_plan(plan_path)
    evaluation = evaluate(plan, backend, settings, rounds=rounds, most_processes=most_processes)
    if out is not None:
        write_bytes(out, evaluation.canonical_json())
    return evaluation
