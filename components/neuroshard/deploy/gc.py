"""Deletes old artifacts, releases, refusals and what trainers saw, that no rollback within reach needs.

    neuroshard gc --store s3://bucket/prefix --name ads-ranker --keep 10 --older-than 7d [--apply]

Kept are the live release, the last `keep` releases, the `keep` releases that rollbacks from the live one reach, the artifacts
of all of them, the newest trace of a model's trainers, the lists of hot rows that these plans name, its page of sizes, and every
object that is younger than the age.
A damaged release among them is kept too, and named; it does not count, since no rollback can use it.

An artifact must not go live while it is deleted. gc first writes a mark that names what it is about to delete, and then looks at
the ages again. golive.py makes an artifact young first, and then looks for marks, so at least one of the two sees the other and
gives way. Ages are by the store's clock alone, never by this machine's. It deletes releases and refusals first, then artifacts,
so that the next run finds what a kill leaves; it stops when half an hour has passed since its mark; and it deletes the mark
last, unless a deletion failed, which may still take effect. A mark that was left counts for an hour. This rests on listings that
show what was written before (S3's and local folders' do; an NFS client's after its `acdirmax`, a minute), and on no process that
sleeps for half an hour in the middle of a request and then continues. Nothing is deleted where there is no live release, or
where one that it keeps is of a newer format.

    neuroshard gc --store s3://bucket/prefix --name _measuring/FINGERPRINT --older-than 720h [--apply]

deletes what nightly runs measured of a kind of hardware (`_measuring`: of all kinds) if nothing has changed there for so long.
In a folder, both delete temporary files of writers that were killed, if they are as old.
"""

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import NamedTuple
from uuid import uuid4

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NewerFormat, NotFound, StoreError, UsageError
from neuroshard.core.release import FINGERPRINT, HARDWARE, Condemned
from neuroshard.core.value import timestamp
from neuroshard.deploy.golive import MARK_SECONDS
from neuroshard.orders.nightly import MEASURING_FOLDER
from neuroshard.progress import progress
from neuroshard.store.bundles import track_of
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.protocol import ObjectInfo, Store
from neuroshard.store.row_orders import list_digests
from neuroshard.store.traces import is_recorded, pointer_key, read_trace_pointer, trace_key
from neuroshard.store.track import Live, R, ReleaseTrack, read_artifact, read_past, read_pointer

MIN_AGE_SECONDS = 3600.0  # no writer takes longer from its artifact to its swap


class Garbage(NamedTuple):
    """What `gc` deletes, or would delete, in that order: releases and refusals before the artifacts they refer to. `damaged` are
    lines about releases that could not be read."""

    entries: tuple[ObjectInfo, ...]
    kept: int
    damaged: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(entry.size for entry in self.entries)


def find_garbage(store: Store, track: ReleaseTrack[R], *, keep: int, age_seconds: float, now: datetime) -> Garbage:
    """What may be deleted at `now`, by the store's clock.

    Raises NotFound where nothing is live, and NewerFormat where a newer program wrote a release, since it is then unknown what is
    in use; UsageError.
    """
    if keep < 1:
        raise UsageError(f"--keep must be at least 1 release, not {keep}")
    _check_age(age_seconds, f"a {track.noun} is written before its release")
    live = read_pointer(store, track)
    entries = store.list(f"{track.name}/")
    keys = {entry.key for entry in entries}
    numbers = [number for key in keys if (number := track.number_of(key)) and number != live.release.number]
    damaged: dict[int, str] = {}
    read = partial(_read_undamaged, store, track, damaged)
    past = islice(filter(None, map(read, sorted(numbers, reverse=True))), keep)
    kept = [live.release, *past, *_reached(read, track, live, keep, keys)]

    def is_mark(entry: ObjectInfo) -> bool:
        return entry.key.startswith(track.condemned_folder)

    wanted = {track.release_key(number) for number in (*damaged, *(release.number for release in kept))}
    wanted |= {key for release in kept for key in track.keys(release.artifact)}
    newest = now - timedelta(seconds=age_seconds)
    old = [entry for entry in entries if entry.key not in wanted and entry.modified < newest]
    found = [
        *(entry for entry in old if track.number_of(entry.key)),
        *(entry for entry in old if track.is_record(entry.key) and not is_mark(entry)),
        *(entry for entry in old if track.digest_of(entry.key) is not None),
        *_traces(store, track, old),
        *_lists(store, track, [release.artifact for release in kept], old),
        *(entry for entry in old if track.is_record(entry.key) and is_mark(entry)),
    ]
    return Garbage(tuple(found), len(entries) - len(found), tuple(damaged.values()))


