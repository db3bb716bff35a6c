"""What trainers of a model saw of its plans, in a store.

<model>/seen/<time>-<16 hex digits>.json    a Seen (record.py), written once
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.plan import Plan
from neuroshard.core.release import HARDWARE
from neuroshard.seen.corrected import factors_of
from neuroshard.seen.record import Correction, Seen, comparable, correction, truth_of
from neuroshard.store.protocol import Store
from neuroshard.store.releases import check_model, plans_of, read_live, read_plan
from neuroshard.store.traces import read_trace_pointer
from neuroshard.store.track import readable

MOST_SEEN = 200  # that are read: a job writes one an hour
MOST_SEEN_BYTES = 4 * 2**20  # of one, of 4,096 ranks


def put_seen(store: Store, seen: Seen) -> None:
    """Write what a job saw. Raises StoreError."""
    moment = seen.time.replace("-", "").replace(":", "")
    store.create(f"{check_model(seen.model)}/seen/{moment}-{seen.digest()[:16]}.json", seen.canonical_json())


def read_seen(store: Store, model: str) -> list[Seen]:
    """What can be read of what trainers of a model saw, newest first."""
    return _newest(store, model, [entry.key for entry in store.list(f"{model}/seen/")])


def _newest(store: Store, model: str, keys: Sequence[str]) -> list[Seen]:
    newest = list(filter(plans_of(model).is_record, reversed(keys)))[:MOST_SEEN]
    return [*readable(newest, lambda key: Seen.from_json(store.read(key, MOST_SEEN_BYTES), f"{store.url}/{key}"))]


def _of_live(store: Store, model: str) -> tuple[str, Plan, list[Seen]]:
    """Digest and plan of a model's live release, and what trainers saw of it. Raises NotFound, InvalidInput, StoreError."""
    digest = read_live(store, model).release.plan_digest
    plan = read_plan(store, model, digest)
    return digest, plan, [one for one in read_seen(store, model) if one.plan_digest == digest and comparable(plan, one)]


def correction_seen(store: Store, model: str) -> Correction | None:
    """The factors for a cost model (its name, uncorrected) from what the jobs of all models saw of plans by it that are still
    there; None where there is none, and where jobs that are left out are promised no better by them. Raises StoreError."""
    keys = [entry.key for entry in store.list("") if entry.key.split("/")[1:2] == ["seen"]]
    by_name = groupby(keys, key=lambda key: key.partition("/")[0])
    every = [one for name, there in by_name for one in _newest(store, name, [*there])]
    named = sorted({(one.model, one.plan_digest) for one in every})
    plans = dict(readable(named, lambda one: (one, read_plan(store, *one))))
    by = correction(model, [(plan, one) for one in every if (plan := plans.get((one.model, one.plan_digest)))])
    return by if by and by.helps else None


def said_of_live(store: Store, model: str) -> str:
    """A line on what trainers saw of a model's live plan; empty where nothing is known, nor can be. Raises StoreError."""
    with suppress(NotFound, InvalidInput):
        digest, plan, found = _of_live(store, model)
        return f"plan {digest[:12]}: {truth_of(plan, found).line}" if found else ""
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


def compared(store: Store, model: str) -> tuple[str, dict[str, Any]]:
    """The promise of a model's live plan beside what its trainers saw: as text, and as values. Raises NotFound where none has
    written anything, InvalidInput, StoreError."""
    digest, plan, found = _of_live(store, model)
    if not found:
        nothing = f"{store.url}: no trainer has written what steps of plan {digest[:12]} of {model!r} took"
        raise NotFound(f"{nothing}; let it train in watch_plan (docs/trainer.md)")
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
