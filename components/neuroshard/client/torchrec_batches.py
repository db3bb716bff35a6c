"""Batches that TorchRec reads wrongly, without an error: refused before it reads them. Needs torch and torchrec.

    check_batches(model)  # on every rank, after DistributedModelParallel

Unsharded collections read a batch's features by name, and its weights where they are weighted. Sharded ones (seen with torchrec
1.8) find features by their places in the first batch, use whatever weights a batch has, and send them without their gradient.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType

from neuroshard.client.rows_sharded import ShardedCollectionByAccess
from neuroshard.client.torchrec_order import SHARDED, collections_in, inner_of
from neuroshard.core.errors import InvalidInput, UsageError

M = TypeVar("M", bound=nn.Module)


def check_batches(model: M) -> M:
    """Let the sharded collections of a model refuse batches that TorchRec would read otherwise than the unsharded ones. Returns
    the model.

    Call it on what DistributedModelParallel returns, before the first batch, on every rank. From then on a forward raises
    InvalidInput, on the rank that has such a batch: features in other places than in the module's first batch; weights for a
    collection that is not weighted, or none for one that is; weights with a gradient, unless every rank has a copy of all tables.
    Values are not looked at, so nothing waits for a device. Raises UsageError for a model without a sharded collection.
    """
    kinds = (*SHARDED, ShardedCollectionByAccess)
    sharded = [(path, each) for path, each in collections_in(model) if isinstance(each, kinds)]
    if not sharded:
        raise UsageError(
            f"the {type(model).__name__} has no sharded collection in it; call check_batches(model) on what "
            "DistributedModelParallel returns"
        )
    for path, collection in sharded:
        if not any(isinstance(hook, _Checked) for hook in collection._forward_pre_hooks.values()):
            collection.register_forward_pre_hook(_Checked(path), with_kwargs=True)
    return model


class _Checked:
    """What a module does before it reads a batch. `reshard` gives it to the module that takes its place."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.first: list[str] | None = None  # features of the first batch

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        features = [*given, *named.values()][0]
        if isinstance(module, ShardedCollectionByAccess):  # it reads features by name
            inner = module.inner
        else:
            inner = inner_of(module)
            self._check_places(list(features.keys()), inner)
        makes_weights = isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection)
        if not makes_weights and not isinstance(inner, ShardedEmbeddingCollection):  # sequences use none
            self._check_weights(features.weights_or_none(), inner)

    def _check_places(self, keys: list[str], inner: Any) -> None:
        if self.first is None:
            self.first = keys
        elif keys != self.first and (moved := _moved(self.first, keys, inner)):
            raise InvalidInput(
                f"module {self.path!r} gets a batch that {moved}: TorchRec reads features by their places in the first batch of "
                "a module, so tables would get the ids of others; give all batches the same features in one order"
            )

    def _check_weights(self, weights: torch.Tensor | None, inner: Any) -> None:
        if (weights is None) is inner._is_weighted:
            what, how = "not weighted", "with weights, which TorchRec uses all the same"
            if weights is None:
                what, how = "weighted", "without weights, where TorchRec takes all to be 1"
            raise InvalidInput(
                f"module {self.path!r} is {what} (is_weighted) and gets a batch {how}; give it batches as the collection says"
            )
        if weights is not None and weights.requires_grad and torch.is_grad_enabled() and _sends(inner):
            raise InvalidInput(
                f"module {self.path!r} gets a batch whose weights have a gradient, which TorchRec does not send back: what made "
                "them is not trained; let a FeatureProcessedEmbeddingBagCollection make them, or detach them"
            )


def _moved(first: Sequence[str], keys: Sequence[str], inner: Any) -> str:
    """How the features of a batch, that a collection reads, are in other places than in the first one, in words; empty where all
    are in theirs. Others may come after them, if some came in the first one: else TorchRec takes all to be the collection's."""
    configs = (
        inner._embedding_configs if isinstance(inner, ShardedEmbeddingCollection) else inner._embedding_bag_configs
    )
    read = [
        name for name in dict.fromkeys(name for config in configs for name in config.feature_names) if name in first
    ]
    for name in read:
        if name not in keys:
            return f"lacks feature {name!r}"
        if (here := keys.index(name)) != (there := first.index(name)):
            return f"has feature {name!r} at place {here}, and the first one had it at {there}"
    more = [name for name in keys if name not in read] if len(first) == len(read) else []
    return f"has feature {more[0]!r}, which the first one had not" if more else ""


def _sends(inner: Any) -> bool:
    """Whether a collection sends lookups to other ranks."""
    held = inner.module_sharding_plan.values()
    return any(parameter.sharding_type != ShardingType.DATA_PARALLEL.value for parameter in held)
