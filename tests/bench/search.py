"""Our search beside its peers: cost by the nets and by the truth, time, memory, scale, and a production plan.

    make bench-search ARGS="--tables-dir /path/to/table-sets"      (--quick: under two minutes; --only paper,time; --tasks 20)

`--tables-dir` holds public table sets, which are third-party data and never committed: meta-production-1935.json, of TorchRec's
docs/wiki/sharding_stats_example.txt, and nvidia-synthetic-small.json to -colossal.json, of config_v3.py in NVIDIA-Merlin's
distributed-embeddings; each an object whose `tables` have name, rows, dim and pooling_factor. Without it there is MLPerf, which
is built in. Cost nets are trained first, on noisy costs of the synthetic backend, and kept. Answers are kept a line each, so a
run that was cut off goes on; another version of the code asks anew. Tables come out as Markdown; `--publish` also writes them
into docs/benchmarks/.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.publishing.page import markdown, publish
from bench.searching import picture, production, published, tables, tasks
from bench.searching.jobs import Job, answers
from bench.searching.methods import OTHER_SEED, SWITCHES, Figures, run
from bench.searching.nets import trained
from bench.searching.tables import ALL_TYPES, OURS, PUBLISHED, ROWS_TOO, percent, times, verdict
from helpers.restart import restart_with
from neuroshard.files.disk import write_bytes
from neuroshard.gpu_day.stages import gain

COMPARED = (OURS, ROWS_TOO, PUBLISHED, *tables.HEURISTICS, "torchrec", ALL_TYPES)
BUDGET_S = {4: 2.0, 8: 3.0, 16: 4.0}  # of ours in the cost comparison, by devices
ONE_AT_A_TIME = "neuroshard-2023, one at a time"
SMALL_NETS = (
    "meta, 2,000 cases"  # what the ablation waits for: a quarter of the cases, and no more devices than it needs
)
Costs = Literal["formula", "measured", "printed", "none"]
TARGET_HEADER = ["| | measured | target | |", "|---|---|---|---|"]


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

    def publish(
        self, name: str, question: str, columns: Sequence[str], rows: Sequence[Sequence[str]], costs: Costs = "formula"
    ) -> None:
        if self.published:
            publish(name, question, columns, rows, costs)

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables-dir", type=Path, help="folder of the public table sets")
    parser.add_argument(
        "--out", type=Path, default=Path("bench"), help="folder for nets, answers, search.json, search.svg"
    )
    parser.add_argument("--quick", action="store_true", help="a few tasks of each, to see that it runs")
    parser.add_argument("--tasks", type=int, help="tasks for each number of devices [default: 100, or 3 with --quick]")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on our time budgets, for a busy machine")
    parser.add_argument("--publish", action="store_true", help="write the tables into docs/benchmarks/, and the page")
    parser.add_argument("--only", help=f"sections, of {', '.join(SECTIONS)}")
    asked = parser.parse_args()
    restart_with({"PYTHONHASHSEED": "0"})  # as TorchRec's planner needs it (searching/peers_torchrec.py)
    sections = asked.only.split(",") if asked.only else list(SECTIONS) if asked.tables_dir else ["named"]
    if unknown := set(sections) - SECTIONS.keys():
        parser.error(f"unknown section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if asked.tables_dir is None and sections != ["named"]:
        parser.error("give --tables-dir: only `named` goes without")
    if asked.tables_dir is not None and not asked.tables_dir.is_dir():
        parser.error(f"--tables-dir {asked.tables_dir} is no folder")

    if asked.publish and asked.quick:
        parser.error("--publish is for whole runs, not for --quick")

    count = asked.tasks or (3 if asked.quick else 100)
    settings = Settings(asked.tables_dir or Path(), asked.out, count, asked.quick, asked.patience, asked.publish)
    settings.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    for section in sections:
        lines, figures = SECTIONS[section](settings)
        print("\n".join([f"\n### {section}\n", *lines]), flush=True)
        report[section] = {"lines": lines, "answers": figures}
        write_bytes(settings.out / "search.json", json.dumps(report, indent=1).encode())
    print(f"\n{settings.out / 'search.json'} and {settings.out / 'search.svg'} written", file=sys.stderr)


Section = tuple[list[str], list[Figures]]


def compare(settings: Settings) -> Section:
    """The paper's protocol: 4 and 8 devices, and 16 likewise."""
    lines: list[str] = []
    found: list[Figures] = []
    verdicts = list(TARGET_HEADER)
    costs: published.Rows = []
    counts: published.Rows = []
    for devices, budget_s in BUDGET_S.items():
        options = settings.ours(budget_s / 4 if settings.quick else budget_s)
        count = min(settings.tasks, 30) if devices == 16 else settings.tasks
        jobs = [Job("compare", ("paper_protocol", devices, i), COMPARED, options) for i in range(count)]
        of_devices = settings.ask(f"{devices} devices", "meta", jobs, workers=2)
        low, high = tasks.PAPER_TABLES[devices]
        lines += [
            f"{devices} devices, {low}-{high} tables, {budget_s:g} s for ours:",
            "",
            *tables.methods_table(of_devices),
            "",
        ]
        verdicts += tables.cost_verdicts(of_devices, devices)
        verdicts += tables.cost_verdicts(of_devices, devices, ROWS_TOO)
        costs += published.plans(of_devices, devices)
        counts.append(published.solved_row(of_devices, devices))
        found += of_devices
    question = "How much lower is the cost of the slowest device, by the formula, on tasks that both solve?"
    settings.publish("search-plans", question, published.PLANS, costs)
    question = "How many tasks get a plan, and how far at most is ours from the best of all plans?"
    settings.publish("search-solved", question, published.SOLVED, counts)
    picture.draw(found, "Cost against CPU time, all tasks of 4, 8 and 16 devices", settings.out / "search.svg")
    return lines + verdicts, found


