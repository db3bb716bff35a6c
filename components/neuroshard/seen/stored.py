"""What trainers of a model saw of its plans, in a store.

<model>/seen/<time>-<16 hex digits>.json    a Seen (record.py), written once
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.plan import Plan
from neuroshard.core.release import HARDWARE
from neuroshard.core.store_url import StoreUrl
from neuroshard.seen.corrected import factors_of
from neuroshard.seen.record import Correction, Seen, comparable, correction, truth_of
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import check_model, live_plan, plans_of, read_live, read_plan
from neuroshard.store.traces import read_trace_pointer
from neuroshard.store.track import live_or_none, readable

MOST_SEEN = 200  # that are read: a job writes one an hour
MOST_SEEN_BYTES = 4 * 2**20  # of one, of 4,096 ranks


def put_seen(store: Store, seen: Seen) -> None:
    """Write what a job saw. Raises StoreError."""
    moment = seen.time.replace("-", "").replace(":", "")
    store.create(f"{check_model(seen.model)}/seen/{moment}-{seen.digest()[:16]}.json", seen.canonical_json())


def jobs_seen(store: Store) -> list[tuple[Plan, Seen]]:
    """What can be read of what the jobs of all models saw, each with its plan where that is still there."""
    keys = [entry.key.split("/") for entry in store.list("")]
    every = [
        one for model in sorted({key[0] for key in keys if key[1:2] == ["seen"]}) for one in read_seen(store, model)
    ]
    named = sorted({(one.model, one.plan_digest) for one in every})
    plans = dict(readable(named, lambda one: (one, read_plan(store, *one))))
    return [(plan, one) for one in every if (plan := plans.get((one.model, one.plan_digest))) is not None]


def read_seen(store: Store, model: str, digest: str | None = None, most: int = MOST_SEEN) -> Sequence[Seen]:
    """What can be read of what trainers of a model saw, of the plan of a digest, newest first."""
    track = plans_of(model)
    keys = [entry.key for entry in reversed(store.list(f"{model}/seen/")) if track.is_record(entry.key)][:most]
    every = readable(keys, lambda key: Seen.from_json(store.read(key, MOST_SEEN_BYTES), f"{store.url}/{key}"))
    return [seen for seen in every if digest in (None, seen.plan_digest)]


def correction_seen(store: Store, model: str) -> Correction | None:
    """The factors for a cost model (its name, uncorrected) from what all jobs saw of plans by it; None where there is no such
    job, and where jobs that are left out are promised no better by them. Raises StoreError."""
    by = correction(model, jobs_seen(store))
    return by if by and by.helps else None


def said_of_live(store: Store, model: str) -> str:
    """A line on what trainers saw of a model's live plan; empty where nothing is known, nor can be. Raises StoreError."""
    with suppress(InvalidInput):
        live = live_or_none(store, plans_of(model))
        plan, found = live_plan(live, store), read_seen(store, model, live.release.plan_digest) if live else []
        fits = [one for one in found if plan and comparable(plan, one)]
        return f"plan {live.release.plan_digest[:12]}: {truth_of(plan, fits).line}" if live and plan and fits else ""
    return ""


def said_of_trainers(store: Store, name: str) -> tuple[str, ...]:
    """Lines on what trainers of a model recorded of its tables, and saw of its live plan; none of cost models. Raises
    StoreError."""
    if name.partition("/")[0] == HARDWARE:
        return ()
    try:
        traces = f"how its tables are read: {read_trace_pointer(store, name).said}"
    except NotFound:
        traces = ""
    except InvalidInput as error:
        traces = f"how its tables are read: {error}"
    return traces, said_of_live(store, name)


def compared(store_url: StoreUrl, model: str) -> tuple[str, dict[str, Any]]:
    """The promise of a model's live plan beside what its trainers saw: as text, and as values. Raises NotFound where none has
    written anything, InvalidInput, StoreError."""
    store = open_store(store_url)
    digest = read_live(store, model).release.plan_digest
    plan = read_plan(store, model, digest)
    if not (found := [one for one in read_seen(store, model, digest) if comparable(plan, one)]):
        raise NotFound(
            f"{store.url}: no trainer has written what steps of plan {digest[:12]} of {model!r} took; let it train in "
            "watch_plan (docs/trainer.md)"
        )
    truth, made_by = truth_of(plan, found), factors_of(plan.provenance.cost_model or "")[0]
    by, better = correction_seen(store, made_by), ""
    if by:
        name = made_by if made_by.startswith("analytic:") else "…"  # of others a digest is known, not where they lie
        better = f"\nplan by what was seen: --model {name}{by.suffix} ({by})"
    values = {
        "plan": digest,
        "truth": truth._asdict() | {"parts": [part._asdict() for part in truth.parts]},
        "correction": by and by._asdict(),
        "seen": [one.model_dump(mode="json") for one in found],
    }
    return f"plan {digest[:12]} of {model}\n{truth}{better}", values
