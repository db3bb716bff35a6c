"""What caches in HBM miss: tables and a batch size -> figures for programs, text, TorchRec's statistics, and one
HTML page: curves of the tables, HBM of the model, and all figures, without scripts, and it fetches nothing.

neuroshard cache tables.json --batch-size 65536
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuroshard.core.access import STEADY
from neuroshard.core.errors import UsageError
from neuroshard.core.table import Table
from neuroshard.core.text import agreeing, counted, wrapped
from neuroshard.core.tiers import MAP_BYTES, Cache, slot_bytes
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.cache import CROWDED, Caches, MissCurve, miss_curve
from neuroshard.report.page import MOST_COLOURS, drawn, plain_page

LOAD_FACTORS = (0.01, 0.05, 0.1, 0.2, 0.5)
MISSED_SHARES = (0.01, 0.05, 0.2)
STATISTICS_BINS = 2000  # of TorchRec's histogram of a table: a load factor of 0.0005 is a bin
MOST_BATCH_SIZE = 2**31
_TABLES_SHOWN = 24
_NAME_WIDTH = 16
_FACTORS_SHOWN = 5  # in 80 columns
MOST_ROWS = 1000  # of the page
_POINTS = np.geomspace(1e-3, 1.0, 61)


@dataclass(frozen=True)
class CacheMisses:
    """Predicted misses of each table's cache, and the HBM that all of them need.

    `data` is what `neuroshard cache --json` prints. A table's `cached_rows`, `missed_rows` and `warm_up_batches` are lists, one
    number for each of `load_factors`.
    """

    tables: tuple[Table, ...]
    curves: tuple[MissCurve, ...]
    data: dict[str, Any]

    def torchrec_stats(self, bins: int = STATISTICS_BINS) -> dict[str, Any]:
        """The arguments of TorchRec's `EmbeddingOffloadStats` by table, for its own planner."""
        return {
            table.name: offload_stats(table, curve, bins) for table, curve in zip(self.tables, self.curves, strict=True)
        }


def cache_misses(tables: Sequence[Table], batch_size: int, load_factors: Sequence[float] = LOAD_FACTORS) -> CacheMisses:
    """Misses a step of each table by load factor, and HBM for 1, 5 and 20 % misses of all. Raises UsageError.

    `batch_size` is the global one: all lookups of a batch reach a table's cache. A load factor is the share of a table's rows
    that are cached; FBGEMM rounds it up to whole sets of 32 rows.
    """
    if not 1 <= batch_size <= MOST_BATCH_SIZE:
        raise UsageError(f"batch size is from 1 to {MOST_BATCH_SIZE}, not {batch_size}")
    if wrong := [one for one in load_factors if not 0 <= one <= 1]:
        raise UsageError(f"a load factor is a share of a table's rows, from 0 to 1, not {wrong[0]:g}")
    curves = tuple(miss_curve(table, batch_size) for table in tables)
    row_bytes = [float(table.dim * table.element_bytes) for table in tables]
    of_tables = [_of_table(table, curve, batch_size, load_factors) for table, curve in zip(tables, curves, strict=True)]
    caches = Caches(curves, row_bytes)
    data = {
        "batch_size": batch_size,
        "load_factors": list(load_factors),
        "tables": of_tables,
        "model": {
            "weight_bytes": int(sum(table.rows * size for table, size in zip(tables, row_bytes, strict=True))),
            "distinct_bytes": caches.distinct_bytes,
            "apart_bytes": sum(table.rows * (MAP_BYTES + table.optimizer_bytes_per_row) for table in tables),
            "needs": [_needs(tables, caches, share) for share in MISSED_SHARES],
        },
        "notes": [*_notes(tables, batch_size, of_tables)],
    }
    return CacheMisses(tuple(tables), curves, data)


def slots(rows: int, load_factor: float) -> int:
    """Rows that FBGEMM caches at a load factor: whole sets of 32, at least one; at most the table's rows count."""
    if load_factor == 0:
        return 0
    return min(Cache(load_factor).slots(rows), rows)