def clock(settings: Settings) -> Section:
    """CPU time of the published search, a prediction at a time, and ours until it has as good a plan; a process each."""
    sizes = {(35, 4): (25, 300), (57, 8): (25, 300), (200, 16): (9, 500)}  # tasks, and the target
    if settings.quick:
        sizes = {(35, 4): (1, 300)}
    lines = [
        "| tables x devices | paper, one at a time: median CPU s | its peak memory | ours: median CPU s to its cost (reached) "
        "| our peak memory |",
        "|---|---|---|---|---|",
    ]
    verdicts, found, rows = list(TARGET_HEADER), [], []
    for (count, devices), (most, target) in sizes.items():
        pairs = []
        for method in (ONE_AT_A_TIME, OURS):
            options = settings.ours(3.0)
            jobs = [Job("time", ("sized", count, devices, i), (method,), options) for i in range(most)]
            pairs.append(settings.ask(f"{method}, {count} x {devices}", "meta", jobs, fresh=True))
        found += [figures for side in pairs for figures in side]
        both = [(p, o) for p, o in zip(*pairs, strict=True) if tables.solved(p) and tables.solved(o)]
        if not both:
            lines.append(f"| {count} x {devices} | none solved | - | - | - |")
            continue
        rows.append(published.time_row(f"{count} x {devices}", both))
        reached = [tables.reached(o, p["nets_ms"]) for p, o in both]
        lines.append(
            f"| {count} x {devices} ({len(both)} tasks) | {median(p['cpu_s'] for p, _ in both):.2f} "
            f"| {tables.memory_text(both[0][0])} | {median(reached):.4f} ({sum(map(math.isfinite, reached))} of {len(both)}) "
            f"| {tables.memory_text(both[0][1])} |"
        )
        faster = median(p["cpu_s"] / r for (p, _), r in zip(both, reached, strict=True))
        verdicts.append(
            verdict(f"{count} x {devices}: faster to paper's cost, median", faster, target, times, least=True)
        )
    question = "How soon does ours reach the cost that the published search ends with, asking its nets a set at a time?"
    settings.publish("search-time", question, published.TIME, rows)
    return [*lines, "", *verdicts], found


def named(settings: Settings) -> Section:
    """MLPerf, the production model whole, NVIDIA's synthetic models."""
    lines, found, rows = [], [], []
    fast = (OURS, ROWS_TOO, PUBLISHED, *tables.HEURISTICS)
    jobs: dict[str, list[tuple]] = {"mlperf": [("mlperf",)]}
    if not settings.quick and settings.folder != Path():
        jobs |= {"zoo": [("zoo", size) for size in tasks.ZOO], "meta-production": [("production",)]}
    for pool, draws in jobs.items():
        for draw in draws:
            small = draw in [("mlperf",), ("zoo", "small")]
            methods = (*fast, "torchrec", ALL_TYPES) if small else fast
            budget_s = 1.0 if settings.quick else 10.0 if small else 20.0
            job = Job("named", draw, methods, settings.ours(budget_s))
            of_task = settings.ask(str(draw[-1]), pool, [job], fresh=True)
            found += of_task
            rows.append(published.named_row(of_task))
            lines += [
                f"{of_task[0]['task']}, {of_task[0]['tables']} tables, {budget_s:g} s for ours:",
                "",
                *tables.methods_table(of_task),
                "",
            ]
    question = "What do plans of public table sets cost? Slowest device in ms, by the formula."
    settings.publish("search-named", question, published.NAMED, rows)
    return lines, found


