"""Our search beside its peers: cost by the nets and by the truth, time, memory, scale, and a production plan.

    make bench-search ARGS="--tables-dir /path/to/table-sets"      (--quick: under two minutes; --only paper,time; --tasks 20)

`--tables-dir` holds public table sets, which are third-party data and never committed: meta-production-1935.json, of TorchRec's
docs/wiki/sharding_stats_example.txt, and nvidia-synthetic-small.json to -colossal.json, of config_v3.py in NVIDIA-Merlin's
distributed-embeddings; each an object whose `tables` have name, rows, dim and pooling_factor. Without it there is MLPerf, which
is built in. Cost nets are trained first, on noisy costs of the synthetic backend, and kept. Answers are kept a line each, so a
run that was cut off goes on; another version of the code asks anew.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu_day.stages import gain
from bench.publishing import page
from bench.searching import production, published, tasks
from bench.searching.jobs import Job, answers
from bench.searching.methods import OTHER_SEED, SWITCHES, Figures, run
from bench.searching.nets import trained
from bench.searching.published import ALL_TYPES, OURS, PUBLISHED, ROWS_TOO
from helpers.restart import restart_with

COMPARED = (OURS, ROWS_TOO, PUBLISHED, *published.HEURISTICS, "torchrec", ALL_TYPES)
BUDGET_S = {4: 2.0, 8: 3.0, 16: 4.0}  # of ours in the cost comparison, by devices
ONE_AT_A_TIME = "neuroshard-2023, one at a time"
SMALL_NETS = (
    "meta, 2,000 cases"  # what the ablation waits for: a quarter of the cases, and no more devices than it needs
)


@dataclass(frozen=True)
class Settings:
    """What to run, and where things lie."""

    folder: Path
    out: Path
    tasks: int
    quick: bool
    patience: float  # what budgets of ours are multiplied by
    published: bool = False  # whether tables go into docs/benchmarks/

    def ours(self, budget_s: float) -> dict[str, dict[str, float]]:
        """Options of a job in which ours has a time budget."""
        return {name: {"budget_s": self.patience * budget_s} for name in (OURS, ROWS_TOO)}

    def show(
        self, name: str, question: str, columns: Sequence[str], rows: Sequence[Sequence[str]], costs: page.CostsFrom
    ) -> None:
        page.show(f"search-{name}", question, columns, rows, costs, published=self.published)

    def ask(
        self, what: str, pool: str | None, jobs: Sequence[Job], *, workers: int = 1, fresh: bool = False
    ) -> list[Figures]:
        """Answers by the cost nets of a pool, or, of none, by the analytic model."""
        nets = None if pool is None else cost_nets(self, pool)
        return answers(what, jobs, self.folder, nets, self.out / "answers.jsonl", workers=workers, fresh=fresh)


@cache
def cost_nets(settings: Settings, pool: str) -> Path:
    """The folder of the cost nets of a pool."""
    devices = {
        "meta": (4, 8, 16, 32, 64, 128),
        "mlperf": (8,),
        "meta-production": (96,),
        "zoo": tuple(tasks.ZOO.values()),
        SMALL_NETS: tasks.ABLATION_DEVICES,
    }
    cases = (1000, 100) if settings.quick else (2000, 300) if pool == SMALL_NETS else (8000, 700)
    if settings.quick:
        devices["meta"] = (4, 8, 16)
    return trained(
        tasks.pool("meta" if pool == SMALL_NETS else pool, settings.folder),
        devices[pool],
        settings.out,
        compute_cases=cases[0],
        collective_cases=cases[1] * len(devices[pool]),
        batch_size=tasks.BATCH_SIZE,
    )


def main() -> None:
    parser = page.parser(__doc__, "a few tasks of each, to see that it runs")
    parser.add_argument("--tables-dir", type=Path, help="folder of the public table sets")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder for nets and answers")
    parser.add_argument("--tasks", type=int, help="tasks for each number of devices [default: 100, or 3 with --quick]")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on our time budgets, for a busy machine")
    parser.add_argument("--only", help=f"sections, of {', '.join(SECTIONS)}")
    asked = page.asked(parser)
    restart_with({"PYTHONHASHSEED": "0"})  # as TorchRec's planner needs it (searching/peers_torchrec.py)
    sections = asked.only.split(",") if asked.only else list(SECTIONS) if asked.tables_dir else ["named"]
    if unknown := set(sections) - SECTIONS.keys():
        parser.error(f"unknown section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if asked.tables_dir is None and sections != ["named"]:
        parser.error("give --tables-dir: only `named` goes without")
    if asked.tables_dir is not None and not asked.tables_dir.is_dir():
        parser.error(f"--tables-dir {asked.tables_dir} is no folder")

    count = asked.tasks or (3 if asked.quick else 100)
    settings = Settings(asked.tables_dir or Path(), asked.out, count, asked.quick, asked.patience, asked.publish)
    settings.out.mkdir(parents=True, exist_ok=True)
    for section in sections:
        SECTIONS[section](settings)


def compare(settings: Settings) -> None:
    """The paper's protocol: 4 and 8 devices, and 16 likewise."""
    costs: published.Rows = []
    counts: published.Rows = []
    for devices, budget_s in BUDGET_S.items():
        options = settings.ours(budget_s / 4 if settings.quick else budget_s)
        count = min(settings.tasks, 30) if devices == 16 else settings.tasks
        jobs = [Job("compare", ("paper_protocol", devices, i), COMPARED, options) for i in range(count)]
        of_devices = settings.ask(f"{devices} devices", "meta", jobs, workers=2)
        costs += published.plans(of_devices, devices)
        counts.append(published.solved_row(of_devices, devices))
    question = "How much lower is the cost of the slowest device, by the formula, on tasks that both solve?"
    settings.show("plans", question, published.PLANS, costs, "formula")
    question = "How many tasks get a plan, and how far at most is ours from the best of all plans?"
    settings.show("solved", question, published.SOLVED, counts, "formula")


