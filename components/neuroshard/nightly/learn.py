"""The costs measured of a kind of hardware -> its cost model, live if it is good enough: merge, pretrain, publish.

A failure concerns this kind alone: it is recorded in the store, and plans are searched with the cost models there are.
"""

from pathlib import Path

from neuroshard import __version__
from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, NeuroshardError, Refused, Unreachable, Unsafe
from neuroshard.core.nightly import Survey, Work
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.measure.workers.job import merge_shares
from neuroshard.nightly.publish import publish
from neuroshard.pretrain.run import run as pretrain
from neuroshard.store.measuring import FAILED, LEARNED, costs_digest, measuring, note_failure, write_record
from neuroshard.store.patience import open_patiently
from neuroshard.store.protocol import Store


def run(
    survey: Survey, work: Work, store_url: str, costs: Path, cost_model: Path, *, single_writer: bool = False
) -> TrainedCostModel | None:
    """Merge the shares into `costs`, train into `cost_model`, and make it live. None where no cost model could be trained.

    Raises StoreError where the store cannot be listed, or does not answer.
    """
    store = open_patiently(store_url, single_writer=single_writer)
    model: TrainedCostModel | None = None
    step = "merge"
    try:
        merge_shares(work, store_url, costs, single_writer=single_writer)
        learned_from = costs_digest(store, work.folder)
        step = "pretrain"
        model = pretrain(costs, cost_model, seed=survey.request.seed, ranks=work.ranks)
        step = "publish"
        publish(work, survey.request, cost_model, store_url, max_error=survey.max_error, single_writer=single_writer)
    except Refused as error:
        _record_learned(store, work, learned_from, survey.max_error, str(error))
        note_failure(store, work.folder, step, str(error))
    except Conflict as error:  # another run published first, a cost model that is as good
        log(f"note: {error}")
    except (Unreachable, Unsafe):
        raise
    except NeuroshardError as error:
        if step == "pretrain":  # these costs are not enough to learn from
            _record_learned(store, work, learned_from, survey.max_error, str(error))
        if step != "merge" or FAILED not in measuring(store, work.folder).others:  # a failure of measuring says more
            note_failure(store, work.folder, step, str(error))
    else:
        _record_learned(store, work, learned_from, survey.max_error)
        _forget_failures(store, work)
    return model


def _record_learned(store: Store, work: Work, costs: str, max_error: float | None, refused: str = "") -> None:
    record = {"costs": costs, "version": __version__, "refused": refused, "max_error": max_error}
    write_record(store, f"{work.folder}/{LEARNED}", record)


def _forget_failures(store: Store, work: Work) -> None:
    if FAILED in measuring(store, work.folder).others:
        store.delete(f"{work.folder}/{FAILED}")
