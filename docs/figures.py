"""The figures of docs/cost-model.md, docs/search.md and docs/benchmarks.md: kept as numbers, drawn from them.

    python docs/figures.py measure run/figures     measure, train, search (10 minutes), and write docs/images/figures.json
    python docs/figures.py draw                    docs/images/figures.json -> docs/images/*.svg
    python docs/figures.py picture report.html     the top of a report, by Chromium -> docs/images/report.png of the README

Charts are Vega-Lite, drawn by vl-convert. Nothing is smoothed or left out but what each function says.
"""

import argparse
import json
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import vl_convert

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.part import Part
from neuroshard.core.table import Table
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.files.cases import write_cases
from neuroshard.files.costs import read_costs
from neuroshard.files.disk import write_bytes
from neuroshard.files.plan import read_plan
from neuroshard.files.tables import read_tables
from neuroshard.measure.run import compute_repeatability

IMAGES = Path(__file__).resolve().parent / "images"
NUMBERS = IMAGES / "figures.json"
BATCH, LARGE_BATCH, LIMIT, SEED = 512, 16384, "256MiB", 0
DIMS, SETS, LATEST_MS = (4, 8, 16, 32, 64, 96, 128), 40, 40
OURS, OTHER, THIRD, GREY = "#1f6feb", "#d1495b", "#2a9d5c", "#8a8f98"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "draw", "picture"])
    parser.add_argument(
        "path", type=Path, nargs="?", default=Path("run/figures"), help="folder to measure in; report.html"
    )
    options = parser.parse_args()
    if options.what == "picture":
        picture(options.path)
        return
    if options.what == "measure":
        write_bytes(NUMBERS, json.dumps(measured(options.path), indent=1).encode())
    draw(json.loads(NUMBERS.read_text()))


def measured(folder: Path) -> dict[str, Any]:
    """All numbers, from a folder that is filled where it is not yet."""
    folder.mkdir(parents=True, exist_ok=True)
    tables_json = folder / "tables.json"
    neuroshard("tables", "--preset", "mlperf-dlrm-dcnv2", "--access", "zipf:1.1", "-o", tables_json)
    tables, _ = read_tables(tables_json)
    measure = ("--backend", "cpu", "--memory-limit", LIMIT, "--batch-size")

    for name, cases, batch in (("sets", sets(tables), BATCH), ("widths", widths(tables), LARGE_BATCH)):
        write_cases(folder / name, cases)
        neuroshard("measure", folder / name, *measure, batch, "--budget", "4m", "-o", folder / f"{name}-costs")
    sizes = ("--compute-cases", 500, "--collective-cases", 120, "--devices", 2, "--memory", "32GiB", "--seed", 1)
    neuroshard("augment", tables_json, *sizes, "-o", folder / "cases")
    neuroshard("measure", folder / "cases", *measure, BATCH, "--budget", "6m", "-o", folder / "costs")
    neuroshard("pretrain", folder / "costs", "-o", folder / "model")
    search = ("--model", "analytic:h100", "--batch-size", 65536, "--devices", 8, "--memory", "24GiB")
    for algorithm in ("local-search", "neuroshard-2023"):
        out = folder / f"{algorithm}.json"
        neuroshard("search", tables_json, *search, "--algorithm", algorithm, "-o", out)
    costs = read_costs(folder / "costs")
    return {
        "measured": f"{costs.bench.hardware.name}, {date.today():%d %B %Y}, other work on the machine",
        "sets": of_sets(folder / "sets-costs"),
        "widths": of_widths(folder / "widths-costs"),
        "trust": of_unseen_tables(folder),
        "noise": compute_repeatability(costs),
        "all_to_all": of_all_to_alls(folder / "sets-costs"),
        "search": of_search(folder),
    }


def neuroshard(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "neuroshard", *map(str, arguments)], check=True)


