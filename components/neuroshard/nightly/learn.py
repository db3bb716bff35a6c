"""What a night measured of a kind of hardware -> its cost model, live if it serves: merge, pretrain, publish.

What fails here concerns this kind alone: it is written down in the store, and the models are planned with what there is.
"""

from pathlib import Path

from neuroshard import __version__
from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, NeuroshardError, Refused, StoreError
from neuroshard.core.nightly import Survey, Work
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.deploy.night import publish
from neuroshard.measure.workers.job import merge_shares
from neuroshard.pretrain.run import run as pretrain
from neuroshard.store.folders import patiently
from neuroshard.store.measuring import FAILED, LEARNED, costs_digest, measuring, note_failure, write_record
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store


def run(
    night: Survey, work: Work, store_url: str, costs: Path, cost_model: Path, *, single_writer: bool = False
) -> TrainedCostModel | None:
    """Merge the shares into `costs`, train into `cost_model`, and make it live. None where no cost model came of it.

    Raises StoreError where the store cannot be written.
    """
    store = open_store(store_url, single_writer=single_writer)
    model: TrainedCostModel | None = None
    step = "merge"
    try:
        merge_shares(work, store_url, costs, single_writer=single_writer)
        learned_from = costs_digest(store, work.folder)
        step = "pretrain"
        model = pretrain(costs, cost_model, seed=night.request.seed, ranks=work.ranks)
        step = "publish"
        publish(
            work, night.request, cost_model, store_url, max_error=night.max_error or 0.0, single_writer=single_writer
        )
    except Refused as error:
        _learned(store, work, learned_from, night.max_error, str(error))
        note_failure(store, work.folder, step, str(error))
    except Conflict as error:  # another night was faster; what it published is as good
        log(f"note: {error}")
    except StoreError:
        raise
    except NeuroshardError as error:
        if step == "pretrain":  # from these costs nothing can be learned: more are needed
            _learned(store, work, learned_from, night.max_error, str(error))
        if step != "merge" or FAILED not in measuring(store, work.folder).others:  # why nothing was measured says more
            note_failure(store, work.folder, step, str(error))
    else:
        _learned(store, work, learned_from, night.max_error)
        _forget_failures(store, work)
    return model


def _learned(store: Store, work: Work, costs: str, max_error: float | None, refused: str = "") -> None:
    record = {"costs": costs, "version": __version__, "refused": refused, "max_error": max_error}
    write_record(store, f"{work.folder}/{LEARNED}", record)


def _forget_failures(store: Store, work: Work) -> None:
    if FAILED in measuring(store, work.folder).others:
        patiently(lambda: store.delete(f"{work.folder}/{FAILED}"))
