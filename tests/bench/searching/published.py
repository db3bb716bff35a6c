"""Answers -> the rows of the tables in docs/benchmarks/, a function a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING

import numpy as np

from bench.gpu_day.stages import Gain
from bench.searching.methods import Figures

if TYPE_CHECKING:  # torch, which a process that only searches should not load
    from bench.searching.measured import Measured

Rows = list[list[str]]

OURS, ROWS_TOO, PUBLISHED = "local-search", "local-search, row-wise too", "neuroshard-2023"
ALL_TYPES = "torchrec, all types"
HEURISTICS = ("random", "size", "dim", "lookup", "size-lookup")

PLANS = ("devices", "ours, against", "column-wise: mean", "worst task", "row-wise too: mean", "worst task")
SOLVED = (
    *("devices", "tasks", "local-search", "row-wise too", "neuroshard-2023", "TorchRec's planner"),
    *("proven gap: column-wise", "row-wise too"),
)
TIME = ("tables x devices", "published, CPU s (median)", "ours, CPU s", "times as fast: median (quartiles)")
NAMED = (
    *("task", "tables x devices", "ours: column-wise, row-wise too", "best of the others"),
    "CPU s to within 2 % of the end",
)
MEASURED = (
    "plans of",
    "tasks",
    "measured: mean and interval",
    "worst for ours",
    "predicted: mean",
    "predicted / measured",
)
PRINTED = ("plan", "slowest rank")
ABLATION = ("without", "true cost: mean, worst", "analytic model: mean, worst", "tasks lost, won", "CPU")

PEERS = {
    "neuroshard-2023": (PUBLISHED,),
    "TorchRec's planner": ("torchrec",),
    "TorchRec's planner, all types": (ALL_TYPES,),
    "best heuristic": HEURISTICS,
}


def by_task(answers: Sequence[Figures]) -> dict[str, dict[str, Figures]]:
    """Answers by task and method."""
    found: dict[str, dict[str, Figures]] = {}
    for figures in answers:
        found.setdefault(figures["task"], {})[figures["method"]] = figures
    return found


def solved(figures: Figures | None) -> bool:
    return figures is not None and "nets_ms" in figures


def ratios(answers: Sequence[Figures], method: str, beside: str) -> list[float]:
    """True cost of one method over another's, on the tasks that both solved."""
    return [
        of[method]["truth_ms"] / of[beside]["truth_ms"]
        for of in by_task(answers).values()
        if solved(of.get(method)) and solved(of.get(beside))
    ]


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def average(values: Sequence[float]) -> float:
    return mean(values) if values else math.nan


def reached(figures: Figures, cost_ms: float) -> float:
    """CPU seconds until the search had a plan at most so dear; infinite where it never had."""
    return next((seconds for seconds, ms in figures["trace"] if ms <= cost_ms * (1 + 1e-9)), math.inf)


@dataclass(frozen=True)
class Part:
    """What a search without one of its parts loses, over the tasks that both solved; and tasks that only one of them solved."""

    name: str
    truth_mean: float  # share that the true cost rises by
    truth_worst: float
    lost: int
    won: int
    cpu: float  # share of the CPU time with all parts


def parts(answers: Sequence[Figures]) -> list[Part]:
    """Of each method but the first, which has all parts."""
    tasks = by_task(answers)
    everything, *names = dict.fromkeys(figures["method"] for figures in answers)
    found = []
    for name in names:
        pairs = [(of[everything], of[name]) for of in tasks.values()]
        truth = ratios(answers, name, everything)
        lost, won = (sum(solved(pair[a]) > solved(pair[1 - a]) for pair in pairs) for a in (0, 1))
        cpu = sum(one["cpu_s"] for _, one in pairs) / sum(one["cpu_s"] for one, _ in pairs)
        worst = max(truth, default=math.nan)
        found.append(Part(name, average(truth) - 1, worst - 1, lost, won, cpu))
    return found


def change(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:+.2%}"


def plans(answers: Sequence[Figures], devices: int) -> Rows:
    """How far ours is below each peer by the truth. Column-wise plans are not compared with a planner that may split rows."""
    rows = []
    for peer, methods in PEERS.items():
        row = [str(devices), peer]
        for ours in (OURS, ROWS_TOO):
            below = [] if (ours, peer) == (OURS, "TorchRec's planner, all types") else _below(answers, ours, methods)
            row += [percent(mean(below)), percent(min(below))] if below else ["", ""]
        rows.append(row)
    return rows


