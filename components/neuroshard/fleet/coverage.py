"""Which kinds of a fleet a live cost model serves, and why the others need measuring."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from neuroshard.core.cost import Hardware
from neuroshard.core.value import Value
from neuroshard.fleet.kinds import Kind
from neuroshard.models.serving import DAY_SECONDS, Known, Lack, Wanted, age, live_at, serves
from neuroshard.store.bundles import Track

State = Literal["covered", "new", "driver changed", "shared"] | Lack
NOT_TO_MEASURE: tuple[State, ...] = ("covered", "shared")


class Coverage(Value):
    """How a kind stands. `bundle` and `release` are the digest and the number of its own live cost model, "" and 0 without.

    `lacks` is everything in which that model falls short, `state` the worst of it.
    """

    kind: Kind
    state: State
    why: str
    bundle: str = ""
    release: int = 0
    lacks: tuple[Lack, ...] = ()

    @property
    def to_measure(self) -> bool:
        """Does it need measuring, and can it be had tonight?"""
        return self.state not in NOT_TO_MEASURE and self.can_be_measured

    @property
    def can_be_measured(self) -> bool:
        return self.kind.nodes > 0 and not self.kind.hardware.sharing


def coverage(
    kinds: Sequence[Kind],
    known: Mapping[Track, Known],
    *,
    now: datetime,
    wanted: Mapping[str, Wanted] | None = None,
    usual: Wanted = Wanted(),  # noqa: B008 # a value
) -> tuple[Coverage, ...]:
    """How each kind stands at `now` (UTC), by the live cost models `known`: against what is `wanted` of its fingerprint, else
    what is `usual`.
    """
    return tuple(_stands(kind, known, (wanted or {}).get(kind.fingerprint, usual), now) for kind in kinds)


def _stands(kind: Kind, known: Mapping[Track, Known], wanted: Wanted, now: datetime) -> Coverage:
    own = live_at(known, wanted.batch_size).get(kind.fingerprint)
    if own is None:
        state, why = _without(kind, known, wanted)
        return Coverage(kind=kind, state=state, why=why)
    digest, error = own.release.bundle_digest, own.release.error
    found = serves(own, wanted, now)
    if found:
        state, why = found[0].lack, f"cost model {digest[:12]}: {'; '.join(one.why for one in found)}"
    else:
        state, why = "covered", f"cost model {digest[:12]}, {age(own.release, now) / DAY_SECONDS:.1f} days old"
        why += "" if error is None else f", error on unseen tables {error:.1%}"
    return Coverage(
        kind=kind,
        state=state,
        why=why,
        bundle=digest,
        release=own.release.number,
        lacks=tuple(one.lack for one in found),
    )


def _without(kind: Kind, known: Mapping[Track, Known], wanted: Wanted) -> tuple[State, str]:
    """How a kind stands that has no live cost model of its own at the batch size that is wanted."""
    if kind.hardware.sharing:
        return "shared", "others compute on the same devices, so times taken there would be of no device"
    sizes = sorted(one.release.batch_size for track, one in known.items() if track.fingerprint == kind.fingerprint)
    if sizes and wanted.batch_size:
        told = ", ".join(f"{size:,}" for size in sizes)
        return (
            "batch size changed",
            f"cost models are live for {told} samples a step, and {wanted.batch_size:,} are asked for",
        )
    before = [
        one.model.manifest.bench.hardware.driver
        for one in live_at(known, wanted.batch_size).values()
        if one.model and _same_but_driver(kind.hardware, one.model.manifest.bench.hardware)
    ]
    if before:
        return "driver changed", f"its cost model is of driver {max(before)}, and the nodes have {kind.hardware.driver}"
    return "new", "no cost model of this kind is live"


def _same_but_driver(one: Hardware, other: Hardware) -> bool:
    return one.model_copy(update={"driver": ""}).fingerprint == other.model_copy(update={"driver": ""}).fingerprint
