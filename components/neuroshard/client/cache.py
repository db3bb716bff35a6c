"""The last plan that was loaded, kept on this machine for when the store is down. It is a store of its own, in a folder.

<cache>/<sha256 of the store's identity>/<model>/…   laid out and checked as in any store
"""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from neuroshard.core.errors import Conflict, InvalidInput, NeuroshardError, NotFound
from neuroshard.core.release import Release
from neuroshard.core.value import sha256
from neuroshard.store.folder import FolderStore
from neuroshard.store.protocol import Store
from neuroshard.store.releases import Published, live_key, plan_key, read_live
from neuroshard.store.track import Live


def cache_of(store: Store, cache_dir: Path) -> FolderStore:
    return FolderStore(cache_dir / sha256(store.identity.encode())[:32])


def remember(cache: FolderStore, live: Live[Release], published: Published) -> None:
    """Keep a live release and its plan, which were read and checked. What cannot be kept is not: no error.

    Several ranks of a host may do so at once. What is there and broken is replaced. Plans that are no longer live go after a day.
    """
    model = live.release.model
    pointer, plan = live_key(model), plan_key(model, live.release.plan_digest)
    with suppress(NeuroshardError, OSError):
        there, token = _there(cache, pointer)
        if (there, _there(cache, plan)[0]) == (live.data, published.data):
            return
        _write(cache, plan, published.data)
        cache.swap(pointer, live.data, token)
        yesterday = cache.clock() - timedelta(days=1)
        for entry in cache.list(f"{model}/plans/"):
            if entry.key != plan and entry.modified < yesterday:
                cache.delete(entry.key)


def remember_plan(cache: FolderStore, model: str, published: Published) -> None:
    """Keep a plan that was asked for by its digest, which need not be live. What cannot be kept is not: no error."""
    with suppress(NeuroshardError, OSError):
        _write(cache, plan_key(model, sha256(published.data)), published.data)


def last(cache: FolderStore, model: str) -> Live[Release] | None:
    """The release that is kept; None where there is none that can be read."""
    try:
        return read_live(cache, model)
    except NeuroshardError:
        return None


def outdated(release: Release, seen: Release) -> bool:
    """Whether `release` went live before `seen`, of the same store: numbers only grow, unless all is begun anew, later."""
    return release.number < seen.number and release.time <= seen.time


def _write(cache: FolderStore, plan: str, data: bytes) -> None:
    """Write a plan under its key. What is there and broken is replaced."""
    cache.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        cache.create(plan, data)
    except Conflict:
        cache.delete(plan)
        cache.create(plan, data)


def _there(cache: FolderStore, key: str) -> tuple[bytes | None, str | None]:
    """What the cache holds, whole or broken, and its token. What is too large is deleted."""
    try:
        return cache.read_versioned(key)
    except NotFound:
        return None, None
    except InvalidInput:
        cache.delete(key)
        return None, None
