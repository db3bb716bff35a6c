"""What the page of a plan says in words: its cost against the live plan, the heuristics and the bound, and how far to trust it;
and the origin of all that: code, digests of the inputs, hardware, seeds, and the fleet, if given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.core.units import format_bytes
from neuroshard.core.value import Value, decode_json
from neuroshard.costmodel.protocol import CostModel
from neuroshard.costmodel.tiers import knows_tiers
from neuroshard.costmodel.uncertainty import off_by
from neuroshard.files.disk import read_bytes
from neuroshard.report.live import PlanChange
from neuroshard.report.numbers import against, measured, percent, ranges_text, source
from neuroshard.report.trust import Evaluated

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
    device, need, limit = plan.fullest
    note = f"device {device}: {format_bytes(need)} of {format_bytes(limit)}, computed"
    return Card("Fullest device", percent(need / max(limit, 1)), note)


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


class Fact(NamedTuple):
    name: str
    value: str


def plan_facts(plan: Plan, files: Mapping[str, str]) -> list[Fact]:
    """Facts about the plan, and the sha256 of each file that the page was made from, by name."""
    by, task = plan.provenance, plan.task
    effort = f"{by.time_budget_s:g} s of improvement" if by.time_budget_s is not None else ""
    effort = effort or (f"{by.rounds} rounds of improvement" if by.rounds is not None else "")
    found = {
        "plan": plan.digest(),
        "task": plan.task_digest,
        "hosts": "" if task.topology is None else task.topology.text(task.devices),
        "groups": "" if task.groups is None else task.groups.text(task.devices),
        "collectives in": "" if task.collective_precision is None else task.collective_precision.text,
        "found by": ", ".join(filter(None, (by.algorithm, effort))),
        "seed": "none" if by.seed is None else str(by.seed),
        "code": f"neuroshard {by.neuroshard_version}",
        "cost model": by.cost_model or "none",
        "its milliseconds are from": source(by.cost_model_backend, by.cost_model_device),
    }
    digests = {f"sha256 of {name}": digest for name, digest in files.items()}
    return _known({**found, **by.cost_model_versions, **digests})


def _known(found: Mapping[str, str | None]) -> list[Fact]:
    return [Fact(name, value) for name, value in found.items() if value]


def model_facts(model: CostModel) -> list[Fact]:
    """Facts about the cost model: the bench that it was measured on, and its training."""
    manifest = model.manifest
    if manifest is None:
        return _known({"cost model": model.name, "its milliseconds are from": source(model.backend, model.device_name)})
    by, bench, hardware = manifest.provenance, manifest.bench, manifest.bench.hardware
    repeats = f"{bench.warmup} warm-ups, {bench.repeats} repeats"
    found = {
        "cost model": model.name,
        "code": f"neuroshard {by.neuroshard_version}",
        "training": f"seed {by.seed}, {by.compute_cases:,} table sets, {by.collective_cases:,} all-to-alls",
        "started from": by.started_from or "nothing: a fresh net",
        "hardware": f"{hardware.name} ({hardware.kind}), {format_bytes(hardware.memory_bytes)}",
        "fingerprint": hardware.fingerprint,
        "driver": hardware.driver,
        "interconnect": hardware.interconnect,
        "compute capability": hardware.compute_capability,
        "machine": hardware.machine,
        "shared": hardware.sharing,
        "measuring": f"{bench.backend}, {repeats}, optimizer {bench.optimizer}, seed {bench.seed}",
        **bench.facts,
        **bench.versions,
        "batch sizes": ", ".join(f"{size:,}" for size in manifest.batch_sizes),
        "devices of all-to-alls": ", ".join(map(str, manifest.device_counts)) or "none",
        "tables beyond HBM": model.tiers_from if knows_tiers(model) else "",
    }
    return [*_known(found), *(Fact("missing", gap) for gap in manifest.report.gaps)]


class FleetKind(Value):
    """A kind of hardware, as `neuroshard fleet --json` writes it."""

    hardware: Hardware
    nodes: int = 0
    devices: int = 0
    out_of_service: int = 0
    state: str = ""
    why: str = ""


class FleetFile(Value):
    """All kinds, and where they were looked for."""

    source: str = "unknown"
    kinds: tuple[FleetKind, ...]


def fleet_rows(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The source of a fleet and a row for each kind, from the output of `neuroshard fleet --json`. Raises InvalidInput."""
    found = decode_json(read_bytes(path), str(path))
    if not isinstance(found, dict) or not isinstance(found.get("kinds"), list):
        raise InvalidInput(f"{path}: holds no fleet; write it with `neuroshard fleet --json > {path.name}`")
    fleet = FleetFile.parse(found, str(path))
    return fleet.source, [
        kind.model_dump()
        | {"fingerprint": kind.hardware.fingerprint, "memory": format_bytes(kind.hardware.memory_bytes)}
        for kind in fleet.kinds
    ]
