"""The protocol of docs/formats.md, "Releases", for whatever goes live: claim the artifact, then swap the pointer to it.

The order of the writes makes a writer that dies at any of them harmless: the old release or the new one is live, and whoever
writes next puts the rest right. A `gc` beside it (gc.py) never takes what it is about to put live, whoever of them dies.
"""

from contextlib import suppress
from datetime import UTC, datetime, timedelta

from neuroshard.core.errors import (
    Conflict,
    InvalidInput,
    NeuroshardError,
    NewerFormat,
    NotFound,
    StoreError,
    Unreachable,
)
from neuroshard.core.release import Condemned
from neuroshard.core.value import sha256
from neuroshard.store.protocol import Store
from neuroshard.store.track import (
    MAX_ARTIFACT_BYTES,
    MAX_RELEASE_BYTES,
    Artifact,
    Files,
    Line,
    Live,
    R,
    history,
    live_or_none,
    read_artifact,
    read_past,
    read_pointer,
)

# A gc's mark counts this long by the store's own clock; a gc that lives deletes nothing after half of it.
MARK_SECONDS = 3600.0


def put(store: Store, line: Line[R], digest: str, files: Files) -> Artifact:
    """Write an artifact under its digest, unless it is there, claim it, and read it back. It does not go live."""
    for key, data in files.items():
        if len(data) > MAX_ARTIFACT_BYTES:
            raise InvalidInput(
                f"the {line.noun} has {len(data):,} bytes, more than the {MAX_ARTIFACT_BYTES:,} that are read"
            )
        with suppress(Conflict):  # what is there under this digest is something else: reading it says so better
            if not store.create(key, data):
                _renew(store, key, data)
    return _claimed(store, line, digest)


def claim(store: Store, line: Line[R], artifact: Artifact) -> Artifact:
    """Make an artifact that was read from the store safe to put live, also beside a `gc` that wants it."""
    return put(store, line, artifact.digest, artifact.files)


def bring_back(store: Store, line: Line[R], *, now: datetime) -> R:
    """Make live again what the live release replaced. Another time goes further back, never forth.

    Raises NotFound where there is nothing to go back to, and what `go_live` raises. The artifact is read and checked first.
    """
    live = read_pointer(store, line)
    if live.release.rollback_number is None:
        raise NotFound(
            f"{store.url}: release {live.release.number} of {line.name!r} has no release before it to roll back to"
        )
    remember(live, store, line)
    target = read_past(store, line, live.release.rollback_number)
    claim(store, line, read_artifact(store, line, target.artifact))
    number = next_number(live, store, line)
    return go_live(target.brought_back(number, live.release.artifact, timestamp(now)), live, store, line)


def go_live(release: R, live: Live[R] | None, store: Store, line: Line[R]) -> R:
    """Swap the pointer from `live` to `release`, whose artifact is claimed, between two writes of the history.

    Raises Conflict where it lost.
    """
    data = release.canonical_json()
    if len(data) > MAX_RELEASE_BYTES:  # a device's name is as long as its file says
        raise InvalidInput(
            f"{store.url}: release {release.number} of {line.name!r} would have {len(data):,} bytes, more than the "
            f"{MAX_RELEASE_BYTES:,} that are read"
        )
    if live:
        remember(live, store, line)
    try:
        store.swap(line.live_key, data, live.token if live else None)
    except StoreError as error:
        _check_lost(error, release, live, store, line)
    with suppress(StoreError):  # it is live, and whoever writes next does this again
        store.create(line.release_key(release.number), data)
    return release


def mend_pointer(store: Store, line: Line[R]) -> str | None:
    """Put the newest release of the history in place of a pointer that is garbage, which nobody can follow; what was done, in
    one line, or None where nothing was.

    What was there is kept under aside/. A pointer of a newer version is left alone: others follow it. Raises StoreError, and
    Conflict where somebody else changed it in between.
    """
    try:
        read_pointer(store, line)
        return None
    except (NotFound, NewerFormat):
        return None
    except InvalidInput as error:
        fault = str(error).partition("; if that is")[0]
    data, token = store.read_versioned(line.live_key)
    kept = f"{line.name}/aside/live-{sha256(data)[:16]}.json"
    with suppress(Conflict):
        store.create(kept, data)
    for number in reversed(history(store, line)):
        with suppress(InvalidInput):
            read_past(store, line, number)
            store.swap(line.live_key, store.read(line.release_key(number)), token)
            return f"{fault}; release {number} was put in its place, and it is kept as {kept}"
    store.delete(line.live_key)
    return f"{fault}; it was taken away, as no release is in its history, and is kept as {kept}"


