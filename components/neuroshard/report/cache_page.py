"""What caches in HBM miss, as one HTML page: curves of the tables, HBM of the model, and all figures. No scripts, nothing
fetched."""

from typing import Any

import numpy as np

from neuroshard.core.clean import cleaned
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.cache import Caches
from neuroshard.report.cache import CacheMisses
from neuroshard.report.plain_page import plain_page
from neuroshard.report.svg import COLOURS

MOST_CURVES = len(COLOURS)
MOST_ROWS = 1000
_POINTS = np.geomspace(1e-3, 1.0, 61)

BLOCKS = """
{% block legend %}
Predicted, of FBGEMM's LRU cache once it is warm. Misses are shares of the distinct rows that a step reads.
{%- endblock %}
{% block pictures %}
  <div><h3>Misses of each table by the share of its rows in HBM</h3>{{ curves | safe }}<p class="quiet">{{ shown }}</p></div>
  <div><h3>Misses of the whole model by HBM for its caches</h3>{{ hbm | safe }}
  <p class="quiet">Each next row goes to the table where it saves most bytes. The maps of rows and row-wise optimizer state take
    {{ apart }} more.</p></div>
{% endblock %}
{% block table %}Tables{% endblock %}
{% block under_table %}In each cell: misses, and batches until the cache is warm.{% if left %} {{ left }} more are in --json.{%
  endif %}{% endblock %}
"""


def cache_page(misses: CacheMisses) -> str:
    """The page as HTML. The same figures give the same page."""
    data = misses.data
    order = sorted(
        range(len(misses.tables)), key=lambda n: -misses.curves[n].distinct_rows * data["tables"][n]["row_bytes"]
    )
    listed = [data["tables"][place] for place in order]
    shown = order[:MOST_CURVES]
    left = len(listed) - MOST_ROWS
    fields = {
        "title": "What caches in HBM miss",
        "what": f"{counted(len(listed), 'table')}, {format_bytes(data['model']['weight_bytes'])} of weights, a step of "
        f"{data['batch_size']:,} samples",
        "cards": [_card(need, data["model"]["weight_bytes"]) for need in reversed(data["model"]["needs"])],
        "notes": data["notes"],
        "shown": "" if len(order) <= MOST_CURVES else f"The {MOST_CURVES} tables whose rows are most bytes a step.",
        "apart": format_bytes(data["model"]["apart_bytes"]),
        "columns": [
            "table",
            "rows",
            "distinct rows",
            "read as",
            *(f"{100 * factor:.3g} % of rows" for factor in data["load_factors"]),
        ],
        "rows": [_row(one) for one in listed[:MOST_ROWS]],
        "left": counted(left, "table") if left > 0 else "",
    }
    return plain_page(BLOCKS, fields, {"curves": _curves(misses, shown), "hbm": _hbm(misses)})


def _card(need: dict[str, Any], weight_bytes: int) -> dict[str, str]:
    return {
        "title": f"HBM for {need['missed_share']:.0%} misses",
        "figure": format_bytes(need["hbm_bytes"]),
        "note": f"{need['hbm_bytes'] / max(weight_bytes, 1):.1%} of the weights; a step moves "
        f"{format_bytes(need['missed_bytes'])} over the bus",
    }


def _row(one: dict[str, Any]) -> list[str]:
    source = one["source"] + {None: "", "time": ", in order of time", "shuffled": ", shuffled"}[one["order"]]
    cells = [
        f"{missed / one['distinct_rows']:.1%}{'!' if crowded else ''} · {warm:,.0f}" if one["distinct_rows"] else "-"
        for missed, warm, crowded in zip(
            one["missed_rows"], np.ceil(one["warm_up_batches"]), one["crowded"], strict=True
        )
    ]
    return [one["table"], f"{one['rows']:,}", f"{one['distinct_rows']:,.0f}", source, *cells]


def _curves(misses: CacheMisses, shown: list[int]) -> dict[str, Any]:
    """A line a table: the share of its rows that is cached, against the share of the distinct rows that is missed."""
    names = cleaned([misses.tables[place].name for place in shown])
    values = [
        {"table": name, "cached": 100 * float(share), "missed": 100 * float(missed)}
        for name, place in zip(names, shown, strict=True)
        if misses.curves[place].distinct_rows
        for share, missed in zip(
            _POINTS,
            misses.curves[place].missed(_POINTS * misses.curves[place].rows) / misses.curves[place].distinct_rows,
            strict=True,
        )
    ]
    return {
        "data": {"values": values},
        "mark": {"type": "line", "strokeWidth": 1.8},
        "encoding": {
            "x": {"field": "cached", "type": "quantitative", "title": "rows in HBM, %", "scale": {"type": "log"}},
            "y": {"field": "missed", "type": "quantitative", "title": "distinct rows missed, %", "scale": {"domain": [0, 100]}},
            "color": {
                "field": "table", "type": "nominal", "title": None, "sort": names,
                "scale": {"domain": names, "range": [*COLOURS[: len(names)]]},
            },
        },
    }  # fmt: skip


def _hbm(misses: CacheMisses) -> dict[str, Any]:
    """One line: bytes of HBM against the share of the bytes of distinct rows that is missed, with the three needs as points."""
    caches = Caches(misses.curves, [one["row_bytes"] for one in misses.data["tables"]])
    most = caches.for_misses(0.0).hbm_bytes
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    shares = np.linspace(0, 1, 101)
    line = [{"hbm": caches.for_misses(float(share)).hbm_bytes / size, "missed": 100 * float(share)} for share in shares]
    points = [
        {"hbm": need["hbm_bytes"] / size, "missed": 100 * need["missed_share"]}
        for need in misses.data["model"]["needs"]
    ]
    x = {"field": "hbm", "type": "quantitative", "title": f"HBM for caches, {unit}"}
    y = {
        "field": "missed",
        "type": "quantitative",
        "title": "bytes of distinct rows missed, %",
        "scale": {"domain": [0, 100]},
    }
    return {
        "layer": [
            {
                "data": {"values": line},
                "mark": {"type": "line", "color": COLOURS[0], "orient": "vertical"},
                "encoding": {"x": x, "y": y, "order": {"field": "missed"}},
            },
            {
                "data": {"values": points},
                "mark": {"type": "point", "filled": True, "size": 60, "color": COLOURS[1], "opacity": 1},
                "encoding": {"x": x, "y": y},
            },
        ]
    }
