"""The origin of a plan and its predictions: code, digests of the inputs, hardware, seeds; and the fleet, if given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neuroshard.core.cost import Bench, Hardware
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.core.units import format_bytes
from neuroshard.core.value import decode_json
from neuroshard.costmodel.protocol import CostModel
from neuroshard.costmodel.tiers import knows_tiers
from neuroshard.files.disk import read_bytes
from neuroshard.report.numbers import source


class Fact(NamedTuple):
    name: str
    value: str


def measured(backend: str | None) -> str:
    """The name of the costs that a cost model learned from: those of a formula are never called measured."""
    return "the formula's" if backend == "synthetic" else "measured"


def plan_facts(plan: Plan, files: Mapping[str, str]) -> list[Fact]:
    """Facts about the plan, and the sha256 of each file that the page was made from, by name."""
    by = plan.provenance
    effort = f"{by.time_budget_s:g} s of improvement" if by.time_budget_s is not None else ""
    effort = effort or (f"{by.rounds} rounds of improvement" if by.rounds is not None else "")
    facts = [
        Fact("plan", plan.digest()),
        Fact("task", plan.task_digest),
        *([] if plan.task.topology is None else [Fact("hosts", plan.task.topology.text(plan.task.devices))]),
        *([] if plan.task.groups is None else [Fact("groups", plan.task.groups.text(plan.task.devices))]),
        *(
            []
            if plan.task.collective_precision is None
            else [Fact("collectives in", plan.task.collective_precision.text)]
        ),
        Fact("found by", ", ".join(filter(None, (by.algorithm, effort)))),
        Fact("seed", "none" if by.seed is None else str(by.seed)),
        Fact("code", f"neuroshard {by.neuroshard_version}"),
        Fact("cost model", by.cost_model or "none"),
        Fact("its milliseconds are from", source(by.cost_model_backend, by.cost_model_device)),
        *(Fact(name, version) for name, version in by.cost_model_versions.items()),
    ]
    return facts + [Fact(f"sha256 of {name}", digest) for name, digest in files.items()]


def model_facts(model: CostModel) -> list[Fact]:
    """Facts about the cost model: the bench that it was measured on, and its training."""
    manifest = model.manifest
    if manifest is None:
        return [
            Fact("cost model", model.name),
            Fact("its milliseconds are from", source(model.backend, model.device_name)),
        ]
    by, bench = manifest.provenance, manifest.bench
    return [
        Fact("cost model", model.name),
        Fact("code", f"neuroshard {by.neuroshard_version}"),
        Fact("training", f"seed {by.seed}, {by.compute_cases:,} table sets, {by.collective_cases:,} all-to-alls"),
        Fact("started from", by.started_from or "nothing: a fresh net"),
        *_hardware(bench.hardware),
        *_bench(bench),
        Fact("batch sizes", ", ".join(f"{size:,}" for size in manifest.batch_sizes)),
        Fact("devices of all-to-alls", ", ".join(map(str, manifest.device_counts)) or "none"),
        *((Fact("tables beyond HBM", model.tiers_from),) if knows_tiers(model) else ()),
        *(Fact("missing", gap) for gap in manifest.report.gaps),
    ]


def _hardware(hardware: Hardware) -> list[Fact]:
    found = {
        "hardware": f"{hardware.name} ({hardware.kind}), {format_bytes(hardware.memory_bytes)}",
        "fingerprint": hardware.fingerprint,
        "driver": hardware.driver,
        "interconnect": hardware.interconnect,
        "compute capability": hardware.compute_capability,
        "machine": hardware.machine,
        "shared": hardware.sharing,
    }
    return [Fact(name, value) for name, value in found.items() if value]


def _bench(bench: Bench) -> list[Fact]:
    repeats = f"{bench.warmup} warm-ups, {bench.repeats} repeats"
    found = {"measuring": f"{bench.backend}, {repeats}, optimizer {bench.optimizer}, seed {bench.seed}"}
    return [Fact(name, value) for name, value in {**found, **bench.facts, **bench.versions}.items()]


def fleet_rows(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The source of a fleet and a row for each kind, from the output of `neuroshard fleet --json`. Raises InvalidInput."""
    found = decode_json(read_bytes(path), str(path))
    if not isinstance(found, dict) or not isinstance(found.get("kinds"), list):
        raise InvalidInput(f"{path}: holds no fleet; write it with `neuroshard fleet --json > {path.name}`")
    return str(found.get("source", "unknown")), [
        _kind(kind, f"{path} kinds[{n}]") for n, kind in enumerate(found["kinds"])
    ]


def _kind(kind: Any, where: str) -> dict[str, Any]:
    if not isinstance(kind, dict):
        raise InvalidInput(f"{where}: expected a JSON object, found {type(kind).__name__}")
    hardware = Hardware.parse(kind.get("hardware"), f"{where}.hardware")
    counts = {name: kind.get(name, 0) for name in ("nodes", "devices", "out_of_service")}
    if wrong := [name for name, count in counts.items() if not isinstance(count, int)]:
        raise InvalidInput(f"{where}.{wrong[0]}: expected a number, found {type(counts[wrong[0]]).__name__}")
    return {
        "fingerprint": hardware.fingerprint,
        "name": hardware.name,
        "memory": format_bytes(hardware.memory_bytes),
        "driver": hardware.driver,
        **counts,
        "state": str(kind.get("state", "")),
        "why": str(kind.get("why", "")),
    }
