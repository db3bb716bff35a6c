"""The hardware of a fleet: `neuroshard fleet`; and with `--against STORE`, which kinds need measuring, and why."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from neuroshard import devices
from neuroshard.core.clean import log
from neuroshard.core.errors import UsageError
from neuroshard.core.text import wrapped
from neuroshard.core.units import format_bytes
from neuroshard.core.value import shown
from neuroshard.fleet.cluster import labelled, list_nodes, unlabelled
from neuroshard.fleet.coverage import KindCoverage, coverage
from neuroshard.fleet.labels import Fleet, Kind, kinds_of
from neuroshard.models.serving import Wanted, known_models
from neuroshard.store.open import open_store

Decoded = TypeVar("Decoded", dict[str, Any], list[Any])

# the usual taint of GPU nodes, which keeps other pods off
TOLERATIONS: tuple[Mapping[str, Any], ...] = ({"key": "nvidia.com/gpu", "operator": "Exists"},)


def local_fleet() -> Fleet:
    """This machine: its CPU, and each kind of GPU that NVML reports."""
    gpus = devices.gpus()
    kinds = [Kind(hardware=devices.cpu(), nodes=1, devices=1)]
    for fingerprint in dict.fromkeys(gpu.fingerprint for gpu in gpus):
        alike = [gpu for gpu in gpus if gpu.fingerprint == fingerprint]
        kinds.append(Kind(hardware=alike[0], nodes=1, devices=len(alike)))
    return Fleet(source="this machine", kinds=tuple(kinds))


def pods_fleet(memory_bytes: int, node_selector: Mapping[str, str], tolerations: Sequence[Mapping[str, Any]]) -> Fleet:
    """The CPU of measuring pods with so much memory, on nodes with these labels, which are not those of GPUs alone."""
    others = tuple(dict(one) for one in tolerations if one not in TOLERATIONS)
    kind = Kind(
        hardware=devices.pod_cpu(memory_bytes),
        nodes=1,
        devices=1,
        node_selector=dict(node_selector),
        tolerations=others,
    )
    return Fleet(source="measuring pods", kinds=(kind,))


def kubernetes_fleet(
    *,
    recorded: Path | None = None,
    context: str | None = None,
    node_selector: Mapping[str, str] | None = None,
    tolerations: Sequence[Mapping[str, Any]] = TOLERATIONS,
) -> Fleet:
    """The kinds of GPUs of a cluster, or of the NodeList in the file `recorded`.

    Raises NeuroshardError, InvalidInput and UsageError.
    """
    source, every = list_nodes(recorded, context)
    kinds, notes = kinds_of(nodes := labelled(every), node_selector or {}, tolerations)
    return Fleet(source=source, kinds=kinds, notes=notes if nodes else (unlabelled(every),))


def against(
    fleet: Fleet, store_url: str, *, now: datetime, max_age_seconds: float | None, max_error: float | None
) -> tuple[KindCoverage, ...]:
    """How the live cost models of a store cover the fleet at `now` (UTC)."""
    known, notes = known_models(open_store(store_url))
    log(*(f"note: {note}" for note in notes.values()))
    return coverage(fleet.kinds, known, now=now, usual=Wanted(max_age_seconds=max_age_seconds, max_error=max_error))


def json_option(text: str, kind: type[Decoded], option: str) -> Decoded:
    """Parse an option that is a JSON object or list. Raises UsageError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise UsageError(f"{option} must be a JSON {'object' if kind is dict else 'list'}, not {shown(text)}")
    return value


def fleet_json(fleet: Fleet, covered: Sequence[KindCoverage] = ()) -> str:
    """`fleet_text` as JSON: each kind with its fingerprint, and with `covered` its state and why."""
    shown_fleet = fleet.model_dump(mode="json")
    for index, kind in enumerate(shown_fleet["kinds"]):
        kind["fingerprint"] = fleet.kinds[index].fingerprint
        if covered:
            kind |= covered[index].model_dump(mode="json", exclude={"kind"}) | {"to_measure": covered[index].to_measure}
    return json.dumps({**shown_fleet, "fingerprint": fleet.fingerprint}, indent=2)


def fleet_text(fleet: Fleet, covered: Sequence[KindCoverage] = ()) -> str:
    """A table with a line for each kind; with `covered` also its state and why."""
    lines = [f"{'fingerprint':<17} {'nodes':>5} {'out':>4} {'each':>4} {'memory':>10}  hardware"]
    for index, kind in enumerate(fleet.kinds):
        hardware = kind.hardware
        facts = (
            hardware.name,
            hardware.compute_capability and f"compute {hardware.compute_capability}",
            hardware.driver and f"driver {hardware.driver}",
            hardware.machine,
            hardware.sharing,
        )
        counts = f"{kind.fingerprint:<17} {kind.nodes:>5} {kind.out_of_service:>4} {kind.devices:>4}"
        memory = f"{format_bytes(hardware.memory_bytes):>10}"
        lines += wrapped(f"{counts} {memory}  {', '.join(filter(None, facts))}", indent=46)
        if covered:
            lines += wrapped(f"-> {covered[index].state}: {covered[index].why}", indent=3)
    if not fleet.kinds:
        lines.append("no kind of hardware was found")
    return "\n".join(lines)
