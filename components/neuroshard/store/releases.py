"""How plans and releases lie in a store, and the reading of them that deployers and trainers share.

<model>/plans/<sha256>.json        a plan, written once under the digest of its bytes
<model>/live.json                  the live Release: the one object that is ever replaced
<model>/releases/<number>.json     the live.json of each release, written once; all before the live one are there, but for
                                   those that `gc` took
<model>/decisions/<time>-….json    a Refusal: a plan that was not let through, and why
"""

import re
from typing import NamedTuple

from neuroshard.core.errors import InvalidInput, NewerFormat, NotFound, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.release import MODEL_NAME, Refusal, Release
from neuroshard.core.value import sha256
from neuroshard.store.protocol import MAX_BYTES, Store

MAX_RELEASE_BYTES = 64 * 2**10


class Live(NamedTuple):
    """A live pointer as it was read: its value, its bytes, and the token with which it can be swapped."""

    release: Release
    data: bytes
    token: str


def plan_key(model: str, digest: str) -> str:
    return f"{check_model(model)}/plans/{digest}.json"


def live_key(model: str) -> str:
    return f"{check_model(model)}/live.json"


def release_key(model: str, number: int) -> str:
    return f"{check_model(model)}/releases/{number:08d}.json"


def refusal_key(refusal: Refusal) -> str:
    """Sorts by time; the same refusal in the same second has the same key."""
    moment = refusal.time.replace("-", "").replace(":", "")
    return f"{check_model(refusal.model)}/decisions/{moment}-{refusal.digest()[:16]}.json"


def check_model(model: str) -> str:
    """`model`, if it can be a folder's name. Raises UsageError. `hardware` is where cost models lie."""
    if model == "hardware":
        raise UsageError("'hardware' is not a usable model name: cost models lie under it; choose another")
    if not re.fullmatch(MODEL_NAME, model):
        raise UsageError(
            f"{model[:120]!r} is not a usable model name; write letters, digits, '.', '_' and '-', at most 100, the first "
            "a letter or digit"
        )
    return model


def read_live(store: Store, model: str) -> Live:
    """The live pointer. Raises NotFound where the model has no release, and InvalidInput or NewerFormat."""
    key = live_key(model)
    try:
        data, token = store.read_versioned(key, MAX_RELEASE_BYTES)
        return Live(_release(data, store, key, model), data, token)
    except NotFound as error:
        raise NotFound(f"{error}; has a plan of {model!r} been deployed there (`neuroshard deploy`)?") from None
    except NewerFormat:
        raise
    except InvalidInput as error:
        raise InvalidInput(f"{error}; put the newest file of {model}/releases/ in its place") from None


def read_release(store: Store, model: str, number: int) -> Release:
    """A release from the history. Raises NotFound, InvalidInput or NewerFormat."""
    key = release_key(model, number)
    try:
        release = _release(store.read(key, MAX_RELEASE_BYTES), store, key, model)
    except NotFound as error:
        raise NotFound(
            f"{error}; `neuroshard gc` may have taken it: make a plan that is still there live with promote"
        ) from None
    if release.number != number:
        raise InvalidInput(f"{store.url}/{key}: holds release {release.number}")
    return release


def _release(data: bytes, store: Store, key: str, model: str) -> Release:
    release = Release.from_json(data, f"{store.url}/{key}")
    if release.model != model:
        raise InvalidInput(f"{store.url}/{key}: is a release of model {release.model!r}, not of {model!r}")
    return release


class Published(NamedTuple):
    """A plan with the very bytes that its digest is of: those of another version need not be those we would write."""

    plan: Plan
    data: bytes


def read_plan(store: Store, model: str, digest: str) -> Plan:
    """A plan, its digest checked before anything in it is believed. Raises NotFound, InvalidInput or NewerFormat."""
    return read_published(store, model, digest).plan


def read_published(store: Store, model: str, digest: str) -> Published:
    """`read_plan`, and the plan's bytes."""
    key = plan_key(model, digest)
    data = store.read(key, MAX_BYTES)
    if sha256(data) != digest:
        raise InvalidInput(
            f"{store.url}/{key}: its {len(data):,} bytes have sha256 {sha256(data)[:12]}…, so it is not the plan that was "
            "deployed; it is cut off or was changed: delete it and deploy the plan again"
        )
    return Published(Plan.from_json(data, f"{store.url}/{key}"), data)


def find_plan(store: Store, model: str, prefix: str) -> str:
    """The digest of the published plan that begins with `prefix`, at least 8 hex digits. Raises NotFound, UsageError."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", prefix):
        raise UsageError(
            f"{prefix[:80]!r} is not a plan's digest; give at least 8 of its hex digits, as `releases` shows them"
        )
    folder = plan_key(model, "")[: -len(".json")]
    found = [entry.key.removeprefix(folder).removesuffix(".json") for entry in store.list(folder + prefix)]
    if not found:
        raise NotFound(f"{store.url}: no plan {prefix!r} of {model!r} is published there")
    if len(found) > 1:
        raise UsageError(f"{prefix!r} is the beginning of {len(found)} plans of {model!r}; give more digits")
    return found[0]


def read_refusals(store: Store, model: str) -> tuple[Refusal, ...]:
    """The refusals of a model, newest first. Raises InvalidInput or NewerFormat for one that is broken."""
    entries = store.list(f"{check_model(model)}/decisions/")
    return tuple(
        Refusal.from_json(store.read(entry.key, MAX_RELEASE_BYTES), f"{store.url}/{entry.key}")
        for entry in reversed(entries)
    )
