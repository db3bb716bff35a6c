"""Sizes as one HTML page: ms against devices, ms against memory, and all rows. No scripts, nothing fetched."""

from collections.abc import Iterator, Sequence

from neuroshard.core.text import short_name
from neuroshard.core.units import format_bytes
from neuroshard.report.page import MOST_COLOURS, drawn, plain_page
from neuroshard.size.cells import Row, name_of
from neuroshard.size.frontier import GIB, may_join_or_leave, with_several_memories
from neuroshard.size.run import Sizes

COLUMNS = (
    *(
        "size",
        "memory a device",
        "costs",
        "ms a step",
        "of it dense",
        "may be",
        "no less than",
        "samples/s",
        "a device",
    ),
    *("memory left", "host memory", "money per billion samples", ""),
)


def sizes_page(sizes: Sizes) -> str:
    """The page as HTML. The same sizes give the same page."""
    best, uncertain = set(sizes.places_of_frontier), may_join_or_leave(sizes.rows)
    swept = [row for group in with_several_memories(sizes.rows) for row in group]
    pictures = [{"title": "Ms a step by the number of devices", "svg": _by_devices(sizes, best), "note": ""}]
    pictures += [{"title": "Ms a step by HBM kept for tables", "svg": _by_memory(swept), "note": ""}] if swept else []
    second = "money" if sizes.order.priced else "devices"
    fields = {
        "title": "How many devices, and which",
        "what": sizes.what,
        "legend": "Predicted. Shaded: between a plan's ms and the bound that no plan goes below. Crosses, and the grey ground: "
        f"does not fit. Rings: no other size is better in both time and {second}.",
        "cards": list(_cards(sizes)),
        "notes": [*sizes.notes, *(f"beyond what was measured: {line}" for line in sizes.caveats)],
        "pictures": pictures,
        "heading": "Sizes",
        "columns": COLUMNS,
        "rows": [
            _cells(row, sizes.order.currency, place in best, place in uncertain) for place, row in enumerate(sizes.rows)
        ],
        "under_table": "~: within the errors of the models it may be otherwise, beside sizes of another kind."
        + (" !: beyond what was measured, as the notes say." if sizes.caveats else ""),
    }
    return plain_page(fields)


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


def _by_devices(sizes: Sizes, best: set[int]) -> str:
    """A line a kind, of its rows with most memory, with the ground down to their bounds; rings and crosses at sizes, and `grey`
    ground where nothing fits."""
    shown = list({(row.cell.kind, row.cell.devices): row for row in sizes.rows}.values())
    fitting = [row for row in shown if row.fits]
    rows = [
        {
            "kind": short_name(row.cell.kind.name),
            "devices": row.cell.devices,
            "ms": row.step_ms,
            "bound": row.step_ms if row.bound_step_ms is None else row.bound_step_ms,
        }
        for row in fitting
    ]
    most, fewest = (
        max((row.step_ms for row in fitting), default=1.0),
        min((row.cell.devices for row in fitting), default=0),
    )
    none_below = [row.cell.devices for row in shown if not row.fits and row.cell.devices < fewest]
    return drawn(
        "devices",
        sizes=rows,
        rings=[{"devices": sizes.rows[place].cell.devices, "ms": sizes.rows[place].step_ms} for place in best],
        crosses=[
            {"kind": short_name(row.cell.kind.name), "devices": row.cell.devices, "ms": most}
            for row in shown
            if row.state in ("proven not to fit", "no plan found")
        ],
        grey=[{"from": min(none_below), "to": fewest}] if none_below else [],
    )


def _by_memory(rows: Sequence[Row]) -> str:
    """A line a kind and number of devices, in steps: ms stay until there is enough memory for a faster plan."""
    names = [*dict.fromkeys(map(name_of, rows))][:MOST_COLOURS]
    return drawn(
        "memory",
        sizes=[
            {"size": name_of(row), "memory": row.cell.memory_bytes / GIB, "ms": row.step_ms}
            for row in rows
            if name_of(row) in names
        ],
    )
