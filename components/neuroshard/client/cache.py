"""Copies of the last plan that was loaded, and of its lists of hot rows, on this machine, for when the store is down. They
are a store of their own, in a folder.

<cache>/<sha256 of the store's identity>/<model>/…   laid out and checked as in any store
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from neuroshard.core.errors import Conflict, InvalidInput, NeuroshardError, NotFound
from neuroshard.core.release import Release
from neuroshard.core.value import sha256
from neuroshard.store.folder import FolderStore
from neuroshard.store.protocol import Store
from neuroshard.store.releases import Published, live_key, plan_key, read_live
from neuroshard.store.row_orders import rows_of
from neuroshard.store.track import Live, read_artifact


def cache_of(store: Store, cache_dir: Path) -> FolderStore:
    return FolderStore(cache_dir / sha256(store.identity.encode())[:32])


def remember(cache: FolderStore, live: Live[Release], published: Published) -> None:
    """Keep a live release and its plan, both already checked. Failing to write is no error.

    Several ranks of a host may do this at once. A damaged copy is replaced. Plans that are not live are deleted after a day.
    """
    model = live.release.model
    pointer, plan = live_key(model), plan_key(model, live.release.plan_digest)
    with suppress(NeuroshardError, OSError):
        there, token = _there(cache, pointer)
        if (there, _there(cache, plan)[0]) == (live.data, published.data):
            return
        _write(cache, plan, published.data)
        cache.swap(pointer, live.data, token)
        _delete_older(cache, f"{model}/plans/", [plan])


def remember_plan(cache: FolderStore, model: str, published: Published) -> None:
    """Keep a plan that was loaded by its digest. Failing to write is no error."""
    with suppress(NeuroshardError, OSError):
        _write(cache, plan_key(model, sha256(published.data)), published.data)


def kept_list(cache: FolderStore, model: str, digest: str) -> bytes | None:
    """A list of hot rows in the cache (store/row_orders.py), of this digest; None if there is none that can be read."""
    try:
        data: bytes = read_artifact(cache, rows_of(model), digest).value
    except (NeuroshardError, OSError):
        return None
    return data


def remember_lists(cache: FolderStore, model: str, lists: Mapping[str, bytes], kept: Collection[str]) -> None:
    """Keep lists of hot rows, by their digests, beside those that are `kept` already. Failing to write is no error. Others are
    deleted after a day."""
    with suppress(NeuroshardError, OSError):
        for digest, data in lists.items():
            if digest not in kept:
                _write(cache, rows_of(model).keys(digest)[0], data)
        _delete_older(cache, f"{model}/rows/", [rows_of(model).keys(digest)[0] for digest in lists])


def last(cache: FolderStore, model: str) -> Live[Release] | None:
    """The release in the cache; None if there is none that can be read."""
    try:
        return read_live(cache, model)
    except NeuroshardError:
        return None


def outdated(release: Release, seen: Release) -> bool:
    """True if `release` went live before `seen`. Numbers only grow, unless a store was begun again, later."""
    return release.number < seen.number and release.time <= seen.time


def _write(cache: FolderStore, key: str, data: bytes) -> None:
    """Write a plan or a list under its key, in place of a damaged one."""
    cache.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        cache.create(key, data)
    except Conflict:
        cache.delete(key)
        cache.create(key, data)


def _delete_older(cache: FolderStore, folder: str, kept: Collection[str]) -> None:
    """Delete what is in a folder for more than a day, but for the keys that are kept."""
    yesterday = cache.clock() - timedelta(days=1)
    for entry in cache.list(folder):
        if entry.modified < yesterday and entry.key not in kept:
            cache.delete(entry.key)


def _there(cache: FolderStore, key: str) -> tuple[bytes | None, str | None]:
    """The content of a key and its token, unchecked. Content that is too large is deleted."""
    try:
        return cache.read_versioned(key)
    except NotFound:
        return None, None
    except InvalidInput:
        cache.delete(key)
        return None, None
