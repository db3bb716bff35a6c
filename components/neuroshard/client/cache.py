"""The last plan that was loaded, kept on this machine for when the store is down. It is a store of its own, in a folder.

<cache>/<sha256 of the store's identity>/<model>/…   laid out and checked as in any store
"""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from neuroshard.core.errors import NeuroshardError
from neuroshard.core.release import Release
from neuroshard.core.value import sha256
from neuroshard.store.folder import FolderStore
from neuroshard.store.line import Live
from neuroshard.store.protocol import Store
from neuroshard.store.releases import Published, live_key, plan_key, read_live


def cache_of(store: Store, cache_dir: Path) -> FolderStore:
    return FolderStore(cache_dir / sha256(store.identity.encode())[:32])


def remember(cache: FolderStore, live: Live[Release], published: Published) -> None:
    """Keep a live release and its plan, which were read and checked. What cannot be kept is not: no error.

    Several ranks of a host may do so at once. Plans that are no longer live go after a day.
    """
    model, digest = live.release.model, live.release.plan_digest
    with suppress(NeuroshardError, OSError):
        old = _cached(cache, model)
        if (
            old
            and old.data == live.data
            and any(e.key == plan_key(model, digest) for e in cache.list(f"{model}/plans/"))
        ):
            return
        cache.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        cache.create(plan_key(model, digest), published.data)
        if old is None:
            cache.delete(live_key(model))  # it may be there, and broken
        cache.swap(live_key(model), live.data, old.token if old else None)
        yesterday = datetime.now(UTC) - timedelta(days=1)
        for entry in cache.list(f"{model}/plans/"):
            if entry.key != plan_key(model, digest) and entry.modified < yesterday:
                cache.delete(entry.key)


def _cached(cache: FolderStore, model: str) -> Live[Release] | None:
    try:
        return read_live(cache, model)
    except NeuroshardError:
        return None
