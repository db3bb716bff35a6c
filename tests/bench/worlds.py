"""Is what the cost nets promise also true where hardware is another? Worlds: the formula with constants drawn around its own.

    make bench-worlds ARGS="--tables-dir FOLDER"        forty minutes on 2 cores; --worlds 2 --tasks 1 to see that it runs

In each world cost nets are trained on noisy costs of it, and then ours and the published search look for plans of the same tasks
by the same nets. A gain is promised where the nets say that ours is cheaper than the published search's plan, and real where the
world says so. No world and no task of this script was looked at while nets, search or their constants were shaped.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.publishing.page import publish
from bench.searching import tasks
from bench.searching.nets import trained
from bench.searching.scoring import cost_ms, rows_of
from bench.searching.worlds import lived_in
from neuroshard.core.errors import Infeasible
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.protocol import CostModel
from neuroshard.measure.formula import Formula
from neuroshard.search.run import search
from neuroshard.search.settings import PUBLISHED, SearchSettings

FIRST_WORLD = 1001
OURS = "ours"
METHODS = {
    OURS: SearchSettings(simplicity=0),
    PUBLISHED: SearchSettings(algorithm=PUBLISHED),
}
COLUMNS = ["world", "tasks", "promised", "real", "of it real", "worst task"]


class Costs(NamedTuple):
    """Of one plan: ms of the slowest device by the nets, and by the world."""

    nets: float
    true: float


@dataclass(frozen=True)
class Asked:
    """What to do in a world."""

    world: int
    folder: Path
    out: Path
    tasks: int
    compute_cases: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables-dir", type=Path, help="folder of the public table sets")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder for the nets [bench]")
    parser.add_argument("--worlds", type=int, default=10, help="how many [10]")
    parser.add_argument("--first", type=int, default=FIRST_WORLD, help=f"seed of the first world [{FIRST_WORLD}]")
    parser.add_argument("--tasks", type=int, default=4, help="of each number of devices [4]")
    parser.add_argument("--cases", type=int, default=4000, help="table sets that are measured in a world [4000]")
    parser.add_argument("--quick", action="store_true", help="one world, one task, 500 cases")
    parser.add_argument("--publish", action="store_true", help="write the table into docs/benchmarks/, and the page")
    options = parser.parse_args()
    if options.tables_dir is None or not options.tables_dir.is_dir():
        print("nothing is run: give --tables-dir, a folder of the public table sets")
        return
    worlds, count, cases = (1, 1, 500) if options.quick else (options.worlds, options.tasks, options.cases)
    asked = [Asked(options.first + i, options.tables_dir, options.out, count, cases) for i in range(worlds)]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    rows, found = [], []
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        for one, answers in zip(asked, pool.map(answers_of, asked), strict=True):
            found += answers
            rows.append(row(str(one.world), answers))
            print(f"| {' | '.join(rows[-1])} |", flush=True)
    rows.append(row("all", found))
    print(f"| {' | '.join(rows[-1])} |")
    if options.publish:
        question = (
            "Is the gain over the published search real in worlds whose hardware is another? Formulas with drawn constants, nets "
            f"of {cases:,} noisy cases of each, {count} tasks each of {', '.join(map(str, tasks.PAPER_TABLES))} devices."
        )
        publish("search-worlds", question, COLUMNS, rows, costs="formula")


def answers_of(asked: Asked) -> list[dict[str, Costs]]:
    """By method, the costs of every task of a world that all methods solve."""
    with lived_in(asked.world):
        devices = tuple(tasks.PAPER_TABLES)
        nets = trained(
            tasks.pool("meta", asked.folder),
            devices,
            asked.out / f"world-{asked.world}",
            compute_cases=asked.compute_cases,
            collective_cases=300 * len(devices),
            batch_size=tasks.BATCH_SIZE,
        )
        model = load_cost_model(nets)
        drawn = [tasks.of_world(asked.world, d, i, asked.folder).task for d in devices for i in range(asked.tasks)]
        found = [{name: costs(settings, task, model) for name, settings in METHODS.items()} for task in drawn]
    return [{name: each for name, each in of.items() if each is not None} for of in found if None not in of.values()]


def costs(settings: SearchSettings, task: ShardingTask, model: CostModel) -> Costs | None:
    try:
        rows = rows_of(search(task, model, settings))
    except Infeasible:
        return None
    return Costs(cost_ms(model, task, rows), cost_ms(Formula(task.batch_size), task, rows))


def row(name: str, answers: Sequence[dict[str, Costs]]) -> tuple[str, ...]:
    """Mean gains over the published search, and the share of the promise that is real."""
    if not answers:
        return (name, "0", *["-"] * (len(COLUMNS) - 2))
    promised, real = (
        np.array([1 - getattr(of[OURS], by) / getattr(of[PUBLISHED], by) for of in answers]) for by in ("nets", "true")
    )
    return (
        name,
        str(len(answers)),
        f"{promised.mean():.1%}",
        f"{real.mean():.1%}",
        f"{real.mean() / promised.mean():.0%}" if promised.mean() > 0 else "-",
        f"{-real.min():+.1%}",
    )


if __name__ == "__main__":
    main()