def take_away_damaged(store: Store, line: Line[R], digest: str) -> str | None:
    """Delete the artifact under `digest` if its bytes are damaged, so that it can be written again; what was done, or None."""
    try:
        read_artifact(store, line, digest)
        return None
    except (NotFound, NewerFormat):
        return None
    except InvalidInput as error:
        for key in line.keys(digest):
            store.delete(key)
        fault = str(error).partition(": delete it and")[0]
        return f"{fault}; it was deleted, and is written again"


def next_number(live: Live[R] | None, store: Store, line: Line[R]) -> int:
    """One more than any release has, also where live.json was lost or put back by hand."""
    return max([live.release.number if live else 0, *history(store, line)]) + 1


def remember(live: Live[R], store: Store, line: Line[R]) -> None:
    """Put the live release in the history, where its writer may have died before it could."""
    key = line.release_key(live.release.number)
    try:
        store.create(key, live.data)
    except Conflict:
        raise Conflict(
            f"{store.url}/{key}: holds another release {live.release.number} than {line.live_key}, which was put there by hand; "
            "move one of the two away, then try again"
        ) from None


def timestamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _renew(store: Store, key: str, data: bytes) -> None:
    """Write the bytes that are there once more, so that the object is young, and no gc's."""
    try:
        there, token = store.read_versioned(key)
        if there == data:
            store.swap(key, data, token)
    except (NotFound, Conflict):  # deleted since, or renewed by somebody else
        store.create(key, data)


def _claimed(store: Store, line: Line[R], digest: str) -> Artifact:
    """The artifact, which is young now, if no `gc` is about to delete it; read after that was asked, so it is there to stay.

    Either the gc's mark was written before we asked, and we see it; or after, and the gc sees, looking after its mark, that the
    artifact is young. A mark that came and went did so before the artifact was read.
    """
    marks = [entry for entry in store.list(line.condemned_folder) if line.is_record(entry.key)]
    if marks:
        (own,) = store.list(line.keys(digest)[-1])[:1] or (max(marks, key=lambda mark: mark.modified),)
        for mark in marks:
            if mark.modified > own.modified - timedelta(seconds=MARK_SECONDS):
                _refuse_condemned(store, line, digest, mark.key)
    return read_artifact(store, line, digest)


def _refuse_condemned(store: Store, line: Line[R], digest: str, key: str) -> None:
    try:
        mark = Condemned.from_json(store.read(key), f"{store.url}/{key}")
    except NotFound:
        return
    if digest in mark.digests:
        raise Conflict(
            f"{store.url}: `neuroshard gc`, begun at {mark.time}, is deleting {line.noun} {digest[:12]} of {line.name!r}; try "
            f"again when it is done, or an hour later if it died"
        )


def _check_lost(error: StoreError, release: R, live: Live[R] | None, store: Store, line: Line[R]) -> None:
    """Return if the swap from `live` came through after all: a retry meets its own first write, or only the answer was lost."""
    data, said = release.canonical_json(), f"release {release.number} of {line.name!r}"
    try:
        now_live = live_or_none(store, line)
        if now_live and now_live.data == data:
            return
        if live and not now_live:
            raise Conflict(f"{store.url}/{line.live_key}: was deleted in the meantime, so {said} did not go live")
        if now_live and (not live or now_live.data != live.data):
            other = now_live.release
            found = f"release {other.number} ({line.noun} {other.artifact[:12]}, {other.time})"
            if _is_past(release, data, store, line):
                raise Conflict(f"{store.url}: {said} went live, and {found} replaced it at once; look at it")
            raise Conflict(
                f"{store.url}: {found} of {line.name!r} went live in the meantime, so this one did not; look at it, then try "
                "again"
            )
    except Conflict:
        raise
    except NeuroshardError:
        raise StoreError(f"{error}; whether {said} went live is not known: look with `neuroshard releases`") from None
    if isinstance(error, Conflict):
        raise Conflict(f"{error}; but what is live there is as it was, so {said} did not go live; try again")
    if isinstance(error, Unreachable):
        raise Unreachable(
            f"{error}; {said} is not live, unless the request is still under way: look with `neuroshard releases`"
        )
    raise error


def _is_past(release: R, data: bytes, store: Store, line: Line[R]) -> bool:
    """Whether the release is in the history: who replaces one puts it there before."""
    try:
        return store.read(line.release_key(release.number), MAX_RELEASE_BYTES) == data
    except NotFound:
        return False
