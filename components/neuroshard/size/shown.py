"""Sizes as lines of at most 80 columns: a block a kind, the frontiers, and what they do not say. And as one HTML page: ms against
devices, ms against memory, and all rows; without scripts, and it fetches nothing."""

from collections.abc import Iterator, Sequence

from neuroshard.core.text import short_name, wrapped
from neuroshard.core.units import format_bytes
from neuroshard.report.numbers import source
from neuroshard.report.page import MOST_COLOURS, drawn, plain_page
from neuroshard.size.rows import GIB, Row, may_join_or_leave, memory_frontiers, name_of, with_several_memories
from neuroshard.size.run import Sizes

COLUMNS: tuple[str, ...] = (
    "size",
    "memory a device",
    "costs",
    "ms a step",
    "of it dense",
    "may be",
    "no less than",
    "samples/s",
    "a device",
)
COLUMNS += ("memory left", "host memory", "money per billion samples")
HEAD = " {:3} {:>7} {:>9} {:>9} {:>15} {:>8} {:>7} {:>9}"


def sizes_text(sizes: Sizes) -> str:
    """All rows, by kind, with the frontiers."""
    lines = [*wrapped(sizes.what), *_kinds(sizes), "", *_marks(sizes), *_of_memory(sizes)]
    lines += [line for note in (*sizes.notes, *sizes.plan_notes) for line in wrapped(f"note: {note}")]
    return "\n".join(lines)


def _kinds(sizes: Sizes) -> Iterator[str]:
    best, uncertain = set(sizes.places_of_frontier), may_join_or_leave(sizes.rows)
    money = f"{sizes.order.currency or 'money'}/bn" if sizes.order.priced else "a device"
    fewest = sizes.fewest_devices
    for kind in sizes.order.kinds:
        rows = [(place, row) for place, row in enumerate(sizes.rows) if row.cell.kind == kind]
        if not rows:
            continue
        fitting = next((row for _, row in rows if row.fits), None)
        provenance = None if fitting is None else fitting.found.provenance
        costs = (
            "" if provenance is None else f", by {source(provenance.cost_model_backend, provenance.cost_model_device)}"
        )
        yield ""
        yield from wrapped(f"{short_name(kind.name)}{costs}")
        for (name, memory), devices in fewest.items():
            if name == kind.name and devices > 1:
                yield from wrapped(
                    f"  nothing below {devices:,} devices of {format_bytes(memory)} fits (proven)", indent=4
                )
        yield HEAD.format("", "devices", "memory", "ms a step", "may be", "no less", "k/s", money)
        for place, row in rows:
            if row.fits:
                mark = "*" * (place in best) + "~" * (place in uncertain) + "!" * bool(row.caveats)
                yield _line(row, mark)
            elif row.state != "proven not to fit" or row.cell.devices >= fewest.get(
                (kind.name, row.cell.memory_bytes), 0
            ):
                size = f"    {row.cell.devices:>7}  {format_bytes(row.cell.memory_bytes):>9}  {row.state}: {row.why}"
                yield from wrapped(size, indent=13)


def _line(row: Row, mark: str) -> str:
    of = _figures(row)
    last = f"{row.samples_per_s / row.cell.devices / 1000:,.1f}" if row.money is None else row.money_text
    devices, per_second = f"{row.cell.devices:,}", f"{row.samples_per_s / 1000:,.0f}"
    step, may_be, bound = (of[name] or "-" for name in ("ms a step", "may be", "no less than"))
    return HEAD.format(mark, devices, of["memory a device"], step, may_be, bound, per_second, last).rstrip()


def _figures(row: Row) -> dict[str, str]:
    """What is known of a row that fits, by COLUMNS."""
    interval, bound = row.interval_ms, row.bound_step_ms
    return {
        "size": name_of(row),
        "memory a device": format_bytes(row.cell.memory_bytes),
        "costs": row.basis,
        "ms a step": _ms(row.step_ms),
        "of it dense": _ms(row.dense_ms) if row.dense_ms else "",
        "may be": "" if interval is None else f"{_ms(interval[0])}-{_ms(interval[1])}",
        "no less than": "" if bound is None else _ms(bound),
        "samples/s": f"{row.samples_per_s:,.0f}",
        "a device": f"{row.samples_per_s / row.cell.devices:,.0f}",
        "memory left": format_bytes(row.memory_left_bytes, "down"),
        "host memory": format_bytes(row.host_bytes) if row.host_bytes else "",
        "money per billion samples": row.money_text,
    }


