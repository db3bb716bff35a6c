"""A new cost model of a kind of hardware -> the hardware's live one, unless the live one serves plans that it cannot."""

from datetime import UTC, datetime
from pathlib import Path

from neuroshard.core.clean import log
from neuroshard.core.errors import Refused
from neuroshard.core.release import ModelRelease
from neuroshard.core.text import short_name
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.protocol import predicts
from neuroshard.deploy.bundles import PublishRule, publish_model
from neuroshard.deploy.golive import delete_damaged, mended_or_why_not
from neuroshard.models.serving import known_models
from neuroshard.orders.nightly import Campaign, Request
from neuroshard.store.bundles import ModelKey, models_of
from neuroshard.store.protocol import Store


def publish(
    campaign: Campaign,
    request: Request,
    cost_model: Path,
    store: Store,
    *,
    max_error: float | None = None,
) -> ModelRelease:
    """Publish the cost model of a campaign, and return its release. Without `max_error` any error on unseen tables is allowed.

    Raises Refused where the error on unseen tables is higher, or where the live cost model serves more; StoreError, Conflict.
    """
    track = models_of(campaign.hardware.fingerprint, request.batch_size)
    if mended := mended_or_why_not(store, track):
        log(f"note: {mended}")
    now = datetime.now(UTC)
    if less := _serves_less(store, campaign, request, cost_model):
        raise Refused(less)
    if mended := delete_damaged(store, track, load_cost_model(cost_model).name):
        log(f"note: {mended}")
    asked = PublishRule(max_error, renew=campaign.oldest_seconds is not None)
    release = publish_model(cost_model, store, now=now, asked=asked)
    error = "" if release.error is None else f", error on unseen tables {release.error:.1%}"
    log(f"{release.device_name}: cost model {release.bundle_digest[:12]} is live{error}")
    return release


def _serves_less(store: Store, campaign: Campaign, request: Request, cost_model: Path) -> str:
    """Which numbers of devices the live cost model can predict and the new one cannot, in words; "" where there are none."""
    live = known_models(store)[0].get(ModelKey(campaign.hardware.fingerprint, request.batch_size))
    if live is None or live.model is None:
        return ""
    new, old = load_cost_model(cost_model), live.model
    missing = [ranks for ranks in campaign.ranks if predicts(old, ranks) and not predicts(new, ranks)]
    missing += [
        ranks for ranks in old.manifest.device_counts if ranks in campaign.measurable and not predicts(new, ranks)
    ]
    if not missing:
        return ""
    asked = ", ".join(map(str, sorted(set(missing))))
    return (
        f"{campaign.hardware.name}: cost model {short_name(new.name)} cannot predict the all-to-all of {asked} devices, which "
        f"the live {short_name(old.name)} can; that one stays live, and later runs measure more"
    )
