"""What caches in HBM miss, as one HTML page: curves of the tables, HBM of the model, and all figures. No scripts, nothing
fetched."""

from typing import Any

import numpy as np

from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.cache import Caches
from neuroshard.report.cache import CacheMisses
from neuroshard.report.page import MOST_COLOURS, drawn, plain_page

MOST_ROWS = 1000
_POINTS = np.geomspace(1e-3, 1.0, 61)


def cache_page(misses: CacheMisses) -> str:
    """The page as HTML. The same figures give the same page."""
    data = misses.data
    order = sorted(
        range(len(misses.tables)), key=lambda n: -misses.curves[n].distinct_rows * data["tables"][n]["row_bytes"]
    )
    listed = [data["tables"][place] for place in order]
    shown = order[:MOST_COLOURS]
    left = len(listed) - MOST_ROWS
    hbm = (
        "Each next row goes to the table where it saves most bytes. The maps of rows and row-wise optimizer state take "
        f"{format_bytes(data['model']['apart_bytes'])} more."
    )
    most = "" if len(order) <= MOST_COLOURS else f"The {MOST_COLOURS} tables whose rows are most bytes a step."
    fields = {
        "title": "What caches in HBM miss",
        "what": f"{counted(len(listed), 'table')}, {format_bytes(data['model']['weight_bytes'])} of weights, a step of "
        f"{data['batch_size']:,} samples",
        "legend": "Predicted, of FBGEMM's LRU cache once it is warm. Misses are shares of the distinct rows that a step reads.",
        "cards": [_card(need, data["model"]["weight_bytes"]) for need in reversed(data["model"]["needs"])],
        "notes": data["notes"],
        "pictures": [
            {
                "title": "Misses of each table by the share of its rows in HBM",
                "svg": _curves(misses, shown),
                "note": most,
            },
            {"title": "Misses of the whole model by HBM for its caches", "svg": _hbm(misses), "note": hbm},
        ],
        "heading": "Tables",
        "columns": [
            *("table", "rows", "distinct rows", "read as"),
            *(f"{100 * factor:.3g} % of rows" for factor in data["load_factors"]),
        ],
        "rows": [_row(one) for one in listed[:MOST_ROWS]],
        "under_table": "In each cell: misses, and batches until the cache is warm."
        + (f" {counted(left, 'table')} more are in --json." if left > 0 else ""),
    }
    return plain_page(fields)


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


def _curves(misses: CacheMisses, shown: list[int]) -> str:
    """A line a table: the share of its rows that is cached, against the share of the distinct rows that is missed."""
    curves = [
        (misses.tables[place].name, misses.curves[place]) for place in shown if misses.curves[place].distinct_rows
    ]
    rows = [
        {"table": name, "cached": 100 * float(share), "missed": 100 * float(missed)}
        for name, curve in curves
        for share, missed in zip(_POINTS, curve.missed(_POINTS * curve.rows) / curve.distinct_rows, strict=True)
    ]
    return drawn("misses", curves=rows)


def _hbm(misses: CacheMisses) -> str:
    """One line: bytes of HBM against the share of the bytes of distinct rows that is missed, with the three needs as points."""
    caches = Caches(misses.curves, [one["row_bytes"] for one in misses.data["tables"]])
    unit, size = ("GiB", 2**30) if caches.for_misses(0.0).hbm_bytes >= 2**30 else ("MiB", 2**20)
    line = [(caches.for_misses(float(share)).hbm_bytes, float(share)) for share in np.linspace(0, 1, 101)]
    needs = [(need["hbm_bytes"], need["missed_share"]) for need in misses.data["model"]["needs"]]
    of_line, of_needs = (
        [{"hbm": nbytes / size, "missed": 100 * share} for nbytes, share in some] for some in (line, needs)
    )
    return drawn("hbm", {"unit": unit}, line=of_line, needs=of_needs)
