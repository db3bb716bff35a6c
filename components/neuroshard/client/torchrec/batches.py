"""Batches that TorchRec reads wrongly, without an error: refused before it reads them. Needs torch and torchrec.

    check_batches(model)  # on every rank, after DistributedModelParallel

Unsharded collections read a batch's features by name, and its weights where they are weighted. Sharded ones (seen with torchrec
1.8) find features by their places in the first batch, use whatever weights a batch has, and send them without their gradient.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDict
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection

from neuroshard.client.model.order import (
    SHARDED,
    SHARDED_MAPPED,
    check_sharded,
    collections_in,
    inner_of,
    sharded_configs,
)
from neuroshard.client.rows.sharded import ShardedCollectionByAccess
from neuroshard.client.torchrec.shards import sharding_named
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.sharding import Sharding
from neuroshard.core.value import shown, whole_number
from neuroshard.files.importers.table_access import as_keyed

M = TypeVar("M", bound=nn.Module)


def check_batches(model: M, *, values_of_first: int = 0, values_every: int = 0) -> M:
    """Let the sharded collections of a model refuse batches that TorchRec would read otherwise than the unsharded ones. Returns
    the model.

    Call it on what DistributedModelParallel returns, before the first batch, on every rank. From then on a forward raises
    InvalidInput, on the rank that has such a batch: features that are missing, or in other places than in the module's first
    batch; weights for a collection that is not weighted, or none for one that is; weights with a gradient, unless every rank has
    a copy of all tables; KeyedJaggedTensors and TensorDicts in turns, where TorchRec then stops reordering features; what is
    neither.

    Values are looked at on request only, since a GPU is waited for then: in the first `values_of_first` batches of each module,
    and in every `values_every`-th. They are refused where a table lacks an id (-1 too), with what TorchRec does by the plan;
    where a weight is no number; and where a batch without samples fails. Raises UsageError for a model without a sharded
    collection.
    """
    of_first, every = whole_number("values_of_first", values_of_first), whole_number("values_every", values_every)
    if min(of_first, every) < 0:
        raise UsageError(
            f"values_of_first is {of_first} and values_every is {every}; give numbers of batches, or 0 for none"
        )
    kinds = (*SHARDED, ShardedCollectionByAccess)
    sharded = [(path, each) for path, each in collections_in(model) if isinstance(each, kinds)]
    check_sharded(model, sharded, "check_batches")
    for path, collection in sharded:
        found = [hook for hook in collection._forward_pre_hooks.values() if isinstance(hook, _Checked)]
        if not found:
            found = [_Checked(path)]
            collection.register_forward_pre_hook(found[0], with_kwargs=True)
        found[0].of_first, found[0].every = of_first, every
    return model


class _Checked:
    """What a module does before it reads a batch. `reshard` gives it to the module that takes its place."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.of_first = self.every = self.batches = 0
        self.first: list[str] | None = None  # features of the first batch
        self.kind: type = KeyedJaggedTensor  # of the first batch

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        features: Any = next(iter((*given, *named.values())), None)
        by_access = isinstance(module, ShardedCollectionByAccess)
        inner: Any = module.inner if isinstance(module, ShardedCollectionByAccess) else inner_of(module)
        self._check_kind(features, module)
        configs = (
            module.rows.configs.values() if isinstance(module, ShardedCollectionByAccess) else sharded_configs(inner)
        )
        keys, read = list(features.keys()), ((name, each.name) for each in configs for name in each.feature_names)
        if self.first is None and (lacks := next((pair for pair in read if pair[0] not in keys), None)):
            raise InvalidInput(
                f"batch {self.batches + 1} of module {self.path!r} lacks feature {lacks[0]!r}, which table {lacks[1]!r} reads; "
                "give every batch the features of all tables (without ids, where no sample has one)"
            )
        if not by_access:  # which reads features by name
            self._check_turns(features, inner)
            self._check_places(keys, inner)
        makes_weights = isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection)
        # TorchRec drops those of the former
        weights = None if isinstance(features, TensorDict) else features.weights_or_none()
        if not makes_weights and not isinstance(inner, ShardedEmbeddingCollection):  # sequences use none
            self._check_weights(weights, inner)
        self.batches += 1
        if self.batches <= self.of_first or (self.every and not self.batches % self.every):
            self._check_values(cast(KeyedJaggedTensor, as_keyed(features)), module, inner, configs)

    def _check_kind(self, features: object, module: nn.Module) -> None:
        """Raise InvalidInput for what is no batch of this module."""
        row_wise = getattr(
            module, "_row_wise_sharded", False
        )  # of feature processors, which then weigh before ids are sent
        no_dicts = row_wise or isinstance(module, SHARDED_MAPPED)
        keyed = all(hasattr(features, name) for name in ("keys", "values", "weights_or_none"))  # or it waits for one
        if no_dicts if isinstance(features, TensorDict) else not keyed:
            takes = "a KeyedJaggedTensor" if no_dicts else "a KeyedJaggedTensor or a TensorDict"
            raise InvalidInput(
                f"module {self.path!r} gets {shown(type(features).__name__)}, and TorchRec takes {takes} here"
            )

    def _check_turns(self, features: object, inner: Any) -> None:
        """Raise InvalidInput where TorchRec would no longer put the features of pooled tables in order."""
        kind = TensorDict if isinstance(features, TensorDict) else KeyedJaggedTensor
        if self.first is None:
            self.kind = kind
        elif kind is not self.kind and inner._features_order and not isinstance(inner, ShardedEmbeddingCollection):
            raise InvalidInput(
                f"module {self.path!r} gets a {kind.__name__}, and its first batch was a {self.kind.__name__}: once TorchRec has "
                "read a TensorDict it takes features of KeyedJaggedTensors as they come, so tables would get the ids of others; "
                f"give all batches as {self.kind.__name__}"
            )

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

    def _check_values(self, features: KeyedJaggedTensor, module: nn.Module, inner: Any, configs: Iterable[Any]) -> None:
        """Raise InvalidInput for values that TorchRec reads otherwise than the unsharded collection, or that no table has."""
        held = {name: sharding_named(parameter) for name, parameter in inner.module_sharding_plan.items()}
        sequences = isinstance(inner, ShardedEmbeddingCollection)
        if not features.stride() and (sequences or any(kind.splits_rows for kind in held.values())):
            fails = "sequences without samples" if sequences else "one rank without samples where rows are split"
            raise InvalidInput(
                f"module {self.path!r} gets a batch without samples: TorchRec fails on {fails}, and the other ranks wait; leave "
                "the step out on every rank"
            )
        weights = features.weights_or_none()
        if weights is not None and not bool(weights.isfinite().all()):
            raise InvalidInput(
                f"module {self.path!r} gets a batch with weights that are no numbers (nan or inf), and so become the rows that "
                "they weigh"
            )
        if isinstance(module, SHARDED_MAPPED):  # any id is given a row
            return
        read = {}
        for name, (first, end) in zip(features.keys(), pairwise(features.offset_per_key()), strict=True):
            if first < end:
                read[name] = torch.stack(features.values()[first:end].aminmax())
        if not read:
            return
        bounds = dict(zip(read, torch.stack([*read.values()]).tolist(), strict=True))  # one copy from the device
        for config in configs:
            for feature in (name for name in config.feature_names if name in bounds):
                least, most = (int(one) for one in bounds[feature])
                if least < 0 or most >= config.num_embeddings:
                    wrong = most if least >= 0 else least
                    raise InvalidInput(
                        f"module {self.path!r} gets a batch with id {wrong} of feature {feature!r}, and table {config.name!r} "
                        f"has rows 0 to {config.num_embeddings - 1}: {_what_becomes_of(wrong, held.get(config.name))}; leave "
                        "out ids that are missing (a sample may have none), or give them a row"
                    )


def _what_becomes_of(wrong: int, held: Sharding | None) -> str:
    """What TorchRec does with an id that a table lacks, by how the plan holds it (seen on CPUs with torchrec 1.8)."""
    if held is not None and held.splits_rows:
        return "its rows are split, so TorchRec reads and trains the first row of a block for it, without an error"
    if held is not None and held.copied:
        return "every rank has a copy, and on CPUs raises an error"
    if wrong == -1:
        return "on CPUs the ranks that hold it raise an error, and the others lose their connection"
    return "TorchRec reads and trains row 0 for it" if held else "TorchRec reads and trains another row for it"


def _moved(first: Sequence[str], keys: Sequence[str], inner: Any) -> str:
    """How the features of a batch, that a collection reads, are in other places than in the first one, in words; empty where all
    are in theirs. Others may come after them, if some came in the first one: else TorchRec takes all to be the collection's."""
    read = [
        name
        for name in dict.fromkeys(name for config in sharded_configs(inner) for name in config.feature_names)
        if name in first
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
    return not all(sharding_named(parameter).copied for parameter in inner.module_sharding_plan.values())
