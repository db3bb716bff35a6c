"""Fleet, live cost models and specs of models -> each model's hardware, and the kinds of hardware to measure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from neuroshard.core.cost import BACKENDS
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.hardware_names import is_part_of_name, is_same_name
from neuroshard.core.operator_limits import widest_cut, widest_shard
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.fleet.coverage import KindCoverage, coverage
from neuroshard.fleet.labels import Fleet, Kind
from neuroshard.fleet.run import TOLERATIONS
from neuroshard.models.serving import Known, Wanted, live_at
from neuroshard.orders.nightly import Campaign, ModelSpec, Request, campaign_folder
from neuroshard.store.bundles import ModelKey


@dataclass(frozen=True)
class SurveySettings:
    """What a nightly run asks of its survey.

    `nodes` is a file that `kubectl get nodes -o json` wrote, "" for asking the cluster; only nodes with the labels of
    `node_selector` count, and pods have these `tolerations`; a measuring pod has `pod_memory_bytes`. At most `most_pods` pods
    measure one kind at once. A cost model that is older than `max_age_seconds`, or whose error on unseen tables is above
    `max_error`, is measured again; None allows any.
    """

    request: Request
    nodes: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = TOLERATIONS
    most_pods: int = 1
    pod_memory_bytes: int = 0
    max_age_seconds: float | None = None
    max_error: float | None = None


class Surveyed(NamedTuple):
    """The fingerprint of each model's hardware, the reason of each model without a plan, what to measure, and how each kind
    is covered."""

    hardware: dict[str, str]
    no_plan: dict[str, str]
    campaigns: tuple[Campaign, ...]
    kinds: tuple[KindCoverage, ...]


def backends_view(fleet: Fleet, backend: str) -> Fleet:
    """The kinds of the fleet that `backend` measures. Raises UsageError.

    The synthetic backend measures a twin of every kind, whose fingerprint no real hardware has.
    """
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "synthetic":
        twins = {}
        for kind in fleet.kinds:
            changes = {"kind": "synthetic", "name": f"{kind.hardware.name}, by a formula", "interconnect": ""}
            twin = kind.model_copy(update={"hardware": kind.hardware.model_copy(update=changes)})
            twins[twin.fingerprint] = twin
        return fleet.model_copy(update={"kinds": tuple(twins[key] for key in sorted(twins))})
    return fleet.model_copy(update={"kinds": tuple(kind for kind in fleet.kinds if kind.hardware.kind == backend)})


def survey(
    fleet: Fleet,
    known: Mapping[ModelKey, Known],
    specs: Sequence[ModelSpec],
    tables: Mapping[str, Sequence[Table]],
    settings: SurveySettings,
    *,
    now: datetime,
    unreadable: bool = False,
) -> Surveyed:
    """Find the hardware of each model, and the kinds that no live cost model of `known` covers for the models.

    `tables` are those of each model that can be read. A model with invalid constraints, or with an ambiguous
    or unknown name of hardware, gets no plan; the others continue. With `unreadable` the store has pointers that cannot be
    read, so it may know a name that is not found.
    """
    batch_size = settings.request.batch_size
    usual = Wanted(batch_size, max_error=settings.max_error, max_age_seconds=settings.max_age_seconds)
    usually = coverage(fleet.kinds, known, now=now, usual=usual)
    hardware, no_plan = {}, {}
    for spec in specs:  # checked here, before hours of measuring
        try:
            _ = spec.rules
            hardware[spec.name] = hardware_of(spec, usually, live_at(known, batch_size))
            _check_spelling(spec, hardware[spec.name], fleet, known, unreadable)
        except NeuroshardError as error:
            no_plan[spec.name] = str(error)
    wanted = {}
    for kind in fleet.kinds:
        own = [spec for spec in specs if hardware.get(spec.name) == kind.fingerprint]
        ranks = tuple(sorted({spec.order.near_ranks(kind.topology) for spec in own}))
        wanted[kind.fingerprint] = usual._replace(
            ranks=ranks,
            measurable=measurable(kind, ranks) if own else (),
            columns=max((_columns(spec, tables.get(spec.name, ())) for spec in own), default=0),
            tables=tuple(table for spec in own for table in tables.get(spec.name, ())),
            tiers=kind.hardware.kind == "cuda" and any(spec.order.has_host_memory for spec in own),
        )
    kinds = coverage(fleet.kinds, known, now=now, wanted=wanted)
    campaigns = tuple(_campaign(one, wanted[one.kind.fingerprint], specs, settings) for one in kinds if one.to_measure)
    return Surveyed(hardware, no_plan, campaigns, kinds)


def _columns(spec: ModelSpec, tables: Sequence[Table]) -> int:
    """The widest shard that a plan cannot avoid: the widest table, split over all devices, and into what a GPU's operator
    holds."""
    step = DIM_STEP * spec.order.devices
    held = ((table, widest_cut(table, widest_shard(table, "cuda") or table.dim)) for table in tables)
    return max((min(-(-table.dim // step) * DIM_STEP, most) for table, most in held if most is not None), default=0)


def measurable(kind: Kind, ranks: Sequence[int]) -> tuple[int, ...]:
    """The numbers of devices whose all-to-all is to be measured.

    GPUs: 2, 4, 8 … and all of a node. CPUs and the formula: those of the plans.
    """
    if kind.hardware.kind == "cuda":
        doubled = {2**power for power in range(1, kind.devices.bit_length()) if 2**power <= kind.devices}
        return tuple(sorted(doubled | ({kind.devices} - {0, 1})))
    return tuple(sorted(set(ranks) - {1}))


def hardware_of(spec: ModelSpec, kinds: Sequence[KindCoverage], live: Mapping[str, Known]) -> str:
    """The fingerprint of the hardware that a model is trained on; "" where only its name is known, or not even that. Raises
    UsageError for a name that several kinds have a part of.

    Of several kinds with one name (two drivers, say), and for a model that names none, it is a kind whose devices have the
    memory that the model asks for, and of those the one with the most nodes in service. A kind that has left the fleet is found
    among the live cost models, the newest first.
    """
    named = [one for one in kinds if not spec.hardware or is_part_of_name(spec.hardware, one.kind.hardware.name)]
    usable = [one for one in named if one.bundle or one.can_be_measured] or named
    # A100-SXM4-80GB is also the beginning of the names of its MIG slices
    usable = [one for one in usable if is_same_name(spec.hardware, one.kind.hardware.name)] or usable
    if spec.hardware and len({one.kind.hardware.name for one in usable}) > 1:
        names = "; ".join(sorted({one.kind.hardware.name for one in usable}))
        raise UsageError(f"model {spec.name!r}: hardware {spec.hardware!r} may be any of {names}; name one")

    def likelihood(one: KindCoverage) -> tuple[bool, int, str]:
        return spec.most_memory <= one.kind.hardware.memory_bytes, one.kind.nodes, one.kind.fingerprint

    if usable:
        return max(usable, key=likelihood).kind.fingerprint
    releases = [one.release for one in live.values() if is_part_of_name(spec.hardware, one.release.device_name)]
    return max(releases, key=lambda release: (release.time, release.fingerprint)).fingerprint if releases else ""


def _check_spelling(
    spec: ModelSpec, fingerprint: str, fleet: Fleet, known: Mapping[ModelKey, Known], unreadable: bool
) -> None:
    """Raise UsageError for hardware that neither the fleet nor the store has ever had.

    An empty fleet proves nothing: its nodes may be away tonight, or the cluster could not be asked.
    """
    if fingerprint or unreadable or not fleet.kinds:
        return
    if any(is_part_of_name(spec.hardware, one.release.device_name) for one in known.values()):  # at another batch size
        return
    there = "; ".join(kind.hardware.name for kind in fleet.kinds)
    raise UsageError(f"no hardware {spec.hardware!r} in the fleet or the store, which have {there}; is it misspelt?")


def _campaign(one: KindCoverage, wanted: Wanted, specs: Sequence[ModelSpec], settings: SurveySettings) -> Campaign:
    kind = one.kind
    ranks = wanted.ranks or tuple(sorted({spec.order.near_ranks(kind.topology) for spec in specs}))
    return Campaign(
        hardware=kind.hardware,
        folder=campaign_folder(kind.fingerprint, settings.request),
        pods=max(1, min(kind.alike, settings.most_pods)),
        devices=max(kind.devices, 1),
        resource=kind.resource,
        node_selector=kind.node_selector,
        tolerations=kind.tolerations,
        ranks=ranks,
        measurable=measurable(kind, ranks),
        tiers=wanted.tiers,
        oldest_seconds=wanted.max_age_seconds if "model too old" in one.lacks else None,
    )
