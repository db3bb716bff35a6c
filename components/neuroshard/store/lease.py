"""Who works on something in a store just now: a lease that its holder renews, and that others take over when it has expired.

Ages are by the store's own clock alone, so no machine's clock decides whose work it is.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from uuid import uuid4

from neuroshard.core.errors import Conflict, NotFound, StoreError
from neuroshard.core.value import canonical_json
from neuroshard.store.protocol import Entry, Store

LEASE_SECONDS = 600.0  # a holder renews ten times as often: so a store that is away for minutes takes no lease away


class Held(StoreError):
    """Somebody else works on it. The message names the holder."""


@contextmanager
def leased(store: Store, key: str, owner: str, seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """Hold the lease at `key` while the block runs. Raises Held where another holds it, and StoreError.

    Whoever is killed leaves its lease behind, which anybody may take once it was not renewed for `seconds`. At its end a holder
    deletes its own lease, never that of whoever took it over.
    """
    me = uuid4().hex
    if not _took(store, key, _lease(owner, me, 0)) and not _took_over(store, key, owner, me, seconds):
        raise Held(f"{store.url}/{key}: {holder(store, key)} is at work on it; what it does is left to it")
    ended = threading.Event()

    def renew() -> None:
        count = 0
        while not ended.wait(seconds / 10):
            count += 1
            with suppress(StoreError):  # away for a while; or taken over, which the next renewal sees too
                data, token = store.read_versioned(key)
                if _nonce(data) == me:
                    store.swap(key, _lease(owner, me, count), token)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(StoreError):  # it expires by itself
            if _nonce(store.read(key)) == me:
                store.delete(key)


def holder(store: Store, key: str) -> str:
    """Who holds, or last held, the lease, in words."""
    with suppress(StoreError, ValueError, AttributeError):
        return f"night {json.loads(store.read(key)).get('owner')}"
    return "another night"


def expired(store: Store, entry: Entry, seconds: float = LEASE_SECONDS) -> bool:
    """Has the lease in a listing not been renewed for so long, by the store's clock?

    One that is dated so far in the future is expired too: a holder that lives dates it anew within a minute.
    """
    return abs(_age(store, entry)) > timedelta(seconds=seconds)


def _took(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.create(key, data)
    except Conflict:
        return False


def _took_over(store: Store, key: str, owner: str, me: str, seconds: float) -> bool:
    try:
        _, token = store.read_versioned(key)
        entry = next((one for one in store.list(key) if one.key == key), None)
        if entry is None or not expired(store, entry, seconds):
            return entry is None and _took(store, key, _lease(owner, me, 0))
        store.swap(key, _lease(owner, me, 0), token)
        return True
    except NotFound:  # its holder has just ended
        return _took(store, key, _lease(owner, me, 0))
    except Conflict:  # another one was faster
        return False


def _age(store: Store, entry: Entry) -> timedelta:
    """How long ago, by the store's clock, which is read off an object that is written for it."""
    probe = f"{entry.key.rpartition('/')[0]}/now-{uuid4().hex}"
    store.create(probe, b"")
    try:
        written = next((one.modified for one in store.list(probe)), entry.modified)
    finally:
        store.delete(probe)
    return written - entry.modified


def _lease(owner: str, me: str, count: int) -> bytes:
    return canonical_json({"format_version": 1, "owner": owner, "nonce": me, "renewed": count})


def _nonce(data: bytes) -> str:
    with suppress(ValueError, AttributeError):
        return str(json.loads(data).get("nonce"))
    return ""
