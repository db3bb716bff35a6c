"""A cost model -> its hardware's live one, in a store.

    neuroshard publish-model model/ --store s3://bucket/prefix

Released as plans are (golive.py), under the fingerprint of the hardware and the batch size that it was measured with.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from neuroshard.core.errors import InvalidInput, Refused
from neuroshard.core.release import BUNDLE_FILES, ModelRelease, in_the_future
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.manifest import Manifest
from neuroshard.deploy.gate import check_max_error
from neuroshard.deploy.golive import claim, go_live, next_number, put, remember, timestamp
from neuroshard.files.disk import read_bytes
from neuroshard.store.bundles import models_of
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.track import Artifact, Line, find_artifact, live_or_none, read_artifact

MAX_ERROR = 0.2  # on tables never seen; measured again, the same case differs by 2 to 7 % on a CPU


class Asked(NamedTuple):
    """What a cost model must show to go live: its error on unseen tables, unless forced. None asks for nothing.

    With `renew` the one that is live goes live again, with today's date: it was measured again, and is the same.
    """

    max_error: float | None = MAX_ERROR
    force: bool = False
    renew: bool = False


USUAL = Asked()


def publish_model(folder: Path, store: Store, *, now: datetime, asked: Asked = USUAL) -> ModelRelease:
    """Put the bundle of a folder in the store and make it its hardware's live one. Returns the release that is live then.

    Raises Refused where its error is above what is asked, or not known: then it is published, but not live; InvalidInput,
    NewerFormat, StoreError, and Conflict where another publisher was faster.
    """
    check_max_error(asked.max_error)
    manifest = load_cost_model(folder).manifest
    if manifest.hardware_fingerprint != manifest.bench.hardware.fingerprint:
        raise InvalidInput(
            f"{folder}: its hardware_fingerprint {manifest.hardware_fingerprint[:16]} is not that of its hardware "
            f"({manifest.bench.hardware.fingerprint}): the file was changed, or is of another version; pretrain again"
        )
    line = models_of(manifest.hardware_fingerprint, manifest.batch_size)
    live_or_none(store, line)  # a pointer that is broken is told before anything is written
    data = dict(zip(line.keys(manifest.digest()), (read_bytes(folder / name) for name in BUNDLE_FILES), strict=True))
    data[line.keys(manifest.digest())[-1]] = manifest.canonical_json()
    return _go_live(put(store, line, manifest.digest(), data), manifest, "publish", asked, store, line, now)


def promote_model(store: Store, line: Line[ModelRelease], digest: str, *, now: datetime) -> ModelRelease:
    """Make a published cost model its hardware's live one, whatever its error. `digest` may be its beginning."""
    artifact = claim(store, line, read_artifact(store, line, find_artifact(store, line, digest)))
    manifest = Manifest.parse(artifact.value, f"{store.url}/{line.keys(artifact.digest)[-1]}")
    return _go_live(artifact, manifest, "promote", Asked(None), store, line, now)


def run(
    folder: Path,
    store_url: str,
    *,
    max_error: float | None = MAX_ERROR,
    force: bool = False,
    single_writer: bool = False,
) -> ModelRelease:
    """Publish the cost model of a folder into a store, by this machine's clock."""
    store = open_store(store_url, single_writer=single_writer)
    return publish_model(folder, store, now=datetime.now(UTC), asked=Asked(max_error, force))


def _go_live(
    artifact: Artifact,
    manifest: Manifest,
    action: Literal["publish", "promote"],
    asked: Asked,
    store: Store,
    line: Line[ModelRelease],
    now: datetime,
) -> ModelRelease:
    live = live_or_none(store, line)
    is_live = live is not None and live.release.bundle_digest == artifact.digest
    if live and is_live and not asked.renew and not in_the_future(live.release.time, now):
        remember(live, store, line)
        return live.release
    error = manifest.report.unseen_tables_error
    if asked.max_error is not None and not asked.force and (error is None or error > asked.max_error):
        found = "is not known" if error is None else f"is {error:.1%}"
        stays = f"release {live.release.number} stays live" if live else "nothing is live"
        unknown = "cases of tables kept from training, of which `augment` draws none from fewer than 3 kinds of tables"
        raise Refused(
            f"{store.url}: cost model {artifact.digest[:12]} of {line.name} is published, but does not go live: its error on "
            f"unseen tables {found}, and at most {asked.max_error:.1%} is asked for ({stays}); measure more "
            f"{unknown if error is None else 'cases'}, or make it live all the same by `neuroshard publish-model` with --force"
            f"{'' if error is None else ' or --max-error'}"
        )
    release = ModelRelease(
        number=next_number(live, store, line),
        previous_digest=live.release.bundle_digest if live else None,
        rollback_number=live.release.number if live else None,
        time=timestamp(now),
        fingerprint=manifest.hardware_fingerprint,
        bundle_digest=artifact.digest,
        action=action,
        backend=manifest.bench.backend,
        device_name=manifest.bench.hardware.name,
        batch_size=manifest.batch_size,
        error=error,
        max_error=asked.max_error,
        forced=asked.force,
    )
    return go_live(release, live, store, line)
