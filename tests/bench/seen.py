"""How near are promises by a datasheet to what trainers see, before and after other jobs have corrected it? On this CPU.

    make bench-seen ARGS=--quick        (or: .venv/bin/python tests/bench/seen.py)

Tables are drawn anew for each job; its plan is searched by `analytic:cpu` and trained by TorchRec on gloo ranks, watched as
client/seen/watch.py says. The first jobs correct the datasheet (seen/record.py), and the others, which it never saw, say
how far its promises were off, and are now: of the embeddings of a step without waiting, in the mean of the ranks.
"""

import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.publishing import page
from helpers.gloo import on_ranks
from helpers.restart import restart_with
from helpers.step_cases import StepCase, batches, sharded_model
from neuroshard.client.seen.watch import EVERY as EVERY_BY_DEFAULT
from neuroshard.client.seen.watch import STEPS as STEPS_BY_DEFAULT
from neuroshard.client.seen.watch import WARM_UP, Watch, watch_plan
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.measure.real_devices import kept_memory
from neuroshard.search.run import search
from neuroshard.seen.record import Correction, Seen, correction, of_job, off_by
from neuroshard.seen.stored import read_seen
from neuroshard.store.open import open_store

LEARNED, UNSEEN, BATCH_SIZE = 10, 20, 2048
EVERY, TIMED, STEPS = 100, 15, WARM_UP + 15 + 2  # of a job, which is timed once
Job = tuple[Plan, Seen]


def main() -> None:
    parser = page.parser(__doc__, "three jobs, and two unseen")
    parser.add_argument("--ranks", type=int, default=2, help="of a job, each a gloo process [2]")
    parser.add_argument("--seed", type=int, default=0, help="of the tables [0]")
    options = page.asked(parser)
    restart_with(kept_memory(os.environ))  # as in tests/bench/trainer.py
    learned, unseen = (3, 2) if options.quick else (LEARNED, UNSEEN)
    rng, jobs, shares = random.Random(options.seed), list[Job](), list[float]()
    for number in range(learned + unseen):
        plan = plan_of(rng, options.ranks)
        with tempfile.TemporaryDirectory() as folder:
            shares += on_ranks(
                options.ranks, Path(folder), train, StepCase(plan, "none", options.ranks), f"{folder}/store"
            )
            (seen,) = read_seen(open_store(f"{folder}/store"), "job")
        jobs.append((plan, seen))
        print(f"job {number}: promised and seen {of_job(*jobs[-1])}", flush=True)
    by = correction("analytic:cpu", jobs[:learned])
    assert by is not None
    rows = [
        ("the datasheet", *told(jobs[learned:], by._replace(lookups=1.0, exchanges=1.0))),
        (
            f"corrected by {learned} jobs: lookups x {by.lookups:.2f}, exchanges x {by.exchanges:.2f}",
            *told(jobs[learned:], by),
        ),
    ]
    columns = ["promises by", "jobs", "off in the mean", "worst", "Kendall's tau of jobs"]
    question = (
        f"How near are promises by `analytic:cpu` to what trainers see? {unseen} jobs of tables that no other has, "
        f"{options.ranks} gloo ranks on {len(os.sched_getaffinity(0))} cores, batch {BATCH_SIZE:,}. Timing took "
        f"{fmean(shares):.2%} of their CPU time, reckoned for {STEPS_BY_DEFAULT} steps in {EVERY_BY_DEFAULT}."
    )
    page.show("trainer-seen", question, columns, rows, "measured", published=options.publish)


def plan_of(rng: random.Random, ranks: int) -> Plan:
    tables = []
    for number in range(rng.randint(8, 24)):
        pooling = round(2 ** rng.uniform(0, 5))
        given = {
            "name": f"t{number}",
            "module": "m",
            "rows": round(2 ** rng.uniform(10, 18)),
            "dim": rng.choice([16, 32, 64, 128]),
        }
        features = [{"name": f"f{number}", "pooling_factor": pooling}]
        tables.append(
            Table.model_validate(
                {**given, "pooling_factor": pooling, "features": features, "optimizer_bytes_per_row": 0}
            )
        )
    task = ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=(2**33,) * ranks,
        batch_size=BATCH_SIZE,
        step_ledger=1,
        pipeline="none",
    )
    return search(task, analytic_model("cpu", BATCH_SIZE))


def train(rank: int, case: StepCase, store: str) -> float:
    """The share of a rank's CPU time that watching would take, as it is by default."""
    warnings.simplefilter("ignore")
    model, spent = sharded_model(case), [0.0]
    made = list(batches(case.plan.task.tables, BATCH_SIZE // case.plan.task.devices, rank, 4))
    for name in ("begins_step", "_looks_up", "_took"):
        setattr(Watch, name, timed(getattr(Watch, name), spent))
    began = time.thread_time()
    with watch_plan(model, case.plan, store, "job", every=EVERY, steps=TIMED):
        for step in range(STEPS):
            model(made[step % len(made)])[0].backward()
    a_step = (time.thread_time() - began - spent[0]) / STEPS
    return spent[0] * STEPS_BY_DEFAULT / TIMED / (a_step * EVERY_BY_DEFAULT)


def timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def works(*given: Any) -> Any:
        began = time.thread_time()
        done = work(*given)
        spent[0] += time.thread_time() - began
        return done

    return works


def told(jobs: Sequence[Job], by: Correction) -> tuple[str, ...]:
    found = [of_job(*job) for job in jobs]
    off = [off_by(one, (by.lookups, by.exchanges)) for one in found]
    pairs = [(one.promised[0] * by.lookups + one.promised[1] * by.exchanges, sum(one.seen)) for one in found]
    signs = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in combinations(pairs, 2)]
    return str(len(jobs)), f"{fmean(off):.1%}", f"{max(off):.0%}", f"{2 * fmean(signs) - 1:.2f}"


if __name__ == "__main__":
    main()
