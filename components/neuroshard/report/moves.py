"""What changes from one plan to another, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroshard.core.clean import clean
from neuroshard.core.comparable import other_groups, other_work, why_not_comparable
from neuroshard.core.errors import InvalidInput
from neuroshard.core.moves import (
    bytes_by_device,
    carried_over,
    changed_state,
    changed_tiers,
    ids_lost,
    moves,
    said_ids_lost,
)
from neuroshard.core.output_order import reordered, said_reordered
from neuroshard.core.plan import Plan
from neuroshard.core.text import WIDTH, counted, first_few, spanned, wrapped
from neuroshard.core.units import format_bytes
from neuroshard.report.numbers import bar

if TYPE_CHECKING:
    from neuroshard.costmodel.protocol import CostModel

MOVES_SHOWN, DEVICES_SHOWN = 20, 32


def diff_json(
    old: Plan,
    new: Plan,
    model: CostModel | None = None,
    lists: Sequence[Path] = (),
) -> dict[str, Any]:
    """All changes. Bytes are of weights and optimizer state; ms are predicted, by `model` if it is given, else as each plan says.
    The folders `lists` may have the hot rows of their row orders, from which access may have drifted.

    Raises InvalidInput for plans of other tables, and where `model` cannot price a plan.
    """
    found, (old_ms, new_ms, not_compared) = moves(old, new), _predictions(old, new, model)
    if differ := other_groups(old.task, new.task):
        raise InvalidInput(f"what moves between plans of other groups is not counted: they are for {differ}")
    then, now = ({table.name for table in plan.task.tables} for plan in (old, new))
    if not then & now:
        raise InvalidInput(
            f"the plans are for other tables: the first has {old.task.tables[0].name!r}, the second none of its {len(then)}"
        )
    devices = range(max(old.task.devices, new.task.devices))
    sums = bytes_by_device(found, len(devices))
    slowest = {"old_ms": max(old_ms, default=None), "new_ms": max(new_ms, default=None)}
    compared = not not_compared and bool(old_ms and new_ms)
    return {
        "old": old.digest(),
        "new": new.digest(),
        "moved_bytes": sum(sums["arriving"]),
        "made_bytes": sum(sums["made"]),
        **slowest,
        "gain_ms": max(old_ms) - max(new_ms) if compared else None,
        "not_compared": not_compared or None,
        "tables_new": sorted(now - then),
        "tables_gone": sorted(then - now),
        "tables_changed_state": list(changed_state(old, new)),
        "tables_losing_ids": list(ids_lost(old, new.task)),
        "tables_changed_tier": changed_tiers(old, new),
        "reordered": [each._asdict() for each in reordered(old, new)],
        "devices": [
            {
                "device": device,
                **{f"{what}_bytes": amounts[device] for what, amounts in sums.items()},
                "old_ms": old_ms[device] if device < len(old_ms) else None,
                "new_ms": new_ms[device] if device < len(new_ms) else None,
            }
            for device in devices
        ],
        "moves": [move.model_dump() for move in found],
        "row_orders_drifted": _drifted(old, new, lists),
    }


def _predictions(old: Plan, new: Plan, model: CostModel | None) -> tuple[Sequence[float], Sequence[float], str]:
    """Ms of each device of both plans, none where they are not known, and why they cannot be compared; empty if they can."""
    if model is None:
        return old.predicted_ms or (), new.predicted_ms or (), why_not_comparable(old, new)
    if old.task.batch_size != new.task.batch_size and not other_groups(old.task, new.task):
        sizes = f"{old.task.batch_size:,} and {new.task.batch_size:,}"
        raise InvalidInput(f"the plans are for batches of {sizes} samples, so no single cost model prices both")
    from neuroshard.report.live import priced  # NumPy, which plans as they are do not need

    old_ms, new_ms = ([cost.total_ms for cost in priced(plan, model)] for plan in (old, new))
    return old_ms, new_ms, other_work(old.task, new.task)


def _drifted(old: Plan, new: Plan, lists: Sequence[Path]) -> list[str]:
    """Lines on row orders of the old plan that access has drifted from."""
    if not (old.held.orders and new.held.orders):
        return []
    from neuroshard.files.row_orders import ids_among, with_drift  # NumPy

    _, lines, unknown = with_drift(old.held, new.held, cache(partial(ids_among, lists)), "the old plan's")
    return [*lines, *filter(None, [unknown])]


def diff_text(old: Plan, new: Plan, data: dict[str, Any]) -> str:
    """What moves between which devices, what is gained, and both for every device; `data` is what `diff_json` says of both."""
    moving = sorted((m for m in data["moves"] if m["from_device"] is not None), key=lambda m: -m["nbytes"])
    moved = f"{format_bytes(data['moved_bytes'])} to move in {counted(len(moving), 'piece')}"
    lines = [f"plan {old.digest()[:12]} -> {new.digest()[:12]}: {moved}", *_gain_lines(data)]
    for names, what in ((data["tables_new"], "new"), (data["tables_gone"], "no longer there")):
        if names:
            some = f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
            lines += wrapped(f"  {counted(len(names), 'table')} {what}: {some}", indent=4)
    if tiers := data["tables_changed_tier"]:
        nbytes = format_bytes(sum(tiers.values()))
        lines += wrapped(
            f"  {counted(len(tiers), 'table')} in another tier, {nbytes}: {first_few(list(tiers))}", indent=4
        )
    if lost := said_ids_lost(old, new.task):
        lines += wrapped(f"  {lost}", indent=4)
    if names := data["tables_changed_state"]:
        lines += wrapped(f"  {carried_over(len(names))}: {first_few(names)}", indent=4)
    if changed := data["reordered"]:
        lines += wrapped(f"  {said_reordered([each['module'] for each in changed])}", indent=4)
    for line in data["row_orders_drifted"]:
        lines += wrapped(f"  {line}", indent=4)
    lines += ["", "device     arriving      leaving         made      ms before     ms after  taken"]
    busiest = max(device["arriving_bytes"] + device["made_bytes"] for device in data["devices"])
    shown = sorted(data["devices"], key=lambda device: -(device["arriving_bytes"] + device["made_bytes"]))
    shown = data["devices"] if len(shown) <= DEVICES_SHOWN else shown[:DEVICES_SHOWN]
    for device in shown:
        sizes = (f"{format_bytes(device[f'{kind}_bytes']):>12}" for kind in ("arriving", "leaving", "made"))
        costs = (
            f"{'-' if device[f'{when}_ms'] is None else format(device[f'{when}_ms'], '.3f'):>12}"
            for when in ("old", "new")
        )
        drawn = bar([device["arriving_bytes"], device["made_bytes"]], busiest, 5)
        lines.append(f"{device['device']:>6} {' '.join(sizes)}  {' '.join(costs)}  {drawn}".rstrip())
    if len(shown) < len(data["devices"]):
        lines.append(f"the {len(shown)} with most to take; {len(data['devices']) - len(shown)} more with --json")
    lines += _move_lines(moving[:MOVES_SHOWN], {table.name: table.rows for table in new.parted.tables})
    if len(moving) > MOVES_SHOWN:
        lines.append(f"and {counted(len(moving) - MOVES_SHOWN, 'smaller piece')} (--json lists all)")
    return "\n".join(lines)


def _move_lines(moving: Sequence[Mapping[str, Any]], rows_of: Mapping[str, int]) -> list[str]:
    """A line for each move; with its rows, where any move has only part of a table's rows."""
    if not moving:
        return []
    rows = [
        "all" if move["rows"] == rows_of[move["table"]] else spanned(move["row_offset"], move["rows"])
        for move in moving
    ]
    if set(rows) == {"all"}:
        rows = [""] * len(moving)
    width = max(map(len, rows)) + 1 if any(rows) else 0
    lines = ["", f"from   to        bytes  {'columns':<16} {'rows' if width else '':<{width}}table"]
    for move, some in zip(moving, rows, strict=True):
        columns = spanned(move["column_offset"], move["dim"])
        room = WIDTH - 41 - width
        whole = clean(move["table"])
        name = whole if len(whole) <= room else f"…{whole[1 - room :]}"  # the end of a path is the more useful part
        place = f"{move['from_device']:>4} {move['to_device']:>4} {format_bytes(move['nbytes']):>12}"
        lines.append(f"{place}  {columns:<16} {some:<{width}}{name}")
    return lines


def _gain_lines(data: dict[str, Any]) -> list[str]:
    apart = wrapped(f"  not comparable: {data['not_compared']}", indent=4) if data["not_compared"] else []
    if data["old_ms"] is None or data["new_ms"] is None:
        return [*apart, "  a plan carries no prediction, so what is gained is not known"]
    line = f"  predicted cost (slowest device): {data['old_ms']:.3f} ms -> {data['new_ms']:.3f} ms a step"
    if data["gain_ms"] is None:
        return [*apart, line]
    return [f"{line}, {abs(data['gain_ms']):.3f} ms {'less' if data['gain_ms'] >= 0 else 'more'}"]
