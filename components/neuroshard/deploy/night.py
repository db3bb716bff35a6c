"""The end of learning a kind of hardware in a nightly run: its cost model goes live, unless that would serve less."""

from datetime import UTC, datetime
from pathlib import Path

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NotFound, Refused
from neuroshard.core.nightly import Request, Work
from neuroshard.core.release import ModelRelease
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.protocol import predicts
from neuroshard.deploy.bundles import MAX_ERROR, Asked, publish_model
from neuroshard.deploy.golive import mend_pointer
from neuroshard.models.serving import known_models
from neuroshard.store.bundles import Track, models_of
from neuroshard.store.folders import patiently
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.track import Line, read_artifact


def publish(
    work: Work,
    request: Request,
    cost_model: Path,
    store_url: str,
    *,
    max_error: float,
    single_writer: bool = False,
) -> ModelRelease:
    """Publish a work's cost model; its release. `max_error` 0 asks for what `publish-model` asks for.

    Raises Refused where its error on unseen tables is higher, or where the live one serves more; StoreError, Conflict.
    """
    store = open_store(store_url, single_writer=single_writer)
    line = models_of(work.hardware.fingerprint, request.batch_size)
    if mended := patiently(lambda: mend_pointer(store, line)):
        log(f"note: {mended}")
    now = datetime.now(UTC)
    if less := patiently(lambda: _serves_less(store, work, request, cost_model)):
        raise Refused(less)
    patiently(lambda: _take_away_damaged(store, line, cost_model))
    asked = Asked(max_error or MAX_ERROR, renew=work.oldest_seconds is not None)
    release = patiently(lambda: publish_model(cost_model, store, now=now, asked=asked))
    error = "" if release.error is None else f", error on unseen tables {release.error:.1%}"
    log(f"{release.device_name}: cost model {release.bundle_digest[:12]} is live{error}")
    return release


def _take_away_damaged(store: Store, line: Line[ModelRelease], cost_model: Path) -> None:
    """Delete what the store holds under the digest of this very cost model, if that is damaged: it is written whole next."""
    digest = load_cost_model(cost_model).name
    try:
        read_artifact(store, line, digest)
    except NotFound:
        return
    except InvalidInput as error:
        log(f"note: {error}; it was taken away")
        for key in line.keys(digest):
            store.delete(key)


def _serves_less(store: Store, work: Work, request: Request, cost_model: Path) -> str:
    """Why the new cost model would serve less of tonight's plans than the live one; nothing where it does not."""
    live = known_models(store)[0].get(Track(work.hardware.fingerprint, request.batch_size))
    if live is None or live.model is None:
        return ""
    new, old = load_cost_model(cost_model), live.model
    lost = [ranks for ranks in work.ranks if predicts(old, ranks) and not predicts(new, ranks)]
    lost += [ranks for ranks in old.manifest.device_counts if ranks in work.measurable and not predicts(new, ranks)]
    if not lost:
        return ""
    asked = ", ".join(map(str, sorted(set(lost))))
    return (
        f"{work.hardware.name}: cost model {new.name[:12]} cannot predict the all-to-all of {asked} devices, which the live "
        f"{old.name[:12]} can; that one stays live, and the measuring goes on"
    )