def scale(settings: Settings) -> Section:
    """How soon a large task is near its cost of much later, and how that grows."""
    lines, found = list(TARGET_HEADER), []
    sizes: list[tuple[str, tuple, float, float]]
    if settings.quick:
        sizes = [("meta", ("sized", 200, 16, 0), 4.0, 2.0)]
    else:
        sizes = [("meta", ("sized", 800, 64, 0), 60.0, 2.0), ("zoo", ("zoo", "colossal"), 120.0, 20.0)]
    for pool, draw, budget_s, target_s in sizes:
        (figures,) = settings.ask(str(draw), pool, [Job("scale", draw, (OURS,), settings.ours(budget_s))], fresh=True)
        found.append(figures)
        if not tables.solved(figures):
            lines.append(f"| {figures['task']} | not solved: {figures['error']} | solved | MISS |")
            continue
        near = tables.reached(figures, 1.02 * figures["trace"][-1][1])
        lines.append(
            verdict(
                f"{figures['task']}: within 2 % of its {budget_s:g} s cost after", near, target_s, "{:.2f} s".format
            )
        )
        if draw[0] == "zoo":
            lines.append(
                verdict(f"{figures['task']}: peak memory", figures["peak_bytes"] / 2**30, 1.5, "{:.2f} GiB".format)
            )
    if settings.quick:
        return lines, found
    sweeps = {
        "tables (16 devices)": [(n, 16) for n in (100, 200, 400, 800)],
        "devices (400 tables)": [(400, d) for d in (8, 16, 32, 64)],
    }
    for what, points in sweeps.items():
        jobs = [Job("growth", ("sized", n, d, 0), (OURS,), settings.ours(15.0)) for n, d in points]
        of_sweep = settings.ask(f"growth in {what}", "meta", jobs, workers=2, fresh=True)
        found += of_sweep
        soon = [tables.reached(f, 1.02 * f["trace"][-1][1]) for f in of_sweep]
        axis = [max(p) if "devices (" not in what else p[1] for p in points]
        shown = ", ".join(f"{size}: {seconds:.2f} s" for size, seconds in zip(axis, soon, strict=True))
        power = f"{tables.growth(axis, soon):.2f} ({shown})"
        lines.append(f"| CPU time to within 2 % of the 15 s cost grows with {what} to the power of | {power} | - | - |")
    return lines, found


def printed(settings: Settings) -> Section:
    """The production plan under its own printed costs."""
    plan = production.read_printed(settings.folder / "meta-production-1935.json")
    lines, rows = list(TARGET_HEADER), []
    for rank, ms, in_print in (
        ("slowest", plan.rank_ms.max(), production.PRINTED_SLOWEST_MS),
        ("mean", plan.rank_ms.mean(), production.PRINTED_MEAN_MS),
    ):
        assert round(float(ms), 1) == in_print, "the accounting is not that of the file"
        rows.append([f"{rank} rank as printed", f"{ms:,.1f} ms"])
        lines.append(f"| printed plan, {rank} rank | {ms:.1f} ms | {in_print} ms as printed | reproduced |")
    found = []
    for narrow in (False, True):
        budget_s = settings.patience * (2.0 if settings.quick else 20.0)
        figures = run(OURS, plan.task, plan.model(narrow), budget_s=budget_s)
        name = "ours, narrow columns penalised" if narrow else "ours"
        found.append({"section": "production", "method": name, **figures})
        if "nets_ms" not in figures:
            lines.append(f"| {name} | not solved: {figures['error']} | at most {production.TARGET_MS:.0f} ms | MISS |")
            continue
        shown = "{:,.1f} ms".format
        what = "the same, narrow columns penalised" if narrow else f"local-search, {budget_s:g} s"
        rows.append([what, shown(figures["nets_ms"])])
        lines.append(
            f"| {name}, slowest rank | {shown(figures['nets_ms'])} | - | {figures['cpu_s']:.1f} s |"
            if narrow
            else verdict(
                f"{name}, slowest rank, {figures['cpu_s']:.1f} s", figures["nets_ms"], production.TARGET_MS, shown
            )
        )
    lines.append(
        f"| memory of a rank, as its fullest in print | {percent(1.0)} of {plan.rank_bytes.max() / 1e9:.2f} GB | - | - |"
    )
    question = "What does a search find under the costs that a production planner printed? 1,933 tables, 96 ranks."
    settings.publish("search-printed", question, published.PRINTED, rows, "printed")
    return lines, found


