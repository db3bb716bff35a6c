"""Whether a live cost model is good enough for the plans that are wanted. Survey, search and publishing all use this.

A model serves if no shortfall is found. For each shortfall more is measured. A model that is merely old or inaccurate is still
usable: a plan searched with it is better than no plan.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from neuroshard.core.errors import InvalidInput, NotFound, StoreError, Unreachable
from neuroshard.core.part import Part
from neuroshard.core.release import ModelRelease, in_the_future
from neuroshard.core.table import Table
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import predicts
from neuroshard.models.published import open_bundle
from neuroshard.store.bundles import ModelKey, model_keys, models_of
from neuroshard.store.protocol import Store
from neuroshard.store.track import read_pointer

Lack = Literal[
    "unreadable",
    "batch size changed",
    "ranks missing",
    "too narrow",
    "other kinds of tables",
    "dated in the future",
    "model too old",
    "error too high",
    "partly learned",
    "tiers not measured",
]
DAY_SECONDS = 86400.0


class Wanted(NamedTuple):
    """What plans need of the cost model of a kind of hardware. The defaults need nothing.

    `ranks` are the numbers of devices that plans are for, `measurable` those whose all-to-all this hardware can measure.
    `columns` is the width of the widest shard that a plan cannot avoid. `tables` are those of the plans. `tiers` says that plans
    may put tables beyond HBM, on hardware that can measure that.
    """

    batch_size: int | None = None
    ranks: tuple[int, ...] = ()
    measurable: tuple[int, ...] = ()
    columns: int = 0
    tables: tuple[Table, ...] = ()
    tiers: bool = False
    max_error: float | None = None
    max_age_seconds: float | None = None


class Known(NamedTuple):
    """A live cost model: its release and the model, or None and the fault for which this version cannot open it."""

    release: ModelRelease
    model: TrainedCostModel | None
    fault: str = ""


class Shortfall(NamedTuple):
    """One way in which a cost model falls short, and why. `usable`: plans can still be searched with the model."""

    lack: Lack
    why: str
    usable: bool


def known_models(store: Store) -> tuple[dict[ModelKey, Known], dict[str, str]]:
    """The live cost models of a store; and by fingerprint, a note on hardware whose pointers cannot be read. Raises StoreError.

    A model that cannot be opened is among them with its fault.
    """
    keys, unlisted = model_keys(store)
    known = {}
    notes = {one: f"hardware {one}: some of its cost models cannot be listed: {why}" for one, why in unlisted.items()}
    for key in keys:
        track = models_of(*key)
        try:
            release = read_pointer(store, track).release
        except NotFound:  # published, none of them live
            continue
        except Unreachable:
            raise
        except (InvalidInput, StoreError) as error:  # damaged, or this key may not be read
            note = f"hardware {key.fingerprint} counts as without a cost model at this batch size: {error}"
            notes[key.fingerprint] = "; ".join(filter(None, (notes.get(key.fingerprint), note)))
            continue
        try:
            known[key] = Known(release, open_bundle(store, track, release.bundle_digest))
        except Unreachable:
            raise
        except (InvalidInput, StoreError) as error:
            known[key] = Known(release, None, str(error))
    return known, notes


def serves(known: Known, wanted: Wanted, now: datetime) -> tuple[Shortfall, ...]:
    """The shortfalls of a live cost model at `now` (UTC), the worst first; empty if it serves."""
    model, release = known.model, known.release
    if model is None:
        return (Shortfall("unreadable", f"it cannot be used: {known.fault}", usable=False),)
    found = []
    if wanted.batch_size not in (None, release.batch_size):
        why = f"it is for {release.batch_size:,} samples a step, and {wanted.batch_size:,} are asked for"
        found.append(Shortfall("batch size changed", why, usable=False))
    found += [
        *_ranks(model, wanted),
        *_columns(model, wanted),
        *_kinds(model, wanted),
        *_parts(model),
        *_tiers(model, wanted),
        *_age(release, wanted, now),
    ]
    error = release.error
    if wanted.max_error is not None and (error is None or error > wanted.max_error):
        is_ = "was not measured" if error is None else f"is {error:.1%}"
        why = f"its error on unseen tables {is_}, and {wanted.max_error:.1%} is allowed"
        found.append(Shortfall("error too high", why, usable=True))
    return tuple(sorted(found, key=lambda one: one.usable))


def usable(found: tuple[Shortfall, ...]) -> bool:
    """Whether plans can be searched with a model that has these shortfalls."""
    return all(one.usable for one in found)


def live_at(known: Mapping[ModelKey, Known], batch_size: int | None) -> dict[str, Known]:
    """By fingerprint, the live cost models at a batch size; without one, the newest of each hardware."""
    found: dict[str, Known] = {}
    for key, one in sorted(known.items(), key=lambda item: item[1].release.time):
        if batch_size in (None, key.batch_size):
            found[key.fingerprint] = one
    return found


def _ranks(model: TrainedCostModel, wanted: Wanted) -> list[Shortfall]:
    """Numbers of ranks that it cannot predict, and those that it extrapolates though this hardware could measure them."""
    measured = model.manifest.device_counts
    known = f"measured for {', '.join(map(str, measured))} devices" if measured else "not measured"
    missing = sorted(set(wanted.measurable) - {1, *measured})
    out_of_reach = [ranks for ranks in wanted.ranks if not predicts(model, ranks)]
    if not missing and not out_of_reach:
        return []
    asked = ", ".join(map(str, sorted({*missing, *out_of_reach})))
    why = f"its all-to-all was {known}, and plans are for {asked}"
    return [Shortfall("ranks missing", why, usable=not out_of_reach)]


def _columns(model: TrainedCostModel, wanted: Wanted) -> list[Shortfall]:
    if model.max_dim >= wanted.columns:
        return []
    why = f"its widest shard has {model.max_dim} columns, and plans need shards of {wanted.columns}"
    return [Shortfall("too narrow", why, usable=True)]


def _kinds(model: TrainedCostModel, wanted: Wanted) -> list[Shortfall]:
    lines = model.unmeasured_kinds(list(map(Part.of, wanted.tables)))
    return [Shortfall("other kinds of tables", line, usable=True) for line in lines]


def _parts(model: TrainedCostModel) -> list[Shortfall]:
    return [Shortfall("partly learned", "; ".join(model.stand_ins), usable=True)] if model.stand_ins else []


def _tiers(model: TrainedCostModel, wanted: Wanted) -> list[Shortfall]:
    if not wanted.tiers or model.manifest.tiers is not None:
        return []
    why = "it learned nothing of tables beyond HBM, and plans have host memory for some: it prices them by a datasheet's bus"
    return [Shortfall("tiers not measured", why, usable=True)]


def _age(release: ModelRelease, wanted: Wanted, now: datetime) -> list[Shortfall]:
    if in_the_future(release.time, now):
        why = f"it is dated {release.time}, which is in the future, so its age is not known"
        return [Shortfall("dated in the future", why, usable=True)]
    age_seconds = age(release, now)
    if wanted.max_age_seconds is None or age_seconds <= wanted.max_age_seconds:
        return []
    allowed = wanted.max_age_seconds / DAY_SECONDS
    why = f"it is {age_seconds / DAY_SECONDS:.1f} days old, and {allowed:.1f} are allowed"
    return [Shortfall("model too old", why, usable=True)]


def age(release: ModelRelease, now: datetime) -> float:
    """Seconds from the release to `now`."""
    return (now - datetime.fromisoformat(release.time).astimezone(UTC)).total_seconds()