def _ms(ms: float) -> str:
    """In at most 7 characters below 3 hours, which two fit in a column."""
    return f"{ms:.{3 if ms < 1000 else 1 if ms < 1e5 else 0}f}"


def _marks(sizes: Sizes) -> Iterator[str]:
    second = "money" if sizes.order.priced else "devices"
    last = "its price" if sizes.order.priced else "those of a device"
    yield from wrapped(
        "ms of a step as predicted, what it may measure (68 %, or the model's error), and the bound that no plan goes below; "
        f"thousands of samples a second, and {last}{' for a billion samples' if sizes.order.priced else ''}"
    )
    yield from wrapped(f"* no other size is better in both time and {second}")
    if may_join_or_leave(sizes.rows):
        yield from wrapped(
            "~ within the errors of the models that is not certain: beside another kind it may be the other way round"
        )
    if caveats := sizes.caveats:
        yield from wrapped("! beyond what was measured:")
        for line in caveats:
            yield from wrapped(f"  {line}", indent=4)


def _of_memory(sizes: Sizes) -> Iterator[str]:
    curves = memory_frontiers(sizes.rows)
    if not curves:
        return
    yield ""
    yield "step time against HBM for tables: what each GiB more saved"
    for points in curves:
        steps = [f"{format_bytes(points[0].row.cell.memory_bytes)} {points[0].row.step_ms:.3f} ms"]
        steps += [
            f"{format_bytes(point.row.cell.memory_bytes)} {point.row.step_ms:.3f} ms ({point.ms_a_gib:.3g} ms a GiB)"
            for point in points[1:]
        ]
        more = "" if len(points) > 1 else "; more saves nothing"
        yield from wrapped(f"  {name_of(points[0].row)}: {', '.join(steps)}{more}", indent=6)


def sizes_page(sizes: Sizes) -> str:
    """The page as HTML. The same sizes give the same page."""
    best, uncertain = set(sizes.places_of_frontier), may_join_or_leave(sizes.rows)
    swept = [row for group in with_several_memories(sizes.rows) for row in group]
    pictures = [{"title": "Ms a step by the number of devices", "svg": _by_devices(sizes, best), "note": ""}]
    pictures += [{"title": "Ms a step by HBM kept for tables", "svg": _by_memory(swept), "note": ""}] if swept else []
    second = "money" if sizes.order.priced else "devices"
    rows = [
        _cells(row, sizes.order.currency, place in best, place in uncertain) for place, row in enumerate(sizes.rows)
    ]
    columns = [column for column in zip((*COLUMNS, ""), *rows, strict=True) if any(column[1:])]
    fields = {
        "title": "How many devices, and which",
        "what": sizes.what,
        "legend": "Predicted. Shaded: between a plan's ms and the bound that no plan goes below. Crosses, and the grey ground: "
        f"does not fit. Rings: no other size is better in both time and {second}.",
        "cards": list(_cards(sizes)),
        "notes": [*sizes.notes, *(f"beyond what was measured: {line}" for line in sizes.caveats), *sizes.plan_notes],
        "pictures": pictures,
        "heading": "Sizes",
        "columns": [column[0] for column in columns],
        "rows": list(zip(*(column[1:] for column in columns), strict=True)),
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
    if not row.fits:
        known = {"size": name_of(row), "memory a device": format_bytes(row.cell.memory_bytes), "ms a step": row.state}
        return [*(known.get(name, "") for name in COLUMNS), row.why]
    *figures, money = _figures(row).values()
    marks = ["frontier"] * best + ["~"] * uncertain + ["!"] * bool(row.caveats)
    return [*figures, f"{money} {currency}".strip() if money else "", " ".join(marks)]


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
