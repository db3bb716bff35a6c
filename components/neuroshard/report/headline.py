"""The top of the page: the plan's cost against the live plan, the heuristics and the bound, and its cost model's error."""

from typing import Any, NamedTuple

from neuroshard.core.plan import Plan
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.protocol import CostModel
from neuroshard.costmodel.uncertainty import off_by
from neuroshard.report.evaluated import Evaluated
from neuroshard.report.live import PlanChange
from neuroshard.report.numbers import against, cut_tables, percent, ranges_text, short
from neuroshard.report.origin import measured

LIVE = "Against live plan"


class Card(NamedTuple):
    """One figure: its title, its value, and a line on where it comes from."""

    title: str
    figure: str
    note: str


def cards(
    plan: Plan, change: PlanChange | None, model: CostModel | None, evaluated: Evaluated | None, nothing_live: bool
) -> list[Card]:
    live = Card(LIVE, "–", "nothing was live before") if nothing_live else _live(plan, change)
    return [_cost(plan, evaluated), live, _baselines(plan), _bound(plan), _memory(plan), _trust(plan, model)]


def size(plan: Plan) -> str:
    """`26 tables in 31 shards (5 cuts) on 8 devices, batch 65,536`."""
    groups = "" if plan.task.groups is None else f" in {plan.task.groups.text(plan.task.devices)}"
    return (
        f"{cut_tables(plan)} on {counted(plan.task.devices, 'device')}{groups}, batch {plan.task.global_batch_size:,}"
    )


def bars(plan: Plan, change: PlanChange | None) -> list[dict[str, Any]]:
    """Predicted ms of the slowest device for this plan, the live plan, and the plan of each heuristic."""
    named = [("this plan", "plan", plan.cost_ms), ("live plan", "live", change.cost_ms if change else None)]
    named += [(f"heuristic: {baseline.algorithm}", "heuristic", baseline.cost_ms) for baseline in plan.baselines]
    costs = [(name, kind, cost) for name, kind, cost in named if cost is not None]
    return [{"name": name, "kind": kind, "ms": short([cost])[0]} for name, kind, cost in costs]


def without_a_plan(plan: Plan) -> list[str]:
    """A line for each heuristic that found no plan, with the reason."""
    return [f"{baseline.algorithm}: no plan: {baseline.error}" for baseline in plan.baselines if baseline.error]


def _cost(plan: Plan, evaluated: Evaluated | None) -> Card:
    title = "Slowest device"
    if plan.cost_ms is None or plan.predicted_ms is None:
        return Card(title, "not known", "the plan carries no prediction")
    slowest = plan.predicted_ms.index(plan.cost_ms)
    slowest_ms = max((ms for ms in evaluated.ms() if ms is not None), default=None) if evaluated else None
    run = f"; {slowest_ms:.3f} ms: {evaluated.what}" if evaluated and slowest_ms is not None else ""
    may_be = f"; {said}" if (said := ranges_text(plan)) else ""
    return Card(title, f"{plan.cost_ms:.3f} ms", f"a step, predicted; device {slowest}{run}{may_be}")


def _live(plan: Plan, change: PlanChange | None) -> Card:
    title = LIVE
    if change is None:
        return Card(title, "–", "nothing to compare with: give --live PLAN or STORE#MODEL")
    if change.cost_ms is None or plan.cost_ms is None:
        return Card(title, change.to_move, change.why)
    gain, doubt = 1 - plan.cost_ms / change.cost_ms if change.cost_ms else 0.0, off_by(plan)
    than = "more" if gain > doubt else "not more"
    judged = f", {than} than the {percent(doubt)} that predictions may be off by" if gain > 0 else ""
    note = f"predicted{judged}; live: {change.cost_ms:.3f} ms; {change.to_move}"
    return Card(title, against(plan.cost_ms, change.cost_ms), note)


def _baselines(plan: Plan) -> Card:
    title = "Against best heuristic"
    found = [(b.cost_ms, b.algorithm) for b in plan.baselines if b.cost_ms is not None]
    if not found or plan.cost_ms is None:
        return Card(title, "–", "no heuristic found a plan" if plan.baselines else "the plan carries none")
    cost, name = min(found)
    return Card(title, against(plan.cost_ms, cost), f"predicted; {name}: {cost:.3f} ms")


def _bound(plan: Plan) -> Card:
    title = "Left to gain, at most"
    if plan.gap is None or plan.lower_bound_ms is None:
        return Card(title, "–", plan.bound_assumptions[0] if plan.bound_assumptions else "no lower bound was computed")
    return Card(
        title, percent(plan.gap), f"by this cost model no plan takes less than {plan.lower_bound_ms:.3f} ms (predicted)"
    )


def _memory(plan: Plan) -> Card:
    used = zip(plan.memory_bytes(), plan.task.usable_bytes, strict=True)
    share, device, need, limit = max((n / usable, d, n, usable) for d, (n, usable) in enumerate(used))
    return Card(
        "Fullest device", percent(share), f"device {device}: {format_bytes(need)} of {format_bytes(limit)}, computed"
    )


def _trust(plan: Plan, model: CostModel | None) -> Card:
    title = "Error, unseen tables"
    error = plan.provenance.cost_model_error
    if error is None:
        return Card(title, "not known", "nothing was measured for this cost model")
    if plan.provenance.cost_model_backend == "analytic":
        return Card(title, percent(error), "the deviation that this datasheet model states; nothing was measured")
    manifest = None if model is None else model.manifest
    compute = [] if manifest is None else [net for net in manifest.report.nets if net.kind == "compute"]
    noise = compute[0].label_noise if compute else None
    again = f"; measuring again differs by {percent(noise.mape)}" if noise else ""
    truth = measured(plan.provenance.cost_model_backend)
    return Card(title, percent(error), f"compute, predicted against {truth}{again}")
