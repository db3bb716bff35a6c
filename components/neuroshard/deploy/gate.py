"""Decides whether a plan goes live, and returns a Decision with its numbers (docs/deploy.md).

A plan is refused where it breaks a rule: it is for other tables than today's, leaves less memory free than the margin, or its
cost model's error is too high. A valid plan is compared with the live plan, if both can be priced in the same way. It goes
live if it is better by more than `min_gain`, or if the live plan breaks today's task.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from neuroshard.core.comparable import other_groups, other_work, why_not_comparable
from neuroshard.core.errors import UsageError
from neuroshard.core.groups import every
from neuroshard.core.id_map import IdMap
from neuroshard.core.moves import changed_state, moved_bytes, said_ids_lost
from neuroshard.core.operator_limits import device_of, fault_of_plan
from neuroshard.core.output_order import reordered
from neuroshard.core.plan import Plan, device_memory
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.release import Decision, Release
from neuroshard.core.shapes import shape_fault, shapes_of
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.core.value import explain
from neuroshard.costmodel.uncertainty import off_by


@dataclass(frozen=True)
class Gate:
    """The rules. `tables` are today's tables (None: those of the plan). Shares are of 1.

    `price(plan, today)` predicts the cost in ms of another plan on the task of `today`, with its cost model; None where it
    cannot. Without `price`, only plans of one cost model and one task are compared, by the predictions that they carry.

    In a `nightly` run, a plan that is too uncertain or was rolled back is not refused. Instead the live plan is kept, if it
    fits today's task; if not, an uncertain plan is better than none, while one that was rolled back stays away, and the decision
    says why the live one does not serve. A live plan of groups of ranks is kept too.
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
    plan: Plan,
    gate: Gate,
    live: Release | None,
    live_plan: Plan | None,
    *,
    rolled_back: bool = False,
    drifted: tuple[str, ...] = (),
) -> Decision:
    """The gate's decision on `plan`. `live_plan` is None where nothing is live, or the live plan cannot be read.

    `rolled_back` means that somebody rolled back from this plan; only a person may make it live again. `drifted` are lines on row
    orders of the live plan that access has drifted from.
    """
    error = plan.provenance.cost_model_error
    why_not = "the live plan cannot be read" if live else "nothing was live before"
    if live_plan is not None:
        why_not = why_it_cannot_serve(live_plan, plan.task, gate)
    serving = not why_not
    wide = _widths(plan)
    faults = [
        fault
        for fault in (_tables(plan, gate), _memory(plan, gate), f"{wide}; search again" if wide else None)
        if fault
    ]
    grouped = _leaves_groups(plan, gate, live_plan)
    doubts = [_error(error, gate), "it was live, and was rolled back" if rolled_back else None, grouped]
    found = [doubt for doubt in doubts if doubt]
    if not gate.nightly:
        faults += found
    keep = "; ".join(found) if gate.nightly and (serving or rolled_back or grouped) else ""

    comparison, live_cost = (
        (f"{keep}; the live plan stays{'' if serving or grouped else ' until somebody promotes another'}", None)
        if keep
        else _comparison(plan, gate, live_plan, why_not)
    )
    gain = None if live_cost is None or plan.cost_ms is None else _gain(plan.cost_ms, live_cost)
    off = off_by(plan)
    min_gain = gate.min_gain if gate.min_gain is not None else off
    # Without an explicit min_gain, a plan that cannot be compared goes live, since it is based on newer data.
    demanded = gate.min_gain is not None and serving
    better = gain > min_gain if gain is not None else not demanded
    better = better and not keep
    stays = live_plan is not None and (faults or not better) and not gate.force
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
        deviation=None if off == (error or 0.0) else off,
        max_error=gate.max_error,
        memory_left=_memory_left(plan),
        memory_margin=gate.memory_margin,
        moved_bytes=moved_bytes(live_plan, plan) if live_plan and not other_groups(live_plan.task, plan.task) else None,
        changed_state=len(changed_state(live_plan, plan)) if live_plan else 0,
        ids_lost=said_ids_lost(live_plan, plan.task) if live_plan else "",
        reordered=tuple(module for module, *_ in reordered(live_plan, plan)) if live_plan else (),
        drifted=drifted,
        instead=plan.provenance.instead,
        unserved=why_not if stays and not grouped else "",
    )


def _gain(cost_ms: float, live_cost_ms: float) -> float:
    """The share of the live plan's cost that is saved. It is always finite, as every number in a record must be."""
    return max(1 - cost_ms / live_cost_ms, -1e9) if live_cost_ms else 0.0


def _tables(plan: Plan, gate: Gate) -> str | None:
    if gate.tables is None:
        return None
    fault = shape_fault(plan, shapes_of(gate.tables))
    if fault is None:
        planned = {table.name: table for table in plan.task.tables}
        wrong = [table for table in gate.tables if planned[table.name].element_bytes != table.element_bytes]
        mapped = [table for table in gate.tables if planned[table.name].id_map != table.id_map]
        if wrong:
            fault = (
                f"has table {wrong[0].name!r} at {planned[wrong[0].name].element_bytes} bytes an element, but the model has "
                f"{wrong[0].element_bytes}"
            )
        elif mapped:
            was, now = planned[mapped[0].name].id_map, mapped[0].id_map
            fault = f"has table {mapped[0].name!r} with {_ids(was)}, but the model has it with {_ids(now)}"
        else:
            return None
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
                f"{gate.memory_margin:.1%}; search with --reserve {100 * gate.memory_margin:g}%"
            )
    return None


