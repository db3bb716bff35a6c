"""Delete what nobody can want any more: plans, releases and refusals that are old, and far from what is live.

    neuroshard gc --store s3://bucket/prefix --name ads-ranker --keep 10 --older-than 7d [--apply]

Kept: the live release and its plan, the last `keep` releases and their plans, the `keep` that rollbacks from the live one reach,
and whatever is younger than the age. A deployer works with a plan before any release names it; so the age, and so the plan is
looked after again on both sides: the deployer creates it once more after its swap, and this reads the pointer before every
deletion, and after it puts back the plan that has become live.
"""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from neuroshard.core.errors import NotFound, UsageError
from neuroshard.core.release import Release
from neuroshard.progress import progress
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Entry, Store
from neuroshard.store.releases import check_model, plan_key, read_live, read_release, release_key

MIN_AGE_SECONDS = 3600.0  # a deployer that takes longer from its plan to its swap is not one


class Garbage(NamedTuple):
    """What `gc` deletes, or would: releases and refusals first, then plans, which are nothing's any more by then."""

    entries: tuple[Entry, ...]
    kept: int

    @property
    def nbytes(self) -> int:
        return sum(entry.size for entry in self.entries)


def find_garbage(store: Store, model: str, *, keep: int, age_seconds: float, now: datetime) -> Garbage:
    """What may go. Raises NotFound where nothing is live: then nobody can tell what is in use; UsageError."""
    if keep < 1:
        raise UsageError(f"--keep must be at least 1 release, not {keep}")
    if age_seconds < MIN_AGE_SECONDS:
        raise UsageError(
            f"--older-than must be at least {MIN_AGE_SECONDS / 3600:.0f}h, not {age_seconds:g} s: a plan is there before "
            "its release"
        )
    live = read_live(store, model).release
    entries = store.list(f"{check_model(model)}/")
    keys = {entry.key for entry in entries}
    numbers = [n for n in _numbers(entries, model) if n != live.number]
    kept = [live, *(read_release(store, model, n) for n in sorted(numbers)[-keep:]), *_reached(store, live, keep, keys)]

    wanted = {release_key(model, release.number) for release in kept}
    wanted |= {plan_key(model, release.plan_digest) for release in kept}
    newest = now.astimezone(UTC) - timedelta(seconds=age_seconds)
    folders = [release_key(model, 1), f"{model}/decisions/", plan_key(model, "")]
    found = [
        entry
        for folder in folders
        for entry in entries
        if entry.key.startswith(folder.rpartition("/")[0] + "/") and entry.key not in wanted and entry.modified < newest
    ]
    return Garbage(tuple(found), len(entries) - len(found))


def gc(store: Store, model: str, *, keep: int, age_seconds: float, now: datetime, apply: bool = False) -> Garbage:
    """Delete the garbage if `apply`, else only find it. What it did delete before an error or a kill was garbage too."""
    garbage = find_garbage(store, model, keep=keep, age_seconds=age_seconds, now=now)
    if not apply or not garbage.entries:
        return garbage
    with progress("gc", len(garbage.entries), "objects") as bar:
        for entry in garbage.entries:
            _delete(store, model, entry.key)
            bar.advance(1, entry.key)
    return garbage


def run(store_url: str, model: str, *, keep: int, age_seconds: float, apply: bool = False) -> Garbage:
    """`gc` in the store at `store_url`, by this machine's clock. It needs no conditional writes."""
    # the one write that it may do is of bytes that were there, so it is the same on any store
    store = open_store(store_url, single_writer=True)
    return gc(store, model, keep=keep, age_seconds=age_seconds, now=datetime.now(UTC), apply=apply)


def _delete(store: Store, model: str, key: str) -> None:
    """Delete one object, unless it has become the live plan; if it becomes that meanwhile, put it back."""

    def is_live() -> bool:
        return key == plan_key(model, read_live(store, model).release.plan_digest)

    is_plan = key.startswith(plan_key(model, "").rpartition("/")[0] + "/")
    if not is_plan:
        store.delete(key)
        return
    if is_live():
        return
    try:
        data = store.read(key)
    except NotFound:  # another gc was faster
        return
    store.delete(key)
    if is_live():
        store.create(key, data)


def _numbers(entries: tuple[Entry, ...], model: str) -> list[int]:
    folder = release_key(model, 1).rpartition("/")[0] + "/"
    stems = [e.key.removeprefix(folder).removesuffix(".json") for e in entries if e.key.startswith(folder)]
    return [int(stem) for stem in stems if stem.isdecimal()]


def _reached(store: Store, live: Release, count: int, keys: set[str]) -> list[Release]:
    """The releases that as many rollbacks from the live one reach."""
    reached: list[Release] = []
    release = live
    while release.rollback_number and len(reached) < count and release_key(live.model, release.rollback_number) in keys:
        release = read_release(store, live.model, release.rollback_number)
        reached.append(release)
    return reached
