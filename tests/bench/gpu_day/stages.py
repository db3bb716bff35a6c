"""The stages of the day: each writes its files into one folder, so that a later call continues where an earlier one was cut off.

Stages call this package's commands where there are any. A stage's results are in STAGE.json, and `page` renders all of them.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.gpu_day.operators import check
from bench.gpu_day.page import Day, OutOfTime, render
from neuroshard.core.case import Cases, ComputeCase
from neuroshard.core.cost import Bench
from neuroshard.core.errors import Infeasible, MeasureError, NeuroshardError
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic, analytic_for
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.protocol import Floats
from neuroshard.files.costs import read_costs
from neuroshard.files.disk import only_writer, write_bytes
from neuroshard.files.importers.presets import preset
from neuroshard.files.importers.tables_source import import_tables
from neuroshard.files.tables import read_tables, write_tables
from neuroshard.measure.backends import MeasureSettings, open_backend
from neuroshard.measure.evaluate import device_tables
from neuroshard.measure.run import run as measure
from neuroshard.orders.options import LOCAL_SEARCH, PUBLISHED
from neuroshard.pretrain.run import run as pretrain
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

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


OURS, THEIRS, HEURISTIC = LOCAL_SEARCH, PUBLISHED, "best heuristic"
POOL = 300  # tables that cases are drawn from, of all table sets together
TASK_TABLES, TASK_DEVICES = (16, 60), 4
TIGHTNESS = 1.3  # memory of a task's devices, times what its tables need
ACCESS = "zipf:1.05"  # how rows are read, where a table set does not say it
VERIFIED = 100  # cases that are measured again
LEAST_SECONDS = 20.0  # the least time for which measuring is worth starting


def run(day: Day) -> bool:
    """Do what is missing, in order. False if time was up before all was done. Raises NeuroshardError where a stage fails, or
    where another call is at work in the folder."""
    with only_writer(day.folder, "a GPU day"):
        return _run(day)


def _run(day: Day) -> bool:
    for name, stage in STAGES.items():
        if day.has(name):
            continue
        began = day.clock()
        try:
            found = stage(day)
        except OutOfTime:
            day.say(f"{name}: time is up; the same command continues from here")
            return False
        day.write(name, found)
        day.say(f"{name}: done, {day.clock() - began:.0f} s")
    write_bytes(day.folder / "page.md", render(day).encode())
    day.say(f"{day.folder / 'page.md'}: all results; the cost model is {day.folder / 'model'}")
    return True


def doctor(day: Day) -> Any:
    """What `neuroshard doctor` says of this machine."""
    done = _neuroshard(day, "doctor", "--json", check_exit=False)
    return json.loads(done) if done.startswith(("{", "[")) else {"said": done}


def operators(day: Day) -> Any:
    """FBGEMM's operators of every kind, compared with the CPU's results."""
    device = "cuda" if day.scale.backend == "cuda" else "cpu"
    return [
        {"what": each.what, "difference": each.difference, "good": each.good, "error": each.error}
        for each in check(device)
    ]


def cases(day: Day) -> Any:
    """Tables of all sets, in sizes that the device takes, and the cases to measure."""
    tables = _pool(day)
    write_tables(day.folder / "tables.json", tables)
    counts, collective_cases = (day.devices, day.scale.collective_cases) if day.devices else ((2,), 0)
    _neuroshard(
        day,
        *("augment", "tables.json", "-o", "cases", "--memory", day.scale.memory),
        *("--compute-cases", day.scale.compute_cases, "--collective-cases", collective_cases),
        *("--tier-cases", day.scale.tier_cases),
        *("--batch-sizes", f"{day.scale.other_batch_size},{day.scale.batch_size}"),
        *("--devices", ",".join(map(str, counts))),
    )
    return {"tables": len(tables)}


def costs(day: Day) -> Any:
    """The long stage: every call measures for as long as it has time, and the next one continues."""
    while day.left_s > LEAST_SECONDS:
        settings = MeasureSettings(batch_size=day.scale.batch_size, budget_seconds=day.left_s - LEAST_SECONDS / 2)
        found = measure(day.folder / "cases", day.folder / "costs", day.scale.backend, settings)
        if not found.left:
            return {
                "measured": found.measured,
                "errors": found.errors,
                "repeatability": found.repeatability["compute"],
                "no_tiers": found.no_tiers,
            }
        day.say(f"costs: {found.measured} of {found.planned} measured")
    raise OutOfTime


def datasheet(day: Day) -> Any:
    """Measured over computed ms by the device's datasheet, of table sets in the batch of the plans."""
    found = read_costs(day.folder / "costs")
    name, own = analytic_for(found.bench.hardware)
    sheet, ratios = Analytic(name, day.scale.batch_size), []
    for case, cost in found.compute:
        if not cost.error and cost.round == 0 and case.batch_size in (None, day.scale.batch_size):
            vectors = sheet.part_vectors([Part.of(table) for table in case.tables])
            ratios.append(cost.total_ms / float(sheet.compute_ms(vectors.sum(axis=0))))
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9]).tolist()
    return {"sheet": f"analytic:{name}", "own": own, "cases": len(ratios), "low": low, "median": middle, "high": high}


def noise(day: Day) -> Any:
    """How far labels repeat: some cases measured again. Raises NeuroshardError where none could be."""
    _need(day, 60)
    said = _neuroshard(day, "measure", "--verify", "costs", "-n", VERIFIED, check_exit=False).splitlines()
    if not said:  # labels that differ also exit with 1
        raise NeuroshardError("labels could not be measured again")
    return {"said": said}


