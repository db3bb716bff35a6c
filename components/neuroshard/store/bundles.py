"""Cost models in a store (line.py), by the fingerprint of the hardware that they were measured on.

hardware/<fingerprint>/<sha256>/model.json, nets.safetensors      a bundle, under the digest of its model.json
"""

import re
import sys
from functools import partial
from typing import Any

from neuroshard.core.errors import InvalidInput, NotFound, UsageError
from neuroshard.core.release import FINGERPRINT, HARDWARE, ModelRelease
from neuroshard.core.value import decode_json, sha256, shown
from neuroshard.store.line import Files, Line, Live, read_pointer
from neuroshard.store.protocol import Store

BUNDLE_FILES = ("nets.safetensors", "model.json")  # in the order in which they are written


def models_of(fingerprint: str) -> Line[ModelRelease]:
    """Where the cost models of a kind of hardware lie. Raises UsageError for what is no fingerprint."""
    if not re.fullmatch(FINGERPRINT, fingerprint):
        raise UsageError(
            f"{fingerprint[:80]!r} is not a hardware's fingerprint: 16 hex digits, as `neuroshard models` shows"
        )
    patterns = tuple(f"{{}}/{file}" for file in BUNDLE_FILES)
    parse = partial(_whole, fingerprint)
    return Line(f"{HARDWARE}/{fingerprint}", ModelRelease, patterns, parse, "cost model", "publish-model")


def fingerprints(store: Store) -> tuple[str, ...]:
    """Of every kind of hardware that has cost models there, live or not."""
    parts = {entry.key.split("/")[1] for entry in store.list(f"{HARDWARE}/")}
    return tuple(sorted(part for part in parts if re.fullmatch(FINGERPRINT, part)))


def find_hardware(store: Store, wanted: str) -> Live[ModelRelease]:
    """The live cost model of the hardware with this fingerprint, or with this in its name ("h200" is in "NVIDIA H200").

    Raises NotFound where there is none, UsageError where there are several. A pointer that cannot be read, as of a newer
    version, is told on stderr and holds up no other hardware.
    """
    if re.fullmatch(FINGERPRINT, wanted):
        return read_pointer(store, models_of(wanted))
    live = []
    for fingerprint in fingerprints(store):
        try:
            live.append(read_pointer(store, models_of(fingerprint)))
        except NotFound:  # published, none of them live
            continue
        except InvalidInput as error:
            print(f"note: its hardware is passed over: {error}", file=sys.stderr)
    found = [one for one in live if _plain(wanted) and _plain(wanted) in _plain(one.release.device_name)]
    if len(found) == 1:
        return found[0]
    known = "; ".join(f"{one.release.fingerprint} {one.release.device_name}" for one in found or live)
    if found:
        raise UsageError(f"{store.url}: {wanted!r} names {len(found)} kinds of hardware; give a fingerprint: {known}")
    raise NotFound(
        f"{store.url}: no cost model of hardware {wanted!r} is live there; there is {known or 'none of any hardware'}"
    )


def _plain(name: str) -> str:
    """A name without case, spaces and dashes, which people leave out."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _whole(fingerprint: str, files: Files, where: str) -> dict[str, Any]:
    """The decoded model.json of a bundle whose tensors are those it answers for, and whose hardware is the one it lies under."""
    tensors, manifest = files.values()
    raw = decode_json(manifest, where)
    if not isinstance(raw, dict):
        raise InvalidInput(f"{where}: expected a JSON object, found {type(raw).__name__}")
    if raw.get("tensors_sha256") != sha256(tensors):
        raise InvalidInput(
            f"{where}: its tensors_sha256 is not that of {BUNDLE_FILES[0]}: one of the two was changed or damaged"
        )
    if raw.get("hardware_fingerprint") != fingerprint:
        raise InvalidInput(
            f"{where}: is a cost model of hardware {shown(raw.get('hardware_fingerprint'))}, but lies under {fingerprint}"
        )
    return raw
