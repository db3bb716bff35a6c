"""Which kinds of hardware of a fleet a live cost model covers, and why the others need measuring."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from neuroshard.core.cost import Hardware
from neuroshard.core.value import Value
from neuroshard.fleet.labels import Kind
from neuroshard.models.serving import DAY_SECONDS, Known, Lack, Wanted, age, live_at, serves
from neuroshard.store.bundles import ModelKey

State = Literal["covered", "new", "driver changed", "shared"] | Lack
NOT_TO_MEASURE: tuple[State, ...] = ("covered", "shared")


class KindCoverage(Value):
    """How a kind of hardware is covered.

    `bundle` and `release` are the digest and the number of its own live cost model, "" and 0 without one. `lacks` are all
    shortfalls of that cost model; `state` is the worst of them.
    """

    kind: Kind
    state: State
    why: str
    bundle: str = ""
    release: int = 0
    lacks: tuple[Lack, ...] = ()

    @property
    def to_measure(self) -> bool:
        """Whether the kind needs measuring, and can be measured now."""
        return self.state not in NOT_TO_MEASURE and self.can_be_measured

    @property
    def can_be_measured(self) -> bool:
        return self.kind.nodes > 0 and not self.kind.hardware.sharing


def coverage(
    kinds: Sequence[Kind],
    known: Mapping[ModelKey, Known],
    *,
    now: datetime,
    wanted: Mapping[str, Wanted] | None = None,
    usual: Wanted = Wanted(),  # noqa: B008 # a value
) -> tuple[KindCoverage, ...]:
    """How the live cost models `known` cover each kind at `now` (UTC).

    What is asked of a kind's cost model is `wanted` of its fingerprint, else `usual`.
    """
    return tuple(_covered(kind, known, (wanted or {}).get(kind.fingerprint, usual), now) for kind in kinds)


def _covered(kind: Kind, known: Mapping[ModelKey, Known], wanted: Wanted, now: datetime) -> KindCoverage:
    own = live_at(known, wanted.batch_size).get(kind.fingerprint)
    if own is None:
        state, why = _without(kind, known, wanted)
        return KindCoverage(kind=kind, state=state, why=why)
    digest, error = own.release.bundle_digest, own.release.error
    found = serves(own, wanted, now)
    if found:
        state, why = found[0].lack, f"cost model {digest[:12]}: {'; '.join(one.why for one in found)}"
    else:
        state, why = "covered", f"cost model {digest[:12]}, {age(own.release, now) / DAY_SECONDS:.1f} days old"
        why += "" if error is None else f", error on unseen tables {error:.1%}"
    return KindCoverage(
        kind=kind,
        state=state,
        why=why,
        bundle=digest,
        release=own.release.number,
        lacks=tuple(one.lack for one in found),
    )


def _without(kind: Kind, known: Mapping[ModelKey, Known], wanted: Wanted) -> tuple[State, str]:
    """The state of a kind without a live cost model of its own at the wanted batch size, and why."""
    if kind.hardware.sharing:
        return "shared", "other processes share these devices, so times measured there would not be those of one device"
    sizes = sorted(one.release.batch_size for key, one in known.items() if key.fingerprint == kind.fingerprint)
    if sizes and wanted.batch_size:
        at = ", ".join(f"{size:,}" for size in sizes)
        return (
            "batch size changed",
            f"cost models are live for {at} samples a step, and {wanted.batch_size:,} are asked for",
        )
    before = [
        one.model.manifest.bench.hardware.driver
        for one in live_at(known, wanted.batch_size).values()
        if one.model and len({_without_driver(kind.hardware), _without_driver(one.model.manifest.bench.hardware)}) == 1
    ]
    if before:
        return "driver changed", f"its cost model is of driver {max(before)}, and the nodes have {kind.hardware.driver}"
    return "new", "no cost model of this kind is live"


def _without_driver(hardware: Hardware) -> str:
    return hardware.model_copy(update={"driver": ""}).fingerprint
