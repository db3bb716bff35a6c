"""Cost models in a store (line.py), by the fingerprint of the hardware and the batch size that they were measured with.

hardware/<fingerprint>/<batch size>/<sha256>/model.json, nets.safetensors      a bundle, under the digest of its model.json
"""

import re
from functools import partial
from typing import Any, NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NotFound, UsageError
from neuroshard.core.release import BUNDLE_FILES, FINGERPRINT, HARDWARE, ModelRelease
from neuroshard.core.value import decode_json, sha256, shown
from neuroshard.store.protocol import Store
from neuroshard.store.track import Files, Line, Live, find_artifact, read_pointer

BATCH_SIZE = r"[1-9][0-9]{0,11}"


class Track(NamedTuple):
    """One live cost model at a time: for a kind of hardware and a batch size."""

    fingerprint: str
    batch_size: int


def models_of(fingerprint: str, batch_size: int) -> Line[ModelRelease]:
    """Where the cost models of a kind of hardware at a batch size are. Raises UsageError for what is no fingerprint."""
    if not re.fullmatch(FINGERPRINT, fingerprint):
        raise UsageError(
            f"{fingerprint[:80]!r} is not a hardware's fingerprint: 16 hex digits, as `neuroshard models` shows"
        )
    if batch_size < 1:
        raise UsageError(f"a batch size must be at least 1, not {batch_size}")
    patterns = tuple(f"{{}}/{file}" for file in BUNDLE_FILES)
    parse = partial(_whole, Track(fingerprint, batch_size))
    return Line(f"{HARDWARE}/{fingerprint}/{batch_size}", ModelRelease, patterns, parse, "cost model", "publish-model")


def tracks(store: Store) -> tuple[Track, ...]:
    """Every kind of hardware and batch size that has cost models there, live or not."""
    form = re.compile(rf"{HARDWARE}/({FINGERPRINT.strip('^$')})/({BATCH_SIZE})/.+")
    found = {match.groups() for entry in store.list(f"{HARDWARE}/") if (match := form.fullmatch(entry.key))}
    return tuple(sorted(Track(fingerprint, int(batch_size)) for fingerprint, batch_size in found))


def find_hardware(store: Store, wanted: str, batch_size: int | None = None) -> Live[ModelRelease]:
    """The live cost model of the hardware with this fingerprint, or with this in its name ("h200" is in "NVIDIA H200").

    Of several batch sizes that of `batch_size`; where there is none, and one other alone, that other: the caller checks it.
    Raises NotFound where there is none, UsageError where there are several. A pointer that cannot be read, as of a newer
    version, is noted on stderr and holds up no other hardware.
    """
    named = bool(re.fullmatch(FINGERPRINT, wanted))
    live, passed_over = [], ""
    for track in tracks(store):
        try:
            live.append(read_pointer(store, models_of(*track)))
        except NotFound:  # published, none of them live
            continue
        except InvalidInput as error:
            if named and track.fingerprint == wanted and batch_size in (None, track.batch_size):
                raise
            passed_over = str(error)
    if passed_over:
        log(f"note: its hardware is passed over: {passed_over}")
    if named:
        found = [one for one in live if one.release.fingerprint == wanted]
    else:
        found = [one for one in live if _plain(wanted) and _plain(wanted) in _plain(one.release.device_name)]
    kinds = {one.release.fingerprint for one in found}
    known = "; ".join(
        f"{one.release.fingerprint} {one.release.device_name}, batch {one.release.batch_size:,}"
        for one in found or live
    )
    if not found:
        raise NotFound(
            f"{store.url}: no cost model of hardware {wanted!r} is live there; there is "
            f"{known or 'none of any hardware'} (`neuroshard publish-model` puts one there)"
        )
    if len(kinds) > 1:
        raise UsageError(f"{store.url}: {wanted!r} names {len(kinds)} kinds of hardware; give a fingerprint: {known}")
    same = [one for one in found if one.release.batch_size == batch_size]
    if len(same or found) > 1:
        way_out = "give --batch-size" if batch_size is None else f"measure at batch size {batch_size:,}"
        raise UsageError(f"{store.url}: {wanted!r} has cost models of several batch sizes, {way_out}: {known}")
    return (same or found)[0]


def find_bundle(store: Store, fingerprint: str, prefix: str) -> tuple[Line[ModelRelease], str]:
    """Where a published cost model of a hardware is, live or not, by the beginning of its digest; and the whole digest.

    Raises NotFound, and UsageError for what is no digest.
    """
    for track in tracks(store):
        if track.fingerprint == fingerprint:
            try:
                return models_of(*track), find_artifact(store, models_of(*track), prefix)
            except NotFound:
                continue
    raise NotFound(f"{store.url}: no cost model {prefix[:12]!r} of hardware {fingerprint} is published there")


def _plain(name: str) -> str:
    """A name without case, spaces and dashes, which people leave out."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _whole(track: Track, files: Files, where: str) -> dict[str, Any]:
    """The decoded model.json of a bundle. Raises InvalidInput unless its tensors are those it answers for, and its hardware and
    batch size are those that it is stored under."""
    tensors, manifest = files.values()
    raw = decode_json(manifest, where)
    if not isinstance(raw, dict):
        raise InvalidInput(f"{where}: expected a JSON object, found {type(raw).__name__}")
    if raw.get("tensors_sha256") != sha256(tensors):
        raise InvalidInput(
            f"{where}: its tensors_sha256 is not that of {BUNDLE_FILES[0]}: one of the two was changed or damaged"
        )
    for key, said, expected in (
        ("hardware", raw.get("hardware_fingerprint"), track.fingerprint),
        ("batch size", raw.get("batch_size"), track.batch_size),
    ):
        if said != expected:
            raise InvalidInput(f"{where}: is a cost model of {key} {shown(said)}, but is stored under {expected}")
    return raw
