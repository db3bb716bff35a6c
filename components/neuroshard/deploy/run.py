"""Plan -> release: put the plan in the store under its digest, ask the gate, then swap the live pointer to it; or back.

    neuroshard deploy plan.json --store s3://bucket/prefix --name ads-ranker

The order of the writes (docs/formats.md, "Releases") makes a deployer that dies at any of them harmless: the old plan or
the new one is live, and whoever writes next puts the rest right.
"""

import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from neuroshard.core.errors import Conflict, InvalidInput, NotFound, Refused, StoreError
from neuroshard.core.plan import Plan
from neuroshard.core.release import Decision, Refusal, Release
from neuroshard.core.value import sha256
from neuroshard.deploy.gate import Gate, decide
from neuroshard.files.plan import read_plan as read_plan_file
from neuroshard.files.tables import read_tables
from neuroshard.store.open import open_store
from neuroshard.store.protocol import MAX_BYTES, Store
from neuroshard.store.releases import (
    Live,
    Published,
    find_plan,
    live_key,
    plan_key,
    read_live,
    read_plan,
    read_published,
    read_release,
    refusal_key,
    release_key,
)

OPEN = Gate()


class Outcome(NamedTuple):
    """The release that is live now, and what the gate said; no decision where the plan was live already."""

    release: Release
    decision: Decision | None


def deploy(plan: Plan, store: Store, model: str, *, now: datetime, gate: Gate = OPEN) -> Release:
    """Make `plan` the live one of `model`, if the gate lets it. Returns the release that is live then.

    Where the plan is live already, or not better than the live one by as much as the gate asks, nothing but the gate's record
    changes and the live release is returned. Raises Refused where the plan breaks a rule of the gate, or there is nothing to
    keep; Conflict where another deployer was faster, whose release stays; StoreError; InvalidInput where what the store holds
    is broken.
    """
    return _deploy_plan(plan, store, model, gate, now).release


def publish(plan: Plan, store: Store, model: str) -> Published:
    """Write the plan under its digest, and read it back. It does not go live."""
    data = plan.canonical_json()
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"the plan has {len(data):,} bytes, more than the {MAX_BYTES:,} that a trainer reads")
    digest = sha256(data)
    with suppress(Conflict):  # what is there under this digest is something else: reading it says so better
        store.create(plan_key(model, digest), data)
    return read_published(store, model, digest)


def promote(store: Store, model: str, digest: str, *, now: datetime) -> Release:
    """Make a published plan live, whatever the gate says; its numbers are recorded. `digest` may be its beginning.

    Raises NotFound, UsageError, and what `deploy` raises.
    """
    published = read_published(store, model, find_plan(store, model, digest))
    return _deploy(published, store, model, "promote", Gate(force=True), now).release


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
    published = read_published(store, model, target.plan_digest)
    release = Release(
        model=model,
        number=_next_number(live, store, model),
        plan_digest=target.plan_digest,
        previous_digest=live.release.plan_digest,
        rollback_number=target.rollback_number,
        time=timestamp(now),
        action="rollback",
        cost_ms=published.plan.cost_ms,
    )
    return _go_live(release, published, live, store)


def releases(store: Store, model: str) -> tuple[Release, ...]:
    """All releases of `model`, newest first, so the live one is the first. Raises NotFound where there is none."""
    live = read_live(store, model).release
    # a newer one can have come since live.json was read; the live one may not be in the history yet
    older = [number for number in reversed(history(store, model)) if number < live.number]
    return (live, *(read_release(store, model, number) for number in older))


def run(
    plan_path: Path,
    store_url: str,
    model: str,
    *,
    tables: Path | None = None,
    cost_model: Path | None = None,
    memory_margin: float = 0.0,
    max_error: float | None = None,
    min_gain: float | None = None,
    force: bool = False,
    single_writer: bool = False,
) -> Outcome:
    """Deploy a plan.json into a store, past the gate. Says on stderr if its plan was live already."""
    plan = read_plan_file(plan_path)
    price = None
    if cost_model is not None:
        from neuroshard.deploy.price import pricer  # NumPy, which a deployer without a cost model does not need

        price = pricer(cost_model, plan)
    today = None if tables is None else read_tables(tables)[0]
    gate = Gate(today, memory_margin, max_error, min_gain, price, force)
    store = open_store(store_url, single_writer=single_writer)
    outcome = _deploy_plan(plan, store, model, gate, datetime.now(UTC))
    if outcome.decision is None:
        print(f"{store.url}: this plan is live already, since {outcome.release.time}; nothing to do", file=sys.stderr)
    return outcome