def _below(answers: Sequence[Figures], ours: str, methods: Sequence[str]) -> list[float]:
    """Share of the cheapest of these methods' true cost that ours saves, for each task that ours and any of them solved."""
    return [
        1 - of[ours]["truth_ms"] / min(of[method]["truth_ms"] for method in methods if solved(of.get(method)))
        for of in by_task(answers).values()
        if solved(of.get(ours)) and any(solved(of.get(method)) for method in methods)
    ]


def solved_row(answers: Sequence[Figures], devices: int) -> list[str]:
    tasks = by_task(answers).values()
    counts = [sum(solved(of.get(method)) for of in tasks) for method in (OURS, ROWS_TOO, PUBLISHED, "torchrec")]
    gaps = []
    for ours in (OURS, ROWS_TOO):
        bounded = [of[ours] for of in tasks if solved(of.get(ours)) and of[ours].get("bound_ms")]
        gaps.append(percent(mean(f["nets_ms"] / f["bound_ms"] - 1 for f in bounded)) if bounded else "-")
    return [str(devices), str(len(tasks)), *map(str, counts), *gaps]


def time_row(size: str, both: Sequence[tuple[Figures, Figures]]) -> list[str]:
    """`both`: of each task what the published search took, asked a set at a time, and ours."""
    seconds = [reached(ours, published["nets_ms"]) for published, ours in both]
    faster = [published["cpu_s"] / s for (published, _), s in zip(both, seconds, strict=True)]
    low, middle, high = quantiles(faster, n=4, method="inclusive") if len(faster) > 1 else faster * 3
    published_s = median(published["cpu_s"] for published, _ in both)
    return [size, f"{published_s:.2f}", f"{median(seconds):.4f}", f"{middle:,.0f} ({low:,.0f}, {high:,.0f})"]


def named_row(answers: Sequence[Figures]) -> list[str]:
    """`answers` of all methods to one task."""
    (of,) = by_task(answers).values()
    first = answers[0]
    mine = [f"{of[ours]['truth_ms']:.3f}" if solved(of.get(ours)) else "-" for ours in (OURS, ROWS_TOO)]
    others = [f for name, f in of.items() if name not in (OURS, ROWS_TOO) and solved(f)]
    best = min(others, key=lambda f: f["truth_ms"], default=None)
    names = {ALL_TYPES: "TorchRec, all types", "torchrec": "TorchRec"}
    near = reached(of[OURS], 1.02 * of[OURS]["trace"][-1][1]) if solved(of.get(OURS)) else math.nan
    return [
        first["task"].split(" x ")[0],
        f"{first['tables']:,} x {first['devices']}",
        ", ".join(mine),
        "-" if best is None else f"{best['truth_ms']:.3f} ({names.get(best['method'], best['method'])})",
        f"{near:.2f}",
    ]


def measured_row(method: str, gain: Gain, answers: "Sequence[Measured]") -> list[str]:
    """How much longer a method's plans take than ours, and how far the nets are off."""
    some = [each for each in answers if method in each.rounds_ms]
    predicted = [each.predicted_ms[method] / each.predicted_ms["local-search"] - 1 for each in some]
    off = [each.predicted_ms[method] / float(np.median(each.rounds_ms[method])) for each in some]
    ours = method == "local-search"
    return [
        method,
        str(len(some)),
        "-" if ours else str(gain),
        "-" if ours else f"{gain.worst:+.1%}",
        "-" if ours else f"{mean(predicted):+.1%}",
        f"{mean(off):.2f}",
    ]


def part(method: str) -> str:
    """What a method leaves out, as the tables of ablations name it."""
    return method.removeprefix("without ").replace("_", " ")


def ablation(by_nets: Sequence[Figures], by_formula: Sequence[Figures]) -> Rows:
    """What each part earns, where nets search and the truth decides, and where an analytic model is its own truth."""
    shown = "{}, {}".format
    return [
        [
            part(nets.name),
            shown(change(nets.truth_mean), change(nets.truth_worst)),
            shown(change(formula.truth_mean), change(formula.truth_worst)),
            f"{nets.lost + formula.lost}, {nets.won + formula.won}",
            f"{nets.cpu:.0%}",
        ]
        for nets, formula in zip(parts(by_nets), parts(by_formula), strict=True)
    ]
