"""Sizes as one HTML page: ms against devices, ms against memory, and all rows. No scripts, nothing fetched."""

from collections.abc import Iterator, Sequence
from typing import Any

from neuroshard.core.clean import cleaned
from neuroshard.core.text import short_name
from neuroshard.core.units import format_bytes
from neuroshard.report.plain_page import plain_page
from neuroshard.report.svg import COLOURS
from neuroshard.size.frontier import GIB, may_join_or_leave, with_several_memories
from neuroshard.size.row import Row, name_of
from neuroshard.size.run import Sizes

BLOCKS = """
{% block legend %}
Predicted. Shaded: between a plan's ms and the bound that no plan goes below. Crosses, and the grey ground: does
not fit. Rings: no other size is better in both time and {{ second }}.
{%- endblock %}
{% block pictures %}
  <div><h3>Ms a step by the number of devices</h3>{{ by_devices | safe }}</div>
  {% if by_memory %}<div><h3>Ms a step by HBM kept for tables</h3>{{ by_memory | safe }}</div>{% endif %}
{% endblock %}
{% block table %}Sizes{% endblock %}
{% block under_table %}
~: within the errors of the models it may be otherwise, beside sizes of another kind.
{%- if not_measured %} !: beyond what was measured, as the notes say.{% endif %}
{% endblock %}
"""
Values = list[dict[str, Any]]
COLUMNS = (
    "size",
    "memory a device",
    "costs",
    "ms a step",
    "of it dense",
    "may be",
    "no less than",
    "samples/s",
    "a device",
    "memory left",
    "host memory",
    "money per billion samples",
    "",
)


def sizes_page(sizes: Sizes) -> str:
    """The page as HTML. The same sizes give the same page."""
    best, uncertain = set(sizes.places_of_frontier), may_join_or_leave(sizes.rows)
    swept = [row for group in with_several_memories(sizes.rows) for row in group]
    fields = {
        "title": "How many devices, and which",
        "what": sizes.what,
        "second": "money" if sizes.order.priced else "devices",
        "cards": list(_cards(sizes)),
        "notes": [*sizes.notes, *(f"beyond what was measured: {line}" for line in sizes.caveats)],
        "not_measured": bool(sizes.caveats),
        "columns": COLUMNS,
        "rows": [
            _cells(row, sizes.order.currency, place in best, place in uncertain) for place, row in enumerate(sizes.rows)
        ],
    }
    charts = {"by_devices": _by_devices(sizes, best), "by_memory": _by_memory(swept) if swept else None}
    return plain_page(BLOCKS, fields, charts)


def _cards(sizes: Sizes) -> Iterator[dict[str, str]]:
    """The sizes at both ends of the frontier."""
    best = sizes.frontier
    if not best:
        return
    least = "least money" if sizes.order.priced else "fewest devices"
    for title, row in {least: best[0], "fastest": best[-1]}.items():
        money = f", {row.money_text} {sizes.order.currency}".rstrip() + " per billion samples" if row.money_text else ""
        yield {"title": title, "figure": name_of(row), "note": f"{row.step_ms:.3f} ms a step{money} ({row.basis})"}
    for name, devices in {name: devices for (name, _), devices in sizes.fewest_devices.items()}.items():
        if devices > 1:
            yield {
                "title": short_name(name),
                "figure": f"from {devices:,} devices",
                "note": "nothing below fits: proven",
            }


def _cells(row: Row, currency: str, best: bool, uncertain: bool) -> list[str]:
    size = [name_of(row), format_bytes(row.cell.memory_bytes)]
    if not row.fits:
        return [*size, "", row.state, "", "", "", "", "", "", "", "", row.why]
    interval, bound = row.interval_ms, row.bound_step_ms
    return [
        *size,
        row.basis,
        f"{row.step_ms:.3f}",
        f"{row.dense_ms:.3f}" if row.dense_ms else "",
        "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        "" if bound is None else f"{bound:.3f}",
        f"{row.samples_per_s:,.0f}",
        f"{row.samples_per_s / row.cell.devices:,.0f}",
        format_bytes(row.memory_left_bytes, "down"),
        format_bytes(row.host_bytes) if row.host_bytes else "",
        f"{row.money_text} {currency}".strip() if row.money_text else "",
        " ".join(["frontier"] * best + ["~"] * uncertain + ["!"] * bool(row.caveats)),
    ]


