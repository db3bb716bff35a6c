"""The costs measured of a kind of hardware -> its cost model, live if it is good enough: merge, pretrain, publish.

A failure concerns this kind alone: it is recorded in the store, and plans are searched with the cost models there are.
"""

from datetime import UTC, datetime
from pathlib import Path

from neuroshard import __version__
from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, NeuroshardError, Refused, StoreError, Unreachable, Unsafe
from neuroshard.core.text import short_name
from neuroshard.costmodel.bundle import TrainedCostModel, load_cost_model
from neuroshard.costmodel.protocol import predicts
from neuroshard.deploy.bundles import PublishRule, publish_model
from neuroshard.deploy.golive import delete_damaged, mended_or_why_not
from neuroshard.measure.shares.job import merge_shares
from neuroshard.models.serving import known_models
from neuroshard.orders.nightly import Campaign, Survey
from neuroshard.pretrain.run import run as pretrain
from neuroshard.store.bundles import ModelKey, models_of
from neuroshard.store.measuring import LEARNED, costs_digest, note_failure, write_record
from neuroshard.store.night import not_learned
from neuroshard.store.patience import open_patiently
from neuroshard.store.protocol import Store


def run(
    survey: Survey, campaign: Campaign, store_url: str, costs: Path, cost_model: Path, *, single_writer: bool = False
) -> TrainedCostModel | None:
    """Merge the shares into `costs`, train into `cost_model`, and make it live. None where no cost model could be trained.

    Raises StoreError where the store cannot be listed, or does not answer.
    """
    store = open_patiently(store_url, single_writer=single_writer)
    model: TrainedCostModel | None = None
    step, refused, learned_from, is_learned = "merge", "", "", True
    try:
        learned_from = costs_digest(store, campaign.folder)  # what another run's pods send from now on is not merged
        merge_shares(campaign, store_url, costs, single_writer=single_writer)
        step = "pretrain"
        model = pretrain(costs, cost_model, seed=survey.request.seed, ranks=campaign.ranks)
        step = "publish"
        _publish(survey, campaign, cost_model, store)
    except Conflict as error:  # another run published first, a cost model that is as good
        log(f"note: {error}")
        is_learned = False
    except (Unreachable, Unsafe):
        raise
    except NeuroshardError as error:
        refused = str(error)
        note_failure(store, campaign.folder, step, refused)
        is_learned = step == "pretrain" or isinstance(error, Refused)  # these costs are not enough
    if is_learned:  # without the record, the next run learns from the same costs again
        record = {"costs": learned_from, "version": __version__, "refused": refused, "max_error": survey.max_error}
        try:
            write_record(store, f"{campaign.folder}/{LEARNED}", record)
        except (Unreachable, Unsafe):
            raise
        except StoreError as error:
            log(f"note: what was learned from could not be recorded: {error}")
    if less := not_learned(store, campaign):
        log(f"degraded: {less}")
    return model


def _publish(survey: Survey, campaign: Campaign, cost_model: Path, store: Store) -> None:
    """Publish the cost model of a campaign. Raises Refused where its error on unseen tables is higher than the survey allows, or
    where the live cost model serves more; StoreError, Conflict."""
    track, new = models_of(campaign.hardware.fingerprint, survey.request.batch_size), load_cost_model(cost_model)
    if mended := mended_or_why_not(store, track):
        log(f"note: {mended}")
    now = datetime.now(UTC)
    if less := _serves_less(store, campaign, survey.request.batch_size, new):
        raise Refused(less)
    if mended := delete_damaged(store, track, new.name):
        log(f"note: {mended}")
    asked = PublishRule(survey.max_error, renew=campaign.oldest_seconds is not None)
    release = publish_model(cost_model, store, now=now, asked=asked)
    error = "" if release.error is None else f", error on unseen tables {release.error:.1%}"
    log(f"{release.device_name}: cost model {release.bundle_digest[:12]} is live{error}")


def _serves_less(store: Store, campaign: Campaign, batch_size: int, new: TrainedCostModel) -> str:
    """Which numbers of devices the live cost model can predict and the new one cannot, in words; "" where there are none."""
    live = known_models(store)[0].get(ModelKey(campaign.hardware.fingerprint, batch_size))
    old = live.model if live else None
    measured = old.manifest.device_counts if old else ()
    wanted = sorted({*campaign.ranks, *(ranks for ranks in measured if ranks in campaign.measurable)})
    missing = [ranks for ranks in wanted if old and predicts(old, ranks) and not predicts(new, ranks)]
    if old is None or not missing:
        return ""
    asked = ", ".join(map(str, missing))
    return (
        f"{campaign.hardware.name}: cost model {short_name(new.name)} cannot predict the all-to-all of {asked} devices, which "
        f"the live {short_name(old.name)} can; that one stays live, and later runs measure more"
    )