def clock(settings: Settings) -> None:
    """CPU time of the published search, a prediction at a time, and ours until it has as good a plan; a process each."""
    sizes = {(35, 4): 1} if settings.quick else {(35, 4): 25, (57, 8): 25, (200, 16): 9}  # tasks of each
    rows = []
    for (count, devices), most in sizes.items():
        pairs = []
        for method in (ONE_AT_A_TIME, OURS):
            options = settings.ours(3.0)
            jobs = [Job("time", ("sized", count, devices, i), (method,), options) for i in range(most)]
            pairs.append(settings.ask(f"{method}, {count} x {devices}", "meta", jobs, fresh=True))
        if both := [(p, o) for p, o in zip(*pairs, strict=True) if published.solved(p) and published.solved(o)]:
            rows.append(published.time_row(f"{count} x {devices}", both))
    question = "How soon does ours reach the cost that the published search ends with, asking its nets a set at a time?"
    settings.show("time", question, published.TIME, rows, "formula")


def named(settings: Settings) -> None:
    """MLPerf, the production model whole, NVIDIA's synthetic models."""
    rows = []
    fast = (OURS, ROWS_TOO, PUBLISHED, *published.HEURISTICS)
    jobs: dict[str, list[tuple]] = {"mlperf": [("mlperf",)]}
    if not settings.quick and settings.folder != Path():
        jobs |= {"zoo": [("zoo", size) for size in tasks.ZOO], "meta-production": [("production",)]}
    for pool, draws in jobs.items():
        for draw in draws:
            small = draw in [("mlperf",), ("zoo", "small")]
            methods = (*fast, "torchrec", ALL_TYPES) if small else fast
            budget_s = 1.0 if settings.quick else 10.0 if small else 20.0
            job = Job("named", draw, methods, settings.ours(budget_s))
            rows.append(published.named_row(settings.ask(str(draw[-1]), pool, [job], fresh=True)))
    question = "What do plans of public table sets cost? Slowest device in ms, by the formula."
    settings.show("named", question, published.NAMED, rows, "formula")


def printed(settings: Settings) -> None:
    """The production plan under its own printed costs."""
    plan, rows = production.read_printed(settings.folder / "meta-production-1935.json"), []
    for rank, ms, in_print in (
        ("slowest", plan.rank_ms.max(), production.PRINTED_SLOWEST_MS),
        ("mean", plan.rank_ms.mean(), production.PRINTED_MEAN_MS),
    ):
        assert round(float(ms), 1) == in_print, "the accounting is not that of the file"
        rows.append([f"{rank} rank as printed", f"{ms:,.1f} ms"])
    for narrow in (False, True):
        budget_s = settings.patience * (2.0 if settings.quick else 20.0)
        figures = run(OURS, plan.task, plan.model(narrow), budget_s=budget_s)
        what = "the same, narrow columns penalised" if narrow else f"local-search, {budget_s:g} s"
        rows.append([what, f"{figures['nets_ms']:,.1f} ms" if published.solved(figures) else str(figures["error"])])
    question = "What does a search find under the costs that a production planner printed? 1,933 tables, 96 ranks."
    settings.show("printed", question, published.PRINTED, rows, "printed")


