"""Cost models in a store: one release track (track.py) for each kind of hardware and batch size.

hardware/<fingerprint>/<batch size>/<sha256>/model.json, nets.safetensors      a bundle, under the digest of its model.json
"""

import re
from functools import partial
from typing import Any, NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NotFound, StoreError, Unreachable, UsageError
from neuroshard.core.hardware_names import is_part_of_name
from neuroshard.core.release import BUNDLE_FILES, FINGERPRINT, HARDWARE, ModelRelease
from neuroshard.core.value import decode_json, sha256, shown
from neuroshard.store.protocol import PartlyListed, Store
from neuroshard.store.releases import plans_of
from neuroshard.store.track import Files, Live, ReleaseTrack, find_artifact, read_pointer

BATCH_SIZE = r"[1-9][0-9]{0,11}"


class ModelKey(NamedTuple):
    """What cost models in a store are found by: each key has one live cost model at a time."""

    fingerprint: str
    batch_size: int


def models_of(fingerprint: str, batch_size: int) -> ReleaseTrack[ModelRelease]:
    """The release track of the cost models of a kind of hardware at a batch size. Raises UsageError for an invalid key."""
    if not re.fullmatch(FINGERPRINT, fingerprint):
        raise UsageError(
            f"{fingerprint[:80]!r} is not a hardware's fingerprint: 16 hex digits, as `neuroshard models` shows"
        )
    if batch_size < 1:
        raise UsageError(f"a batch size must be at least 1, not {batch_size}")
    patterns = tuple(f"{{}}/{file}" for file in BUNDLE_FILES)
    parse = partial(_whole, ModelKey(fingerprint, batch_size))
    return ReleaseTrack(
        f"{HARDWARE}/{fingerprint}/{batch_size}", ModelRelease, patterns, parse, "cost model", "publish-model"
    )


def track_of(name: str) -> ReleaseTrack[Any]:
    """The release track of a name that a user types: of a model's plans, or of the cost models of hardware/FINGERPRINT/BATCH.

    Raises UsageError for an invalid name.
    """
    folder, _, rest = name.partition("/")
    if folder != HARDWARE or not rest:
        return plans_of(name)
    fingerprint, _, batch_size = rest.partition("/")
    if not re.fullmatch(BATCH_SIZE, batch_size):
        raise UsageError(
            f"{name[:80]!r} is not the name of cost models; write hardware/FINGERPRINT/BATCH, as in "
            "hardware/1f0c6a2b9d3e4857/512 (`neuroshard models` shows both)"
        )
    return models_of(fingerprint, int(batch_size))


def model_keys(store: Store) -> tuple[tuple[ModelKey, ...], dict[str, str]]:
    """The keys of all cost models in the store, live or not; and by fingerprint, why some of a hardware cannot be listed."""
    unlisted = {}
    try:
        entries = store.list(f"{HARDWARE}/")
    except PartlyListed as error:
        if HARDWARE in error.denied:
            raise
        entries = error.entries
        of = {folder.split("/")[1]: why for folder, why in error.denied.items()}
        unlisted = {name: why for name, why in of.items() if re.fullmatch(FINGERPRINT, name)}
    form = re.compile(rf"{HARDWARE}/({FINGERPRINT.strip('^$')})/({BATCH_SIZE})/.+")
    found = {match.groups() for entry in entries if (match := form.fullmatch(entry.key))}
    return tuple(sorted(ModelKey(fingerprint, int(batch_size)) for fingerprint, batch_size in found)), unlisted


def find_hardware(store: Store, wanted: str, batch_size: int | None = None) -> Live[ModelRelease]:
    """The live cost model of the hardware with the fingerprint `wanted`, or with `wanted` in its name.

    Of cost models of several batch sizes it is the one of `batch_size`. A single cost model is returned whatever its batch
    size, and the caller checks that. Raises NotFound where there is none, UsageError where several fit, InvalidInput where none
    of several has the batch size. Hardware whose pointer cannot be read, such as one of a newer version, is noted on stderr and
    skipped, unless its fingerprint is `wanted`.
    """
    named = bool(re.fullmatch(FINGERPRINT, wanted))
    keys, skipped = model_keys(store)
    live = []
    for key in keys:
        try:
            live.append(read_pointer(store, models_of(*key)))
        except NotFound:  # published, none of them live
            continue
        except Unreachable:
            raise
        except (InvalidInput, StoreError) as error:
            if key.fingerprint == wanted and batch_size in (None, key.batch_size):
                raise
            skipped[key.fingerprint] = str(error)
    log(*(f"note: hardware {fingerprint} is skipped: {why}" for fingerprint, why in skipped.items()))
    if named:
        found = [one for one in live if one.release.fingerprint == wanted]
    else:
        found = [one for one in live if is_part_of_name(wanted, one.release.device_name)]
    kinds = {one.release.fingerprint for one in found}
    known = "; ".join(
        f"{one.release.fingerprint} {one.release.device_name}, batch {one.release.batch_size:,}"
        for one in found or live
    )
    if not found and wanted in skipped:
        raise StoreError(skipped[wanted])
    if not found:
        raise NotFound(
            f"{store.url}: no cost model of hardware {wanted!r} is live there; there is "
            f"{known or 'none of any hardware'} (`neuroshard publish-model` puts one there)"
        )
    if len(kinds) > 1:
        raise UsageError(f"{store.url}: {wanted!r} names {len(kinds)} kinds of hardware; give a fingerprint: {known}")
    same = [one for one in found if one.release.batch_size == batch_size]
    if len(same or found) > 1:
        several = f"{store.url}: {wanted!r} has cost models of several batch sizes"
        if batch_size is None:
            raise UsageError(f"{several}, give --batch-size: {known}")
        raise InvalidInput(f"{several}, and none of {batch_size:,}; measure at batch size {batch_size:,}: {known}")
    return (same or found)[0]


def find_bundle(store: Store, fingerprint: str, prefix: str) -> tuple[ReleaseTrack[ModelRelease], str]:
    """The release track and the whole digest of a published cost model, live or not, from the beginning of its digest.

    Raises NotFound, and UsageError for an invalid digest.
    """
    for key in model_keys(store)[0]:
        if key.fingerprint == fingerprint:
            try:
                return models_of(*key), find_artifact(store, models_of(*key), prefix)
            except NotFound:
                continue
    raise NotFound(f"{store.url}: no cost model {prefix[:12]!r} of hardware {fingerprint} is published there")


def _whole(key: ModelKey, files: Files, where: str) -> dict[str, Any]:
    """The decoded model.json of a bundle.

    Raises InvalidInput unless it fits its tensors, and the hardware and batch size that it is stored under.
    """
    tensors, manifest = files.values()
    raw = decode_json(manifest, where)
    if not isinstance(raw, dict):
        raise InvalidInput(f"{where}: expected a JSON object, found {type(raw).__name__}")
    if raw.get("tensors_sha256") != sha256(tensors):
        raise InvalidInput(
            f"{where}: its tensors_sha256 is not that of {BUNDLE_FILES[0]}: one of the two was changed or damaged"
        )
    for what, said, expected in (
        ("hardware", raw.get("hardware_fingerprint"), key.fingerprint),
        ("batch size", raw.get("batch_size"), key.batch_size),
    ):
        if said != expected:
            raise InvalidInput(f"{where}: is a cost model of {what} {shown(said)}, but is stored under {expected}")
    return raw
