"""Plans of tables beyond HBM beside peers: an integer programme, TorchRec's planner, a linear programme, and a bound.

    make bench-tiers ARGS="--tables-dir /path/to/table-sets"      (--quick: a task of each; --only milp,division; --tasks 6)

`--tables-dir` holds meta-production-1935.json (see bench/search.py). Of its tables some are drawn by seed, fp16, each with a
zipf exponent of 0.6 to 1.3; HBM holds 10, 25 or 50 % of them, and a device's batch is 512 to 4,096. All costs are by
analytic:h100. Times are CPU seconds of one process with one thread.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from bench.publishing import page
from bench.searching.peers_tiers import MissedBytes, WithoutCollectives, least_ms, recshard
from bench.searching.tier_tasks import SHARES, drawn
from helpers.restart import restart_with
from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.plan import Shard, device_memory
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic, analytic_model
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.tiers import with_tiers
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tiers.division import divided
from neuroshard.search.tiers.points import PartPoints

GPU = "h100"
FIRST_SEED = 7_000_000  # add to it for tasks that nobody has looked at
LIGHT = 30.0  # most lookups a sample of a table of the integer programme, so that no table is all of the cost
MILP_LIMIT_S = 120.0


class Settings(NamedTuple):
    """What to run, and where the tables are."""

    folder: Path
    tasks: int
    seed: int
    quick: bool

    def draws(self, sizes: Sequence[tuple[int, int]], **more: Any) -> list[tuple[ShardingTask, float]]:
        """Tasks of these tables and devices, in turns, and the share of HBM of each."""
        shares = SHARES[1:2] if self.quick else SHARES
        found = []
        for number in range(self.tasks):
            count, devices = sizes[number % len(sizes)]
            for share in shares:
                task = drawn(count, devices, self.seed + number, share, self.folder, **more)
                found.append((task, share))
        return found


class Section(NamedTuple):
    """A table of figures, under the question that it answers."""

    question: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def our_plan(task: ShardingTask, model: Analytic) -> tuple[float, float | None, float]:
    """Cost and bound of our plan, as `neuroshard search` finds it, in ms, and CPU seconds. Infinite where there is none."""
    began = time.process_time()
    try:
        plan = search(task, model, SearchSettings(try_row_wise=True))
    except Infeasible as error:
        print(f"no plan: {error}", file=sys.stderr)
        return np.inf, None, time.process_time() - began
    assert plan.predicted_ms is not None
    return max(plan.predicted_ms), plan.lower_bound_ms, time.process_time() - began


def milp(settings: Settings) -> Section:
    """a) Against the optimum of whole tables, by a price without collectives on either side."""
    found: dict[str, list[tuple[float, float, float]]] = {"whole tables": [], "cuts allowed": []}
    unsolved = 0
    draws = settings.draws([(12, 3), (14, 4), (12, 4)], most_lookups=LIGHT)
    for task, _ in draws:
        model = WithoutCollectives(GPU, task.batch_size)
        began = time.process_time()
        solved = recshard(task, model, MILP_LIMIT_S)
        milp_s = time.process_time() - began
        if solved is None:
            unsolved += 1
            continue
        whole = task.model_copy(update={"constraints": Constraints(max_shards=1)})
        for name, one in (("whole tables", whole), ("cuts allowed", task)):
            cost, _, seconds = our_plan(one, model)
            found[name].append((cost / solved.cost_ms - 1, milp_s, seconds))
            print(f"  {name}: {cost / solved.cost_ms - 1:+.2%}, {milp_s:.2f} s, {seconds:.2f} s", file=sys.stderr)
    rows = []
    for name, each in found.items():
        over = [one[0] for one in each]
        near = sum(one <= 0.01 for one in over)
        rows.append(
            (
                name,
                f"{len(over)} of {len(draws)}",
                f"{median(over):+.2%}",
                f"{max(over):+.2%}",
                f"{near} of {len(over)}",
                f"{median(one[1] for one in each):.2f} s",
                f"{median(one[2] for one in each):.2f} s",
            )
        )
    question = (
        "How far is our plan above the optimum of whole tables in tiers, by an integer programme solved to the end?"
    )
    columns = ("our plan", "solved", "above: median", "most", "at most 1 % above", "programme's time", "ours")
    return Section(question, columns, rows)


def torchrec(settings: Settings) -> Section:
    """b) Against TorchRec's proposer, under our price."""
    from bench.searching import peers_scaleup  # torch, which other sections do without

    gains: dict[str, list[float]] = {"its plan fits our bytes": [], "its plan does not": []}
    theirs_s, ours_s, none = [], [], 0
    for task, share in settings.draws([(12, 4), (40, 8), (60, 8)]):
        model = analytic_model(GPU, task.batch_size)
        began = time.process_time()
        plans = peers_scaleup.plans(task)
        theirs_s.append(time.process_time() - began)
        cost, _, own = our_plan(task, model)
        ours_s.append(own)
        costs = []
        for plan in plans:
            prices = price_shards(model, plan.held, plan.shards)
            assert prices is not None
            too_full = fullest(plan.held, plan.shards) > min(task.placeable_bytes)
            costs.append((too_full, float(prices.total_ms.max())))
        if not costs:
            none += 1
            continue
        too_full, best = min(costs)  # those that fit come first
        gains[list(gains)[too_full]].append(best / cost)
        print(
            f"  {share:.0%}: {best / cost:.2f} x, fits: {not too_full}, {theirs_s[-1]:.1f} s, {own:.1f} s",
            file=sys.stderr,
        )
    seconds = (f"{median(theirs_s):.1f} s", f"{median(ours_s):.1f} s")
    rows = [
        (name, str(len(each)), f"{median(each):.2f} x", f"{min(each):.2f} x", f"{max(each):.2f} x", *seconds)
        for name, each in gains.items()
        if each
    ]
    if none:
        rows.append(("it finds none", str(none), "-", "-", "-", *seconds))
    question = (
        "What do plans of TorchRec's EmbeddingOffloadScaleupProposer cost over ours, its statistics filled from our curves, "
        "the best of three first load factors?"
    )
    columns = ("", "tasks", "median", "worst for us", "best", "its time", "ours")
    return Section(question, columns, rows)