def _widths(plan: Plan) -> str | None:
    """Which shard the operator of the devices that the plan is for cannot hold. What plans without a cost model of a device are
    for is not known."""
    by = plan.provenance
    if by.cost_model_backend not in ("cuda", "analytic"):
        return None
    return fault_of_plan(plan, device_of(by.cost_model_backend, by.cost_model)) or None


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


def _leaves_groups(plan: Plan, gate: Gate, live_plan: Plan | None) -> str | None:
    """Why a night's plan, which is of no groups, does not replace a live one of groups of as many ranks and of today's tables."""
    if not gate.nightly or live_plan is None or live_plan.task.groups is None or plan.task.groups is not None:
        return None
    if live_plan.task.ranks != plan.task.ranks or shape_fault(live_plan, shapes_of(gate.tables or plan.task.tables)):
        return None
    return (
        f"the live plan is for {live_plan.task.groups.text(live_plan.task.devices)}, whose trainers take no plan without groups, "
        "and no night plans any: deploy the next one by hand"
    )


def why_it_cannot_serve(live_plan: Plan, today: ShardingTask, gate: Gate) -> str:
    """Why the live plan is not for today's tables and devices, or breaks today's rules; empty where it serves."""
    if fault := shape_fault(live_plan, shapes_of(gate.tables or today.tables)):
        return f"the live plan {fault}"
    if wide := _widths(live_plan):
        return f"in the live plan {wide}"
    live = live_plan.held
    if other := _other_tables(today, live) or _other_devices(today, live):
        return other
    own = {"dense_optimizer": today.dense_optimizer or live.dense_optimizer}
    today = today.parted_as(live).model_copy(update=own)
    holdings = today.holdings_of(live)
    memory = zip(device_memory(today.holding(holdings), live_plan.shards), today.usable_bytes, strict=True)
    for device, (needed, limit) in enumerate(memory):
        if needed.total > limit:
            return (
                f"the live plan does not fit today's task: device {device} needs {format_bytes(needed.total, 'up')} of "
                f"{format_bytes(limit)}"
            )
    try:
        Plan(task=today, holdings=holdings, shards=live_plan.shards, provenance=live_plan.provenance)
    except ValidationError as error:
        return f"the live plan breaks today's task: {explain(error)}"
    return ""


def _other_tables(today: ShardingTask, live: ShardingTask) -> str | None:
    """Which table the live plan has in another way than today, beside its shape."""
    mapped = today.mapped or live.mapped
    are, were = (
        {
            table.name: f"at {table.element_bytes} bytes an element with pooling {table.pooling!r}"
            + (f" and {_ids(table.id_map)}" if mapped else "")
            for table in task.tables
        }
        for task in (today, live)
    )
    name = next((name for name in {**are, **were} if are.get(name) != were.get(name)), None)
    if name is None:
        return None
    return (
        f"the live plan has table {name!r} {were.get(name, 'not at all')}, and today's task has it "
        f"{are.get(name, 'not at all')}"
    )


def _ids(id_map: IdMap | None) -> str:
    """How a table gets from ids to rows, in words."""
    if id_map is None:
        return "ids that are its rows"
    return "an id map of " + ", ".join(f"{name} {value}" for name, value in id_map.model_dump().items())


def _other_devices(today: ShardingTask, live: ShardingTask) -> str | None:
    """Why trainers on today's devices would refuse the live plan, or exchange data in another way than it says."""
    if differ := other_groups(live, today):
        return f"the live plan and today's are for {differ}"
    if live.groups and today.groups and live.groups.sync_every != today.groups.sync_every:
        return f"the live plan is for replicas averaged {every(live.groups.sync_every)}, not {every(today.groups.sync_every)}"
    if live.devices != today.devices:
        return f"the live plan is for {counted(live.devices, 'device')}, not for {today.devices}"
    if live.device_memory_bytes != today.device_memory_bytes:
        return "the live plan is for devices of other memory"
    if (was := _hosts(live)) != (now := _hosts(today)):
        return f"the live plan is for {was}, not for {now}"
    if (was := _precision(live)) != (now := _precision(today)):
        return f"the live plan is for collectives in {was}, not in {now}"
    return None


def _hosts(task: ShardingTask) -> str:
    """The hosts and domains, in words. Where one domain has all devices, trainers take any hosts. The network between domains is
    left out: it is measured anew, and trainers do not look at it."""
    if task.topology is None or task.topology.domains(task.devices) == 1:
        return "one domain"
    return task.topology.text(task.devices)


def _precision(task: ShardingTask) -> str:
    return (task.collective_precision or CollectivePrecision()).text


def _comparison(plan: Plan, gate: Gate, live_plan: Plan | None, why_not: str) -> tuple[str, float | None]:
    """How the plans were compared, or why they were not; and the live plan's cost in ms by the same measure."""
    if live_plan is None or why_not:
        return why_not, None
    if plan.cost_ms is None:
        return "not compared: the plan carries no prediction", None
    if gate.price is not None:
        cost = gate.price(live_plan, plan)
        if cost is None or not math.isfinite(cost):
            return "not compared: the cost model cannot price the live plan", None
        apart = other_work(plan.task, live_plan.task).replace("the predictions are", "; the plans are")
        return f"the live plan was priced again, on today's tables with the plan's own cost model{apart}", cost
    if why := why_not_comparable(plan, live_plan):
        return f"not compared: {why} (--model prices both for today's task)", None
    return "both carry the predictions of one cost model, on the same tables", live_plan.cost_ms
