"""Plans and releases as text of 80 columns. Every number has its unit, and says whether it was predicted or measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from neuroshard.core.clean import clean
from neuroshard.core.operator_limits import device_of, fault_of_plan
from neuroshard.core.parts import part_names
from neuroshard.core.plan import DeviceCost, Plan, shardings_of
from neuroshard.core.release import ModelRelease, Pointer, Refusal, Release
from neuroshard.core.text import counted, short_name, spanned, wrapped
from neuroshard.core.units import format_bytes
from neuroshard.core.value import canonical_json
from neuroshard.report.numbers import (
    against,
    bar,
    cut_tables,
    fullest_step,
    hosts_memory,
    memory_counts,
    ranges_text,
    row_wise_tables,
    source,
)

if TYPE_CHECKING:
    from neuroshard.models.published import Listed

DEVICES_SHOWN, TABLES_SHOWN = 32, 8
BAR, MEMORY_BAR = 44, 12


def plan_text(plan: Plan, *, bound: bool = False) -> str:
    """A plan: its cost against the baselines', then its devices, as numbers and as bars. Costs are predicted ms, memory is exact.

    Of more than DEVICES_SHOWN devices the slowest are shown. With `bound`, it says what the lower bound assumes.
    """
    lines = wrapped(f"less certain: {plan.provenance.instead}") if plan.provenance.instead else []
    lines += wrapped(f"plan {plan.digest()[:12]}: {size(plan)}")
    lines += [*_cost_lines(plan, bound), "", *_device_lines(plan), *_bar_lines(plan), "", *_memory_lines(plan), ""]
    lines += [*_row_wise_lines(plan), *_by_access_lines(plan), *_tier_lines(plan), *wrapped(_origin(plan))]
    by = plan.provenance
    wide = fault_of_plan(plan, device_of(by.cost_model_backend, by.cost_model))
    for note in (*by.notes, *([wide] if wide else [])):
        lines += wrapped(f"note: {note}")
    return "\n".join(lines)


def size(plan: Plan) -> str:
    """`26 tables in 31 shards (5 cuts), 8 devices (2 hosts of 4 ranks), batch 65,536`."""
    topology = plan.task.topology
    laid_out = "" if topology is None else f" ({topology.text(plan.task.devices)})"
    precision = plan.task.collective_precision
    sent = "" if precision is None else f", collectives in {precision.text}"
    groups = plan.task.groups
    of_group = "" if groups is None else f", {groups.text(plan.task.devices)}"
    batch = f"batch {plan.task.global_batch_size:,}"
    return f"{cut_tables(plan)}, {counted(plan.task.devices, 'device')}{laid_out}{of_group}, {batch}{sent}"


def _cost_lines(plan: Plan, bound: bool) -> list[str]:
    if plan.cost_ms is None:
        return ["no predicted cost"]
    lines = [f"predicted cost (slowest device): {plan.cost_ms:.3f} ms a step"]
    if (may_be := ranges_text(plan)) is not None:
        lines += wrapped(f"  {may_be}", indent=4)
    lines += _bound_lines(plan, bound)
    for baseline in plan.baselines:
        if baseline.cost_ms is None:
            lines += wrapped(f"  {baseline.algorithm:<12} no plan: {baseline.error}", indent=15)
        else:
            comparison = against(plan.cost_ms, baseline.cost_ms, "{:.1%}".format)
            cost = f"  {clean(baseline.algorithm):<12} {baseline.cost_ms:10.3f} ms   this plan is {comparison}"
            lines.append(cost + (f" (after {counted(baseline.cuts, 'cut')})" if baseline.cuts else ""))
    return lines


def _bound_lines(plan: Plan, assumptions: bool) -> list[str]:
    if plan.gap is None:
        return [line for why in plan.bound_assumptions for line in wrapped(f"  {why}", indent=4)]
    lines = [
        f"  no plan costs less than {plan.lower_bound_ms:.3f} ms by this cost model: at most {plan.gap:.1%} to gain"
    ]
    return lines + [
        line for why in plan.bound_assumptions * assumptions for line in wrapped(f"  where {why}", indent=4)
    ]


def _device_lines(plan: Plan) -> list[str]:
    lines = [
        "device shards    compute    forward   backward      total  memory",
        "              (predicted ms; all-to-all forward, with waiting, and backward)",
    ]
    shards, used, limits = plan.shards_by_device(), plan.memory_bytes(), plan.task.usable_bytes
    for device in devices_shown(plan):
        costs = ["-"] * 4
        if plan.predicted:
            cost = plan.predicted[device]
            parts = cost.compute_ms, cost.forward_collective_ms, cost.backward_collective_ms, cost.total_ms
            costs = [f"{ms:.3f}" for ms in parts]
        share = f"{format_bytes(used[device])} of {format_bytes(limits[device])}"
        lines.append(f"{device:>6} {shards[device]:>6} {' '.join(f'{cost:>10}' for cost in costs)}  {share}")
    if (left := plan.task.devices - DEVICES_SHOWN) > 0:
        some = f"the {DEVICES_SHOWN} slowest" if plan.predicted else f"the first {DEVICES_SHOWN}"
        lines.append(f"{some}; {counted(left, 'device')} more with --json")
    averaging = averaging_line(plan.predicted or ())
    return [*lines, averaging] if averaging else lines


def averaging_line(costs: Sequence[DeviceCost]) -> str:
    """What each total has beside the parts shown, where ranks train in groups; else empty."""
    ms = costs[0].averaging_ms if costs else 0.0
    return f"each total includes {ms:.3f} ms of averaging replicas" if ms else ""


def devices_shown(plan: Plan) -> list[int]:
    """All devices in order; of more than DEVICES_SHOWN the slowest, slowest first."""
    devices = list(range(plan.task.devices))
    if len(devices) > DEVICES_SHOWN and plan.predicted_ms:
        devices.sort(key=lambda device: -round((plan.predicted_ms or ())[device], 3))
    return devices[:DEVICES_SHOWN]


def _bar_lines(plan: Plan) -> list[str]:
    """The devices as bars. The slowest device fills the first bar, what a device has for tables the second."""
    if not plan.predicted:
        return []
    last = "backward, averaging" if averaging_line(plan.predicted) else "backward all-to-all"
    legend = f"predicted ms: █ compute ▓ forward ░ {last}"
    lines = ["", f"{'device':>6}  {legend:<{BAR + 10}} memory used"]
    memory, usable = plan.memory_bytes(), plan.task.usable_bytes
    slowest = max(cost.total_ms for cost in plan.predicted)
    for device in devices_shown(plan):
        cost, used, limit = plan.predicted[device], memory[device], usable[device]
        parts = (cost.compute_ms, cost.forward_collective_ms, cost.backward_collective_ms + cost.averaging_ms)
        drawn = f"{bar(parts, slowest, BAR)} {cost.total_ms:8.3f}  {bar([used], limit, MEMORY_BAR)}"
        lines.append(f"{device:>6}  {drawn} {used / limit:>4.0%}")
    return lines


def _memory_lines(plan: Plan) -> list[str]:
    """What takes the memory of the devices, and what is left of it."""
    memory, usable = plan.device_memory(), plan.task.usable_bytes
    maps = any(held.maps for held in memory)
    names = ("weights", "optimizer", *["id maps"] * maps, "step", "reserve", "left", "of")
    lines = [" ".join(["device", *(f"{part:>11}" for part in names)])]
    for device in devices_shown(plan):
        held, limit = memory[device], plan.task.device_memory_bytes[device]
        parts = (held.weights, held.optimizer, *[held.maps] * maps, held.step, limit - usable[device])
        amounts = (f"{format_bytes(nbytes):>11}" for nbytes in (*parts, limit - sum(parts), limit))
        lines.append(" ".join([f"{device:>6}", *amounts]))
    fullest = fullest_step(plan)
    counts = wrapped(f"       (computed; it counts {memory_counts(plan)})", indent=8)
    return [*lines, *(wrapped(fullest) if fullest else []), *counts]


def _first_of(said: Sequence[str], what: str) -> list[str]:
    """The first TABLES_SHOWN of lines on tables, and how many more there are."""
    lines = [line for one in said[:TABLES_SHOWN] for line in wrapped(one)]
    left = len(said) - TABLES_SHOWN
    return [*lines, f"and {counted(left, 'more table')} {what} (--json lists all)"] if left > 0 else lines


def _row_wise_lines(plan: Plan) -> list[str]:
    """The tables that are split row-wise: over how many devices, and the rows on the first of them."""
    said, kinds = [], shardings_of(plan)
    for name, shards in row_wise_tables(plan).items():
        first, devices = shards[0], len({shard.device for shard in shards})
        part = f"rows {spanned(first.row_offset, first.rows)}"
        part += f", columns {spanned(first.column_offset, first.dim)}" if kinds[name].splits_columns else ""
        said.append(f"{name}: {kinds[name].words} over {counted(devices, 'device')} ({part} on device {first.device})")
    return _first_of(said, "row-wise")


def _by_access_lines(plan: Plan) -> list[str]:
    """The tables that are in two parts, or dealt over their row blocks, those with most lookups first."""
    said, held, kinds = [], plan.held.constraints.rows_by_access, shardings_of(plan)
    by_access = [table for table in plan.task.tables if table.name in held]
    for table in sorted(by_access, key=lambda one: -one.pooling_factor):
        if (hot_rows := held[table.name].hot_rows) is None:
            said.append(f"{table.name}: rows dealt over its blocks by access")
        else:
            each = " and ".join(f"{part} {kinds[part].words}" for part in part_names(table.name))
            share = f"{hot_rows:,} of {table.rows:,} rows hot, with {table.hottest_share(hot_rows):.1%} of the lookups"
            said.append(f"{table.name}: in two parts, {share} ({each})")
    return _first_of(said, "by access")


def _tier_lines(plan: Plan) -> list[str]:
    """What hosts hold, and the tables beyond HBM, those with the largest caches first."""
    rows, said = {table.name: table.rows for table in plan.parted.tables}, []
    for rule in sorted(plan.parted.constraints.beyond_hbm.values(), key=lambda rule: -(rule.cached_rows or 0)):
        said.append(f"{rule.table}: {rule.in_tier.holds(rows[rule.table], rule.cached_rows)}")
    lines = [line for resource in hosts_memory(plan) for line in wrapped(resource)]
    return [*lines, *_first_of(said, "beyond HBM")] if said else []


def _origin(plan: Plan) -> str:
    """Who found the plan, by which cost model, and whether anything was measured for that."""
    by = plan.provenance
    model = "no cost model"
    if by.cost_model is not None:
        model = f"cost model {short_name(by.cost_model)} of {source(by.cost_model_backend, by.cost_model_device)}"
    seed = "" if by.seed is None else f", seed {by.seed}"
    return f"by {by.algorithm}{seed}, neuroshard {by.neuroshard_version}, {model}"


def costs_by_device_text(plan: Plan) -> str:
    """Predicted ms of every device: a line for the plan, and one for each baseline that found a plan."""
    rows = [(plan.provenance.algorithm, plan.predicted_ms), *((b.algorithm, b.predicted_ms) for b in plan.baselines)]
    lines = ["predicted ms a step of each device"]
    for name, costs in rows:
        if costs is not None:
            lines += wrapped(f"  {name:<12} " + " ".join(f"{cost:8.3f}" for cost in costs), indent=15)
    return "\n".join(lines)


def plan_json(plan: Plan) -> dict[str, Any]:
    """`plan_text` as JSON, of all devices. Costs are predicted ms, memory is exact."""
    shards = plan.shards_by_device()
    peaks = plan.step_peaks() if plan.task.counts_steps else None
    return {
        "digest": plan.digest(),
        "tables": len(plan.task.tables),
        "shards": len(plan.shards),
        "row_wise_tables": list(row_wise_tables(plan)),
        "beyond_hbm": [
            {"table": rule.table, "tier": rule.tier, "cached_rows": rule.cached_rows}
            for rule in plan.parted.constraints.beyond_hbm.values()
        ],
        "rows_by_access": {name: held.model_dump() for name, held in plan.held.constraints.rows_by_access.items()},
        "row_maps_bytes": plan.held.by_access.map_bytes,
        "host_memory_bytes": list(plan.host_memory()),
        "batch_size": plan.task.global_batch_size,
        "groups": _groups_json(plan),
        "pipeline": plan.task.pipeline,
        "dense_ms": plan.task.dense_ms,
        "dense_optimizer": plan.task.dense_optimizer,
        "collective_precision": None if plan.task.collective_precision is None else plan.task.collective_precision.text,
        "cost_ms": plan.cost_ms,
        "lower_bound_ms": plan.lower_bound_ms,
        "gap": plan.gap,
        "bound_assumptions": list(plan.bound_assumptions),
        "devices": [
            {
                "device": device,
                "shards": shards[device],
                **(plan.predicted[device].model_dump() if plan.predicted else {}),
                "total_ms": plan.predicted_ms[device] if plan.predicted_ms else None,
                "memory_bytes": memory.total,
                "weight_bytes": memory.weights,
                "optimizer_bytes": memory.optimizer,
                **({"id_map_bytes": memory.id_map} if plan.task.mapped else {}),
                "step_bytes": memory.step,
                **({} if peaks is None else {"step_peak": peaks[device]._asdict()}),
                "reserve_bytes": plan.task.constraints.reserved(limit),
                "memory_limit_bytes": limit,
            }
            for device, (memory, limit) in enumerate(
                zip(plan.device_memory(), plan.task.device_memory_bytes, strict=True)
            )
        ],
        "baselines": [
            {"algorithm": one.algorithm, "cost_ms": one.cost_ms, "cuts": one.cuts, "error": one.error}
            for one in plan.baselines
        ],
        "provenance": plan.provenance.model_dump(mode="json"),
    }


def _groups_json(plan: Plan) -> dict[str, Any] | None:
    groups, size = plan.task.groups, plan.task.devices
    return (
        None
        if groups is None
        else {
            "size": size,
            "ranks": groups.ranks,
            "replicas": groups.replicas(size),
            "numbering": groups.numbering,
            "sync_every": groups.sync_every,
            "batch_size": plan.task.batch_size,
            "averaging_ms": plan.predicted[0].averaging_ms if plan.predicted else None,
        }
    )


def releases_text(releases: Sequence[Pointer]) -> str:
    """A line for each release of a model's plans or a hardware's cost models, newest first; the first is live.

    Predicted costs may be by different cost models, so they have no bars. The gain over the plan before is by one cost model,
    where the gate knew it. Errors of cost models are comparable, so they have bars.
    """
    of_plans = isinstance(releases[0], Release)
    what, figure = ("plan", "   predicted   gain") if of_plans else ("cost model", "unseen error")
    lines = [f"number  time                  action    {what:<12}  {figure}"]
    worst = max(release.error or 0.0 if isinstance(release, ModelRelease) else 0.0 for release in releases)
    for release in releases:
        shown, gained = "-", ""
        if isinstance(release, Release):
            shown = "-" if release.cost_ms is None else f"{release.cost_ms:.3f} ms"
            gain = release.decision.gain if release.decision else None
            gained = "-" if gain is None else f"{gain:+.1%}"
        elif isinstance(release, ModelRelease) and release.error is not None:
            shown, gained = f"{release.error:.1%}", bar([release.error], worst, 6)
        line = f"{release.number:>6}  {release.time:<20}  {release.action:<8}  {release.artifact[:12]}"
        lines.append(f"{line}  {shown:>12} {gained:>6} {'live' if release is releases[0] else ''}".rstrip())
    return "\n".join(lines)


def refusals_text(refusals: Sequence[Refusal]) -> str:
    """The plans that the gate held back, newest first."""
    if not refusals:
        return "no plan was held back"
    lines = []
    for refusal in refusals:
        lines.append(f"{refusal.time}  plan {refusal.plan_digest[:12]}  {refusal.decision.verdict}")
        lines += wrapped(f"  {refusal.decision.why}")
    return "\n".join(lines)


def listing_text(found: Sequence[Listed], where: str) -> str:
    """Two lines a cost model: hardware, digest, time, error on unseen tables, batch size, whether it is live; and the device."""
    if not found:
        return f"{where}: no cost model is published there"
    lines = ["hardware          cost model    published             unseen error   batch"]
    worst = max((one.error or 0.0 for one in found), default=0.0)
    for one in found:
        moment = one.modified.strftime("%Y-%m-%dT%H:%M:%SZ")
        line = f"{one.fingerprint}  {one.digest[:12]}  {moment}"
        if one.manifest is None:
            lines += [line, *wrapped(f"  {one.fault}", indent=4)]
            continue
        error, bench = one.error, one.manifest.bench
        shown = f"{'-':>5}" if error is None else f"{error:>5.1%} {bar([error], worst, 6)}"
        lines.append(f"{line}  {shown:<12}  {one.manifest.batch_size:>6,}{'  live' if one.is_live else ''}")
        lines += wrapped(f"  {bench.hardware.name} ({bench.backend})", indent=4)
        lines += wrapped(f"  {one.fault}", indent=4) if one.fault else []
    return "\n".join(lines)


def listing_json(found: Sequence[Listed]) -> str:
    """A JSON list with an object a cost model, its whole manifest included."""
    rows = [
        {
            "fingerprint": one.fingerprint,
            "digest": one.digest,
            "published": one.modified.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "live": one.is_live,
            "error": one.error,
            "fault": one.fault or None,
            "manifest": one.manifest.model_dump(mode="json") if one.manifest else None,
        }
        for one in found
    ]
    return canonical_json(rows).decode()
