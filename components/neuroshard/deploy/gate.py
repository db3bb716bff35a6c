"""Decides whether a plan goes live, and returns a Decision with its numbers (docs/deploy.md).

A plan is refused where it breaks a rule: it is for other tables than today's, leaves less memory free than the margin, or its
cost model's error is too high. A valid plan is compared with the live plan, if both can be priced in the same way. It goes
live if it is better by more than `min_gain`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from neuroshard.core.comparable import why_not_comparable
from neuroshard.core.errors import UsageError
from neuroshard.core.moves import changed_state, moved_bytes
from neuroshard.core.plan import Plan, device_memory
from neuroshard.core.release import Decision, Release
from neuroshard.core.shapes import shape_fault, shapes_of
from neuroshard.core.table import Table
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.report import STAND_IN_ERROR

GUESS = STAND_IN_ERROR  # the spread of an analytic cost model


class Gate(NamedTuple):
    """The rules. `tables` are today's tables (None: those of the plan). Shares are of 1.

    `price(plan, today)` predicts the cost in ms of another plan on the task of `today`, with its cost model; None where it
    cannot. Without `price`, only plans of one cost model and one task are compared, by the predictions that they carry.

    In a `nightly` run, a plan that is too uncertain or was rolled back is not refused. Instead the live plan is kept, if it
    fits today's task; if not, an uncertain plan is better than none.
    """

    tables: tuple[Table, ...] | None = None
    memory_margin: float = 0.0
    max_error: float | None = None
    min_gain: float | None = None
    price: Callable[[Plan, Plan], float | None] | None = None
    force: bool = False
    nightly: bool = False

    def check(self) -> None:
        """Raise UsageError for an invalid rule."""
        for name, value in (("memory-margin", self.memory_margin), ("min-gain", self.min_gain)):
            if value is not None and not 0 <= value < 1:
                raise UsageError(f"--{name} is a share of at least 0 and below 1 (0.05 is 5 %), not {value:g}")
        check_max_error(self.max_error)


def check_max_error(max_error: float | None) -> None:
    """Raise UsageError for an invalid limit of an error."""
    if max_error is not None and not 0 < max_error < math.inf:
        raise UsageError(f"--max-error is a share above 0 (0.1 is 10 %), not {max_error:g}")


def decide(
    plan: Plan, gate: Gate, live: Release | None, live_plan: Plan | None, *, rolled_back: bool = False
) -> Decision:
    """The gate's decision on `plan`. `live_plan` is None where nothing is live, or the live plan cannot be read.

    `rolled_back` means that somebody rolled back from this plan; only a person may make it live again.
    """
    error = plan.provenance.cost_model_error
    serving = live is not None and live_plan is not None and not _for_other_task(plan, live_plan, gate)
    faults = [fault for fault in (_tables(plan, gate), _memory(plan, gate)) if fault]
    doubts = [_error(error, gate), "it was live, and was rolled back" if rolled_back else None]
    found = [doubt for doubt in doubts if doubt]
    if not gate.nightly:
        faults += found
    keep = "; ".join(found) if gate.nightly and (serving or rolled_back) else ""

    comparison, live_cost = (f"{keep}; the live plan stays", None) if keep else _comparison(plan, gate, live, live_plan)
    gain = None if live_cost is None or plan.cost_ms is None else _gain(plan.cost_ms, live_cost)
    min_gain = gate.min_gain if gate.min_gain is not None else _uncertainty(plan)
    # Without an explicit min_gain, a plan that cannot be compared goes live, since it is based on newer data.
    demanded = gate.min_gain is not None and serving
    better = gain > min_gain if gain is not None else not demanded
    better = better and not keep
    return Decision(
        verdict="refused" if faults else "passed" if better else "kept",
        forced=gate.force,
        faults=tuple(faults),
        comparison=comparison,
        live_number=live.number if live else None,
        live_digest=live.plan_digest if live else None,
        cost_ms=plan.cost_ms,
        live_cost_ms=live_cost,
        gain=gain,
        min_gain=min_gain if live else None,
        cost_model_error=error,
        max_error=gate.max_error,
        memory_left=_memory_left(plan),
        memory_margin=gate.memory_margin,
        moved_bytes=moved_bytes(live_plan, plan) if live_plan else None,
        changed_state=len(changed_state(live_plan, plan)) if live_plan else 0,
        instead=plan.provenance.instead,
    )


def _uncertainty(plan: Plan) -> float:
    """How far the plan's predictions may be off, as a share: its cost model's error, and at least GUESS for a fallback."""
    error = plan.provenance.cost_model_error or 0.0
    guessed = plan.provenance.instead or (plan.provenance.cost_model or "").startswith("analytic:")
    return max(error, GUESS) if guessed else error


def _gain(cost_ms: float, live_cost_ms: float) -> float:
    """The share of the live plan's cost that is saved. It is always finite, as every number in a record must be."""
    return max(1 - cost_ms / live_cost_ms, -1e9) if live_cost_ms else 0.0


