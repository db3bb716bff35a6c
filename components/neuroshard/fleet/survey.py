"""The beginning of a night: which kinds of hardware to measure first, and which hardware each model's plan is for."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.nightly import Order, Request, Work, work_folder
from neuroshard.files.constraints import ConstraintsFile
from neuroshard.fleet.coverage import Coverage, coverage
from neuroshard.fleet.kinds import Fleet, Kind
from neuroshard.models.serving import Known, Wanted, live_at
from neuroshard.store.bundles import Track

BACKENDS = ("synthetic", "cpu", "cuda")


def backends_view(fleet: Fleet, backend: str) -> Fleet:
    """The fleet as `backend` measures it: GPUs, CPUs, or for the formula a twin of every kind, which no real one is taken for.

    Raises UsageError.
    """
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "synthetic":
        twins = {kind.fingerprint: kind for kind in map(_twin, fleet.kinds)}
        return fleet.model_copy(update={"kinds": tuple(twins[key] for key in sorted(twins))})
    return fleet.model_copy(update={"kinds": tuple(kind for kind in fleet.kinds if kind.hardware.kind == backend)})


def _twin(kind: Kind) -> Kind:
    told = {"kind": "synthetic", "name": f"{kind.hardware.name}, by a formula", "interconnect": ""}
    return kind.model_copy(update={"hardware": kind.hardware.model_copy(update=told)})


class Found(NamedTuple):
    """The hardware that each model's plan is for, why some can have none, what to measure, and how each kind stands."""

    hardware: dict[str, str]
    lost: dict[str, str]
    works: tuple[Work, ...]
    stands: tuple[Coverage, ...]


def survey(
    fleet: Fleet,
    known: Mapping[Track, Known],
    orders: Sequence[Order],
    *,
    request: Request,
    columns: Mapping[str, int],
    most_pods: int,
    now: datetime,
    max_age_seconds: float | None = None,
    max_error: float | None = None,
) -> Found:
    """What to do tonight for `orders`, by the live cost models `known`.

    `columns` are the widest shards that each model's plan cannot avoid. An order that cannot be (constraints that are none, an
    ambiguous name of hardware) loses its own plan alone.
    """
    usual = Wanted(request.batch_size, max_error=max_error, max_age_seconds=max_age_seconds)
    plain = coverage(fleet.kinds, known, now=now, usual=usual)
    hardware, lost = {}, {}
    for order in orders:  # said now, before hours of measuring
        try:
            ConstraintsFile.parse(order.constraints, f"constraints of model {order.name!r}")
            hardware[order.name] = hardware_of(order, plain, live_at(known, request.batch_size))
        except NeuroshardError as error:
            lost[order.name] = str(error)
    wanted = {kind.fingerprint: usual for kind in fleet.kinds}
    for kind in fleet.kinds:
        own = [order for order in orders if hardware.get(order.name) == kind.fingerprint]
        ranks = tuple(sorted({order.devices for order in own}))
        wanted[kind.fingerprint] = usual._replace(
            ranks=ranks,
            measurable=measurable(kind, ranks) if own else (),
            columns=max((columns.get(order.name, 0) for order in own), default=0),
        )
    stands = coverage(fleet.kinds, known, now=now, wanted=wanted)
    works = tuple(
        _work(one, request, wanted[one.kind.fingerprint], orders, most_pods) for one in stands if one.to_measure
    )
    return Found(hardware, lost, works, stands)


def measurable(kind: Kind, ranks: Sequence[int]) -> tuple[int, ...]:
    """Numbers of devices whose all-to-all is to be measured: 2, 4, 8 … and all of a node on GPUs; else those of the plans."""
    if kind.hardware.kind == "cuda":
        doubled = {2**power for power in range(1, kind.devices.bit_length()) if 2**power <= kind.devices}
        return tuple(sorted(doubled | ({kind.devices} - {0, 1})))
    return tuple(sorted(set(ranks) - {1}))


def hardware_of(order: Order, stands: Sequence[Coverage], live: Mapping[str, Known]) -> str:
    """The fingerprint of the hardware that a model is trained on; "" where it is known by name alone. Raises UsageError.

    Of several kinds of one name (two drivers, say) the one with the most nodes in service. A kind that has left the fleet is
    found among the live cost models, the newest first.
    """
    named = [one for one in stands if _is_called(order.hardware, one.kind.hardware.name)]
    usable = [one for one in named if one.bundle or one.can_be_measured] or named
    # A100-SXM4-80GB is also the beginning of its MIG slices' names
    usable = [one for one in usable if _is_called(order.hardware, one.kind.hardware.name, whole=True)] or usable
    if len({one.kind.hardware.name for one in usable}) > 1:
        called = "; ".join(sorted({one.kind.hardware.name for one in usable}))
        raise UsageError(f"model {order.name!r}: hardware {order.hardware!r} may be any of {called}; name one")
    if usable:
        return max(usable, key=lambda one: (one.kind.nodes, one.kind.fingerprint)).kind.fingerprint
    releases = [one.release for one in live.values()]
    before = [one for one in releases if order.hardware and _is_called(order.hardware, one.device_name)]
    if before:
        return max(before, key=lambda release: (release.time, release.fingerprint)).fingerprint
    if order.hardware:
        return ""
    there = "; ".join(f"{one.kind.hardware.name} ({one.state}, {one.kind.nodes} nodes in service)" for one in stands)
    raise UsageError(
        f"model {order.name!r}: names no hardware, and the fleet has {there or 'none that this backend measures'}; name it"
    )


def _is_called(wanted: str, name: str, whole: bool = False) -> bool:
    """Is `wanted` a part of a device's name, or with `whole` all of it, the maker's name and what follows a comma aside?"""
    told = name.partition(",")[0].removeprefix("NVIDIA-") if whole else name
    plain, plain_name = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (wanted, told))
    return plain.removeprefix("nvidia") == plain_name if whole else plain in plain_name


def _work(one: Coverage, request: Request, wanted: Wanted, orders: Sequence[Order], most_pods: int) -> Work:
    kind = one.kind
    ranks = wanted.ranks or tuple(sorted({order.devices for order in orders}))
    return Work(
        hardware=kind.hardware,
        folder=work_folder(kind.fingerprint, request),
        pods=max(1, min(kind.alike, most_pods)),
        devices=max(kind.devices, 1),
        resource=kind.resource,
        node_selector=kind.node_selector,
        tolerations=kind.tolerations,
        ranks=ranks,
        measurable=measurable(kind, ranks),
        oldest_seconds=wanted.max_age_seconds if "model too old" in one.lacks else None,
    )
