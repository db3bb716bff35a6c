"""The fused optimizers of TorchRec by our names, and which one a table has. Needs torch and torchrec."""

from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from neuroshard.core.table import OPTIMIZER_BYTES

NAMES = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.ADAM: "adam",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_rowwise_adam",
    EmbOptimType.LAMB: "lamb",
    EmbOptimType.PARTIAL_ROWWISE_LAMB: "partial_rowwise_lamb",
    EmbOptimType.LARS_SGD: "lars_sgd",
}


def in_backward(weight: nn.Parameter) -> tuple[list[type[Any]], dict[str, Any]]:
    """What apply_optimizer_in_backward has put on a table's weight: the optimizers, and the settings of the first."""
    return getattr(weight, "_optimizer_classes", []), dict(getattr(weight, "_optimizer_kwargs", [{}])[0])


def name_of(kind: type[Any], settings: dict[str, Any]) -> str | None:
    """Our name of an optimizer's class, None where we have none; TorchRec lets an `optimizer` among the settings count."""
    said = settings.get("optimizer")
    try:
        return NAMES.get(said if isinstance(said, EmbOptimType) else optimizer_type_to_emb_opt_type(kind))
    except ValueError:
        return None


def state_fields(weight: nn.Parameter) -> dict[str, int]:
    """The fields of Table for the optimizer on a weight; none without one, with several, or with one that we have no name of."""
    classes, settings = in_backward(weight)
    name = name_of(classes[0], settings) if len(classes) == 1 else None
    if name is None:
        return {}
    per_row, per_element = OPTIMIZER_BYTES[name]
    return {"optimizer_bytes_per_row": per_row, "optimizer_bytes_per_element": per_element}
