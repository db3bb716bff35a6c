"""Plan -> release: put the plan in the store under its digest, ask the gate, then make the plan the live one.

    neuroshard deploy plan.json --store s3://bucket/prefix --name ads-ranker

The order of the writes (golive.py) makes a deployer that dies at any of them harmless: the old plan or
the new one is live, and the next writer completes what is missing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NotFound, Refused
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.release import Decision, Pointer, Refusal, Release
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.value import sha256, timestamp
from neuroshard.deploy.gate import Gate, decide
from neuroshard.deploy.golive import claim, go_live, next_number, put, put_lists, remember, roll_back
from neuroshard.files.plan import read_plan as read_plan_file
from neuroshard.store.bundles import track_of
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import live_plan, plans_of, read_plan, refusal_key
from neuroshard.store.row_orders import read_ids
from neuroshard.store.track import Artifact, Live, find_artifact, history, live_or_none, read_artifact, read_past

if TYPE_CHECKING:
    from neuroshard.costmodel.protocol import CostModel
    from neuroshard.files.row_orders import ReadIds


@dataclass(frozen=True)
class DeploySettings(Gate):
    """The gate's rules, and what is asked beside them.

    `cost_model` names the plan's cost model as `--model` does; with it the gate prices the live plan. `row_orders` is the folder
    of the lists of hot rows that the plan's tables name, by default that beside the plan's file.
    """

    cost_model: str | None = None
    row_orders: Path | None = None
    single_writer: bool = False


RELEASES_READ = 50  # the newest of the history: about a year of plans that were worth a release
Placement = frozenset[Shard]
OPEN = Gate()
USUAL = DeploySettings()


class Deployed(NamedTuple):
    """The release that is live now, and the gate's decision; None where the plan was live already."""

    release: Release
    decision: Decision | None


def deploy(plan: Plan, store: Store, model: str, *, now: datetime, gate: Gate = OPEN) -> Release:
    """Make `plan` the live one of `model`, if the gate allows it. Returns the release that is live then.

    Where the plan is live already, or the gate keeps the live plan, only the gate's record is written. Raises Refused where
    the plan breaks a rule of the gate, or nothing is live that could be kept; Conflict where another deployer was faster, whose
    release stays; StoreError; InvalidInput where an object of the store is broken.
    """
    return _deploy_plan(plan, store, model, gate, now).release


def publish(plan: Plan, store: Store, model: str, row_orders: Path | None = None) -> Artifact:
    """Write the plan under its digest, and read it back; before it the lists of hot rows that are in the folder `row_orders`. It
    does not go live. Raises InvalidInput for one that no reader would take, as a copy that was made in memory may be."""
    plan = plan.read_back()
    put_lists(plan, store, model, row_orders)
    track, data = plans_of(model), plan.canonical_json()
    (key,) = track.keys(sha256(data))
    return put(store, track, sha256(data), {key: data})


def promote(store: Store, model: str, digest: str, *, now: datetime) -> Release:
    """Make a published plan live, whatever the gate finds; its numbers are recorded. `digest` may be shortened.

    Raises NotFound, UsageError, and what `deploy` raises.
    """
    track = plans_of(model)
    artifact = claim(store, track, read_artifact(store, track, find_artifact(store, track, digest)))
    return _deploy(artifact, store, model, "promote", Gate(force=True), now).release


def run(plan_path: Path, store_url: str, model: str, settings: DeploySettings = USUAL) -> Deployed:
    """Deploy a plan.json into a store, if the gate allows it, with the lists of hot rows beside it. Notes of the plan's search go
    to stderr."""
    settings = replace(settings, row_orders=settings.row_orders or plan_path.parent / LISTS_FOLDER)
    return deploy_into(read_plan_file(plan_path), store_url, model, settings, where=str(plan_path))


def deploy_into(plan: Plan, store_url: str, model: str, settings: DeploySettings = USUAL, *, where: str) -> Deployed:
    """Deploy a plan into the store of this URL, if the gate allows it. Notes of its search go to stderr, after `where`."""
    price = settings.price if settings.cost_model is None else pricer(settings.cost_model, plan)
    gate = replace(settings, price=price)
    store = open_store(store_url, single_writer=settings.single_writer)
    deployed = _deploy_plan(plan, store, model, gate, datetime.now(UTC), settings.row_orders)
    if deployed.decision is None:
        log(f"{store.url}: this plan is live already, since {deployed.release.time}; nothing to do")
    else:
        notes = (*filter(None, [plan.provenance.instead]), *plan.provenance.notes)
        log(*(f"note: {where}: {note}" for note in notes))
    return deployed


def run_publish(plan_path: Path, store_url: str, model: str, *, single_writer: bool = False) -> str:
    """Publish a plan.json, and the lists of hot rows beside it, without making it live; its digest."""
    store = open_store(store_url, single_writer=single_writer)
    return publish(read_plan_file(plan_path), store, model, plan_path.parent / LISTS_FOLDER).digest


def _deploy_plan(
    plan: Plan, store: Store, model: str, gate: Gate, now: datetime, row_orders: Path | None = None
) -> Deployed:
    gate.check()
    live_or_none(store, plans_of(model))  # raises for a broken pointer before anything is written
    return _deploy(publish(plan, store, model, row_orders), store, model, "deploy", gate, now)


