"""Which kinds of a fleet a live cost model covers, and why the others need measuring."""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.release import ModelRelease
from neuroshard.core.value import Value
from neuroshard.costmodel.bundle import RATES_OF
from neuroshard.costmodel.features import FEATURE_VERSION, FEATURES
from neuroshard.fleet.kinds import Kind
from neuroshard.store.bundles import fingerprints, models_of
from neuroshard.store.line import read_artifact, read_pointer
from neuroshard.store.protocol import Store

State = Literal[
    "covered",
    "new",
    "driver changed",
    "other version",
    "batch size changed",
    "model too old",
    "error too high",
    "shared",
]
NOT_TO_MEASURE: tuple[State, ...] = ("covered", "shared")
DAY_SECONDS = 86400.0


class Known(NamedTuple):
    """A live cost model: its release, the hardware that it was measured on, and whether this version can use it."""

    release: ModelRelease
    hardware: Hardware
    readable: bool = True


class Coverage(Value):
    """How a kind stands. `bundle` and `release` are the digest and the number of its own live cost model, "" and 0 without."""

    kind: Kind
    state: State
    why: str
    bundle: str = ""
    release: int = 0

    @property
    def to_measure(self) -> bool:
        """Does it need measuring, and can it be had tonight?"""
        return self.state not in NOT_TO_MEASURE and self.kind.nodes > 0


def known_models(store: Store) -> dict[str, Known]:
    """The live cost models of a store, by fingerprint. Raises StoreError and InvalidInput.

    One whose files are gone or damaged is told on stderr and left out: its kind is then measured anew, and holds up no other.
    """
    known = {}
    for fingerprint in fingerprints(store):
        line = models_of(fingerprint)
        try:
            release = read_pointer(store, line).release
        except NotFound:  # published, none of them live
            continue
        try:
            raw = read_artifact(store, line, release.bundle_digest).value
        except (NotFound, InvalidInput) as error:
            print(f"note: its hardware counts as without a cost model, though one is live: {error}", file=sys.stderr)
            continue
        key, bench = line.keys(release.bundle_digest)[-1], raw.get("bench")
        if not isinstance(bench, dict):
            raise InvalidInput(f"{store.url}/{key}: has no bench, so it is no cost model")
        hardware = Hardware.parse(bench.get("hardware"), f"{store.url}/{key}: bench.hardware")
        made_for = (raw.get("feature_version"), raw.get("features"))
        readable = raw.get("format_version") in RATES_OF
        known[fingerprint] = Known(release, hardware, readable and made_for == (FEATURE_VERSION, list(FEATURES)))
    return known


def coverage(
    kinds: Sequence[Kind],
    known: Mapping[str, Known],
    *,
    now: datetime,
    batch_size: int | None = None,
    max_age_seconds: float | None = None,
    max_error: float | None = None,
) -> tuple[Coverage, ...]:
    """How each kind stands at `now` (UTC), by the live cost models `known`. None asks for nothing."""
    stands = []
    for kind in kinds:
        state, why = _state(kind, known, now, batch_size, max_age_seconds, max_error)
        own = known.get(kind.fingerprint)
        stands.append(
            Coverage(
                kind=kind,
                state=state,
                why=why,
                bundle=own.release.bundle_digest if own else "",
                release=own.release.number if own else 0,
            )
        )
    return tuple(stands)


def _state(
    kind: Kind,
    known: Mapping[str, Known],
    now: datetime,
    batch_size: int | None,
    max_age_seconds: float | None,
    max_error: float | None,
) -> tuple[State, str]:
    own = known.get(kind.fingerprint)
    if own is None:
        if kind.hardware.sharing:
            return "shared", "others compute on the same devices, so times taken there would be of no device"
        before = [other.hardware.driver for other in known.values() if _same_but_driver(kind.hardware, other.hardware)]
        if before:
            return (
                "driver changed",
                f"its cost model is of driver {max(before)}, and the nodes have {kind.hardware.driver}",
            )
        return "new", "no cost model of this kind is live"

    if not own.readable:
        return "other version", "its cost model is of a format or of features that this version does not use"
    if batch_size not in (None, own.release.batch_size):
        told = f"its cost model is for {own.release.batch_size:,} samples a step, and {batch_size:,} are asked for"
        return "batch size changed", told
    age_seconds = (now - datetime.fromisoformat(own.release.time).astimezone(UTC)).total_seconds()
    days = f"{age_seconds / DAY_SECONDS:.1f} days old"
    if max_age_seconds is not None and age_seconds > max_age_seconds:
        return "model too old", f"its cost model is {days}, and {max_age_seconds / DAY_SECONDS:.1f} are allowed"
    error = own.release.error
    if max_error is not None and (error is None or error > max_error):
        is_ = "was not measured" if error is None else f"is {error:.1%}"
        return "error too high", f"its cost model's error on unseen tables {is_}, and {max_error:.1%} is allowed"
    return "covered", f"cost model {own.release.bundle_digest[:12]}, {days}" + (
        "" if error is None else f", error on unseen tables {error:.1%}"
    )


def _same_but_driver(one: Hardware, other: Hardware) -> bool:
    return one.model_copy(update={"driver": ""}).fingerprint == other.model_copy(update={"driver": ""}).fingerprint
