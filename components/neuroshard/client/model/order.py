"""The order of a model's outputs: what it is, how to keep it whatever the plan, and whether a plan changes it. Needs torch and
torchrec.

A sharded collection returns its outputs in an order that follows the plan (core/output_order.py). Dense layers that read them by
position (`values()`, or a loop over a dictionary) read other columns under another plan, without an error. Layers that read
by key, or by `KeyedTensor.regroup`, are right under any plan; so are all layers after `keep_output_order(model)`.
"""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, TypeAlias, TypeVar

import torch
from fbgemm_gpu.permute_pooled_embedding_modules import PermutePooledEmbeddings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import JaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from neuroshard.client.model.tables import check_module
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.files.importers.torchrec_collections import COVERED
from neuroshard.files.importers.torchrec_tables import INSIDE, configs_of
from neuroshard.files.importers.torchrec_tables import inner_of as inner_of_mapped

__all__ = ["keep_output_order", "output_order"]

Output: TypeAlias = KeyedTensor | dict[str, JaggedTensor]
SHARDED_MAPPED = (ShardedManagedCollisionEmbeddingBagCollection, ShardedManagedCollisionEmbeddingCollection)
SHARDED = (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
    *SHARDED_MAPPED,
)
WRAPPERS = (DistributedModelParallel, DistributedDataParallel, torch._dynamo.OptimizedModule)
M = TypeVar("M", bound=nn.Module)


def keep_output_order(model: M, order: Mapping[str, Sequence[str]] | None = None) -> M:
    """Let the sharded collections of a model return their outputs in the order of the unsharded ones, or in an `order` as
    `output_order` returns it, of a checkpoint say. Returns the model.

    Call it on what DistributedModelParallel returns, on every rank, whatever the plan. Paths, keys of the state and lazy
    awaitables stay as they are. A collection that has the order already is left alone; another copies its pooled outputs once
    more, forward and backward, when they are waited for. Code that calls `compute_and_output_dist` of a collection itself, and
    not the collection, still gets the plan's order.

    Raises UsageError for a model without a sharded collection, and for a sharded module that is none, by path and class;
    InvalidInput for an order that lacks a collection or has other keys.
    """
    sharded = {path: each for path, each in collections_in(model) if isinstance(each, (*SHARDED, ShardedModule))}
    check_sharded(model, sharded, "keep_output_order")
    wanted = {path: _own_order(collection) for path, collection in sharded.items()}
    if order is not None:
        wanted = {path: _checked(path, order.get(path), own) for path, own in wanted.items()}
    for path, collection in sharded.items():
        _keep(collection, wanted[path])
    return model


def _checked(path: str, order: Sequence[str] | None, own: Sequence[str]) -> list[str]:
    """A given order of a collection's outputs. Raises InvalidInput unless it is one of its `own` keys."""
    if order is None:
        raise InvalidInput(f"the order has no module {path!r}; give output_order(model) of the same model")
    if sorted(order) != sorted(own):
        other = min(set(order) ^ set(own), default=own[0])
        here, there = ("lacks", "has") if other in own else ("has", "lacks")
        raise InvalidInput(
            f"the order {here} {other!r} of module {path!r}, which the model {there}; give output_order(model) of the same model"
        )
    return list(order)


def output_order(model: nn.Module) -> dict[str, list[str]]:
    """The keys of each collection's output, in order, by the collection's path in the model; sharded or not.

    It belongs in a checkpoint: `load_resharded` compares it with that of the model that loads. Raises UsageError for a sharded
    module that is no collection, by path and class.
    """
    return {path: _order(collection) for path, collection in collections_in(model)}


