"""A cost model -> the live one of its hardware, in a store.

    neuroshard publish-model model/ --store s3://bucket/prefix

It goes live as a plan does (golive.py), on the release track of its hardware and batch size.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from neuroshard.core.errors import InvalidInput, NotFound, Refused
from neuroshard.core.release import BUNDLE_FILES, ModelRelease, in_the_future
from neuroshard.core.value import timestamp
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.manifest import Manifest
from neuroshard.deploy.gate import check_max_error
from neuroshard.deploy.golive import claim, go_live, next_number, put, remember
from neuroshard.files.disk import read_bytes
from neuroshard.store.bundles import models_of
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.track import Artifact, Live, ReleaseTrack, find_artifact, live_or_none, read_artifact

MAX_ERROR = 0.2  # on unseen tables; on a CPU, two measurements of one case differ by 2 to 7 %


class PublishRule(NamedTuple):
    """What is asked of a cost model that is to go live: its largest error on unseen tables (None: any), unless forced.

    With `renew` a cost model that is live already gets a new release with today's date, since it was measured again.
    """

    max_error: float | None = MAX_ERROR
    force: bool = False
    renew: bool = False


USUAL = PublishRule()


def publish_model(folder: Path, store: Store, *, now: datetime, asked: PublishRule = USUAL) -> ModelRelease:
    """Put the bundle of a folder in the store, and make it the live cost model of its hardware. Returns the live release.

    Raises Refused where its error is too high or unknown, in which case it is published and not live; InvalidInput,
    NewerFormat, StoreError, and Conflict where another publisher was faster.
    """
    check_max_error(asked.max_error)
    manifest = load_cost_model(folder).manifest
    if manifest.hardware_fingerprint != manifest.bench.hardware.fingerprint:
        raise InvalidInput(
            f"{folder}: its hardware_fingerprint {manifest.hardware_fingerprint[:16]} is not that of its hardware "
            f"({manifest.bench.hardware.fingerprint}): the file was changed, or is of another version; pretrain again"
        )
    track = models_of(manifest.hardware_fingerprint, manifest.batch_size)
    live_or_none(store, track)  # raises for a broken pointer before anything is written
    data = dict(zip(track.keys(manifest.digest()), (read_bytes(folder / name) for name in BUNDLE_FILES), strict=True))
    data[track.keys(manifest.digest())[-1]] = manifest.canonical_json()
    return _go_live(put(store, track, manifest.digest(), data), manifest, "publish", asked, store, track, now)


def promote_model(store: Store, track: ReleaseTrack[ModelRelease], digest: str, *, now: datetime) -> ModelRelease:
    """Make a published cost model the live one of its hardware, whatever its error. `digest` may be shortened."""
    artifact = claim(store, track, read_artifact(store, track, find_artifact(store, track, digest)))
    manifest = Manifest.parse(artifact.value, f"{store.url}/{track.keys(artifact.digest)[-1]}")
    return _go_live(artifact, manifest, "promote", PublishRule(None), store, track, now)


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
    return publish_model(folder, store, now=datetime.now(UTC), asked=PublishRule(max_error, force))


def _go_live(
    artifact: Artifact,
    manifest: Manifest,
    action: Literal["publish", "promote"],
    asked: PublishRule,
    store: Store,
    track: ReleaseTrack[ModelRelease],
    now: datetime,
) -> ModelRelease:
    live = live_or_none(store, track)
    is_live = live is not None and live.release.bundle_digest == artifact.digest
    if live and is_live and not asked.renew and not in_the_future(live.release.time, now):
        remember(live, store, track)
        return live.release
    error = manifest.report.unseen_tables_error
    if asked.max_error is not None and not asked.force and (error is None or error > asked.max_error):
        found = "is not known" if error is None else f"is {error:.1%}"
        stays = f"release {live.release.number} stays live" if live else "nothing is live"
        unknown = "cases of tables kept from training, of which `augment` draws none from fewer than 3 kinds of tables"
        raise Refused(
            f"{store.url}: cost model {artifact.digest[:12]} of {track.name} is published, but does not go live: its error on "
            f"unseen tables {found}, and at most {asked.max_error:.1%} is asked for ({stays}); measure more "
            f"{unknown if error is None else 'cases'}, or make it live anyway: `neuroshard publish-model` with --force"
            f"{'' if error is None else ' or --max-error'}"
        )
    if live and not is_live and action == "publish" and not asked.force:
        _check_still_learned(manifest, live, store, track)
    release = ModelRelease(
        number=next_number(live, store, track),
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
    return go_live(release, live, store, track)


def _check_still_learned(
    new: Manifest, live: Live[ModelRelease], store: Store, track: ReleaseTrack[ModelRelease]
) -> None:
    """Raise Refused where the analytic model stands in for a part that the live cost model learned from costs.

    One that answers for more numbers of ranks is let through: the live one has no answer there.
    """
    digest = live.release.bundle_digest
    try:
        old = Manifest.parse(read_artifact(store, track, digest).value, f"{store.url}/{track.keys(digest)[-1]}")
    except (NotFound, InvalidInput):  # a live one that cannot be opened is worth less than any other
        return
    if set(new.device_counts) - set(old.device_counts):
        return
    # the parts for which the analytic model stands in, as "compute costs", "all-to-all costs of 4 ranks"
    now, then = ({one.partition(" are those of ")[0] for one in of.report.stand_ins} for of in (new, old))
    if lost := sorted(now - then):
        raise Refused(
            f"{store.url}: cost model {new.digest()[:12]} of {track.name} is published, but does not go live: its "
            f"{' and '.join(lost)} were not learned: the analytic model stands in; release {live.release.number}, "
            "which stays live, learned them; measure more cases, or publish it with --force"
        )
