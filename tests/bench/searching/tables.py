"""Answers -> lines of Markdown, each figure beside its target."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from bench.searching.methods import Figures
from neuroshard.core.units import format_bytes

OURS, ROWS_TOO, PUBLISHED = "local-search", "local-search, row-wise too", "neuroshard-2023"
ALL_TYPES = "torchrec, all types"
APART = (
    ROWS_TOO,
    ALL_TYPES,
)  # split rows: what they solve is not feasible for all, and the last is asked of some tasks only


def by_task(answers: Sequence[Figures]) -> dict[str, dict[str, Figures]]:
    """Answers by task and method."""
    found: dict[str, dict[str, Figures]] = {}
    for figures in answers:
        found.setdefault(figures["task"], {})[figures["method"]] = figures
    return found


def solved(figures: Figures | None) -> bool:
    return figures is not None and "nets_ms" in figures


def ratios(answers: Sequence[Figures], method: str, beside: str, cost: str) -> list[float]:
    """Cost of one method over another's, on the tasks that both solved."""
    return [
        of[method][cost] / of[beside][cost]
        for of in by_task(answers).values()
        if solved(of.get(method)) and solved(of.get(beside))
    ]


def methods_table(answers: Sequence[Figures]) -> list[str]:
    """A line a method. Means are over the tasks that all solved which solved any; ratios over those that it and paper solved."""
    tasks = by_task(answers)
    names = list(dict.fromkeys(figures["method"] for figures in answers))
    able = [name for name in names if any(solved(of.get(name)) for of in tasks.values())]
    common = [of for of in tasks.values() if all(solved(of.get(m)) for m in able if m not in APART)]
    lines = [
        f"| method | solved of {len(tasks)} | nets: mean ms of {len(common)} that all solved | truth: mean ms "
        "| nets / paper: mean, worst | truth / paper: mean, worst | median CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        mine = [of[name] for of in tasks.values() if name in of]
        cells = [name, str(sum(map(solved, mine)))]
        for cost in ("nets_ms", "truth_ms"):
            values = [of[name][cost] for of in common if solved(of.get(name))]
            cells.append(f"{mean(values):.3f}" if values else "-")
        for cost in ("nets_ms", "truth_ms"):
            beside = ratios(answers, name, PUBLISHED, cost)
            cells.append(f"{mean(beside):.3f}, {max(beside):.3f}" if beside else "-")
        lines.append(f"| {' | '.join(cells)} | {median(f['cpu_s'] for f in mine):.3g} |")
    return lines


def verdict(what: str, value: float, limit: float, shown: Callable[[float], str], least: bool = False) -> str:
    """`what: value (target …)`, and MISS where it is missed; NaN, where nothing was measured, is none."""
    if math.isnan(value):
        return f"| {what} | - | {'at least' if least else 'at most'} {shown(limit)} | not measured |"
    met = value >= limit if least else value <= limit
    return f"| {what} | {shown(value)} | {'at least' if least else 'at most'} {shown(limit)} | {'met' if met else 'MISS'} |"


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def times(factor: float) -> str:
    return f"{factor:,.0f} ×"


def average(values: Sequence[float]) -> float:
    return mean(values) if values else math.nan


def cost_verdicts(answers: Sequence[Figures], devices: int, ours: str = OURS) -> list[str]:
    """The targets of a cost comparison, for ours column-wise or with rows too."""
    nets_target = {4: 0.025, 8: 0.07, 16: 0.10}[devices]
    truth_target = {4: 0.02, 8: 0.045, 16: math.nan}[devices]
    nets, truth = (ratios(answers, ours, PUBLISHED, cost) for cost in ("nets_ms", "truth_ms"))
    tasks = by_task(answers).values()
    feasible = [of for of in tasks if any(solved(f) for name, f in of.items() if name not in APART or ours == ROWS_TOO)]
    at = f"{devices} devices" + (", rows too" if ours == ROWS_TOO else "")
    lines = [
        verdict(
            f"{at}: feasible tasks not solved",
            float(sum(not solved(of.get(ours)) for of in feasible)),
            0,
            "{:.0f}".format,
        ),
        verdict(f"{at}: cost below paper's, nets, mean", 1 - average(nets), nets_target, percent, least=True),
        verdict(f"{at}: worst task above paper, nets", max(nets, default=math.nan) - 1, 0.001, percent),
    ]
    if not math.isnan(truth_target):
        lines.append(
            verdict(f"{at}: cost below paper's, truth, mean", 1 - average(truth), truth_target, percent, least=True)
        )
    else:
        lines.append(f"| {at}: cost below paper's, truth, mean | {percent(1 - average(truth))} | - | - |")
    promised = 1 - average(nets)
    gain = (1 - average(truth)) / promised if promised else math.nan  # paper's own plans: nothing was promised
    lines += [
        verdict(f"{at}: worst task above paper, truth", max(truth, default=math.nan) - 1, 0.01, percent),
        verdict(f"{at}: share of the promised gain that is real", gain, 0.8, percent, least=True),
    ]
    peers = {"TorchRec's planner": ("torchrec",), "the best heuristic": HEURISTICS}
    if ours == ROWS_TOO:
        peers = {"TorchRec's planner with all types": (ALL_TYPES,), "neuroshard column-wise": (OURS,)} | peers
    for name, of_task in peers.items():
        for cost in ("nets_ms", "truth_ms"):
            beside = [
                of[ours][cost] / min(of[m][cost] for m in of_task if solved(of.get(m)))
                for of in tasks
                if solved(of.get(ours)) and any(solved(of.get(m)) for m in of_task)
            ]
            kind = cost.removesuffix("_ms")
            lines.append(
                verdict(
                    f"{at}: worst task above {name}, {kind} (mean {percent(1 - average(beside))} below)",
                    max(beside, default=math.nan) - 1,
                    0.0,
                    percent,
                )
            )
    gaps = [
        of[ours]["nets_ms"] / of[ours]["bound_ms"] - 1
        for of in tasks
        if solved(of.get(ours)) and of[ours].get("bound_ms")
    ]
    if devices == 4:
        lines.append(verdict(f"{at}: proven gap, mean", average(gaps), 0.04, percent))
    elif gaps:
        lines.append(f"| {at}: proven gap, mean | {percent(average(gaps))} | - | - |")
    possible = [
        1 - of[ours]["bound_ms"] / of[PUBLISHED]["nets_ms"]
        for of in tasks
        if solved(of.get(ours)) and of[ours].get("bound_ms") and solved(of.get(PUBLISHED))
    ]
    if possible:
        lines.append(
            f"| {at}: cost below paper's that any plan can have, nets, mean | at most {percent(average(possible))} | - | - |"
        )
    return lines


HEURISTICS = ("random", "size", "dim", "lookup", "size-lookup")


def reached(figures: Figures, cost_ms: float) -> float:
    """CPU seconds until the search had a plan at most so dear; infinite where it never had."""
    return next((seconds for seconds, ms in figures["trace"] if ms <= cost_ms * (1 + 1e-9)), math.inf)


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent of a power law through the points, by least squares of the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mx, my = mean(x), mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def memory_text(figures: Figures) -> str:
    grown = figures["peak_bytes"] - figures["peak_before_bytes"]
    return f"{format_bytes(figures['peak_bytes'])}, {format_bytes(grown)} of it in the search"


@dataclass(frozen=True)
class Part:
    """What a search without one of its parts loses, over the tasks that both solved; and tasks that only one of them solved."""

    name: str
    truth_mean: float  # share that the true cost rises by
    truth_worst: float
    nets_mean: float
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
        truth, nets = (ratios(answers, name, everything, cost) for cost in ("truth_ms", "nets_ms"))
        lost, won = (sum(solved(pair[a]) > solved(pair[1 - a]) for pair in pairs) for a in (0, 1))
        cpu = sum(one["cpu_s"] for _, one in pairs) / sum(one["cpu_s"] for one, _ in pairs)
        worst = max(truth, default=math.nan)
        found.append(Part(name, average(truth) - 1, worst - 1, average(nets) - 1, lost, won, cpu))
    return found


def change(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:+.2%}"


def ablation_table(answers: Sequence[Figures]) -> list[str]:
    """A line a part."""
    lines = ["| | true cost: mean, worst | nets: mean | tasks lost, won | CPU |", "|---|---|---|---|---|"]
    for part in parts(answers):
        lines.append(
            f"| {part.name} | {change(part.truth_mean)}, {change(part.truth_worst)} "
            f"| {change(part.nets_mean)} | {part.lost}, {part.won} | {part.cpu:.0%} |"
        )
    everything = answers[0]["method"]
    cpu_s = sum(figures["cpu_s"] for figures in answers if figures["method"] == everything)
    tasks = by_task(answers)
    found = sum(solved(of[everything]) for of in tasks.values())
    return [f"With all parts {found} of {len(tasks)} tasks are solved, in {cpu_s:.0f} s of CPU.", "", *lines]
