"""Cost against time as an SVG, a line a method, by hand: no plotting package is among the project's."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from xml.sax.saxutils import escape

from bench.searching.methods import Figures
from bench.searching.tables import OURS, PUBLISHED, ROWS_TOO, by_task, solved
from neuroshard.files.disk import write_bytes

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 460, 70, 190, 50, 60
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf", "#ff7f0e")
TIMES_S = [10 ** (-3 + i / 20) for i in range(101)]  # 1 ms to 100 s
RANGE = (0.7, 1.3)  # of paper's cost


def draw(answers: Sequence[Figures], title: str, path: Path) -> None:
    """Mean cost by the nets over paper's, on the tasks that it and a method solved; a method but ours has its plan at its end."""
    tasks = [of for of in by_task(answers).values() if solved(of.get(PUBLISHED))]
    names = [n for n in dict.fromkeys(f["method"] for f in answers) if any(solved(of.get(n)) for of in tasks)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="25" font-size="15">{escape(title)}</text>',
        *_axes(),
    ]
    for name, colour in zip(names, COLOURS * 2, strict=False):
        points = _curve([of[name] | {"beside": of[PUBLISHED]["nets_ms"]} for of in tasks if solved(of.get(name))], name)
        last = points[-1]
        parts += [
            f'<polyline fill="none" stroke="{colour}" stroke-width="{3 if name in (OURS, ROWS_TOO) else 1.5}" points="'
            + " ".join(f"{_x(t):.1f},{_y(r):.1f}" for t, r in points)
            + '"/>',
            f'<circle cx="{_x(points[0][0]):.1f}" cy="{_y(points[0][1]):.1f}" r="3" fill="{colour}"/>',
        ]
        row = TOP + 16 * names.index(name)
        parts += [
            f'<rect x="{WIDTH - RIGHT + 12}" y="{row - 9}" width="10" height="10" fill="{colour}"/>',
            f'<text x="{WIDTH - RIGHT + 28}" y="{row}">{escape(name)} {last[1]:.3f}</text>',
        ]
    write_bytes(path, "\n".join([*parts, "</svg>"]).encode())


def _curve(figures: Sequence[Figures], name: str) -> list[tuple[float, float]]:
    """Points of CPU seconds and cost: for ours from when most tasks have a plan, over the tasks that have one."""
    if name not in (OURS, ROWS_TOO):
        ratio = mean(f["nets_ms"] / f["beside"] for f in figures)
        return [(median(f["cpu_s"] for f in figures), ratio), (TIMES_S[-1], ratio)]
    points = []
    for time_s in TIMES_S:
        best = [min((ms for t, ms in f["trace"] if t <= time_s), default=math.nan) / f["beside"] for f in figures]
        known = [ratio for ratio in best if not math.isnan(ratio)]
        if 2 * len(known) > len(figures):
            points.append((time_s, mean(known)))
    return points or [(TIMES_S[-1], mean(f["nets_ms"] / f["beside"] for f in figures))]


def _axes() -> list[str]:
    parts = []
    for power in range(-3, 3):
        x = _x(10.0**power)
        parts += [
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>',
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10.0**power:g}</text>',
        ]
    for step in range(9):
        ratio = RANGE[0] + step * (RANGE[1] - RANGE[0]) / 8
        parts += [
            f'<line x1="{LEFT}" y1="{_y(ratio):.1f}" x2="{WIDTH - RIGHT}" y2="{_y(ratio):.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{_y(ratio) + 4:.1f}" text-anchor="end">{ratio:.2f}</text>',
        ]
    caption = "CPU seconds (logarithmic); mean cost by the nets over that of paper, cut at 1.3"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 20}">{caption}</text>')
    return parts


def _x(seconds: float) -> float:
    share = (math.log10(max(seconds, TIMES_S[0])) + 3) / 5
    return LEFT + min(share, 1.0) * (WIDTH - LEFT - RIGHT)


def _y(ratio: float) -> float:
    share = (min(max(ratio, RANGE[0]), RANGE[1]) - RANGE[0]) / (RANGE[1] - RANGE[0])
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