def on_this_cpu(settings: Settings) -> Section:
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
    lines = [
        f"Cost nets {percent(model.report.unseen_tables_error or math.nan)} off on tables they never saw.",
        "",
        *markdown(published.MEASURED, rows),
    ]
    low, high = measured.TABLES
    question = (
        f"Are our plans faster on hardware? Compute of the slowest of {measured.DEVICES} devices over that of our plan, {count} "
        f"tasks of {low} to {high} tables, {measured.ROUNDS} rounds; 95 % intervals by bootstrap."
    )
    settings.publish("search-measured", question, published.MEASURED, rows, "measured")
    found = [{"task": seed, "ms": {k: list(v) for k, v in each.rounds_ms.items()}} for seed, each in enumerate(answers)]
    return lines, found


def over_hosts(settings: Settings) -> Section:
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
    columns = [
        "method",
        "solved",
        "cost over ours: mean",
        "least",
        "most",
        "over ours with copies: mean",
        "least",
        "most",
    ]
    question = (
        f"What do plans for several hosts cost? {len(found)} worlds of 16 to 64 devices in domains of 4 to 32, 12.5 to 50 "
        "GB/s a device between them, by analytic:h100."
    )
    settings.publish("search-hosts", question, columns, rows, "none")
    return markdown(columns, rows), [dict(each) for each in found]


def ablation(settings: Settings) -> Section:
    """Ours without each of its parts, of its usual rounds: by the truth where nets search, and by an analytic model itself."""
    methods = ("all parts", OTHER_SEED, *(f"without {switch}" for switch in SWITCHES))
    count = min(settings.tasks, 20)
    jobs = [Job("ablation", ("ablation", d, i), methods) for d in tasks.ABLATION_DEVICES for i in range(count)]
    by_nets = settings.ask("ablation, nets", SMALL_NETS, jobs, workers=2)
    half = [job for job in jobs if job.draw[2] < (count + 1) // 2]  # as many of each number of devices
    by_formula = settings.ask("ablation, analytic model", None, half, workers=2)
    by_formula = [f | {"truth_ms": f["nets_ms"]} if tables.solved(f) else f for f in by_formula]
    question = (
        f"What does each part of the search earn? Without it, on {len(jobs)} fresh tasks of "
        f"{tasks.ABLATION_DEVICES[0]} to {tasks.ABLATION_DEVICES[-1]} devices, half of them row-wise too."
    )
    settings.publish("search-ablation", question, published.ABLATION, published.ablation(by_nets, by_formula))
    lines = [
        f"Cost nets of {SMALL_NETS}, seeds from {tasks.ABLATION_SEED}:",
        "",
        *tables.ablation_table(by_nets),
        "",
        "The analytic model of an H100, which is its own truth:",
        "",
        *tables.ablation_table(by_formula),
    ]
    return lines, by_nets + by_formula


def ablation_over_hosts(settings: Settings) -> Section:
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
    columns = ("without", "cost: mean", "worst", "CPU")
    question = (
        f"What does each part earn over several hosts? Cost without it, on {len(chosen)} fresh worlds of 16 and 32 devices in "
        "domains of 4 to 16, by analytic:h100."
    )
    settings.publish("search-ablation-hosts", question, columns, rows, "none")
    return markdown(columns, rows), [dict(zip(columns, row, strict=True)) for row in rows]


SECTIONS: dict[str, Callable[[Settings], Section]] = {
    "compare": compare,
    "time": clock,
    "named": named,
    "scale": scale,
    "production": printed,
    "measured": on_this_cpu,
    "hosts": over_hosts,
    "ablation": ablation,
    "ablation-hosts": ablation_over_hosts,
}

if __name__ == "__main__":
    main()