def _most_memory(sizes: Sizes) -> list[tuple[int, Row]]:
    """Of each kind and number of devices the row with most memory, with its place."""
    found = {(row.cell.kind, row.cell.devices): (place, row) for place, row in enumerate(sizes.rows)}
    return list(found.values())


def _by_devices(sizes: Sizes, best: set[int]) -> dict[str, Any]:
    """A line a kind, of its rows with most memory."""
    names = cleaned([short_name(kind.name) for kind in sizes.order.kinds])
    of = dict(zip(sizes.order.kinds, names, strict=True))
    shown = _most_memory(sizes)
    values = [
        {
            "kind": of[row.cell.kind],
            "devices": row.cell.devices,
            "ms": row.step_ms,
            "bound": row.step_ms if row.bound_step_ms is None else row.bound_step_ms,
        }
        for _, row in shown
        if row.fits
    ]
    rings = [{"devices": row.cell.devices, "ms": row.step_ms} for place, row in enumerate(sizes.rows) if place in best]
    most = max((value["ms"] for value in values), default=1.0)
    crosses = [
        {"kind": of[row.cell.kind], "devices": row.cell.devices, "ms": most}
        for _, row in shown
        if row.state in ("proven not to fit", "no plan found")
    ]
    fitting = [value["devices"] for value in values]
    none_below = [row.cell.devices for _, row in shown if not row.fits and row.cell.devices < min(fitting, default=0)]
    grey = [{"from": min(none_below), "to": min(fitting)}] if none_below else []
    return _layers(names, values, rings, crosses, grey)


def _layers(names: Sequence[str], values: Values, rings: Values, crosses: Values, grey: Values) -> dict[str, Any]:
    """Lines with the ground down to their bounds, rings and crosses at sizes, and `grey` ground where nothing fits."""
    x = {
        "field": "devices",
        "type": "quantitative",
        "title": "devices",
        "scale": {"type": "log", "base": 2, "nice": False},
    }
    y = {"field": "ms", "type": "quantitative", "title": "ms a step", "scale": {"type": "log"}}
    color = {
        "field": "kind", "type": "nominal", "title": None, "sort": names, "legend": {"symbolOpacity": 1},
        "scale": {"domain": names, "range": [COLOURS[place % len(COLOURS)] for place in range(len(names))]},
    }  # fmt: skip
    return {
        "layer": [
            {
                "data": {"values": grey},
                "mark": {"type": "rect", "color": "#9aa4b1", "opacity": 0.2},
                "encoding": {"x": {**x, "field": "from"}, "x2": {"field": "to"}},
            },
            {
                "data": {"values": values},
                "mark": {"type": "area", "opacity": 0.25},
                "encoding": {"x": x, "y": y, "y2": {"field": "bound"}, "color": color},
            },
            {
                "data": {"values": values},
                "mark": {"type": "line", "strokeWidth": 1.8, "point": {"size": 25}},
                "encoding": {"x": x, "y": y, "color": color},
            },
            {
                "data": {"values": rings},
                "mark": {"type": "point", "size": 130, "strokeWidth": 1.8, "color": "#1c2430", "opacity": 1},
                "encoding": {"x": x, "y": y},
            },
            {
                "data": {"values": crosses},
                "mark": {"type": "point", "shape": "cross", "filled": True, "angle": 45, "size": 60, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": color},
            },
        ]
    }


def _by_memory(rows: Sequence[Row]) -> dict[str, Any]:
    """A line a kind and number of devices, in steps: ms stay until there is enough memory for a faster plan."""
    values = [{"size": name_of(row), "memory": row.cell.memory_bytes / GIB, "ms": row.step_ms} for row in rows]
    names = [*dict.fromkeys(value["size"] for value in values)][: len(COLOURS)]
    number = {"type": "quantitative", "scale": {"zero": False}}
    return {
        "data": {"values": [value for value in values if value["size"] in names]},
        "mark": {"type": "line", "interpolate": "step-after", "point": {"size": 40}, "strokeWidth": 1.8},
        "encoding": {
            "x": {"field": "memory", **number, "title": "HBM of a device for tables, GiB"},
            "y": {"field": "ms", **number, "title": "ms a step"},
            "color": {
                "field": "size", "type": "nominal", "title": None, "sort": names,
                "scale": {"domain": names, "range": [*COLOURS[: len(names)]]},
            },
        },
    }  # fmt: skip
