"""Plan -> release: put the plan in the store under its digest, then swap the live pointer to it, or back.

    neuroshard deploy plan.json --store s3://bucket/prefix --name ads-ranker

The order of the writes (docs/formats.md, "Releases") makes a deployer that dies at any of them harmless: the old plan or
the new one is live, and whoever writes next puts the rest right.
"""

import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from neuroshard.core.errors import Conflict, InvalidInput, NotFound, StoreError
from neuroshard.core.plan import Plan
from neuroshard.core.release import Release
from neuroshard.core.value import sha256
from neuroshard.files.plan import read_plan as read_plan_file
from neuroshard.store.open import open_store
from neuroshard.store.protocol import MAX_BYTES, Store
from neuroshard.store.releases import Live, live_key, plan_key, read_live, read_plan, read_release, release_key


def deploy(plan: Plan, store: Store, model: str, *, now: datetime) -> Release:
    """Make `plan` the live one of `model`. Where it is live already, nothing changes and the live release is returned.

    Raises Conflict where another deployer was faster; its release stays. Also StoreError, and InvalidInput where what the
    store holds is broken.
    """
    live = _live(store, model)
    digest = _put_plan(plan, store, model)
    if live and live.release.plan_digest == digest:
        _remember(live, store)
        return live.release
    release = Release(
        model=model,
        number=_next_number(live, store, model),
        plan_digest=digest,
        previous_digest=live.release.plan_digest if live else None,
        rollback_number=live.release.number if live else None,
        time=_timestamp(now),
        cost_ms=plan.cost_ms,
    )
    return _go_live(release, live, store)


def rollback(store: Store, model: str, *, now: datetime) -> Release:
    """Make the plan live again that the live one replaced. Another rollback goes further back, never forth.

    Raises NotFound where there is nothing to go back to, and what `deploy` raises. The plan is read and checked first.
    """
    live = read_live(store, model)
    if live.release.rollback_number is None:
        raise NotFound(
            f"{store.url}: release {live.release.number} of {model!r} has no release before it to roll back to"
        )
    _remember(live, store)
    target = read_release(store, model, live.release.rollback_number)
    plan = read_plan(store, model, target.plan_digest)
    release = Release(
        model=model,
        number=_next_number(live, store, model),
        plan_digest=target.plan_digest,
        previous_digest=live.release.plan_digest,
        rollback_number=target.rollback_number,
        time=_timestamp(now),
        action="rollback",
        cost_ms=plan.cost_ms,
    )
    return _go_live(release, live, store)


def releases(store: Store, model: str) -> tuple[Release, ...]:
    """All releases of `model`, newest first, so the live one is the first. Raises NotFound where there is none."""
    live = read_live(store, model).release
    # a newer one can have come since live.json was read; the live one may not be in the history yet
    older = [number for number in reversed(_history(store, model)) if number < live.number]
    return (live, *(read_release(store, model, number) for number in older))


def run(plan_path: Path, store_url: str, model: str, *, single_writer: bool = False) -> Release:
    """Deploy a plan.json into a store. Says on stderr if its plan was live already."""
    plan = read_plan_file(plan_path)
    store = open_store(store_url, single_writer=single_writer)
    before = _live(store, model)
    release = deploy(plan, store, model, now=datetime.now(UTC))
    if before and before.release == release:
        print(f"{store.url}: this plan is live already, since {release.time}; nothing to do", file=sys.stderr)
    return release


def run_rollback(store_url: str, model: str, *, single_writer: bool = False) -> Release:
    """Roll `model` back in the store at `store_url`."""
    return rollback(open_store(store_url, single_writer=single_writer), model, now=datetime.now(UTC))


def _history(store: Store, model: str) -> list[int]:
    """The numbers of the releases in the history, ascending."""
    folder = release_key(model, 1).rpartition("/")[0]
    stems = [Path(key).stem for key in store.list(f"{folder}/")]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _next_number(live: Live | None, store: Store, model: str) -> int:
    """One more than any release has, also where live.json was lost or put back by hand."""
    return max([live.release.number if live else 0, *_history(store, model)]) + 1


def _live(store: Store, model: str) -> Live | None:
    try:
        return read_live(store, model)
    except NotFound:
        return None


def _put_plan(plan: Plan, store: Store, model: str) -> str:
    """Write the plan under its digest, read it back, and return the digest."""
    data = plan.canonical_json()
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"the plan has {len(data):,} bytes, more than the {MAX_BYTES:,} that a trainer reads")
    digest = sha256(data)
    with suppress(Conflict):  # what is there under this digest is something else: reading it says so better
        store.create(plan_key(model, digest), data)
    read_plan(store, model, digest)
    return digest


def _remember(live: Live, store: Store) -> None:
    """Put the live release in the history, where its deployer may have died before it could."""
    store.create(release_key(live.release.model, live.release.number), live.data)


def _go_live(release: Release, live: Live | None, store: Store) -> Release:
    """Swap the pointer from `live` to `release`, between two writes of the history. Raises Conflict where it lost."""
    if live:
        _remember(live, store)
    data = release.canonical_json()
    try:
        store.swap(live_key(release.model), data, live.token if live else None)
    except StoreError as error:
        _check_lost(error, release, data, store)
    with suppress(StoreError):  # it is live, and whoever writes next does this again
        store.create(release_key(release.model, release.number), data)
    return release


def _check_lost(error: StoreError, release: Release, data: bytes, store: Store) -> None:
    """Return if the swap came through after all: a retry meets its own first write, or only the answer was lost."""
    try:
        now_live = _live(store, release.model)
    except StoreError:
        raise StoreError(
            f"{error}; whether release {release.number} went live is not known: look with `neuroshard releases`"
        ) from None
    if now_live and now_live.data == data:
        return
    if now_live and isinstance(error, Conflict):
        other = now_live.release
        raise Conflict(
            f"{store.url}: release {other.number} of {release.model!r} (plan {other.plan_digest[:12]}, {other.time}) went "
            "live in the meantime, so this one did not; look at it, then try again"
        ) from None
    raise error


def _timestamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
