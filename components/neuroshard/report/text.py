"""Plans and releases as text that fits 80 columns. Every number carries its unit and says predicted or measured."""

import textwrap
from collections.abc import Sequence

from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.release import ModelRelease, Pointer, Refusal, Release
from neuroshard.core.units import format_bytes

WIDTH = 80


def plan_text(plan: Plan) -> str:
    """A plan: its cost beside the baselines', then a line a device. Costs are predicted ms, memory is exact."""
    lines = [f"plan {plan.digest()[:12]}: {_size(plan)}"]
    lines += [*_cost_lines(plan), "", *_device_lines(plan), "", *_wrapped(_origin(plan))]
    for note in plan.provenance.notes:
        lines += _wrapped(f"note: {note}")
    return "\n".join(lines)


def _wrapped(text: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _size(plan: Plan) -> str:
    cuts = _cuts(len(plan.shards) - len(plan.task.tables))
    tables = f"{len(plan.task.tables)} tables in {len(plan.shards)} shards ({cuts})"
    return f"{tables}, {plan.task.devices} devices, batch {plan.task.batch_size:,}"


def _cost_lines(plan: Plan) -> list[str]:
    if plan.cost_ms is None:
        return ["no predicted cost"]
    lines = [f"predicted cost (slowest device): {plan.cost_ms:.3f} ms a step", *_bound_lines(plan)]
    for baseline in plan.baselines:
        if baseline.cost_ms is None:
            lines += _wrapped(f"  {baseline.algorithm:<12} no plan: {baseline.error}", indent=15)
        else:
            gain = 1 - plan.cost_ms / baseline.cost_ms if baseline.cost_ms else 0.0
            cost = f"  {baseline.algorithm:<12} {baseline.cost_ms:10.3f} ms   this plan is {_gain(gain)}"
            lines.append(cost + (f" (after {_cuts(baseline.cuts)})" if baseline.cuts else ""))
    return lines


def _bound_lines(plan: Plan) -> list[str]:
    if plan.gap is None:
        return [line for why in plan.bound_assumptions for line in _wrapped(f"  {why}", indent=4)]
    lines = [
        f"  no plan costs less than {plan.lower_bound_ms:.3f} ms by this cost model: at most {plan.gap:.1%} to gain"
    ]
    return lines + [line for why in plan.bound_assumptions for line in _wrapped(f"  where {why}", indent=4)]


def _cuts(count: int) -> str:
    return f"{count} cut" if count == 1 else f"{count} cuts"


def _gain(gain: float) -> str:
    if abs(gain) < 0.0005:
        return "equal"
    return f"{abs(gain):.1%} {'lower' if gain > 0 else 'higher'}"


def _device_lines(plan: Plan) -> list[str]:
    lines = [
        "device shards    compute  fwd exch.  bwd exch.      total  memory",
        "              (predicted ms; the forward exchange includes waiting)",
    ]
    shards = [0] * plan.task.devices
    for shard in plan.shards:
        shards[shard.device] += 1
    memory = zip(plan.memory_bytes(), plan.task.device_memory_bytes, strict=True)
    for device, (used, limit) in enumerate(memory):
        if plan.predicted:
            cost = plan.predicted[device]
            costs = f"{cost.compute_ms:10.3f} {cost.forward_comm_ms:10.3f} {cost.backward_comm_ms:10.3f} {cost.total_ms:10.3f}"
        else:
            costs = f"{'-':>10} {'-':>10} {'-':>10} {'-':>10}"
        share = f"{format_bytes(used)} of {format_bytes(limit)}"
        lines.append(f"{device:>6} {shards[device]:>6} {costs}  {share}")
    return lines


def _origin(plan: Plan) -> str:
    by = plan.provenance
    seed = "" if by.seed is None else f", seed {by.seed}"
    return f"by {by.algorithm}{seed}, neuroshard {by.neuroshard_version}, {_cost_model(by)}"


def _cost_model(by: Provenance) -> str:
    """Which cost model, and whether anything was measured for it."""
    if by.cost_model is None:
        return "no cost model"
    device = f"({by.cost_model_device})"
    match by.cost_model_backend:
        case "analytic":
            return f"cost model {by.cost_model}, computed from datasheets, not measured {device}"
        case "given":
            return f"given costs {by.cost_model[:12]}, not measured here {device}"
        case "synthetic":
            return f"cost model {by.cost_model[:12]} of costs by a formula, not measured {device}"
        case None:
            return f"cost model {by.cost_model[:12]}"
        case backend:
            return f"cost model {by.cost_model[:12]} of costs measured on {backend} {device}"


def costs_by_device_text(plan: Plan) -> str:
    """Predicted ms of every device, a line for the plan and one for each baseline that found a plan."""
    rows = [(plan.provenance.algorithm, plan.predicted_ms), *((b.algorithm, b.predicted_ms) for b in plan.baselines)]
    lines = ["predicted ms a step of each device"]
    for name, costs in rows:
        if costs is not None:
            lines += _wrapped(f"  {name:<12} " + " ".join(f"{cost:8.3f}" for cost in costs), indent=15)
    return "\n".join(lines)


def releases_text(releases: Sequence[Pointer]) -> str:
    """The releases of a model's plans or a hardware's cost models, newest (live) first, a line each."""
    of_plans = isinstance(releases[0], Release)
    what, figure = ("plan", "predicted") if of_plans else ("cost model", "error on unseen tables")
    lines = [f"number  time                       action    {what:<12}  {figure}"]
    for index, release in enumerate(releases):
        shown = "-"
        if isinstance(release, Release) and release.cost_ms is not None:
            shown = f"{release.cost_ms:.3f} ms"
        elif isinstance(release, ModelRelease) and release.error is not None:
            shown = f"{release.error:.1%}"
        live = "  live" if index == 0 else ""
        lines.append(
            f"{release.number:>6}  {release.time:<25}  {release.action:<8}  {release.artifact[:12]}  {shown}{live}"
        )
    return "\n".join(lines)


def refusals_text(refusals: Sequence[Refusal]) -> str:
    """The plans that the gate held back, newest first."""
    if not refusals:
        return "no plan was held back"
    lines = []
    for refusal in refusals:
        lines.append(f"{refusal.time}  plan {refusal.plan_digest[:12]}  {refusal.decision.verdict}")
        lines += textwrap.wrap(refusal.decision.why, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)