def _traces(store: Store, track: ReleaseTrack[R], old: list[ObjectInfo]) -> list[ObjectInfo]:
    """Traces of a model's trainers that the pointer names no more. All stay where the pointer cannot be read.

    A writer swaps the pointer within minutes of writing what it points to, so nothing that is old is about to be pointed to.
    """
    if track.name.partition("/")[0] == HARDWARE:
        return []
    kept, found = [pointer_key(track.name)], [entry for entry in old if is_recorded(track.name, entry.key)]
    try:
        kept.append(trace_key(track.name, read_trace_pointer(store, track.name).trace_digest))
    except NotFound:
        pass
    except InvalidInput as error:
        if found:
            log(f"note: {error}; so nothing that trainers recorded is deleted")
        return []
    return [entry for entry in found if entry.key not in kept]


def _lists(store: Store, track: ReleaseTrack[R], plans: list[str], old: list[ObjectInfo]) -> list[ObjectInfo]:
    """Lists of hot rows that none of these plans names. All stay where one of them cannot be read."""
    found = list_digests(track.name, [entry.key for entry in old])
    if not found:
        return []
    try:
        named = [table for digest in plans for table in read_artifact(store, track, digest).value.task.tables]
    except (NotFound, InvalidInput) as error:
        log(f"note: {error}; so no list of hot rows is deleted")
        return []
    wanted = {table.row_order.ids_digest for table in named if table.row_order is not None}
    return [entry for entry in old if entry.key in found and found[entry.key] not in wanted]


def gc(store: Store, track: ReleaseTrack[R], *, keep: int, age_seconds: float, apply: bool = False) -> Garbage:
    """Find the garbage, and delete it if `apply`. Whatever was deleted before an error or a kill was garbage too."""
    find = partial(find_garbage, store, track, keep=keep, age_seconds=age_seconds)
    now = store.clock()
    garbage = find(now=now)
    log(*garbage.damaged)
    if not apply or not garbage.entries:
        return garbage
    began = time.monotonic()
    mark = _condemn(garbage, store, track, now)
    # the mark was written a moment ago, by the clock of the artifacts' times
    seen, still = set(garbage.entries), find(now=min(now, mark.modified))
    garbage = Garbage(tuple(entry for entry in still.entries if entry in seen), still.kept - 1)
    with progress("gc", len(garbage.entries), "objects") as bar:
        for entry in garbage.entries:
            if time.monotonic() - began > MARK_SECONDS / 2:
                raise StoreError(
                    f"{store.url}: gc took longer than {MARK_SECONDS / 120:.0f} min and stops; run it again"
                )
            store.delete(entry.key)
            bar.advance(1, entry.key)
    store.delete(mark.key)  # kept where a deletion failed, which may still take effect
    return garbage


def run(store_url: str, name: str, *, keep: int, age_seconds: float, apply: bool = False) -> Garbage:
    """`gc` of a model's plans, of the cost models of hardware/FINGERPRINT/BATCH, or of the measuring under _measuring."""
    # its one write is to a key of its own, so it needs no conditional writes
    store = open_store(store_url, single_writer=True)
    if name.partition("/")[0] == MEASURING_FOLDER:
        found = gc_measuring(store, name, age_seconds=age_seconds, apply=apply)
    else:
        found = gc(store, track_of(name), keep=keep, age_seconds=age_seconds, apply=apply)
    if not isinstance(store, FolderStore):  # S3 keeps an object whole or not at all
        return found
    left = store.scratch(f"{name}/", store.clock() - timedelta(seconds=age_seconds))
    for entry in left if apply else ():
        store.delete_scratch(entry.key)
    return found._replace(entries=(*found.entries, *left))


