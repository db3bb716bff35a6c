"""Cost models out of a store: `s3://bucket/prefix#h200` is the live one of that hardware there.

A bundle is copied to this machine once, under its digest, and checked against it whenever it is opened.
"""

import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NeuroshardError, StoreError, Unreachable, UsageError
from neuroshard.core.release import BUNDLE_FILES, ModelRelease
from neuroshard.core.value import check_format, decode_json, sha256
from neuroshard.costmodel.bundle import TrainedCostModel, load_cost_model
from neuroshard.costmodel.manifest import Manifest
from neuroshard.files.disk import write_bytes
from neuroshard.store.bundles import find_bundle, find_hardware, model_keys, models_of
from neuroshard.store.open import default_cache_dir, open_store
from neuroshard.store.protocol import PartlyListed, Store
from neuroshard.store.track import Files, Live, ReleaseTrack, live_or_none, read_artifact

MANIFEST_VERSIONS = 1_000  # newer than any: a manifest that this version cannot read is listed with its fault


class Listed(NamedTuple):
    """One cost model of a store. `manifest` is None if this version cannot read it, and `fault` says why.

    `fault` also says if the hardware's pointer cannot be read, so that what is live is unknown.
    """

    fingerprint: str
    digest: str
    modified: datetime  # by the store's clock
    is_live: bool
    manifest: Manifest | None
    fault: str = ""

    @property
    def error(self) -> float | None:
        """On unseen tables."""
        return None if self.manifest is None else self.manifest.report.unseen_tables_error


def open_published(spec: str, batch_size: int | None = None) -> TrainedCostModel:
    """The cost model that `spec` names: STORE#HARDWARE is the live one of that hardware, at `batch_size` where it has several;
    STORE#FINGERPRINT@DIGEST is the one of that digest, live or not.

    Raises UsageError, NotFound, StoreError, InvalidInput, NewerFormat.
    """
    url, _, hardware = spec.rpartition("#")
    if not url or not hardware:
        raise UsageError(
            f"{spec!r} does not name a store's cost model; write STORE#HARDWARE, as in s3://bucket/prefix#h200"
        )
    store = open_store(url)
    fingerprint, at, prefix = hardware.partition("@")
    if at:
        track, digest = find_bundle(store, fingerprint, prefix)
    else:
        release = find_hardware(store, hardware, batch_size).release
        track, digest = models_of(release.fingerprint, release.batch_size), release.bundle_digest
    return open_bundle(store, track, digest)


def open_bundle(store: Store, track: ReleaseTrack[ModelRelease], digest: str) -> TrainedCostModel:
    """A published cost model by its digest. Raises NotFound, StoreError, InvalidInput and NewerFormat, naming its place there."""
    where = f"{store.url}/{track.keys(digest)[-1]}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = _kept(digest) or Path(scratch)
        if not _holds(folder, digest):
            _copy(read_artifact(store, track, digest).files, folder)
        try:
            return load_cost_model(folder)
        except InvalidInput as error:
            raise type(error)(f"{where}: {error}") from None


def list_published(store: Store) -> tuple[Listed, ...]:
    """Every cost model of every hardware, newest first within a hardware. Raises StoreError.

    What is broken is listed as such, and what may not be listed is noted on stderr.
    """
    found = []
    keys, unlisted = model_keys(store)
    log(*(f"note: hardware {fingerprint}: {why}" for fingerprint, why in unlisted.items()))
    for key in keys:
        track, fingerprint = models_of(*key), key.fingerprint
        live, broken = _live(store, track)
        try:
            entries = store.list(f"{track.name}/")
        except PartlyListed as error:
            entries = error.entries
        for entry in sorted(entries, key=lambda entry: entry.modified, reverse=True):
            digest = track.digest_of(entry.key)
            if digest is None or not entry.key.endswith(BUNDLE_FILES[-1]):
                continue
            manifest, fault = _manifest(store, entry.key)
            is_live = live is not None and live.release.bundle_digest == digest
            found.append(Listed(fingerprint, digest, entry.modified, is_live, manifest, fault or broken))
    return tuple(found)


def _live(store: Store, track: ReleaseTrack[ModelRelease]) -> tuple[Live[ModelRelease] | None, str]:
    """What is live, if anything; or why that is unknown."""
    try:
        return live_or_none(store, track), ""
    except Unreachable:
        raise
    except (InvalidInput, StoreError) as error:
        return None, str(error)


def _manifest(store: Store, key: str) -> tuple[Manifest | None, str]:
    where = f"{store.url}/{key}"
    try:
        raw = check_format(decode_json(store.read(key), where), MANIFEST_VERSIONS, where)
        return Manifest.parse(raw, where), ""
    except Unreachable:
        raise
    except (InvalidInput, StoreError) as error:
        return None, str(error)


def _kept(digest: str) -> Path | None:
    """The folder of this machine for the bundle, or None where there is no home to keep it in."""
    try:
        folder = default_cache_dir() / "models" / digest
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):
        return None
    return folder


def _holds(folder: Path, digest: str) -> bool:
    """Whether the folder holds the whole bundle; `load_cost_model` checks its tensors."""
    with suppress(OSError, NeuroshardError):
        manifest, tensors = ((folder / name).read_bytes() for name in reversed(BUNDLE_FILES))
        if sha256(manifest) == digest:
            return bool(decode_json(manifest, "").get("tensors_sha256") == sha256(tensors))
    return False


def _copy(files: Files, folder: Path) -> None:
    """Copies files under fixed names: a key of the store never becomes a path."""
    for name, data in zip(BUNDLE_FILES, files.values(), strict=True):
        write_bytes(folder / name, data)
