"""The costs measured of a kind of hardware -> its cost model, live if it is good enough: merge, pretrain, publish.

A failure concerns this kind alone: it is recorded in the store, and plans are searched with the cost models there are.
"""

from pathlib import Path

from neuroshard import __version__
from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, NeuroshardError, Refused, StoreError, Unreachable, Unsafe
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.measure.shares.job import merge_shares
from neuroshard.nightly.publish import publish
from neuroshard.orders.nightly import Campaign, Survey
from neuroshard.pretrain.run import run as pretrain
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
    step = "merge"
    try:
        learned_from = costs_digest(
            store, campaign.folder
        )  # before: what another run's pods send meanwhile is not merged
        merge_shares(campaign, store_url, costs, single_writer=single_writer)
        step = "pretrain"
        model = pretrain(costs, cost_model, seed=survey.request.seed, ranks=campaign.ranks)
        step = "publish"
        publish(campaign, survey.request, cost_model, store, max_error=survey.max_error)
    except Refused as error:
        _record_learned(store, campaign, learned_from, survey.max_error, str(error))
        note_failure(store, campaign.folder, step, str(error))
    except Conflict as error:  # another run published first, a cost model that is as good
        log(f"note: {error}")
    except (Unreachable, Unsafe):
        raise
    except NeuroshardError as error:
        if step == "pretrain":  # these costs are not enough to learn from
            _record_learned(store, campaign, learned_from, survey.max_error, str(error))
        note_failure(store, campaign.folder, step, str(error))
    else:
        _record_learned(store, campaign, learned_from, survey.max_error)
    if less := not_learned(store, campaign):
        log(f"degraded: {less}")
    return model


def _record_learned(store: Store, campaign: Campaign, costs: str, max_error: float | None, refused: str = "") -> None:
    """Record what was learned from; without the record, the next run learns from the same costs again."""
    record = {"costs": costs, "version": __version__, "refused": refused, "max_error": max_error}
    try:
        write_record(store, f"{campaign.folder}/{LEARNED}", record)
    except (Unreachable, Unsafe):
        raise
    except StoreError as error:
        log(f"note: what was learned from could not be recorded: {error}")