def _of_table(table: Table, curve: MissCurve, batch_size: int, load_factors: Sequence[float]) -> dict[str, Any]:
    cached = [slots(table.rows, factor) for factor in load_factors]
    access = table.access
    stream = None if access is None else access.stream
    return {
        "table": table.name,
        "rows": table.rows,
        "row_bytes": table.dim * table.element_bytes,
        "source": "reuse bins" if access is None else access.source or "access curve",
        "order": None if stream is None else stream.order,
        "distinct_rows": curve.distinct_rows,
        "first_touches": curve.first_touches,
        "cached_rows": cached,
        "missed_rows": curve.missed(np.array(cached, dtype=np.float64)).tolist(),
        "warm_up_batches": curve.warm_up(np.array(cached, dtype=np.float64)).tolist(),
        "crowded": [0 < rows < min(CROWDED * curve.distinct_rows, table.rows) for rows in cached],
    }


def _needs(tables: Sequence[Table], caches: Caches, share: float) -> dict[str, Any]:
    shared = caches.for_misses(share)
    cached = np.ceil(shared.cached_rows - 1e-6).astype(np.int64)
    return {
        "missed_share": share,
        "hbm_bytes": shared.hbm_bytes,
        "missed_bytes": shared.missed_bytes,
        "missed_rows": float(shared.missed_rows.sum()),
        "cached_rows": {table.name: min(int(rows), table.rows) for table, rows in zip(tables, cached, strict=True)},
    }


def _notes(tables: Sequence[Table], batch_size: int, of_tables: Sequence[dict[str, Any]]) -> list[str]:
    """What the figures assume."""
    notes = []
    if mapped := sum(table.id_map is not None for table in tables):
        notes.append(
            f"{agreeing(mapped, 'table', 'gives', 'give')} rows to ids while training (id_map): no plan holds such a table "
            "behind a cache, but whole in HBM or in host memory"
        )
    by_bins = sum(table.access is None for table in tables)
    if by_bins:
        notes.append(
            f"{agreeing(by_bins, 'table', 'says', 'say')} no access curve: reuse bins stand in, and which rows are hot is taken "
            "to stay the same. Bins have put misses up to 19 points of the distinct rows off for Zipf, 50 for mixtures; "
            "count a stream (`neuroshard tables --access-from`), or state a distribution (--access zipf:1.05)"
        )
    streams = [table.access for table in tables if table.access is not None and table.access.stream is not None]
    if shuffled := sum(one.stream is not None and one.stream.order == "shuffled" for one in streams):
        notes.append(
            f"{counted(shuffled, 'table')} counted on shuffled batches: a stream in order of time may miss half as much"
        )
    if other := [one.batch_size for one in streams if one.batch_size != batch_size]:
        sizes = f"{other[0]:,}{' or another' if len({*other}) > 1 else ''}"
        notes.append(
            f"{counted(len(other), 'table')} counted at a batch size of {sizes}: "
            f"misses at {batch_size:,} follow from it, to 2.5 points of the distinct rows"
        )
    every = [one.stream for one in streams if one.stream is not None]
    if varying := [one.varies for one in every if one.varies > STEADY]:
        notes.append(
            f"{counted(len(varying), 'table')} counted on streams that change: misses vary by up to {max(varying):.1%} of the "
            "distinct rows between parts of a stream (standard deviation); so may later ones"
        )
    if short := sum(
        any(table.access.stream.cached_rows[-1] < rows < table.rows for rows in one["cached_rows"])
        for table, one in zip(tables, of_tables, strict=True)
        if table.access is not None and table.access.stream is not None and table.access.stream.first_touches > 0
    ):
        notes.append(
            f"{counted(short, 'table')} counted on streams that read fewer rows than the largest cache holds: what it misses is "
            "a guess by the rows that were new; count more batches"
        )
    if any(any(one["crowded"]) for one in of_tables):
        notes.append(
            f"! fewer than {CROWDED} times the distinct rows of a batch: sets are too full for a batch, and misses are more than "
            "predicted"
        )
    return notes


