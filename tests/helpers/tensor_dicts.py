"""Batches as TensorDicts, which TorchRec takes where it takes KeyedJaggedTensors."""

from typing import Any

import torch
from tensordict import TensorDict
from torchrec import KeyedJaggedTensor


def as_tensor_dict(batch: KeyedJaggedTensor) -> TensorDict:
    """The features of a batch: nested tensors, and one JaggedTensor, the last."""
    by_name: dict[str, Any] = batch.to_dict()
    for name in list(by_name)[:-1]:
        by_name[name] = torch.nested.nested_tensor_from_jagged(by_name[name].values(), offsets=by_name[name].offsets())
    return TensorDict(source=by_name)