def model(day: Day) -> Any:
    """The cost model that is trained on the costs, and its error."""
    _need(day, 120)
    # one GPU measures no all-to-alls: the datasheet stands in, since plans are compared by their compute
    report = pretrain(
        day.folder / "costs", day.folder / "model", ranks=(TASK_DEVICES,), epochs=day.scale.epochs
    ).manifest.report
    return {
        "error_on_unseen_tables": report.unseen_tables_error,
        "stand_ins": [*report.stand_ins, *report.datasheet_better],
        "beyond_hbm": {tier: errors.model_dump(mode="json") for tier, errors in report.tiers.items()},
        "gaps": list(report.gaps),
    }


def plans(day: Day) -> Any:
    """Ms of the slowest device, by task, plan and round: each task is a line of plans.jsonl, so none is measured twice."""
    cost_model, path = load_cost_model(day.folder / "model"), day.folder / "plans.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    longest = 30.0
    for index in range(len(done), day.scale.tasks):
        _need(day, 1.5 * longest)
        began = day.clock()
        task = _task(read_tables(day.folder / "tables.json")[0], index, day.scale.batch_size)
        found = _plans(task, cost_model)
        settings = MeasureSettings(batch_size=day.scale.batch_size, seed=index)
        begun = cost_model.manifest.bench if day.scale.backend != "synthetic" else None
        sets = {name: device_tables(plan) for name, plan in found.items()}
        ms = slowest_ms(task.tables, sets, day.scale.backend, settings, day.scale.rounds, begun)
        predicted = {name: max(cost.compute_ms for cost in plan.predicted or ()) for name, plan in found.items()}
        one = {
            "tables": len(task.tables),
            "ms": {name: list(map(float, each)) for name, each in ms.items()},
            "predicted": predicted,
        }
        with path.open("a") as file:
            file.write(json.dumps(one) + "\n")
        done.append(one)
        longest = max(longest, day.clock() - began)
        day.say(f"plans: task {index + 1} of {day.scale.tasks}")
    return summary(done)


def summary(tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the tasks of plans.jsonl: how much longer other plans take than ours, and how far predictions are off."""
    measured = [{name: np.array(ms) for name, ms in task["ms"].items()} for task in tasks]
    others = sorted({name for task in measured for name in task} - {OURS})
    off = [task["predicted"][OURS] / np.median(task["ms"][OURS]) - 1 for task in tasks]
    gains = {name: gain(measured, OURS, name) for name in others}
    return {
        "tasks": len(tasks),
        "gains": {name: {"mean": g.mean, "low": g.low, "high": g.high, "worst": g.worst} for name, g in gains.items()},
        "predicted_over_measured": float(np.mean(off)),
        "absolute": float(np.mean(np.abs(off))),
    }


_IN_ORDER: tuple[Callable[[Day], Any], ...] = (doctor, operators, cases, costs, datasheet, noise, model, plans)
STAGES = {stage.__name__: stage for stage in _IN_ORDER}


def _pool(day: Day) -> tuple[Table, ...]:
    """A draw from each table set, named after it, and no larger than the device takes."""
    scale, rng, found = day.scale, np.random.default_rng(24), []
    sets = {path.stem: import_tables(path, access=ACCESS).tables for path in day.table_sets} or {
        "mlperf": preset("mlperf-dlrm-dcnv2", access=ACCESS)
    }
    for name, tables in sets.items():
        chosen = rng.choice(len(tables), size=min(len(tables), POOL // len(sets)), replace=False)
        found += [
            tables[i]
            .model_copy(
                update={
                    "name": f"{name}_{tables[i].name}",
                    "features": (),
                    "access": None,  # of all rows
                    "row_order": None,
                    "rows": min(tables[i].rows, scale.most_rows),
                    "pooling_factor": min(max(tables[i].pooling_factor, 1.0), scale.most_pooling),
                }
            )
            .with_dim(min(tables[i].dim, 128))
            for i in chosen
        ]
    return tuple(found)


def _task(pool: Sequence[Table], index: int, batch_size: int) -> ShardingTask:
    rng = np.random.default_rng([24, index])
    low, high = TASK_TABLES
    count = min(int(rng.integers(low, high + 1)), len(pool))
    tables = tuple(pool[i] for i in rng.choice(len(pool), size=count, replace=False))
    nbytes = [table.memory_bytes for table in tables]
    memory = max(int(TIGHTNESS * sum(nbytes) / TASK_DEVICES), max(nbytes))
    return ShardingTask(tables=tables, device_memory_bytes=(memory,) * TASK_DEVICES, batch_size=batch_size)


def _plans(task: ShardingTask, cost_model: Any) -> dict[str, Plan]:
    """Ours, the published search's, and the best heuristic's by the nets."""
    found = {OURS: search(task, cost_model)}
    costs = {each.algorithm: each.cost_ms for each in found[OURS].baselines if each.cost_ms is not None}
    wanted = {THEIRS: PUBLISHED} | ({HEURISTIC: min(costs, key=lambda name: costs[name])} if costs else {})
    for name, algorithm in wanted.items():
        try:
            found[name] = search(task, cost_model, replace(SearchSettings(), algorithm=algorithm))
        except Infeasible:
            continue
    return found


def _need(day: Day, seconds: float) -> None:
    if day.left_s < seconds:
        raise OutOfTime


def _neuroshard(day: Day, *arguments: object, check_exit: bool = True) -> str:
    """What a command prints. Its progress goes to this process's stderr. Raises NeuroshardError with its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "neuroshard", *map(str, arguments)],
        cwd=day.folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if check_exit and done.returncode:
        raise NeuroshardError(
            f"neuroshard {' '.join(map(str, arguments))} ended with {done.returncode}; its message is above"
        )
    return done.stdout.strip()