def fullest(task: ShardingTask, shards: Sequence[Shard]) -> float:
    """Bytes of HBM that the fullest device needs."""
    return float(max(memory.total for memory in device_memory(task, shards)))


def division(settings: Settings) -> Section:
    """c) The division of one device's HBM alone, all of its tables beyond HBM."""
    rows = []
    for share in SHARES:
        above: dict[str, list[tuple[float, float]]] = {"ms": [], "bytes missed": []}
        for number in range(settings.tasks):
            task = drawn(24, 1, settings.seed + number, share, settings.folder)
            for what, kind in (("ms", Analytic), ("bytes missed", MissedBytes)):
                points = PartPoints(task, with_tiers(for_task(kind(GPU, task.batch_size), task)))
                each = points(list(map(Part.of, task.placed)))
                least = float(sum(part.nbytes[-1] for part in each))
                free = task.placeable_bytes[0] - least
                tiers, _ = divided(task, on_one_device(task), [t.name for t in task.placed], points, np.zeros(1))
                chosen = [part.at(tiers[t.name][1] or 0) for t, part in zip(task.placed, each, strict=True)]
                assert sum(float(one.nbytes[0]) for one in chosen) - least <= free + 1, "more than there is"
                taken = sum(float(one.ms[0]) for one in chosen)
                above[what].append((taken / least_ms(each, free) - 1, taken / least_ms(each, free, whole=True) - 1))
        for what, gaps in above.items():
            over, of_whole = zip(*gaps, strict=True)
            near = f"{sum(one <= 0.01 for one in over)} of {len(over)}"
            rows.append(
                (f"{share:.0%}", what, f"{median(over):+.2%}", f"{max(over):+.2%}", near, f"{max(of_whole):+.2%}")
            )
    question = (
        "How much more do 24 tables beyond HBM take on a device than by a linear programme over hulled points, in which a table "
        "may be cached in part, with part of its map of rows, and than by an integer programme, in which it is cached or not?"
    )
    columns = ("HBM", "in", "above linear: median", "most", "at most 1 % above", "above integer: most")
    return Section(question, columns, rows)


def on_one_device(task: ShardingTask) -> list[Shard]:
    """All tables, whole, on the first device."""
    return [Shard(table=t.name, column_offset=0, dim=t.dim, device=0, row_offset=0, rows=t.rows) for t in task.placed]


def bound(settings: Settings) -> Section:
    """d) The proven gap, and the time."""
    rows = []
    sizes = [(60, 8)] if settings.quick else [(60, 8), (500, 64)]
    for count, devices in sizes:
        for share in SHARES[1:2] if settings.quick else SHARES:
            gaps, seconds = [], []
            for number in range(settings.tasks if count < 100 else 1):
                task = drawn(count, devices, settings.seed + number, share, settings.folder)
                cost, least, own = our_plan(task, analytic_model(GPU, task.batch_size))
                gaps.append(np.inf if least is None else cost / least - 1)
                seconds.append(own)
                print(f"  {count} x {devices}, {share:.0%}: {gaps[-1]:.1%}, {own:.1f} s", file=sys.stderr)
            rows.append(
                (
                    f"{count} x {devices}",
                    f"{share:.0%}",
                    str(len(gaps)),
                    f"{median(gaps):.1%}",
                    f"{max(gaps):.1%}",
                    f"{median(seconds):.1f} s",
                )
            )
    question = "How far is our plan at most above the best of all plans, by its bound, and how long does that take?"
    return Section(question, ("tables x devices", "HBM", "tasks", "gap: median", "most", "time"), rows)


SECTIONS: dict[str, Callable[[Settings], Section]] = {
    "milp": milp,
    "torchrec": torchrec,
    "division": division,
    "bound": bound,
}


def main() -> None:
    parser = page.parser(__doc__, "a task of each, to see that it runs")
    parser.add_argument("--tables-dir", type=Path, help="folder of the public table sets")
    parser.add_argument("--tasks", type=int, help="draws of tables, each with three shares of HBM [default: 12]")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of the first task")
    parser.add_argument("--only", help=f"sections, of {', '.join(SECTIONS)}")
    asked = page.asked(parser)
    restart_with({"PYTHONHASHSEED": "0"})  # as TorchRec's planner needs it (searching/peers_torchrec.py)
    sections = asked.only.split(",") if asked.only else list(SECTIONS)
    if unknown := set(sections) - SECTIONS.keys():
        parser.error(f"unknown section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if asked.tables_dir is None or not asked.tables_dir.is_dir():
        print("nothing is run: give --tables-dir, the folder of meta-production-1935.json")
        return
    settings = Settings(asked.tables_dir, asked.tasks or (1 if asked.quick else 12), asked.seed, asked.quick)
    for name in sections:
        section = SECTIONS[name](settings)
        page.show(f"search-tiers-{name}", *section, "formula", published=asked.publish)


if __name__ == "__main__":
    main()