class _InOrder:
    """A forward hook that puts a collection's output in an order of keys. TorchRec's pipelines replace `forward`, not the call
    around it, so hooks run there too."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.permute: tuple[list[str], PermutePooledEmbeddings] | None = None

    def __call__(self, module: nn.Module, given: object, output: Any) -> Any:
        if isinstance(output, tuple):  # of managed collisions, with the remapped features
            return (self(module, given, output[0]), *output[1:])
        if isinstance(output, LazyAwaitable) and output._result is not None:  # waited for already
            output._result = self.in_order(output._result)
            return output
        if isinstance(output, Awaitable):
            output.callbacks.append(self.in_order)
            return output
        return self.in_order(output)

    def in_order(self, output: Output) -> Output:
        """The same output if it has the order, so that doing it twice is as good as once."""
        if not isinstance(output, KeyedTensor):
            return {name: output[name] for name in self.names}
        keys = output.keys()
        if keys == self.names:
            return output
        lengths = dict(zip(keys, output.length_per_key(), strict=True))
        if self.permute is None or self.permute[0] != keys:
            places = {key: place for place, key in enumerate(keys)}
            order, device = [places[name] for name in self.names], output.values().device
            self.permute = list(keys), PermutePooledEmbeddings(list(lengths.values()), order, device)
        values = self.permute[1](output.values())
        return KeyedTensor(self.names, [lengths[name] for name in self.names], values)


def _keep(collection: nn.Module, names: Sequence[str]) -> None:
    """Let a sharded collection return its outputs in this order of keys, and no other that was asked for before."""
    hooks = collection._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _InOrder)]:
        del hooks[key]
    if _order(collection) != list(names):
        collection.register_forward_hook(_InOrder(names))


def collections_in(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """The collections, sharded or not, by their paths in the model before it was wrapped or compiled. Those of tables that are
    held by access (client/rows/) keep an order of their own, and say it as `output_names`."""
    check_module(module)
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, (*SHARDED, *COVERED)) or hasattr(module, "output_names"):
        yield path, module
    elif isinstance(module, ShardedModule):
        raise UsageError(
            f"module {path!r} is a {type(module).__name__}, the order of whose outputs is not known; give "
            "DistributedModelParallel no sharder for it, so that the collections inside are sharded"
        )
    else:
        for name, child in module.named_children():
            below = path if isinstance(module, WRAPPERS) else f"{path}.{name}" if path else name
            yield from collections_in(child, below, seen)


def check_sharded(model: nn.Module, sharded: Sized, caller: str) -> None:
    """Raise UsageError for a model without sharded collections."""
    if not sharded:
        raise UsageError(
            f"the {type(model).__name__} has no sharded collection in it; call {caller}(model) on what DistributedModelParallel "
            "returns"
        )


def inner_of(collection: Any) -> Any:
    """The collection that has the tables, sharded or not: of feature processors and managed collisions the one inside."""
    inner = inner_of_mapped(collection)
    return getattr(inner, INSIDE, inner)


def _order(collection: nn.Module) -> list[str]:
    """The keys of a collection's output, in order."""
    for hook in collection._forward_hooks.values():
        if isinstance(hook, _InOrder):
            return list(hook.names)
    inner = inner_of(collection)
    if hasattr(inner, "output_names"):
        return list(inner.output_names)
    if isinstance(inner, ShardedEmbeddingBagCollection):
        return list(inner._embedding_names)
    if isinstance(inner, ShardedEmbeddingCollection):
        return list(dict.fromkeys(name for names in inner._embedding_names_per_sharding for name in names))
    return _names(configs_of(inner))


def _own_order(collection: nn.Module) -> list[str]:
    """The keys of the output of the unsharded collection, in order."""
    inner = inner_of(collection)
    if hasattr(inner, "output_names"):
        return list(inner.output_names)
    return _names(sharded_configs(inner))


def sharded_configs(inner: Any) -> Sequence[Any]:
    """The tables' configs that TorchRec keeps of a sharded collection."""
    sequences = isinstance(inner, ShardedEmbeddingCollection)
    return list(inner._embedding_configs if sequences else inner._embedding_bag_configs)


def _names(configs: Sequence[Any]) -> list[str]:
    return [name for names in get_embedding_names_by_table(configs) for name in names]
