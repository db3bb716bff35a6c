"""Makes an artifact live: release N+1 over release N. In this order:

1. claim the artifact, and before it the lists of hot rows that a plan needs: create it under its digest, and if it was there
   already, swap it for the same bytes, so that it is young; then list `condemned/`, and stop (Conflict) if a mark that is less
   than an hour old, by the store's own clock, holds its digest; then read the artifact, and check its digest and rules
2. ask the gate (not for a rollback); if it holds the plan back, create a refusal and stop
3. create `releases/N.json` with exactly the bytes of `live.json` that were read, if there were any
4. swap `live.json` from those bytes to release N+1, or create it. From 1 to here takes less than an hour
5. create `releases/N+1.json` with the same bytes. It may fail: the next writer does it in 3

So a writer that dies at any of them is harmless: `live.json` is a whole release whose artifact is there, `releases/` holds every
release before it that `gc` did not take, and never one that was not live, and the next writer completes what is missing. A writer
whose swap got no answer reads `live.json`: if it holds the bytes that it wrote, or `releases/` holds them under their number, the
swap succeeded. A `gc` at the same time (gc.py) never deletes an artifact that is about to go live.
"""

from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from neuroshard.core.errors import (
    Conflict,
    InvalidInput,
    NeuroshardError,
    NewerFormat,
    NotFound,
    StoreError,
    Unreachable,
)
from neuroshard.core.plan import Plan
from neuroshard.core.release import Condemned
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.text import first_few
from neuroshard.core.value import sha256, timestamp
from neuroshard.store.protocol import MAX_BYTES, Store
from neuroshard.store.row_orders import rows_of
from neuroshard.store.track import (
    MAX_RELEASE_BYTES,
    Artifact,
    Files,
    Live,
    R,
    ReleaseTrack,
    history,
    live_or_none,
    read_artifact,
    read_past,
    read_pointer,
)

# A gc's mark is valid this long, by the store's own clock. A gc deletes nothing after half of that time.
MARK_SECONDS = 3600.0


def put(store: Store, track: ReleaseTrack[R], digest: str, files: Files) -> Artifact:
    """Write an artifact under its digest, unless it is there already, and claim it. It does not go live."""
    for key, data in files.items():
        if len(data) > MAX_BYTES:
            raise InvalidInput(f"the {track.noun} has {len(data):,} bytes, more than the {MAX_BYTES:,} that are read")
        with suppress(Conflict):  # another object is there under this digest; reading it raises a better error
            if not store.create(key, data):
                _renew(store, key, data)
    return _claimed(store, track, digest)


def claim(store: Store, track: ReleaseTrack[R], artifact: Artifact) -> Artifact:
    """Make an artifact of the store young, after the lists of hot rows that a plan needs, so that no `gc` deletes them before it
    goes live. Raises Conflict where one may, and InvalidInput where a list is not there or is none."""
    if isinstance(artifact.value, Plan):
        put_lists(artifact.value, store, track.name)
    return put(store, track, artifact.digest, artifact.files)


def put_lists(plan: Plan, store: Store, model: str, folder: Path | None = None) -> None:
    """Put the lists of the tables that the plan holds by access into the store from the folder, and keep those that are there
    from `gc`. Raises InvalidInput for a damaged list and for one that is in neither, and StoreError."""
    orders = {name: order for name, order in plan.held.orders.items() if order.ids_digest}
    if not orders:
        return
    from neuroshard.files.row_orders import files_of, ids_in  # NumPy, which other plans do not need

    track, files, missing = rows_of(model), files_of(folder, orders.values()), []
    for name, order in orders.items():
        if order.ids_digest not in files:
            try:
                there = read_artifact(store, track, order.ids_digest)
            except NotFound:
                missing.append(name)
                continue
            (key,) = there.files
            ids_in(there.value, order, f"{store.url}/{key}")
            files[order.ids_digest] = there.value
    if missing:
        where = f"neither in {folder} nor in" if folder else "not in"
        raise InvalidInput(
            f"the plan holds tables by access, and the lists of hot rows of {first_few(missing)} are {where} {store.url}: no "
            f"trainer could load it; deploy it with the folder {LISTS_FOLDER} of the tables.json beside its plan.json"
        )
    for digest, data in files.items():
        put(store, track, digest, {track.keys(digest)[0]: data})


