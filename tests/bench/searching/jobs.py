"""Jobs of the benchmark: a task and the methods to run on it. Each answer is a line in a file, so a run cut off goes on."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.searching import tasks
from bench.searching.methods import Figures, run
from bench.searching.nets import code_digest
from neuroshard.core.value import canonical_json, sha256
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.protocol import CostModel
from neuroshard.progress import progress


@dataclass(frozen=True)
class Job:
    """`draw` is the name of a function of tasks.py, and what it takes besides the folder of table sets."""

    section: str
    draw: tuple[Any, ...]
    methods: tuple[str, ...]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # by method

    def task(self, folder: Path) -> tasks.Task:
        name, *arguments = self.draw
        found: tasks.Task = getattr(tasks, name)(*arguments, folder)
        return found

    def key(self, method: str, nets: str) -> str:
        """The same for the same question asked of the same code and nets."""
        asked = [self.section, self.draw, method, self.options.get(method, {}), nets, CODE]
        return sha256(canonical_json(asked))[:16]


CODE = code_digest("search/**/*.py", "costmodel/*net*.py", "costmodel/bundle.py")


def cost_model(nets: Path | None) -> CostModel:
    """The cost nets in a folder, or, without one, the analytic model of an H100."""
    return analytic_model("h100", tasks.BATCH_SIZE) if nets is None else load_cost_model(nets)


def answer(job: Job, folder: Path, nets: Path | None) -> list[Figures]:
    """Run every method of the job, alone in this process at this moment."""
    drawn = job.task(folder)
    model = cost_model(nets)
    return [
        {
            "section": job.section,
            "task": drawn.name,
            "tables": len(drawn.task.tables),
            "devices": drawn.task.devices,
            "memory_bytes": drawn.task.device_memory_bytes[0],
            "method": method,
            "options": job.options.get(method, {}),
            **run(method, drawn.task, model, **job.options.get(method, {})),
        }
        for method in job.methods
    ]


def answers(
    what: str, jobs: Sequence[Job], folder: Path, nets: Path | None, lines: Path, *, workers: int, fresh: bool
) -> list[Figures]:
    """All answers to the jobs, of which those in `lines` are not asked again. `fresh`: a process for each job."""
    known = {line["key"]: line for line in _read(lines)}
    name = cost_model(nets).name
    left = [
        Job(job.section, job.draw, missing, job.options)
        for job in jobs
        if (missing := tuple(method for method in job.methods if job.key(method, name) not in known))
    ]
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with (
        progress(what, len(left), "tasks") as bar,
        ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1 if fresh else None) as pool,
    ):
        futures = {pool.submit(answer, job, folder, nets): job for job in left}
        for future in as_completed(futures):
            with lines.open("a") as file:
                for figures in future.result():
                    key = futures[future].key(figures["method"], name)
                    known[key] = figures | {"key": key}
                    file.write(json.dumps(known[key]) + "\n")
            bar.advance(1)
    return [known[job.key(method, name)] for job in jobs for method in job.methods]


def _read(lines: Path) -> Iterator[Figures]:
    """Every whole line; the last may be cut off."""
    if not lines.exists():
        return
    for line in lines.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