def on_this_cpu(settings: Settings) -> None:
    """A sample of plans measured again, as `neuroshard evaluate` does it, by nets of what this CPU measured."""
    from bench.searching import measured  # torch, which a process that only searches should not load

    effort = (100, 40, 60.0) if settings.quick else (1500, 120, 240.0)
    model = measured.cost_nets(settings.folder, settings.out / ("cpu-quick" if settings.quick else "cpu"), *effort)
    count = 1 if settings.quick else min(settings.tasks, 30)
    answers = [measured.measured(model, seed, settings.folder) for seed in range(101, 101 + count)]
    rows = [
        published.measured_row(name, gain([each.rounds_ms for each in answers], OURS, name), answers)
        for name in dict.fromkeys(name for each in answers for name in each.rounds_ms)
    ]
    low, high = measured.TABLES
    question = (
        f"Are our plans faster on hardware? Compute of the slowest of {measured.DEVICES} devices over that of our plan, {count} "
        f"tasks of {low} to {high} tables, {measured.ROUNDS} rounds; 95 % intervals by bootstrap."
    )
    settings.show("measured", question, published.MEASURED, rows, "measured")


def over_hosts(settings: Settings) -> None:
    """Plans over several hosts, by a datasheet and a network."""
    from bench.searching import domains  # torch, which a process that only searches should not load

    chosen = domains.worlds(settings.folder)[: 2 if settings.quick else None]
    found = [domains.costs(task) for task in chosen]
    rows = []
    for name in found[0]:
        more = list[str]()
        for ours in (domains.OURS, domains.COPIES_TOO):
            ratios = [each[name] / each[ours] for each in found if each[name] is not None]
            more += [f"{ratio - 1:+.1%}" for ratio in (sum(ratios) / len(ratios), min(ratios), max(ratios))]
        rows.append([name, f"{len(ratios)} of {len(found)}", *more])
    columns = ["method", "solved"]
    columns += ["cost over ours: mean", "least", "most", "over ours with copies: mean", "least", "most"]
    question = (
        f"What do plans for several hosts cost? {len(found)} worlds of 16 to 64 devices in domains of 4 to 32, 12.5 to 50 "
        "GB/s a device between them, by analytic:h100."
    )
    settings.show("hosts", question, columns, rows, "none")


def ablation(settings: Settings) -> None:
    """Ours without each of its parts, of its usual rounds: by the truth where nets search, and by an analytic model itself."""
    methods = ("all parts", OTHER_SEED, *(f"without {switch}" for switch in SWITCHES))
    count = min(settings.tasks, 20)
    jobs = [Job("ablation", ("ablation", d, i), methods) for d in tasks.ABLATION_DEVICES for i in range(count)]
    by_nets = settings.ask("ablation, nets", SMALL_NETS, jobs, workers=2)
    half = [job for job in jobs if job.draw[2] < (count + 1) // 2]  # as many of each number of devices
    by_formula = settings.ask("ablation, analytic model", None, half, workers=2)
    by_formula = [f | {"truth_ms": f["nets_ms"]} if published.solved(f) else f for f in by_formula]
    question = (
        f"What does each part of the search earn? Without it, on {len(jobs)} fresh tasks of "
        f"{tasks.ABLATION_DEVICES[0]} to {tasks.ABLATION_DEVICES[-1]} devices, half of them row-wise too."
    )
    settings.show("ablation", question, published.ABLATION, published.ablation(by_nets, by_formula), "formula")


def ablation_over_hosts(settings: Settings) -> None:
    """The same over several hosts, where other parts matter."""
    from bench.searching import domains

    chosen = domains.ablation_worlds(settings.folder)[: 2 if settings.quick else None]
    whole = [domains.without(task, None) for task in chosen]
    rows = []
    for name, switch, seed in ((OTHER_SEED, None, 1), *((f"without {one}", one, 0) for one in SWITCHES)):
        found = [domains.without(task, switch, seed) for task in chosen]
        more = [ms / before - 1 for (ms, _), (before, _) in zip(found, whole, strict=True)]
        cpu = sum(s for _, s in found) / sum(s for _, s in whole)
        rows.append([published.part(name), f"{sum(more) / len(more):+.2%}", f"{max(more):+.2%}", f"{cpu:.0%}"])
        print(rows[-1], file=sys.stderr, flush=True)
    question = (
        f"What does each part earn over several hosts? Cost without it, on {len(chosen)} fresh worlds of 16 and 32 devices in "
        "domains of 4 to 16, by analytic:h100."
    )
    settings.show("ablation-hosts", question, ("without", "cost: mean", "worst", "CPU"), rows, "none")


SECTIONS: dict[str, Callable[[Settings], None]] = {
    "compare": compare,
    "time": clock,
    "named": named,
    "production": printed,
    "measured": on_this_cpu,
    "hosts": over_hosts,
    "ablation": ablation,
    "ablation-hosts": ablation_over_hosts,
}

if __name__ == "__main__":
    main()
