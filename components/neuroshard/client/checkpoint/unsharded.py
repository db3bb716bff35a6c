"""A sharded collection as it was before it was sharded, on the meta device. Needs torch and torchrec.

TorchRec drops a collection when it shards it. What it keeps of it are the tables' configs, and of each table the settings of its
operator: those of the sharder, of the plan, and of apply_optimizer_in_backward, which are told apart here (torchrec 1.8).
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.utils import (
    add_params_from_parameter_sharding,
    convert_to_fbgemm_types,
    emb_opt_type_to_optimizer_class,
    merge_fused_params,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection, FeatureProcessorsCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from neuroshard.client.model.order import SHARDED_MAPPED, collections_in, inner_of, sharded_configs
from neuroshard.client.torchrec.shards import sharding_named
from neuroshard.core.errors import InvalidInput
from neuroshard.files.importers.torchrec_collections import MAPPED, weight_of
from neuroshard.files.importers.torchrec_tables import INSIDE, INSIDE_MAPPED, configs_of

META = torch.device("meta")
KINDS: dict[type, type[nn.Module]] = {
    ShardedEmbeddingBagCollection: EmbeddingBagCollection,
    ShardedEmbeddingCollection: EmbeddingCollection,
    ShardedFeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollection,
    **dict(zip(SHARDED_MAPPED, MAPPED, strict=True)),
}


def sharded_collections(model: DistributedModelParallel) -> dict[str, Any]:
    """The sharded collections of a model, by path. Raises InvalidInput for a module that is none of them."""
    found: dict[str, Any] = dict(collections_in(model))
    for path, module in found.items():
        if type(module) not in KINDS:
            what = (
                f"module {path!r} is a {type(module).__name__}, which is not sharded, and reshard moves sharded tables"
            )
            if hasattr(module, "rows"):
                table = next(iter(module.rows.held))
                what = f"table {table!r} of module {path!r} is held by access, and reshard cannot move such tables"
            raise InvalidInput(f"{what}; start again by the new plan from a checkpoint")
    return found


def copies_in(collections: Mapping[str, Any], plans: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """The weights of tables that plans copy to every rank, by their key; what they are now, if they are sharded."""
    found: dict[str, Any] = {}
    for path, sharded in collections.items():
        inner = inner_of(sharded)
        holder = "embeddings" if isinstance(inner, ShardedEmbeddingCollection) else "embedding_bags"
        inside = "" if inner is sharded else INSIDE_MAPPED if isinstance(sharded, SHARDED_MAPPED) else INSIDE
        for name in (name for name, parameter in plans[path].items() if sharding_named(parameter).copied):
            key = ".".join(filter(None, (path, inside, holder, name, "weight")))
            found[key] = getattr(getattr(inner, holder)[name], "weight", None)
    return found


def unsharded(model: DistributedModelParallel, collections: dict[str, Any]) -> nn.Module:
    """A model of these sharded collections alone, unsharded, at the same paths. Feature processors are the model's own."""
    whole = nn.Module()
    for path, sharded in collections.items():
        found: nn.Module = _collection(
            sharded, getattr(model._sharder_map[KINDS[type(sharded)]], "fused_params", None) or {}
        )
        if not path:
            return found
        parent, (*above, name) = whole, path.split(".")
        for part in above:
            parent = cast(nn.Module, parent._modules.setdefault(part, nn.Module()))
        parent.add_module(name, found)
    return whole


def _collection(sharded: Any, of_sharder: dict[str, Any]) -> Any:
    if isinstance(sharded, SHARDED_MAPPED):
        return _mapped(sharded, _collection(inner_of(sharded), of_sharder))
    if isinstance(sharded, ShardedFeatureProcessedEmbeddingBagCollection):
        inner = _collection(getattr(sharded, INSIDE), of_sharder)
        processors = sharded._feature_processors
        given = processors if isinstance(processors, FeatureProcessorsCollection) else dict(processors.items())
        return FeatureProcessedEmbeddingBagCollection(inner, given)
    found: Any
    if isinstance(sharded, ShardedEmbeddingCollection):
        found = EmbeddingCollection(
            tables=sharded_configs(sharded),
            device=META,
            need_indices=sharded._need_indices,
            use_gather_select=sharded._use_gather_select,
            use_gather_select_per_sharding=sharded._use_gather_select_per_sharding,
        )
        shardings: Any = sharded._sharding_type_to_sharding.values()
    else:
        assert isinstance(sharded, ShardedEmbeddingBagCollection)
        found = EmbeddingBagCollection(tables=sharded_configs(sharded), is_weighted=sharded._is_weighted, device=META)
        shardings = sharded._embedding_shardings
    for sharding in shardings:
        for groups in sharding._grouped_embedding_configs_per_rank:
            for table in (table for group in groups for table in group.embedding_tables):
                parameter = sharded.module_sharding_plan[table.name]
                if applied := _applied(table.fused_params or {}, of_sharder, parameter):
                    weight: Any = weight_of(found, table.name)
                    kind = emb_opt_type_to_optimizer_class(applied["optimizer"])
                    weight._optimizer_classes = [kind or torch.optim.Optimizer]
                    weight._optimizer_kwargs = [applied]
    return found


def _mapped(sharded: Any, inner: Any) -> Any:
    """Managed collisions of all rows."""
    maps, configs = sharded._managed_collision_collection, configs_of(inner)
    held = maps._managed_collision_modules
    modules = {
        config.name: held[config.name].rebuild_with_output_id_range(
            (0, config.num_embeddings), [0, config.num_embeddings], META
        )
        for config in configs
    }
    collection = ManagedCollisionCollection(modules, configs, maps.need_preprocess)
    return KINDS[type(sharded)](inner, collection, sharded._return_remapped_features)


def _applied(of_table: dict[str, Any], of_sharder: dict[str, Any], parameter: ParameterSharding) -> dict[str, Any]:
    """What apply_optimizer_in_backward put on a table: settings that neither the sharder nor the plan gave it."""
    given = convert_to_fbgemm_types(add_params_from_parameter_sharding(merge_fused_params(of_sharder), parameter))
    other = {key: value for key, value in of_table.items() if key not in given or given[key] != value}
    return {"optimizer": of_table["optimizer"], **other} if other and "optimizer" in of_table else {}
