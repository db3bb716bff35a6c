"""A model's plans in a store: their release track (track.py), as deployers and trainers read it.

<model>/plans/<sha256>.json        a plan, written once under the digest of its bytes
<model>/decisions/<time>-….json    a Refusal: a plan that the gate did not let through, and why
<model>/size.html, size.json       the sizes that the model's newest night found, written over each night
"""

import re
from typing import NamedTuple

from neuroshard.core.errors import InvalidInput, NotFound, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.release import HARDWARE, MODEL_NAME, Refusal, Release
from neuroshard.store.protocol import Store
from neuroshard.store.track import MAX_RELEASE_BYTES, Files, Live, ReleaseTrack, read_artifact, read_pointer, readable


class Published(NamedTuple):
    """A plan, and the bytes that its digest is of. Another version may have written other bytes than this one would."""

    plan: Plan
    data: bytes


def plans_of(model: str) -> ReleaseTrack[Release]:
    """The release track of a model's plans. Raises UsageError for an invalid name of a model."""
    return ReleaseTrack(check_model(model), Release, ("plans/{}.json",), _plan, "plan", "deploy")


def plan_key(model: str, digest: str) -> str:
    return plans_of(model).keys(digest)[0]


def live_key(model: str) -> str:
    return plans_of(model).live_key


def refusal_key(refusal: Refusal) -> str:
    """The key of a refusal. Keys sort by time; the same refusal in the same second has the same key."""
    moment = refusal.time.replace("-", "").replace(":", "")
    return f"{check_model(refusal.model)}/decisions/{moment}-{refusal.digest()[:16]}.json"


def size_keys(model: str) -> tuple[str, str]:
    """The keys of a model's page of sizes and of its JSON, beside live.json."""
    return f"{check_model(model)}/size.html", f"{model}/size.json"


def check_model(model: str) -> str:
    """Return `model`, if it can be the name of a folder. Raises UsageError."""
    if model == HARDWARE:
        raise UsageError(f"{HARDWARE!r} is not a usable model name: it is the folder of cost models; choose another")
    if not isinstance(model, str) or not re.fullmatch(MODEL_NAME, model):
        raise UsageError(
            f"{str(model)[:120]!r} is not a usable model name; write letters, digits, '.', '_' and '-', at most 100, the first "
            "a letter or digit"
        )
    return model


def read_live(store: Store, model: str) -> Live[Release]:
    """The live pointer. Raises NotFound where the model has no release, and InvalidInput or NewerFormat."""
    return read_pointer(store, plans_of(model))


def read_plan(store: Store, model: str, digest: str) -> Plan:
    """A plan, parsed after its digest was checked. Raises NotFound, InvalidInput or NewerFormat."""
    return read_published(store, model, digest).plan


def read_published(store: Store, model: str, digest: str) -> Published:
    """`read_plan`, and the plan's bytes."""
    _, files, plan = read_artifact(store, plans_of(model), digest)
    return Published(plan, files[plan_key(model, digest)])


def live_plan(live: Live[Release] | None, store: Store) -> Plan | None:
    """The plan that a live pointer names. None without a pointer, or where its plan cannot be read."""
    try:
        return read_plan(store, live.release.model, live.release.plan_digest) if live else None
    except (NotFound, InvalidInput):
        return None


def read_refusals(store: Store, model: str) -> tuple[Refusal, ...]:
    """The refusals of a model that can be read, newest first."""
    track = plans_of(model)
    keys = [entry.key for entry in reversed(store.list(f"{model}/decisions/")) if track.is_record(entry.key)]
    return tuple(
        readable(keys, lambda key: Refusal.from_json(store.read(key, MAX_RELEASE_BYTES), f"{store.url}/{key}"))
    )


def _plan(files: Files, where: str) -> Plan:
    ((_, data),) = files.items()
    return Plan.from_json(data, where)