def run_publish(plan_path: Path, store_url: str, model: str, *, single_writer: bool = False) -> str:
    """Publish a plan.json without making it live; its digest."""
    return sha256(publish(read_plan_file(plan_path), open_store(store_url, single_writer=single_writer), model).data)


def run_promote(store_url: str, model: str, digest: str, *, single_writer: bool = False) -> Release:
    """Make a published plan of `model` live."""
    return promote(open_store(store_url, single_writer=single_writer), model, digest, now=datetime.now(UTC))


def run_rollback(store_url: str, model: str, *, single_writer: bool = False) -> Release:
    """Roll `model` back in the store at `store_url`."""
    return rollback(open_store(store_url, single_writer=single_writer), model, now=datetime.now(UTC))


def history(store: Store, model: str) -> list[int]:
    """The numbers of the releases in the history, ascending."""
    folder = release_key(model, 1).rpartition("/")[0]
    stems = [Path(entry.key).stem for entry in store.list(f"{folder}/")]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def timestamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _deploy_plan(plan: Plan, store: Store, model: str, gate: Gate, now: datetime) -> Outcome:
    gate.check()
    _live(store, model)  # a pointer that is broken is told before anything is written
    return _deploy(publish(plan, store, model), store, model, "deploy", gate, now)


def _deploy(
    published: Published, store: Store, model: str, action: Literal["deploy", "promote"], gate: Gate, now: datetime
) -> Outcome:
    live = _live(store, model)
    plan, digest = published.plan, sha256(published.data)
    if live and live.release.plan_digest == digest:
        _remember(live, store)
        return Outcome(live.release, None)
    decision = decide(
        plan,
        gate,
        live.release if live else None,
        _live_plan(live, store),
        rolled_back=_was_rolled_back(digest, live, store),
    )
    if not decision.goes_live:
        refusal = Refusal(model=model, plan_digest=digest, time=timestamp(now), decision=decision)
        return _keep(refusal, live, store)
    release = Release(
        model=model,
        number=_next_number(live, store, model),
        plan_digest=digest,
        previous_digest=live.release.plan_digest if live else None,
        rollback_number=live.release.number if live else None,
        time=timestamp(now),
        action=action,
        cost_ms=plan.cost_ms,
        decision=decision,
    )
    return Outcome(_go_live(release, published, live, store), decision)


def _keep(refusal: Refusal, live: Live | None, store: Store) -> Outcome:
    """Record that the plan does not go live. Raises Refused unless it is only not better than the live one."""
    store.create(refusal_key(refusal), refusal.canonical_json())
    if refusal.decision.verdict == "kept" and live:
        return Outcome(live.release, refusal.decision)
    stays = f"release {live.release.number} stays live" if live else "nothing is live"
    raise Refused(
        f"{store.url}: plan {refusal.plan_digest[:12]} of {refusal.model!r} does not go live: "
        f"{refusal.decision.why} ({stays}; --force overrides)"
    )


def _was_rolled_back(digest: str, live: Live | None, store: Store) -> bool:
    """Whether the rollbacks that led to the live release, one after another, went back from this plan."""
    release = live.release if live else None
    while release and release.action == "rollback":
        if release.previous_digest == digest:
            return True
        try:
            release = read_release(store, release.model, release.number - 1)
        except NotFound:  # a number that gc took
            return False
    return False


def _live_plan(live: Live | None, store: Store) -> Plan | None:
    """The plan that is live, or None where there is none that can be read: then any valid plan is better."""
    try:
        return read_plan(store, live.release.model, live.release.plan_digest) if live else None
    except (NotFound, InvalidInput):
        return None


def _next_number(live: Live | None, store: Store, model: str) -> int:
    """One more than any release has, also where live.json was lost or put back by hand."""
    return max([live.release.number if live else 0, *history(store, model)]) + 1


def _live(store: Store, model: str) -> Live | None:
    try:
        return read_live(store, model)
    except NotFound:
        return None


def _remember(live: Live, store: Store) -> None:
    """Put the live release in the history, where its deployer may have died before it could."""
    store.create(release_key(live.release.model, live.release.number), live.data)


def _go_live(release: Release, published: Published, live: Live | None, store: Store) -> Release:
    """Swap the pointer from `live` to `release`, between two writes of the history. Raises Conflict where it lost.

    The plan is created once more after the swap: a `gc` that read the pointer before it may have taken the plan since.
    """
    if live:
        _remember(live, store)
    data = release.canonical_json()
    try:
        store.swap(live_key(release.model), data, live.token if live else None)
    except StoreError as error:
        _check_lost(error, release, data, store)
    with suppress(StoreError):  # it is live, and whoever writes next does this again
        store.create(plan_key(release.model, release.plan_digest), published.data)
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