def gc_measuring(store: Store, name: str, *, age_seconds: float, apply: bool = False) -> Garbage:
    """Delete, if `apply`, all measuring in which nothing has changed for so long; its hardware is measured again if asked for.

    Leases are renewed every minute, so measuring under way is never old. `name` is _measuring, or _measuring/FINGERPRINT.
    Raises UsageError, StoreError.
    """
    _, slash, fingerprint = name.partition("/")
    if slash and not re.fullmatch(FINGERPRINT, fingerprint):
        raise UsageError(
            f"{name[:80]!r} is not the name of measuring; write {MEASURING_FOLDER}, or {MEASURING_FOLDER}/FINGERPRINT as "
            "`neuroshard models` and `neuroshard fleet` show it"
        )
    _check_age(age_seconds, "a nightly run may be at work on it")
    newest = store.clock() - timedelta(seconds=age_seconds)
    folders: dict[str, list[ObjectInfo]] = {}
    for entry in store.list(f"{name}/"):
        folders.setdefault("/".join(entry.key.split("/")[:3]), []).append(entry)
    old = {folder: found for folder, found in folders.items() if all(entry.modified < newest for entry in found)}
    kept = sum(map(len, folders.values())) - sum(map(len, old.values()))
    deleted: list[ObjectInfo] = []
    for folder, found in old.items():
        if apply and store.list(f"{folder}/") != tuple(found):  # a nightly run has begun to use it
            kept += len(found)
            continue
        # without its cases.json a draw does not count: a nightly run that starts now draws again
        found.sort(key=lambda entry: not entry.key.endswith("/cases.json"))
        for entry in found if apply else ():
            store.delete(entry.key)
        deleted += found
    return Garbage(tuple(deleted), kept)


def _check_age(age_seconds: float, why: str) -> None:
    if age_seconds < MIN_AGE_SECONDS:
        raise UsageError(f"--older-than must be at least {MIN_AGE_SECONDS / 3600:.0f}h, not {age_seconds:g} s: {why}")


def _condemn(garbage: Garbage, store: Store, track: ReleaseTrack[R], now: datetime) -> ObjectInfo:
    """Write the mark of what is about to be deleted, under a new key. Returns the mark as the store lists it."""
    digests = {digest for entry in garbage.entries if (digest := track.digest_of(entry.key))}
    digests |= {*list_digests(track.name, [entry.key for entry in garbage.entries]).values()}
    mark = Condemned(name=track.name, digests=tuple(sorted(digests)), time=timestamp(now))
    key = f"{track.condemned_folder}{mark.time.replace('-', '').replace(':', '')}-{uuid4().hex[:16]}.json"
    store.create(key, mark.canonical_json())
    listed = store.list(key)
    if not listed:
        raise StoreError(f"{store.url}/{key}: is not listed after it was written, so nothing is deleted; run gc again")
    return listed[0]


def _read_undamaged(store: Store, track: ReleaseTrack[R], damaged: dict[int, str], number: int) -> R | None:
    """A release of the history; None where it is damaged, with a line about it in `damaged`."""
    try:
        return read_past(store, track, number)
    except NewerFormat:
        raise
    except InvalidInput as error:
        damaged[number] = (
            f"note: {error}; no rollback can use a damaged release, so it is left there and an older one is kept in its place"
        )
        return None


def _reached(
    read: Callable[[int], R | None], track: ReleaseTrack[R], live: Live[R], count: int, keys: set[str]
) -> list[R]:
    """The releases that `count` rollbacks from the live one reach. A damaged one ends them, as does one that was deleted."""
    reached: list[R] = []
    number = live.release.rollback_number
    while number and len(reached) < count and track.release_key(number) in keys:
        if (release := read(number)) is None:
            break
        reached.append(release)
        number = release.rollback_number
    return reached