def roll_back(store: Store, track: ReleaseTrack[R], *, now: datetime) -> R:
    """Make the artifact live again that the live release replaced. A second rollback goes one further back.

    Raises NotFound where there is nothing to go back to, and what `go_live` raises. The artifact is read and checked first.
    """
    live = read_pointer(store, track)
    if live.release.rollback_number is None:
        raise NotFound(
            f"{store.url}: cannot roll back: release {live.release.number} of {track.name!r} has the first {track.noun} that was "
            f"live; `neuroshard promote` makes any {track.noun} of the store live"
        )
    remember(live, store, track)
    target = read_past(store, track, live.release.rollback_number)
    claim(store, track, read_artifact(store, track, target.artifact))
    number = next_number(live, store, track)
    return go_live(target.brought_back(number, live.release.artifact, timestamp(now)), live, store, track)


def go_live(release: R, live: Live[R] | None, store: Store, track: ReleaseTrack[R]) -> R:
    """Swap the pointer from `live` to `release`, and write both into the history. The artifact must be claimed.

    Raises Conflict where another writer was faster, and StoreError.
    """
    data = release.canonical_json()
    if len(data) > MAX_RELEASE_BYTES:  # a device's name in a file may have any length
        raise InvalidInput(
            f"{store.url}: release {release.number} of {track.name!r} would have {len(data):,} bytes, more than the "
            f"{MAX_RELEASE_BYTES:,} that are read"
        )
    if live:
        remember(live, store, track)
    try:
        store.swap(track.live_key, data, live.token if live else None)
    except StoreError as error:
        _check_lost(error, release, live, store, track)
    with suppress(StoreError):  # the release is live, and the next writer adds it to the history
        store.create(track.release_key(release.number), data)
    return release


def mend_live(store: Store, track: ReleaseTrack[R]) -> str | None:
    """Make the live pointer and its copy in the history agree, so that releases can follow. Returns what was done, or None.

    An unreadable pointer is replaced by the newest release of the history. If the history has something else under the
    number of the live release, it is replaced by that. What is replaced is kept under aside/. A pointer of a newer version is
    left alone, since newer trainers can read it. Raises NewerFormat where a newer version wrote the release that would be put in
    its place, since an older one must not go live instead; StoreError, and Conflict where somebody else changed the pointer in
    between.
    """
    try:
        live = read_pointer(store, track)
    except (NotFound, NewerFormat):
        return None
    except InvalidInput as error:
        return _mend_pointer(store, track, str(error).partition("; if that is")[0])
    key = track.release_key(live.release.number)
    try:
        store.create(key, live.data)
        return None
    except (Conflict, InvalidInput):  # other bytes, or too many
        kept = _replace(store, track, key, live.data)
    return f"{store.url}/{key}: was not the live release {live.release.number}; it was put there, and {kept}"


def mended_or_why_not(store: Store, track: ReleaseTrack[R]) -> str | None:
    """What `mend_live` mended, or why only a newer program can; None where nothing had to be. Raises StoreError, Conflict."""
    try:
        return mend_live(store, track)
    except NewerFormat as error:
        return str(error)


def _mend_pointer(store: Store, track: ReleaseTrack[R], fault: str) -> str:
    for number in reversed(history(store, track)):
        try:
            read_past(store, track, number)
            kept = _replace(store, track, track.live_key, store.read(track.release_key(number)))
            return f"{fault}; release {number} was put in its place, and {kept}"
        except NewerFormat as error:
            raise NewerFormat(
                f"{fault}; it is left so, as its newest release cannot be put in its place: {error}"
            ) from None
        except (InvalidInput, NotFound):  # an older release may be whole
            continue
    kept = _replace(store, track, track.live_key, None)
    return f"{fault}; it was deleted, as its history has no release, and {kept}"


def _replace(store: Store, track: ReleaseTrack[R], key: str, data: bytes | None) -> str:
    """Put `data` in place of an object (None: nothing), and keep that under aside/; returns what happened to it, in words."""
    try:
        there, token = store.read_versioned(key)
    except InvalidInput:  # no object of ours is so large
        store.delete(key)
        if data is not None:
            store.create(key, data)
        return "what was there was too large to keep"
    name = key.removeprefix(f"{track.name}/").replace("/", "-").removesuffix(".json")
    kept = f"{track.name}/aside/{name}-{sha256(there)[:16]}.json"
    with suppress(Conflict):
        store.create(kept, there)
    if data is None:
        store.delete(key)
    else:
        store.swap(key, data, token)
    return f"what was there is kept as {kept}"


