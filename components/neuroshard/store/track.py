"""A release track: the sequence of releases of one name in a store, of a model's plans or of a hardware's cost models.

<name>/live.json                  the live release: what is replaced to make another one live
<name>/releases/<number>.json     the live.json of each release, written once, and again if damaged; `gc` deletes old ones
<name>/condemned/<time>-….json    what a `gc` is about to delete; it is deleted last
<name>/aside/…                    a live.json or a release that was damaged and was replaced
<name>/…<sha256>…                 an artifact: one file or more, written once under the digest of the last of them
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NewerFormat, NotFound, StoreError, Unreachable, UsageError
from neuroshard.core.release import Pointer
from neuroshard.core.value import sha256
from neuroshard.store.protocol import Store

MAX_RELEASE_BYTES = 64 * 2**10
R = TypeVar("R", bound=Pointer)
T = TypeVar("T")
V = TypeVar("V")
Files = Mapping[str, bytes]  # key -> bytes, in the order in which they are written


@dataclass(frozen=True)
class ReleaseTrack(Generic[R]):
    """The releases of `name`, and where their artifacts are.

    `patterns` are the names of an artifact's files, with {} for its digest, which is the sha256 of the last file.
    `parse(files, where)` returns the value of an artifact whose digest was checked, or raises InvalidInput. `noun` names an
    artifact in messages, `verb` is the command that makes one live.
    """

    name: str
    release: type[R]
    patterns: tuple[str, ...]
    parse: Callable[[Files, str], Any]
    noun: str
    verb: str

    @property
    def live_key(self) -> str:
        return f"{self.name}/live.json"

    @property
    def condemned_folder(self) -> str:
        return f"{self.name}/condemned/"

    def release_key(self, number: int) -> str:
        return f"{self.name}/releases/{number:08d}.json"

    def number_of(self, key: str) -> int | None:
        """The number of the release that the object at `key` holds; None where it is no release."""
        stem = key.removeprefix(f"{self.name}/releases/").removesuffix(".json")
        number = int(stem) if re.fullmatch("[0-9]{8,}", stem) else 0
        return number if number and key == self.release_key(number) else None

    def is_record(self, key: str) -> bool:
        """Whether `key` has the form of a mark, a refusal or what trainers saw: a time and 16 hex digits."""
        folders = rf"{re.escape(self.name)}/(condemned|decisions|seen)"
        return re.fullmatch(rf"{folders}/[0-9]{{8}}T[0-9]{{6}}Z-[0-9a-f]{{16}}\.json", key) is not None

    def keys(self, digest: str) -> tuple[str, ...]:
        return tuple(f"{self.name}/{pattern.format(digest)}" for pattern in self.patterns)

    def digest_of(self, key: str) -> str | None:
        """The digest of the artifact that the object at `key` belongs to; None where it belongs to none."""
        found = self._artifact.fullmatch(key)
        return next(filter(None, found.groups()), None) if found else None

    @cached_property
    def _artifact(self) -> re.Pattern[str]:
        forms = (re.escape(form).replace(r"\{\}", "([0-9a-f]{64})") for form in self.patterns)
        return re.compile("|".join(f"{re.escape(self.name)}/{form}" for form in forms))


class Live(NamedTuple, Generic[R]):
    """A live pointer as it was read: its value, its bytes, and the token for swapping it."""

    release: R
    data: bytes
    token: str


class Artifact(NamedTuple):
    """An artifact and its bytes. Another version may have written other bytes than this one would."""

    digest: str
    files: Files
    value: Any


def read_pointer(store: Store, track: ReleaseTrack[R]) -> Live[R]:
    """The live pointer. Raises NotFound where nothing was ever live, and InvalidInput or NewerFormat."""
    try:
        data, token = store.read_versioned(track.live_key, MAX_RELEASE_BYTES)
        return Live(_release(data, store, track.live_key, track), data, token)
    except NotFound as error:
        raise NotFound(
            f"{error}; has a {track.noun} of {track.name!r} been deployed there (`neuroshard {track.verb}`)?"
        ) from None
    except NewerFormat:
        raise
    except InvalidInput as error:
        raise InvalidInput(
            f"{error}; if that is what the store holds, put the newest file of {track.name}/releases/ in its place"
        ) from None


def live_or_none(store: Store, track: ReleaseTrack[R]) -> Live[R] | None:
    """The live pointer, or None where nothing was ever live."""
    try:
        return read_pointer(store, track)
    except NotFound:
        return None


def read_past(store: Store, track: ReleaseTrack[R], number: int) -> R:
    """A release from the history. Raises NotFound, InvalidInput or NewerFormat."""
    key = track.release_key(number)
    try:
        release = _release(store.read(key, MAX_RELEASE_BYTES), store, key, track)
    except NotFound as error:
        raise NotFound(
            f"{error}; `neuroshard gc` may have taken it: make a {track.noun} that is still there live with promote"
        ) from None
    if release.number != number:
        raise InvalidInput(
            f"{store.url}/{key}: holds release {release.number}, not {number}, so another was copied over it; restore it from a "
            f"backup, or make a {track.noun} live with promote"
        )
    return release


def history(store: Store, track: ReleaseTrack[R]) -> list[int]:
    """The numbers of the releases in the history, ascending."""
    folder = track.release_key(1).rpartition("/")[0] + "/"
    return sorted(number for entry in store.list(folder) if (number := track.number_of(entry.key)))


def all_releases(store: Store, track: ReleaseTrack[R]) -> tuple[R, ...]:
    """Every release that can be read, newest first, so the live one is the first. Raises NotFound where there is none."""
    live = read_pointer(store, track).release
    # a newer release may have come since live.json was read, and the live one may not be in the history yet
    older = [number for number in reversed(history(store, track)) if number < live.number]
    return (live, *readable(older, lambda number: read_past(store, track, number)))


def readable(names: Iterable[T], read: Callable[[T], V]) -> Iterator[V]:
    """What `read` returns of each name; a note on stderr names the fault of any that cannot be read. Raises Unreachable."""
    for name in names:
        try:
            yield read(name)
        except Unreachable:
            raise
        except (InvalidInput, StoreError) as error:
            log(f"note: left out: {error}")


def read_artifact(store: Store, track: ReleaseTrack[R], digest: str) -> Artifact:
    """An artifact, parsed after its digest was checked. Raises NotFound, InvalidInput or NewerFormat."""
    try:
        files = {key: store.read(key) for key in track.keys(digest)}
    except NotFound as error:
        raise NotFound(
            f"{error}: the {track.noun} was deleted there; `neuroshard {track.verb}` it again, or promote another"
        ) from None
    key, data = list(files.items())[-1]
    where = f"{store.url}/{key}"
    if sha256(data) != digest:
        raise InvalidInput(
            f"{where}: its {len(data):,} bytes have sha256 {sha256(data)[:12]}…, so it is not the {track.noun} that was "
            f"deployed; it is cut off or was changed: delete it and {track.verb} the {track.noun} again"
        )
    return Artifact(digest, files, track.parse(files, where))


def find_artifact(store: Store, track: ReleaseTrack[R], prefix: str) -> str:
    """The digest of the artifact that begins with `prefix`, at least 8 hex digits. Raises NotFound, UsageError."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", prefix):
        raise UsageError(
            f"{prefix[:80]!r} is not a {track.noun}'s digest; give at least 8 of its hex digits, as commands print them"
        )
    beginning = track.patterns[-1].partition("{}")[0] + prefix
    digests = {track.digest_of(entry.key) for entry in store.list(f"{track.name}/{beginning}")}
    found = sorted(digest for digest in digests if digest is not None)
    if not found:
        raise NotFound(f"{store.url}: no {track.noun} {prefix!r} of {track.name!r} is published there")
    if len(found) > 1:
        raise UsageError(
            f"{prefix!r} is the beginning of {len(found)} {track.noun}s of {track.name!r}; give more digits"
        )
    return found[0]


def _release(data: bytes, store: Store, key: str, track: ReleaseTrack[R]) -> R:
    release = track.release.from_json(data, f"{store.url}/{key}")
    if release.name != track.name:
        raise InvalidInput(f"{store.url}/{key}: is a release of {release.name!r}, not of {track.name!r}")
    return release
