"""A lease on something in a store: one holder at a time, who renews it. An expired lease may be taken over.

Ages are by the store's own clock alone, so no machine's clock decides who holds a lease.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from uuid import uuid4

from neuroshard.core.errors import Conflict, InvalidInput, NotFound, StoreError
from neuroshard.core.value import canonical_json, decode_json
from neuroshard.store.patience import PatientStore
from neuroshard.store.protocol import ObjectInfo, Store

LEASE_SECONDS = 600.0  # a holder renews ten times as often, so no lease is lost while a store is away for minutes


class LeaseHeld(StoreError):
    """Somebody else holds the lease. The message names the holder."""


@contextmanager
def repeating(every_seconds: float, do: Callable[[], None]) -> Iterator[None]:
    """Call `do` every `every_seconds` while the block runs. `do` must not raise.

    The block does not end before the last call has.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_seconds):
            do()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def leased(store: PatientStore, key: str, owner: str, seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """Hold the lease at `key` while the block runs. Raises LeaseHeld where another run holds it, and StoreError.

    A store that does not answer is waited for. A holder that is killed leaves its lease behind. Anybody may take over a lease
    that was not renewed for `seconds`. At the end a holder deletes its own lease alone, never one that was taken over.
    """
    nonce = uuid4().hex
    if not _create(store, key, _lease(owner, nonce, 0)) and not _take_over(store, key, owner, nonce, seconds):
        raise LeaseHeld(f"{store.url}/{key}: {holder(store, key)} is working on it, so this run leaves it alone")
    renewals = 0

    def renew() -> None:
        nonlocal renewals
        renewals += 1
        with suppress(StoreError):  # the store is away; or the lease was taken over, which the next renewal sees too
            data, token = store.impatient.read_versioned(key)
            if _nonce(data) == nonce:
                store.impatient.swap(key, _lease(owner, nonce, renewals), token)

    try:
        with repeating(seconds / 10, renew):
            yield
    finally:
        with suppress(StoreError):  # it will expire
            if _nonce(store.impatient.read(key)) == nonce:
                store.impatient.delete(key)


def holder(store: Store, key: str) -> str:
    """The holder of a lease, or its last holder, in words."""
    with suppress(StoreError, InvalidInput, AttributeError):
        if owner := decode_json(store.read(key), key).get("owner"):  # the pods of a TrainJob do not know their run
            return f"nightly run {owner}"
    return "another nightly run"


def expired(store: Store, entry: ObjectInfo, seconds: float = LEASE_SECONDS) -> bool:
    """Whether an object has not changed for `seconds`, by the store's clock.

    One that is dated so far in the future has expired too: a live holder renews its lease within a minute.
    """
    return abs(_age(store, entry)) > timedelta(seconds=seconds)


def _create(store: Store, key: str, data: bytes) -> bool:
    """Whether the lease is ours. The same bytes, with our nonce, are there already where the answer to a first try was lost."""
    try:
        store.create(key, data)
        return True
    except Conflict:
        return False


def _take_over(store: Store, key: str, owner: str, nonce: str, seconds: float) -> bool:
    """Take a lease that has expired, or that its holder has just deleted; False where another holds it."""
    try:
        _, token = store.read_versioned(key)
        entry = next((one for one in store.list(key) if one.key == key), None)
        if entry is None or not expired(store, entry, seconds):
            return entry is None and _create(store, key, _lease(owner, nonce, 0))
        store.swap(key, _lease(owner, nonce, 0), token)
        return True
    except NotFound:  # its holder has just ended
        return _create(store, key, _lease(owner, nonce, 0))
    except Conflict:  # another one was faster
        return False


def _age(store: Store, entry: ObjectInfo) -> timedelta:
    """How long ago an object changed, by the store's clock: a scratch object is written to read that clock.

    On S3, `Store.clock()` is the date of an answer, which a proxy such as nginx replaces by its own. Where that one's clock is
    off, two runs would hold a lease.
    """
    probe = f"{entry.key.rpartition('/')[0]}/now-{uuid4().hex}"
    store.create(probe, b"")
    try:
        written = next((one.modified for one in store.list(probe)), entry.modified)
    finally:
        store.delete(probe)
    return written - entry.modified


def _lease(owner: str, nonce: str, renewals: int) -> bytes:
    return canonical_json({"format_version": 1, "owner": owner, "nonce": nonce, "renewed": renewals})


def _nonce(data: bytes) -> str:
    with suppress(InvalidInput, AttributeError):
        return str(decode_json(data, "a lease").get("nonce"))
    return ""