def delete_damaged(store: Store, track: ReleaseTrack[R], digest: str) -> str | None:
    """Delete the artifact under `digest` if its bytes are damaged, so that it can be written again. Returns what was done, or
    None."""
    try:
        read_artifact(store, track, digest)
        return None
    except (NotFound, NewerFormat):
        return None
    except InvalidInput as error:
        for key in track.keys(digest):
            store.delete(key)
        fault = str(error).partition(": delete it and")[0]
        return f"{fault}; it was deleted, and is written again"


def next_number(live: Live[R] | None, store: Store, track: ReleaseTrack[R]) -> int:
    """One more than the highest number of any release, even where live.json was lost or restored by hand."""
    return max([live.release.number if live else 0, *history(store, track)]) + 1


def remember(live: Live[R], store: Store, track: ReleaseTrack[R]) -> None:
    """Write the live release into the history, in case its writer died before it could."""
    key = track.release_key(live.release.number)
    try:
        store.create(key, live.data)
    except Conflict:
        raise Conflict(
            f"{store.url}/{key}: holds another release {live.release.number} than {track.live_key}, which was put there by hand; "
            "move one of the two away, then try again"
        ) from None


def _renew(store: Store, key: str, data: bytes) -> None:
    """Write the same bytes again, so that the object is young and no gc deletes it."""
    try:
        there, token = store.read_versioned(key)
        if there == data:
            store.swap(key, data, token)
    except (NotFound, Conflict):  # deleted since, or renewed by somebody else
        store.create(key, data)


def _claimed(store: Store, track: ReleaseTrack[R], digest: str) -> Artifact:
    """Read the artifact, which is young now. Raises Conflict where a `gc` is about to delete it.

    A gc writes its mark and then looks at the ages of artifacts. If its mark was written before this function lists the
    marks, the mark is seen here; if after, the gc sees that the artifact is young. A mark that was written and deleted before
    the listing belongs to a gc that has ended, and the artifact is read after that.
    """
    marks = [entry for entry in store.list(track.condemned_folder) if track.is_record(entry.key)]
    if marks:
        (own,) = store.list(track.keys(digest)[-1])[:1] or (max(marks, key=lambda mark: mark.modified),)
        newest = own.modified - timedelta(seconds=MARK_SECONDS)
        for key in (mark.key for mark in marks if mark.modified > newest):
            with suppress(NotFound):
                mark = Condemned.from_json(store.read(key), f"{store.url}/{key}")
                if digest in mark.digests:
                    raise Conflict(
                        f"{store.url}: `neuroshard gc`, begun at {mark.time}, is deleting {track.noun} {digest[:12]} of "
                        f"{track.name!r}; try again when it is done, or an hour later if it died"
                    )
    return read_artifact(store, track, digest)


def _check_lost(error: StoreError, release: R, live: Live[R] | None, store: Store, track: ReleaseTrack[R]) -> None:
    """Return if the swap from `live` succeeded after all: a retry met its own first write, or only the answer was lost.

    Raises the error that says what is live now.
    """
    data, said = release.canonical_json(), f"release {release.number} of {track.name!r}"
    try:
        now_live = live_or_none(store, track)
        if now_live and now_live.data == data:
            return
        if live and not now_live:
            raise Conflict(f"{store.url}/{track.live_key}: was deleted in the meantime, so {said} did not go live")
        if now_live and (not live or now_live.data != live.data):
            other = now_live.release
            found = f"release {other.number} ({track.noun} {other.artifact[:12]}, {other.time})"
            with suppress(NotFound):  # whoever replaces a live release writes it into the history first
                if store.read(track.release_key(release.number), MAX_RELEASE_BYTES) == data:
                    raise Conflict(f"{store.url}: {said} went live, and {found} replaced it at once; look at it")
            raise Conflict(
                f"{store.url}: {found} of {track.name!r} went live in the meantime, so this one did not; look at it, then try "
                "again"
            )
    except Conflict:
        raise
    except NeuroshardError:
        raise StoreError(f"{error}; whether {said} went live is not known: look with `neuroshard releases`") from None
    if isinstance(error, Conflict):
        raise Conflict(
            f"{error}; but what was live there still is, so {said} did not go live; try again, and if that does not help, look "
            "for a proxy in front of the store that changes ETags"
        )
    if isinstance(error, Unreachable):
        raise Unreachable(
            f"{error}; {said} is not live, unless the request is still under way: look with `neuroshard releases`"
        )
    raise error