def offload_stats(table: Table, curve: MissCurve, bins: int = STATISTICS_BINS) -> dict[str, Any]:
    """The arguments of `EmbeddingOffloadStats(cacheability, expected_lookups, mrc_hist_counts, height)` of one table.

    It gives any cache the hits of the whole bin that its size less 1 lies in, so a bin's hits are those of the middle of these
    sizes. It takes all rows to hit in a cache of the whole table.
    """
    bins = max(min(bins, table.rows), 1)
    edges = np.linspace(0.0, table.rows, bins + 1)
    distinct = curve.distinct_rows
    shares = curve.missed((edges[1:] + edges[:-1]) / 2 + 1) / distinct if distinct else np.zeros(bins)
    hits = np.append(1.0 - shares[:-1], 1.0)
    counts = np.diff(np.append(0.0, hits)) * distinct
    fine = np.linspace(0.0, table.rows, 20 * bins + 1)
    area = float(np.trapezoid(curve.missed(fine), fine) / (distinct * table.rows)) if distinct else 0.0
    return {
        "cacheability": round(area, 9),
        "expected_lookups": math.ceil(distinct),
        "mrc_hist_counts": [float(f"{count:.6g}") for count in counts],
        "height": table.rows,
    }


def cache_text(misses: CacheMisses) -> str:
    """The figures as text of at most 80 columns: the tables that miss most bytes, then the HBM that the model needs."""
    data = misses.data
    title = (
        f"Rows that a step of {data['batch_size']:,} samples misses in FBGEMM's LRU cache, predicted: share of the distinct "
        "rows, and batches until the cache is warm, by share of a table's rows in HBM"
    )
    order = sorted(data["tables"], key=lambda one: -max(one["missed_rows"], default=0.0) * one["row_bytes"])
    factors = [f"{100 * factor:.3g}%" for factor in data["load_factors"][:_FACTORS_SHOWN]]
    lines = [*wrapped(title, width=80, indent=0), "", _line("table", "rows", "distinct", factors)]
    for one in order[:_TABLES_SHOWN]:
        cells = [_cell(one, place) for place in range(len(factors))]
        lines.append(_line(one["table"], _short(one["rows"]), _short(one["distinct_rows"]), cells))
    if len(order) > _TABLES_SHOWN:
        lines.append(f"{counted(len(order) - _TABLES_SHOWN, 'table')} more, of fewer bytes, with --json")
    if len(data["load_factors"]) > _FACTORS_SHOWN:
        lines.append(f"{counted(len(data['load_factors']) - _FACTORS_SHOWN, 'load factor')} more with --json")
    return "\n".join([*lines, "", *_model_lines(data)])


def _model_lines(data: dict[str, Any]) -> list[str]:
    model = data["model"]
    title = (
        f"HBM for the caches of all {counted(len(data['tables']), 'table')} ({format_bytes(model['weight_bytes'])} of weights), "
        "each next row to the table where it saves most bytes"
    )
    lines = [
        *wrapped(title, width=80, indent=0),
        "",
        f"{'misses':>8}  {'of the bytes a step':>20}  {'HBM':>10}  {'of the weights':>14}",
    ]
    for need in reversed(model["needs"]):
        share = need["hbm_bytes"] / model["weight_bytes"]
        missed, hbm = format_bytes(need["missed_bytes"]), format_bytes(need["hbm_bytes"])
        lines.append(f"{need['missed_share']:8.0%}  {missed:>20}  {hbm:>10}  {share:14.1%}")
    apart = (
        f"A cached row is counted with {slot_bytes()} bytes for its slot. The maps of rows and row-wise optimizer state take "
        f"{format_bytes(model['apart_bytes'])} more."
    )
    return [*lines, "", *wrapped(apart, width=80, indent=0)]


def _line(name: str, rows: str, distinct: str, cells: Sequence[str]) -> str:
    name = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
    return f"{name:{_NAME_WIDTH}} {rows:>6} {distinct:>8}" + "".join(f" {cell:>8}" for cell in cells)


def _cell(one: dict[str, Any], place: int) -> str:
    """`55%  40`: misses, and the warm-up in batches; with ! where sets are too full."""
    if not one["distinct_rows"]:
        return "-"
    mark = "!" if one["crowded"][place] else ""
    share = one["missed_rows"][place] / one["distinct_rows"]
    return f"{100 * share:.0f}%{mark} {_short(math.ceil(one['warm_up_batches'][place])):>3}"


def _short(number: float) -> str:
    """`940`, `12k`, `4.5M`: at most four characters up to a trillion."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}" if number < 9.995 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


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