def _tables(plan: Plan, gate: Gate) -> str | None:
    if gate.tables is None:
        return None
    fault = shape_fault(plan, shapes_of(gate.tables))
    if fault is None:
        widths = {table.name: table.element_bytes for table in plan.task.tables}
        wrong = [table for table in gate.tables if widths[table.name] != table.element_bytes]
        if not wrong:
            return None
        fault = (
            f"has table {wrong[0].name!r} at {widths[wrong[0].name]} bytes an element, but the model has "
            f"{wrong[0].element_bytes}"
        )
    return f"it {fault}; search a plan for today's tables"


def _memory_left(plan: Plan) -> float:
    """The share of the fullest device's memory that stays free."""
    used = zip(plan.memory_bytes(), plan.task.device_memory_bytes, strict=True)
    return 1 - max(needed / limit for needed, limit in used)


def _memory(plan: Plan, gate: Gate) -> str | None:
    for device, (used, limit) in enumerate(zip(plan.memory_bytes(), plan.task.device_memory_bytes, strict=True)):
        if used > limit * (1 - gate.memory_margin):
            return (
                f"device {device} needs {format_bytes(used)} of {format_bytes(limit)}, which leaves less than the margin of "
                f"{gate.memory_margin:.1%}; search with less --memory"
            )
    return None


def _error(error: float | None, gate: Gate) -> str | None:
    if gate.max_error is None:
        return None
    if error is None:
        return "its cost model's error on unseen tables is not known, and --max-error asks for it; search again"
    if error > gate.max_error:
        return (
            f"its cost model's error on unseen tables is {error:.1%}, more than the {gate.max_error:.1%} of --max-error; "
            "measure more cases"
        )
    return None


def _for_other_task(plan: Plan, live_plan: Plan, gate: Gate) -> str | None:
    """Why the live plan does not fit today's tables and devices; None where it does."""
    fault = shape_fault(live_plan, shapes_of(gate.tables or plan.task.tables))
    if fault:
        return f"the live plan {fault}"
    today, live = plan.task, live_plan.task
    if {t.name: t.element_bytes for t in today.tables} != {t.name: t.element_bytes for t in live.tables}:
        return "the live plan is for tables of another element size"
    if live.devices != today.devices:
        return f"the live plan is for {live.devices} devices, not for {today.devices}"
    if live.device_memory_bytes != today.device_memory_bytes:
        return "the live plan is for devices of other memory"
    memory = zip(device_memory(today, live_plan.shards), today.usable_bytes, strict=True)
    for device, (needed, limit) in enumerate(memory):
        if needed.total > limit:
            return (
                f"the live plan does not fit today's task: device {device} needs {format_bytes(needed.total, 'up')} of "
                f"{format_bytes(limit)}"
            )
    return None


def _comparison(plan: Plan, gate: Gate, live: Release | None, live_plan: Plan | None) -> tuple[str, float | None]:
    """How the plans were compared, or why they were not; and the live plan's cost in ms by the same measure."""
    if live is None:
        return "nothing is live", None
    if live_plan is None:
        return "the live plan cannot be read", None
    if other := _for_other_task(plan, live_plan, gate):
        return other, None
    if plan.cost_ms is None:
        return "not compared: the plan carries no prediction", None
    if gate.price is not None:
        cost = gate.price(live_plan, plan)
        if cost is None or not math.isfinite(cost):
            return "not compared: the cost model cannot price the live plan", None
        return "the live plan was priced again, on today's tables with the plan's own cost model", cost
    if why := why_not_comparable(plan, live_plan):
        return f"not compared: {why} (--model prices both for today's task)", None
    return "both carry the predictions of one cost model, on the same tables", live_plan.cost_ms
