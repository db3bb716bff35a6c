"""The beginning of a night: which kinds of hardware to measure first, and which cost model each model's plan is searched with."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from neuroshard import __version__
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.nightly import WORK_FOLDER, Order, Survey, Work
from neuroshard.core.value import canonical_json, sha256
from neuroshard.files.constraints import ConstraintsFile
from neuroshard.fleet.coverage import Coverage, Known, coverage
from neuroshard.fleet.kinds import Fleet, Kind

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


def survey(
    fleet: Fleet,
    known: Mapping[str, Known],
    orders: Sequence[Order],
    *,
    request: Mapping[str, object],
    batch_size: int,
    most_pods: int,
    now: datetime,
    max_age_seconds: float | None = None,
    max_error: float | None = None,
) -> tuple[Survey, tuple[Coverage, ...]]:
    """What to do tonight for `orders`, by the live cost models `known`; and how each kind stands.

    `request` is what else is asked of the measuring (cases, seed): another request begins new work. Raises UsageError for an
    order that names no hardware or several, InvalidInput for constraints that are none, NeuroshardError where what it names can
    neither be measured nor has a model.
    """
    for order in orders:  # told now, before hours of measuring
        ConstraintsFile.parse(order.constraints, f"constraints of model {order.name!r}")
    stands = coverage(
        fleet.kinds, known, now=now, batch_size=batch_size, max_age_seconds=max_age_seconds, max_error=max_error
    )
    works = tuple(_work(one, {**request, "batch_size": batch_size}, most_pods) for one in stands if one.to_measure)
    hardware = {order.name: hardware_of(order, stands, known) for order in orders}
    return Survey(orders=tuple(orders), hardware=hardware, works=works), stands


def hardware_of(order: Order, stands: Sequence[Coverage], known: Mapping[str, Known]) -> str:
    """The fingerprint of the hardware that a model is trained on. Raises UsageError, NeuroshardError.

    Of several kinds of one name (two drivers, say) the one with the most nodes in service. A kind that has left the fleet is
    found among the live cost models, the newest first.
    """
    named = [one for one in stands if _is_called(order.hardware, one.kind.hardware.name)]
    usable = [one for one in named if one.bundle or one.to_measure]
    # A100-SXM4-80GB is also the beginning of its MIG slices' names
    usable = [one for one in usable if _is_called(order.hardware, one.kind.hardware.name, whole=True)] or usable
    if len({one.kind.hardware.name for one in usable}) > 1:
        called = "; ".join(sorted({one.kind.hardware.name for one in usable}))
        raise UsageError(f"model {order.name!r}: hardware {order.hardware!r} may be any of {called}; name one")
    if usable:
        return max(usable, key=lambda one: (one.kind.nodes, one.kind.fingerprint)).kind.fingerprint
    before = [one.release for one in known.values() if order.hardware and _is_called(order.hardware, one.hardware.name)]
    if before:
        return max(before, key=lambda release: (release.time, release.fingerprint)).fingerprint
    there = "; ".join(f"{one.kind.hardware.name} ({one.state}, {one.kind.nodes} nodes in service)" for one in stands)
    raise NeuroshardError(
        f"model {order.name!r}: no cost model for hardware {order.hardware!r}, and none can be measured tonight; the fleet has "
        f"{there or 'no kind of hardware that this backend measures'}"
    )


def _is_called(wanted: str, name: str, whole: bool = False) -> bool:
    """Is `wanted` a part of a device's name, or with `whole` all of it, the maker's name and what follows a comma aside?"""
    told = name.partition(",")[0].removeprefix("NVIDIA-") if whole else name
    plain, plain_name = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (wanted, told))
    return plain.removeprefix("nvidia") == plain_name if whole else plain in plain_name


def _work(one: Coverage, request: Mapping[str, object], most_pods: int) -> Work:
    kind = one.kind
    asked = sha256(canonical_json({**request, "replaces": one.release, "neuroshard": __version__}))[:16]
    return Work(
        hardware=kind.hardware,
        folder=f"{WORK_FOLDER}/{kind.fingerprint}/{asked}",
        pods=max(1, min(kind.alike, most_pods)),
        devices=max(kind.devices, 1),
        resource=kind.resource,
        node_selector=kind.node_selector,
        tolerations=kind.tolerations,
    )
