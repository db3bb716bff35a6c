"""Does the gain that cost nets predict hold where hardware is another? Worlds: the formula with constants drawn around its own.

    make bench-worlds ARGS="--tables-dir FOLDER"        an hour on 2 cores; --worlds 2 --tasks 1 to see that it runs

In each world cost nets are trained on noisy costs of it, and then ours and the published search look for plans of the same tasks
by the same nets; ours cuts columns alone, and columns and rows. The predicted gain is how much less our plan costs than the
published search's by the nets, the true gain how much less by the world. No world and no task of this script was looked at while
nets, search or their constants were shaped.
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

from bench.publishing.page import print_table, publish
from bench.searching import tasks
from bench.searching.nets import trained
from bench.searching.scoring import cost_ms, rows_of
from bench.searching.worlds import lived_in
from neuroshard.core.errors import Infeasible
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.protocol import CostModel
from neuroshard.measure.formula import Formula
from neuroshard.orders.options import PUBLISHED
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

FIRST_WORLD = 2001
COLUMN_WISE, ROW_WISE = "columns", "rows too"
METHODS = {
    COLUMN_WISE: SearchSettings(simplicity=0),
    ROW_WISE: SearchSettings(simplicity=0, try_row_wise=True),
    PUBLISHED: SearchSettings(algorithm=PUBLISHED),
}
GAINS = ("predicted gain", "true gain", "true / predicted", "worst task")
COLUMNS = [
    "",
    "tasks",
    *(f"{name}: {what}" for name in (COLUMN_WISE, ROW_WISE) for what in GAINS),
    "at most",
]
CELLS = ["{:.1%}", "{:.1%}", "{:.0%}", "{:+.1%}"] * 2 + ["{:.1%}"]


class Costs(NamedTuple):
    """Of one plan: ms of the slowest device by the nets and by the world, and the least that any plan costs by the nets."""

    nets: float
    true: float
    bound: float


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
    print_table(COLUMNS, [])
    worlds_figures, found = [], Answers()
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        for one, answers in zip(asked, pool.map(answers_of, asked), strict=True):
            found += answers
            worlds_figures.append(figures(answers))
            print(f"| {' | '.join(row(f'world {one.world}', len(answers), worlds_figures[-1]))} |", flush=True)
    by_devices = [(f"{n} devices", [one for one in found if one[0] == n]) for n in tasks.PAPER_TABLES]
    rows = [row(name, len(some), figures(some)) for name, some in (*by_devices, ("all", found))]
    rows.append(row("worst world", "", worst(worlds_figures)))
    print_table(COLUMNS, rows)
    if options.publish:
        question = (
            "Does the gain over the published search that the nets predict hold by the true formula? "
            f"{worlds} formulas with drawn constants, nets "
            f"of {cases:,} noisy cases of each, {count} tasks each of {', '.join(map(str, tasks.PAPER_TABLES))} devices. "
            "At most: what the bound leaves."
        )
        publish("search-worlds", question, COLUMNS, rows, costs="formula")


Answers = list[tuple[int, dict[str, Costs]]]  # devices of a task, and what each method's plan of it costs


def answers_of(asked: Asked) -> Answers:
    """The tasks of a world that all methods solve."""
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
        found = [
            (task.devices, {name: costs(settings, task, model) for name, settings in METHODS.items()}) for task in drawn
        ]
    return [
        (devices, {name: each for name, each in of.items() if each is not None})
        for devices, of in found
        if None not in of.values()
    ]


def costs(settings: SearchSettings, task: ShardingTask, model: CostModel) -> Costs | None:
    try:
        plan = search(task, model, settings)
    except Infeasible:
        return None
    rows = rows_of(plan)
    return Costs(cost_ms(model, task, rows), cost_ms(Formula(task.batch_size), task, rows), plan.lower_bound_ms or 0.0)


def figures(answers: Answers) -> list[float]:
    """Mean gains over the published search, by the nets and by the world; the true one over the predicted one; what ours costs
    more on the worst task; and how much any column-wise plan could gain by the nets. NaN where there is no task."""
    found: list[float] = []
    for method in (COLUMN_WISE, ROW_WISE):
        predicted, true = (
            np.array([1 - getattr(of[method], by) / getattr(of[PUBLISHED], by) for _, of in answers] or [np.nan])
            for by in ("nets", "true")
        )
        found += [predicted.mean(), true.mean(), true.mean() / predicted.mean(), -true.min()]
    return [*found, float(np.mean([1 - of[COLUMN_WISE].bound / of[PUBLISHED].nets for _, of in answers] or [np.nan]))]


def worst(worlds: Sequence[Sequence[float]]) -> list[float]:
    """Of each figure that of the world where it is worst."""
    columns = np.array(worlds).T
    return [
        float(np.nanmax(each) if "+" in cell else np.nanmin(each)) for cell, each in zip(CELLS, columns, strict=True)
    ]


def row(name: str, count: int | str, of: Sequence[float]) -> tuple[str, ...]:
    return (name, str(count), *(cell.format(figure) for cell, figure in zip(CELLS, of, strict=True)))


if __name__ == "__main__":
    main()
