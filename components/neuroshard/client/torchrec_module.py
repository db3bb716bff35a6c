"""Checks of a plan against a model's EmbeddingBagCollections. Needs torch and torchrec."""

import warnings
from collections.abc import Mapping

from torch import nn
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from neuroshard.client.load import check_shapes
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import OPTIMIZER_BYTES
from neuroshard.core.text import agreeing, counted
from neuroshard.core.units import format_bytes

DIVIDED = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)  # sharding types whose sums the collection divides at the end, for mean pooling


class ShardingWarning(UserWarning):
    """The plan can be used, but something about it may surprise."""


def find_collections(module: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """The EmbeddingBagCollections of a model by module path, "" for the model itself. Raises InvalidInput without one."""
    found = {}
    for path, child in module.named_modules():
        if isinstance(child, EmbeddingBagCollection):
            found[path] = child
        elif isinstance(child, EmbeddingCollection):
            warnings.warn(
                f"module {path!r} is an EmbeddingCollection, which plans do not cover: it is not in the sharding plan",
                ShardingWarning,
                stacklevel=3,
            )
    if not found:
        raise InvalidInput(f"the {type(module).__name__} has no EmbeddingBagCollection in it to shard")
    return found


def check_tables(plan: Plan, collections: dict[str, EmbeddingBagCollection], whose: str) -> None:
    """Raise InvalidInput unless the collections hold exactly the tables of the plan, each once."""
    configs: dict[str, EmbeddingBagConfig] = {}
    paths: dict[str, str] = {}
    for path, collection in collections.items():
        for config in collection.embedding_bag_configs():
            if config.name in configs:
                raise InvalidInput(
                    f"table {config.name!r} is in module {paths[config.name]!r} and in {path!r}; names must differ"
                )
            configs[config.name], paths[config.name] = config, path
    check_shapes(plan, {name: (c.num_embeddings, c.embedding_dim) for name, c in configs.items()}, whose)
    otherwise_read = []
    for table in plan.task.tables:
        config, weighted = configs[table.name], collections[paths[table.name]].is_weighted()
        if (config.pooling.name.lower(), weighted) != (table.pooling, table.weighted):
            otherwise_read.append(
                f"table {table.name!r} is pooled by {config.pooling.name.lower()}{' with weights' * weighted} in module "
                f"{paths[table.name]!r}, but {whose} was searched for {table.pooling}{' with weights' * table.weighted}"
            )
        data_type = config.data_type
        if DATA_TYPE_NUM_BITS.get(data_type) != 8 * table.element_bytes:
            raise InvalidInput(
                f"table {table.name!r} is {data_type.value} in module {paths[table.name]!r}, but {whose} is for "
                f"{table.element_bytes} bytes an element; search a plan for today's tables"
            )
    if otherwise_read:
        more = f" (and {len(otherwise_read) - 1} more tables differ)" if len(otherwise_read) > 1 else ""
        warnings.warn(
            f"{otherwise_read[0]}{more}: it trains rightly, but its cost was predicted for other tables; say `pooling` and "
            "`weighted` in tables.json",
            ShardingWarning,
            stacklevel=3,
        )


def divided_twice(
    kinds: Mapping[str, str], collections: Mapping[str, EmbeddingBagCollection]
) -> tuple[str, str, str] | None:
    """A case that TorchRec computes wrongly: (mean-pooled table split row-wise, table that is divided too, module path), or None.

    For a mean-pooled table split row-wise, the ranks sum up and the collection divides by the number of lookups at the end. But
    it then divides all its tables, also the table-wise and column-wise ones, which are complete already (torchrec 1.8,
    `_create_mean_pooling_divisor`). `kinds` is the sharding type by table.
    """
    for path, collection in collections.items():
        configs = collection.embedding_bag_configs()
        means = [c.name for c in configs if kinds[c.name] in DIVIDED and c.pooling is PoolingType.MEAN]
        others = [c.name for c in configs if kinds[c.name] not in DIVIDED]
        if means and others:
            return means[0], others[0], path
    return None


def check_memory(plan: Plan, optimizer: str, whose: str) -> None:
    """Raise InvalidInput if a rank lacks memory for the weights and the state of this optimizer."""
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    update = {"optimizer_bytes_per_row": per_row, "optimizer_bytes_per_element": per_element}
    tables = {table.name: table.model_copy(update=update) for table in plan.task.tables}
    used = [0] * plan.task.devices
    for shard in plan.shards:
        used[shard.device] += tables[shard.table].shard_bytes(shard.rows, shard.dim)
    for rank, (needed, limit) in enumerate(zip(used, plan.task.device_memory_bytes, strict=True)):
        if needed > limit:
            largest = max(
                (s for s in plan.shards if s.device == rank), key=lambda s: tables[s.table].shard_bytes(s.rows, s.dim)
            )
            raise InvalidInput(
                f"{whose}: rank {rank} needs {format_bytes(needed)} of {format_bytes(limit)} with the state of {optimizer}, "
                f"most of it for table {largest.table!r}; search a plan for tables that count it"
            )


def warn_of_split_state(shards: dict[str, list[Shard]], optimizer: str) -> None:
    """Warn of column splits with row-wise Adagrad: with a moment a row and shard, parts of a row learn at different rates."""
    split = [name for name, parts in shards.items() if len({part.column_offset for part in parts}) > 1]
    if optimizer == "rowwise_adagrad" and split:
        warnings.warn(
            f"{counted(len(split), 'table')} split column-wise ({split[0]!r} into {len(shards[split[0]])}): row-wise Adagrad "
            "keeps one moment per row and shard, so training differs from that of the unsplit tables; split rows train "
            "alike (search with --row-wise '*' --min-dim 65536)",
            ShardingWarning,
            stacklevel=3,
        )


def warn_of_shared_tables(collections: dict[str, EmbeddingBagCollection]) -> None:
    """Warn of tables that several features read: TorchRec sends their columns once a feature, plans count them once."""
    configs = [config for collection in collections.values() for config in collection.embedding_bag_configs()]
    shared = [config for config in configs if len(config.feature_names) > 1]
    if shared:
        first, features = shared[0], len(shared[0].feature_names)
        warnings.warn(
            f"{agreeing(len(shared), 'table', 'is', 'are')} read by several features ({first.name!r} by {features}): the plan is "
            f"right, but its predicted all-to-all counts {first.embedding_dim} columns of {first.name!r}, not "
            f"{first.embedding_dim * features}",
            ShardingWarning,
            stacklevel=3,
        )
