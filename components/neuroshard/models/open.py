"""`--model`: a folder that `pretrain` wrote, analytic:NAME, given:FILE, STORE#HARDWARE[@DIGEST], or one of these corrected."""

from pathlib import Path

from neuroshard.core.errors import UsageError
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.bundle import TrainedCostModel, load_cost_model
from neuroshard.costmodel.given import load_given
from neuroshard.costmodel.protocol import CostModel
from neuroshard.models.published import open_published
from neuroshard.seen.corrected import corrected, factors_of


def open_cost_model(spec: str | Path, batch_size: int | None = None) -> CostModel:
    """The cost model that `spec` names. `batch_size` is for models that do not know their own, or know several.

    Raises InvalidInput, NewerFormat, UsageError and StoreError in one line.
    """
    if not str(spec).strip():
        raise UsageError(
            "the cost model's name is empty; name a folder, STORE#HARDWARE, analytic:h100 or given:costs.json"
        )
    if (named := factors_of(str(spec)))[1] and not Path(spec).exists():
        return corrected(open_cost_model(named[0], batch_size), *named[1])
    kind, colon, rest = str(spec).partition(":")
    if colon and kind == "analytic":
        return analytic_model(rest, batch_size)
    if colon and kind == "given":
        return load_given(Path(rest), batch_size)
    in_a_store = "#" in str(spec) or "://" in str(spec)  # a store's URL without hardware gets its own message
    if in_a_store and not Path(spec).exists():
        return at_batch_size(open_published(str(spec), batch_size), batch_size)
    return at_batch_size(load_cost_model(Path(spec)), batch_size)


def open_trained(spec: str | Path, option: str) -> TrainedCostModel:
    """The trained cost model that `option` names. Raises UsageError for an analytic model and for given costs.

    Raises otherwise what `open_cost_model` raises.
    """
    if str(spec).startswith(("analytic:", "given:")):
        raise UsageError(f"{option} {spec}: not a trained cost model; name one that `neuroshard pretrain` wrote")
    model = open_cost_model(spec)
    assert isinstance(model, TrainedCostModel)
    return model


def at_batch_size(model: CostModel, batch_size: int | None) -> CostModel:
    """The model for this batch size (None: its own). Raises InvalidInput if it was measured at a single other batch size."""
    if batch_size is None or not isinstance(model, TrainedCostModel):
        return model
    return model.at_batch_size(batch_size)