def chosen(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    """Twelve of the tables."""
    places = np.random.default_rng(SEED).choice(len(tables), 12, replace=False)
    return tuple(tables[place] for place in sorted(places))


def sets(tables: tuple[Table, ...]) -> Cases:
    """Twelve tables each alone, sets of 2 to 12 of them; and all-to-alls of which one device starts ever later."""
    few, rng = chosen(tables), np.random.default_rng(SEED)
    drawn = [rng.choice(len(few), int(rng.integers(2, 13)), replace=False) for _ in range(SETS)]
    all_sets = [*((table,) for table in few), *(tuple(few[place] for place in places) for places in drawn)]
    compute = {case.case_id: case for case in (ComputeCase(tables=one) for one in all_sets)}
    collective = [
        CollectiveCase(device_dims=(512, 512), start_delays_ms=(0.0, float(late))) for late in range(LATEST_MS + 1)
    ]
    return Cases(tables=few, compute=tuple(compute.values()), collective=tuple(collective), max_dim=128, seed=SEED)


def widths(tables: tuple[Table, ...]) -> Cases:
    """Three tables with few and many lookups, each cut to several numbers of columns."""
    few = sorted(chosen(tables), key=lambda table: table.pooling_factor)
    three = (few[3], few[-3], few[-1])
    compute = tuple(ComputeCase(tables=(table.with_dim(dim),)) for table in three for dim in DIMS)
    return Cases(tables=three, compute=compute, collective=(), max_dim=128, seed=SEED)


def compute_ms(folder: Path) -> dict[tuple[Table, ...], float]:
    """Measured ms of each set of tables, the mean where it was measured twice."""
    times: dict[tuple[Table, ...], list[float]] = {}
    for case, cost in read_costs(folder).compute:
        if not cost.error:
            times.setdefault(case.tables, []).append(cost.total_ms)
    return {tables: float(np.mean(found)) for tables, found in times.items()}


def of_sets(folder: Path) -> list[dict[str, float]]:
    """Each set, and the sum of its tables measured alone."""
    ms = compute_ms(folder)
    return [
        {"tables": len(tables), "sum_ms": sum(ms[table,] for table in tables), "together_ms": together}
        for tables, together in ms.items()
        if len(tables) > 1 and all((table,) in ms for table in tables)
    ]


def of_widths(folder: Path) -> list[dict[str, Any]]:
    """Each shard's cost as a share of its whole table's."""
    ms = {table: cost for (table,), cost in compute_ms(folder).items()}
    whole = {table.name: cost for table, cost in ms.items() if table.dim == max(DIMS)}
    return [
        {"table": f"lookups a sample: {table.pooling_factor:g}", "dim": table.dim, "share": cost / whole[table.name]}
        for table, cost in sorted(ms.items(), key=lambda item: item[0].dim)
        if table.name in whole
    ]


def of_unseen_tables(folder: Path) -> list[dict[str, float]]:
    """Predicted and measured ms of the sets of tables that no training case held."""
    costs, model = read_costs(folder / "costs"), load_cost_model(folder / "model")
    held_back = [(case, cost) for case, cost in costs.compute if case.split == "test_tables" and cost.round == 0]
    good = [(case, cost.total_ms) for case, cost in held_back if not cost.error]
    sums = [model.part_vectors([Part.of(table) for table in case.tables]).sum(axis=0) for case, _ in good]
    predicted = model.compute_ms(np.stack(sums))
    return [
        {"predicted_ms": float(p), "measured_ms": m, "tables": len(case.tables)}
        for p, (case, m) in zip(predicted, good, strict=True)
    ]


def of_all_to_alls(folder: Path) -> list[dict[str, Any]]:
    """The forward all-to-all of both devices, by how much later the second one starts."""
    return [
        {"late_ms": case.start_delays_ms[1], "forward_ms": ms, "device": who}
        for case, cost in read_costs(folder).collective
        if cost.round == 0
        for who, ms in zip(("the early one", "the late one"), cost.forward_ms or (), strict=False)
    ]


def of_search(folder: Path) -> dict[str, Any]:
    """The search's progress, and what it is held against."""
    plan, paper = (read_plan(folder / f"{name}.json") for name in ("local-search", "neuroshard-2023"))
    heuristics = [one.cost_ms for one in plan.baselines if one.cost_ms is not None]
    return {
        "steps": [{"step": one.step, "ms": one.cost_ms} for one in plan.improvements],
        "bound_ms": plan.lower_bound_ms,
        "paper_ms": paper.cost_ms,
        "heuristic_ms": min(heuristics),
    }


def picture(report: Path) -> None:
    """The top of a report as a browser shows it: headline, costs, devices."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or shutil.which("google-chrome"))
        page = browser.new_page(viewport={"width": 1280, "height": 1230})
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("html[data-drawn]")
        page.screenshot(path=IMAGES / "report.png")
        browser.close()


def draw(numbers: dict[str, Any]) -> None:
    """Every figure as an SVG under docs/images."""
    figures = {
        "fusion": fusion(numbers),
        "width": width(numbers),
        "trust": trust(numbers),
        "all-to-all": all_to_all(numbers),
        "search": search(numbers["search"]),
        "truth": truth(),
    }
    for name, spec in figures.items():
        svg = vl_convert.vegalite_to_svg({**FRAME, **spec})
        write_bytes(IMAGES / f"{name}.svg", svg.encode())
        print(f"{IMAGES / f'{name}.svg'}: {len(svg) / 1024:.0f} KiB")


FRAME = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "background": "white",
    "padding": 12,
    "width": 460,
    "height": 280,
    "config": {
        "font": "sans-serif",
        "axis": {"labelFontSize": 12, "titleFontSize": 13, "gridColor": "#e8e8e8", "titleFontWeight": "normal"},
        "title": {"fontSize": 14, "anchor": "start", "subtitleColor": "#555555", "subtitleFontSize": 11},
        "legend": {"labelFontSize": 12, "titleFontSize": 12},
    },
}


def axis(field: str, title: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, **more}


def log(values: list[float]) -> dict[str, Any]:
    """A logarithmic scale just around the values."""
    return {"type": "log", "domain": [min(values) * 0.8, max(values) * 1.25], "nice": False}


def equal(values: list[float]) -> dict[str, Any]:
    """The line on which both are the same."""
    ends = [{"x": min(values), "y": min(values)}, {"x": max(values), "y": max(values)}]
    return {
        "data": {"values": ends},
        "mark": {"type": "line", "strokeDash": [5, 4], "color": GREY},
        "encoding": {"x": axis("x", ""), "y": axis("y", "")},
    }


def title(text: str, below: str) -> dict[str, Any]:
    return {"text": text, "subtitle": below}


def of(numbers: dict[str, Any], batch: int) -> str:
    return f"measured, batch {batch:,}: {numbers['measured']}"


def fusion(numbers: dict[str, Any]) -> dict[str, Any]:
    sets = numbers["sets"]
    both = [one["sum_ms"] for one in sets] + [one["together_ms"] for one in sets]
    return {
        "title": title("Tables together do not cost the sum of each alone", of(numbers, BATCH)),
        "layer": [
            equal(both),
            {
                "data": {"values": sets},
                "mark": {"type": "point", "filled": True, "size": 55, "opacity": 0.8},
                "encoding": {
                    "x": axis("sum_ms", "sum of the tables, each measured alone (ms)", scale=log(both)),
                    "y": axis("together_ms", "the set, measured together (ms)", scale=log(both)),
                    "color": axis("tables", "tables", scale={"range": ["#9ecae1", "#08306b"]}),
                },
            },
        ],
    }


def width(numbers: dict[str, Any]) -> dict[str, Any]:
    ends = [{"x": 4, "y": 4 / 128}, {"x": 128, "y": 1}]
    return {
        "title": title("Half the columns cost more than half", of(numbers, LARGE_BATCH)),
        "layer": [
            {
                "data": {"values": ends},
                "mark": {"type": "line", "strokeDash": [5, 4], "color": GREY},
                "encoding": {"x": axis("x", ""), "y": axis("y", "")},
            },
            {
                "data": {"values": numbers["widths"]},
                "mark": {"type": "line", "point": True},
                "encoding": {
                    "x": axis("dim", "columns of the shard", axis={"values": list(DIMS)}),
                    "y": axis("share", "cost, of the whole table's", axis={"format": "%"}),
                    "color": {
                        "field": "table",
                        "type": "nominal",
                        "title": None,
                        "scale": {"range": [OURS, OTHER, THIRD]},
                    },
                },
            },
        ],
    }


def trust(numbers: dict[str, Any]) -> dict[str, Any]:
    points = numbers["trust"]
    both = [one[key] for one in points for key in ("predicted_ms", "measured_ms")]
    error = float(np.mean([abs(one["predicted_ms"] / one["measured_ms"] - 1) for one in points]))
    return {
        "title": title(
            f"Tables never trained on: {error:.1%} off; measuring again differs by {numbers['noise']:.1%}",
            of(numbers, BATCH),
        ),
        "layer": [
            equal(both),
            {
                "data": {"values": points},
                "mark": {"type": "point", "filled": True, "size": 45, "opacity": 0.7, "color": OURS},
                "encoding": {
                    "x": axis("measured_ms", "measured (ms)", scale=log(both)),
                    "y": axis("predicted_ms", "predicted (ms)", scale=log(both)),
                },
            },
        ],
    }


def all_to_all(numbers: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": title("A device that comes early waits for the last", f"2 gloo processes, {of(numbers, BATCH)}"),
        "layer": [
            equal([0.0, float(LATEST_MS)]),
            {
                "data": {"values": numbers["all_to_all"]},
                "mark": {"type": "point", "filled": True, "size": 40, "opacity": 0.8},
                "encoding": {
                    "x": axis("late_ms", "the second device starts later by (ms)"),
                    "y": axis("forward_ms", "forward all-to-all takes (ms)"),
                    "color": {"field": "device", "type": "nominal", "title": None, "scale": {"range": [OURS, OTHER]}},
                },
            },
        ],
    }


def search(found: dict[str, Any]) -> dict[str, Any]:
    lines = [
        {"ms": found["heuristic_ms"], "what": "best heuristic"},
        {"ms": found["paper_ms"], "what": "the published search"},
        {"ms": found["bound_ms"], "what": "lower bound"},
    ]
    last = {"step": found["steps"][-1]["step"] * 1.03}
    lowest = min(found["bound_ms"], found["steps"][-1]["ms"]) * 0.98
    highest = max(one["ms"] for one in found["steps"] + lines) * 1.02
    return {
        "title": title(
            "The search closes in on what is possible",
            "26 tables, 8 devices of 24 GiB, predicted by analytic:h100, batch 65,536",
        ),
        "layer": [
            {
                "data": {"values": [one for one in lines if one["ms"] is not None]},
                "layer": [
                    {"mark": {"type": "rule", "strokeDash": [5, 4], "color": GREY}, "encoding": {"y": axis("ms", "")}},
                    {
                        "mark": {"type": "text", "align": "right", "dy": -7, "color": "#444444", "fontSize": 12},
                        "encoding": {"y": axis("ms", ""), "x": {"datum": last["step"]}, "text": {"field": "what"}},
                    },
                ],
            },
            {
                "data": {"values": found["steps"]},
                "mark": {"type": "line", "interpolate": "step-after", "color": OURS, "strokeWidth": 2.5, "point": True},
                "encoding": {
                    "x": axis("step", "changes of the plan taken"),
                    "y": axis(
                        "ms", "slowest device (predicted ms)", scale={"domain": [lowest, highest], "zero": False}
                    ),
                },
            },
        ],
    }


def truth() -> dict[str, Any]:
    """Computed over measured, a dot for each of other people's figures: the tables of docs/benchmarks.md that have errors."""
    kinds = {"operator": "operator", "all-to-alls": "all-to-all", "ratios": "system", "hosts": "hosts"}
    values = []
    for name, kind in kinds.items():
        rows = json.loads((IMAGES.parent / "benchmarks" / f"truth-{name}.json").read_text())["rows"]
        values += [{"what": row[0], "kind": kind, "off": float(row[2]) / float(row[1])} for row in rows]
    return {
        "height": 18 * len(values),
        "title": title(
            "Computed over measured", "Milliseconds, bandwidths and ratios; the band is 30 %, the stated deviation"
        ),
        "layer": [
            {
                "data": {"values": [{"low": 0.7, "high": 1.3}]},
                "mark": {"type": "rect", "color": OURS, "opacity": 0.12},
                "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
            },
            {
                "data": {"values": values},
                "mark": {"type": "point", "filled": True, "size": 70},
                "encoding": {
                    "x": axis(
                        "off",
                        "computed over measured",
                        scale={"type": "log"},
                        axis={"values": [0.5, 0.7, 1, 1.3, 2, 4]},
                    ),
                    "y": {"field": "what", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 420}},
                    "color": {"field": "kind", "type": "nominal", "title": None, "sort": None},
                },
            },
        ],
    }


if __name__ == "__main__":
    main()