def _deploy(
    artifact: Artifact, store: Store, model: str, action: Literal["deploy", "promote"], gate: Gate, now: datetime
) -> Deployed:
    """Ask the gate about a published plan, and make it live or record why not."""
    track = plans_of(model)
    live = live_or_none(store, track)
    plan: Plan = artifact.value
    if live and live.release.plan_digest == artifact.digest:
        remember(live, store, track)
        return Deployed(live.release, None)
    read = cache(partial(read_ids, store, model))  # a list may be 16 MiB, and is asked for more than once
    there, drifted = as_read_now(live_plan(live, store), plan, read)
    # a person who deploys a placement by hand means it; a nightly run searches the same one again with another cost model
    digests = rolled_back_digests(live, model, store)
    placed = rolled_back_placements(digests, model, store) if gate.nightly else ()
    decision = decide(
        plan,
        gate,
        live.release if live else None,
        there,
        rolled_back=artifact.digest in digests or placement(plan) in placed,
        drifted=drifted,
    )
    if not decision.goes_live:
        refusal = Refusal(model=model, plan_digest=artifact.digest, time=timestamp(now), decision=decision)
        return _keep(refusal, live, store)
    release = Release(
        model=model,
        number=next_number(live, store, track),
        plan_digest=artifact.digest,
        previous_digest=live.release.plan_digest if live else None,
        rollback_number=live.release.number if live else None,
        time=timestamp(now),
        action=action,
        cost_ms=plan.cost_ms,
        decision=decision,
    )
    return Deployed(go_live(release, live, store, track), decision)


def _keep(refusal: Refusal, live: Live[Release] | None, store: Store) -> Deployed:
    """Record that the plan does not go live. Raises Refused, unless the live plan is merely kept as the better one."""
    store.create(refusal_key(refusal), refusal.canonical_json())
    if refusal.decision.verdict == "kept" and live:
        return Deployed(live.release, refusal.decision)
    stays = f"release {live.release.number} stays live" if live else "nothing is live"
    raise Refused(
        f"{store.url}: plan {refusal.plan_digest[:12]} of {refusal.model!r} does not go live: "
        f"{refusal.decision.why} ({stays}; --force overrides)"
    )


def as_read_now(live: Plan | None, plan: Plan, read: "ReadIds") -> tuple[Plan | None, tuple[str, ...]]:
    """The live plan with what the hottest rows of its row orders have of the lookups now, by the newer orders of a plan; and
    lines on those that access has drifted from. A note says where that is not known."""
    if live is None or not live.held.orders:
        return live, ()
    from neuroshard.files.row_orders import with_drift  # NumPy, which other plans do not need

    task, drifted, unknown = with_drift(live.held, plan.held, read, "the live plan's")
    log(*([f"note: {unknown}"] if unknown else []))
    return live.named.model_copy(update={"task": task}), drifted


def pricer(spec: str, plan: Plan) -> Callable[[Plan, Plan], float | None]:
    """The gate's `price`, with the cost model that `spec` names. Raises InvalidInput unless `plan` was searched with it."""
    from neuroshard.costmodel.pricing import (
        check_searched_with,  # NumPy, which a deployer without a cost model does not need
    )
    from neuroshard.models.open import open_cost_model

    model = open_cost_model(spec, plan.task.batch_size)
    check_searched_with(plan, model, f"{spec}: is cost model")
    return lambda other, today: price(other, today, model)


def price(other: Plan, today: Plan, model: "CostModel") -> float | None:
    """Predicted ms of the slowest device for the shards of `other` with the tables of `today`; None where it cannot be priced."""
    from neuroshard.costmodel.pricing import price_shards

    prices = price_shards(model, today.held.held_as(other.held), other.shards)
    return None if prices is None else float(prices.total_ms.max())


def run_promote(store_url: str, name: str, digest: str, *, single_writer: bool = False) -> Pointer:
    """Make a published plan or cost model live, by this machine's clock."""
    store, now = open_store(store_url, single_writer=single_writer), datetime.now(UTC)
    if track_of(name).noun == "plan":
        return promote(store, name, digest, now=now)
    from neuroshard.deploy.bundles import promote_model

    return promote_model(store, track_of(name), digest, now=now)


def run_rollback(store_url: str, name: str, *, single_writer: bool = False) -> Pointer:
    """Make the plan or cost model live again that the live one replaced, by this machine's clock."""
    store = open_store(store_url, single_writer=single_writer)
    release: Pointer = roll_back(store, track_of(name), now=datetime.now(UTC))
    return release


def placement(plan: Plan) -> Placement:
    """Which shard is on which device, which is all that a trainer runs of a plan."""
    return frozenset(plan.shards)


def rolled_back_digests(live: Live[Release] | None, model: str, store: Store) -> frozenset[str]:
    """The digests of the plans of a model that were rolled back from, and were not made live again since. Raises StoreError."""
    said: dict[str, bool] = {}  # by the newest release that concerns a plan
    for release in _newest(live, model, store):
        said.setdefault(release.plan_digest, False)
        if release.action == "rollback" and release.previous_digest:
            said.setdefault(release.previous_digest, True)
    return frozenset(digest for digest, rolled_back in said.items() if rolled_back)


def rolled_back_placements(digests: frozenset[str], model: str, store: Store) -> frozenset[Placement]:
    """The placements of those plans that can be read. Raises StoreError."""
    found = set()
    for digest in digests:
        try:
            found.add(placement(read_plan(store, model, digest)))
        except (NotFound, InvalidInput):  # gc deleted it, or it is damaged
            continue
    return frozenset(found)


def _newest(live: Live[Release] | None, model: str, store: Store) -> Iterator[Release]:
    """The newest releases, the live one first. Those that cannot be read are left out."""
    numbers = history(store, plans_of(model))
    if live:
        yield live.release
        numbers = [number for number in numbers if number < live.release.number]
    for number in numbers[: -RELEASES_READ - 1 : -1]:
        try:
            yield read_past(store, plans_of(model), number)
        except (NotFound, InvalidInput):
            continue
