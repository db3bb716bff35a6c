"""Sizes as lines of at most 80 columns: a block a kind, the frontiers, and what they do not say."""

from collections.abc import Iterator

from neuroshard.core.text import short_name, wrapped
from neuroshard.core.units import format_bytes
from neuroshard.report.numbers import source
from neuroshard.size.cells import Row, name_of
from neuroshard.size.frontier import may_join_or_leave, memory_frontiers
from neuroshard.size.run import Sizes

HEAD = " {:3} {:>7} {:>9} {:>9} {:>15} {:>8} {:>7} {:>9}"


def sizes_text(sizes: Sizes) -> str:
    """All rows, by kind, with the frontiers."""
    lines = [*wrapped(sizes.what), *_kinds(sizes), "", *_marks(sizes), *_of_memory(sizes)]
    lines += [line for note in sizes.notes for line in wrapped(f"note: {note}")]
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
    interval, bound = row.interval_ms, row.bound_step_ms
    may_be = "-" if interval is None else f"{_ms(interval[0])}-{_ms(interval[1])}"
    last = f"{row.samples_per_s / row.cell.devices / 1000:,.1f}" if row.money is None else row.money_text
    return HEAD.format(
        mark,
        f"{row.cell.devices:,}",
        format_bytes(row.cell.memory_bytes),
        _ms(row.step_ms),
        may_be,
        "-" if bound is None else _ms(bound),
        f"{row.samples_per_s / 1000:,.0f}",
        last,
    ).rstrip()


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
