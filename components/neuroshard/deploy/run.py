"""Plan -> release: put the plan in the store under its digest, ask the gate, then swap the live pointer to it; or back.

    neuroshard deploy plan.json --store s3://bucket/prefix --name ads-ranker

The order of the writes (docs/formats.md, "Releases") makes a deployer that dies at any of them harmless: the old plan or
the new one is live, and whoever writes next puts the rest right.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NotFound, Refused
from neuroshard.core.plan import Plan
from neuroshard.core.release import Decision, Refusal, Release
from neuroshard.core.value import sha256
from neuroshard.deploy.gate import Gate, decide
from neuroshard.deploy.golive import bring_back, claim, go_live, next_number, put, remember, timestamp
from neuroshard.files.plan import read_plan as read_plan_file
from neuroshard.files.tables import read_tables
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of, read_plan, read_release, refusal_key
from neuroshard.store.track import Artifact, Live, all_releases, find_artifact, live_or_none, read_artifact

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


def publish(plan: Plan, store: Store, model: str) -> Artifact:
    """Write the plan under its digest, and read it back. It does not go live."""
    line, data = plans_of(model), plan.canonical_json()
    (key,) = line.keys(sha256(data))
    return put(store, line, sha256(data), {key: data})


def promote(store: Store, model: str, digest: str, *, now: datetime) -> Release:
    """Make a published plan live, whatever the gate says; its numbers are recorded. `digest` may be its beginning.

    Raises NotFound, UsageError, and what `deploy` raises.
    """
    line = plans_of(model)
    artifact = claim(store, line, read_artifact(store, line, find_artifact(store, line, digest)))
    return _deploy(artifact, store, model, "promote", Gate(force=True), now).release


def rollback(store: Store, model: str, *, now: datetime) -> Release:
    """Make the plan live again that the live one replaced. Another rollback goes further back, never forth.

    Raises NotFound where there is nothing to go back to, and what `deploy` raises. The plan is read and checked first.
    """
    return bring_back(store, plans_of(model), now=now)


def releases(store: Store, model: str) -> tuple[Release, ...]:
    """All releases of `model`, newest first, so the live one is the first. Raises NotFound where there is none."""
    return all_releases(store, plans_of(model))


def run(
    plan_path: Path,
    store_url: str,
    model: str,
    *,
    tables: Path | None = None,
    cost_model: str | None = None,
    memory_margin: float = 0.0,
    max_error: float | None = None,
    min_gain: float | None = None,
    force: bool = False,
    nightly: bool = False,
    single_writer: bool = False,
) -> Outcome:
    """Deploy a plan.json into a store, past the gate (`nightly`: by its rules for a night).

    Says on stderr what its search noted, and if it was live already.
    """
    plan = read_plan_file(plan_path)
    price = None
    if cost_model is not None:
        from neuroshard.deploy.price import pricer  # NumPy, which a deployer without a cost model does not need

        price = pricer(cost_model, plan)
    today = None if tables is None else read_tables(tables)[0]
    gate = Gate(today, memory_margin, max_error, min_gain, price, force, nightly)
    store = open_store(store_url, single_writer=single_writer)
    outcome = _deploy_plan(plan, store, model, gate, datetime.now(UTC))
    if outcome.decision is None:
        log(f"{store.url}: this plan is live already, since {outcome.release.time}; nothing to do")
    else:
        said = (*filter(None, [plan.provenance.instead]), *plan.provenance.notes)
        log(*(f"note: {plan_path}: {note}" for note in said))
    return outcome


def run_publish(plan_path: Path, store_url: str, model: str, *, single_writer: bool = False) -> str:
    """Publish a plan.json without making it live; its digest."""
    return publish(read_plan_file(plan_path), open_store(store_url, single_writer=single_writer), model).digest


def _deploy_plan(plan: Plan, store: Store, model: str, gate: Gate, now: datetime) -> Outcome:
    gate.check()
    live_or_none(store, plans_of(model))  # a pointer that is broken is told before anything is written
    return _deploy(publish(plan, store, model), store, model, "deploy", gate, now)


def _deploy(
    artifact: Artifact, store: Store, model: str, action: Literal["deploy", "promote"], gate: Gate, now: datetime
) -> Outcome:
    line = plans_of(model)
    live = live_or_none(store, line)
    plan: Plan = artifact.value
    if live and live.release.plan_digest == artifact.digest:
        remember(live, store, line)
        return Outcome(live.release, None)
    decision = decide(
        plan,
        gate,
        live.release if live else None,
        _live_plan(live, store),
        rolled_back=_was_rolled_back(artifact.digest, live, store),
    )
    if not decision.goes_live:
        refusal = Refusal(model=model, plan_digest=artifact.digest, time=timestamp(now), decision=decision)
        return _keep(refusal, live, store)
    release = Release(
        model=model,
        number=next_number(live, store, line),
        plan_digest=artifact.digest,
        previous_digest=live.release.plan_digest if live else None,
        rollback_number=live.release.number if live else None,
        time=timestamp(now),
        action=action,
        cost_ms=plan.cost_ms,
        decision=decision,
    )
    return Outcome(go_live(release, live, store, line), decision)


def _keep(refusal: Refusal, live: Live[Release] | None, store: Store) -> Outcome:
    """Record that the plan does not go live. Raises Refused unless it is only not better than the live one."""
    store.create(refusal_key(refusal), refusal.canonical_json())
    if refusal.decision.verdict == "kept" and live:
        return Outcome(live.release, refusal.decision)
    stays = f"release {live.release.number} stays live" if live else "nothing is live"
    raise Refused(
        f"{store.url}: plan {refusal.plan_digest[:12]} of {refusal.model!r} does not go live: "
        f"{refusal.decision.why} ({stays}; --force overrides)"
    )


def _was_rolled_back(digest: str, live: Live[Release] | None, store: Store) -> bool:
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


def _live_plan(live: Live[Release] | None, store: Store) -> Plan | None:
    """The plan that is live, or None where there is none that can be read: then any valid plan is better."""
    try:
        return read_plan(store, live.release.model, live.release.plan_digest) if live else None
    except (NotFound, InvalidInput):
        return None
