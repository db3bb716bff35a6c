"""`--model`: a folder that `neuroshard pretrain` wrote, analytic:NAME, given:FILE, or STORE#HARDWARE[@DIGEST]."""

from pathlib import Path

from neuroshard.core.errors import UsageError
from neuroshard.costmodel.analytic import SPREAD, analytic_model
from neuroshard.costmodel.bundle import TrainedCostModel, load_cost_model
from neuroshard.costmodel.given import load_given
from neuroshard.costmodel.protocol import CostModel
from neuroshard.costmodel.published import open_published


def open_cost_model(spec: str | Path, batch_size: int | None = None) -> CostModel:
    """The cost model that `spec` names. `batch_size` is for models that do not know their own, or know several.

    Raises InvalidInput, NewerFormat, UsageError and StoreError in one line.
    """
    if not str(spec).strip():
        raise UsageError(
            "the cost model's name is empty; name a folder, STORE#HARDWARE, analytic:h100 or given:costs.json"
        )
    kind, colon, rest = str(spec).partition(":")
    if colon and kind == "analytic":
        return analytic_model(rest, batch_size)
    if colon and kind == "given":
        return load_given(Path(rest), batch_size)
    in_a_store = "#" in str(spec) or "://" in str(spec)  # a store's URL without hardware is told as such
    if in_a_store and not Path(spec).exists():
        return at_batch_size(open_published(str(spec), batch_size), batch_size)
    return at_batch_size(load_cost_model(Path(spec)), batch_size)


def open_trained(spec: str | Path, option: str) -> TrainedCostModel:
    """The cost model that `option` names, which must have been trained: costs that are computed or given hold nothing learned.

    Raises what `open_cost_model` raises.
    """
    if str(spec).startswith(("analytic:", "given:")):
        raise UsageError(f"{option} {spec}: nothing was learned there; name what `neuroshard pretrain` wrote")
    model = open_cost_model(spec)
    assert isinstance(model, TrainedCostModel)
    return model


def at_batch_size(model: CostModel, batch_size: int | None) -> CostModel:
    """The model for this batch size, None for its own. Raises InvalidInput where it was measured at another one alone."""
    if batch_size is None or not isinstance(model, TrainedCostModel):
        return model
    return model.at_batch_size(batch_size)


def error_on_unseen_tables(model: CostModel) -> float | None:
    """How far the model's predictions are expected to be off, as a share: the mean |predicted / measured - 1| of compute on
    tables that it never saw, or the analytic model's own spread, where that model is all or part of it; None where not known.
    """
    if model.backend == "analytic":
        return SPREAD
    if not isinstance(model, TrainedCostModel):
        return None
    return model.report.uncertainty


def stand_ins(model: CostModel) -> tuple[str, ...]:
    """What of the model was not learned from costs, one sentence a part: there the scaled analytic model answers."""
    return model.report.stand_ins if isinstance(model, TrainedCostModel) else ()
