"""The tables of a TorchRec model: `tables_of(ebc)`, also where the module is on the meta device. Needs no torchrec itself."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from neuroshard.core.errors import InvalidInput
from neuroshard.core.id_map import SORTED, IdMap
from neuroshard.core.table import Table
from neuroshard.files.importers.imported import FAILS_SHARDED, OWN_OPERATOR, check_sharded, table_defaults, width_of

WEIGHTED_MEAN = (
    "pooled by mean with weights, which TorchRec refuses without DistributedModelParallel, and whose gradients FBGEMM's CPU "
    "operator does not divide; pool by sum, and divide the weights"
)
INSIDE = "_embedding_bag_collection"  # where a feature-processed collection keeps its tables; plans name the outer one
INSIDE_MAPPED = "_embedding_module"  # where managed collisions keep theirs
ID_BYTES = 8  # of an id, or of what is remembered of it: all are int64
HISTORY = 1.25  # times the lookups of the first step, which MCHManagedCollisionModule has room for in each step until it evicts
OF_RANK = ("_mch_slots", "_hash_zch_bucket")  # one number, also of a table with one row


def tables_of(
    module_or_configs: Any,
    pooling_factors: Mapping[str, float] | None = None,
    *,
    weighted: bool | None = None,
    access: str = "uniform",
    optimizer: str = "rowwise_adagrad",
) -> tuple[Table, ...]:
    """Tables of an EmbeddingBagCollection or an EmbeddingCollection, or of a sequence of their configs.

    `pooling_factors` are lookups a sample by table name, over all features of the table, which share them equally; by default one
    lookup a feature, as in TorchRec's planner. `weighted` is by default the collection's own; configs do not say, so for them it
    is False. Raises InvalidInput for a data type other than FP32 and FP16, and for a pooling factor of an unknown table;
    UsageError for an unknown access or optimizer.
    """
    configs: Sequence[Any] = configs_of(module_or_configs)
    given = dict(pooling_factors or {})
    unknown = given.keys() - {config.name for config in configs}
    if unknown:
        raise InvalidInput(f"pooling_factors: there is no table {min(unknown)!r}")
    if weighted is None:
        weighted = is_weighted(module_or_configs)
    shared, found = read_by_several(configs), list[Table]()
    defaults = table_defaults(access=access, optimizer=optimizer)
    for config in configs:
        each, ids = _equal_shares(config, given.get(config.name)), id_map(module_or_configs, config)
        found.append(defaults.table(config_fields(config, each, weighted, ids, shared), f"table {config.name!r}"))
    return tuple(found)


def read_by_several(configs: Sequence[Any]) -> frozenset[str]:
    """The features of a collection that several of its tables read."""
    count = Counter(name for config in configs for name in config.feature_names)
    return frozenset(name for name in count if count[name] > 1)


def configs_of(module_or_configs: Any) -> Sequence[Any]:
    """The configs of a collection's tables; configs themselves are returned as they are."""
    inner = inner_of(module_or_configs)
    for name in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(inner, name):
            configs: Sequence[Any] = getattr(inner, name)()
            return configs
    given: Sequence[Any] = module_or_configs
    return given


def inner_of(collection: Any) -> Any:
    """The collection that has the tables: of managed collisions the one inside."""
    return getattr(collection, INSIDE_MAPPED, collection)


def is_weighted(collection: Any) -> bool:
    """Whether the lookups of a collection come with weights."""
    inner = inner_of(collection)
    return bool(inner.is_weighted()) if hasattr(inner, "is_weighted") else False


def _equal_shares(config: Any, total: float | None) -> list[float]:
    """Lookups of each feature of a table, of `total` or of one a feature."""
    count = len(config.feature_names)
    return [(count if total is None else total) / max(count, 1)] * max(count, 1)


def check_config(config: Any, where: str = "") -> None:
    """Raise InvalidInput for a config that TorchRec cannot shard with its usual kernels, or whose data type plans do not have.
    `where` follows the table's name."""
    width_of(config.data_type, f"table {config.name!r}{where}")
    check_sharded({name: getattr(config, name, None) for name in FAILS_SHARDED}, f"table {config.name!r}{where}")


def has_own_operator(config: Any) -> bool:
    """Whether TorchRec looks the table up in an operator apart from that of its module's other tables."""
    return any(getattr(config, name, False) for name in OWN_OPERATOR)


def id_map(collection: Any, config: Any) -> IdMap | None:
    """The id map of a table, what it takes of its rank; None where its collection is of no managed collisions.

    TorchRec (1.8, 1.9) rebuilds each module for the rows of its rank (`rebuild_with_output_id_range`), on the rank's device
    whatever the table's kernel. Counted are its buffers and parameters, and what MCHManagedCollisionModule keeps of the ids since
    it last evicted: 1.25 times what its first batches hold. Not counted is what a remap makes for a moment.
    """
    if inner_of(collection) is collection:
        return None
    module: Any = collection._managed_collision_collection._managed_collision_modules[config.name]
    held = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    of_rows = {name for name, value in held.items() if value.dim() and value.shape[0] == module.output_size()}
    of_rows = {name for name in of_rows if name.startswith(("_mch_", "_hash_zch_")) and name not in OF_RANK}
    sizes = {name: value.numel() * value.element_size() for name, value in held.items()}
    per_row = sum(sizes[name] for name in of_rows) // module.output_size()
    per_rank = sum(size for name, size in sizes.items() if name not in of_rows)
    if type(module).__name__ == "HashZchManagedCollisionModule":
        return IdMap(kind="mpzch", bytes_per_row=per_row, bytes_per_rank=per_rank, buckets=module.buckets())
    remembered = sum(info.is_history_metadata for info in module._eviction_policy.metadata_info)
    per_lookup = ID_BYTES * (1 + remembered) * HISTORY * module._eviction_interval
    return IdMap(kind=SORTED, bytes_per_row=per_row, bytes_per_lookup=per_lookup, bytes_per_rank=per_rank)


def config_fields(
    config: Any, pooling_factors: Sequence[float], weighted: bool, id_map: IdMap | None, shared: frozenset[str]
) -> dict[str, Any]:
    """Fields of Table as an EmbeddingBagConfig or EmbeddingConfig has them, whose features have these lookups a sample each. One
    feature is named if other tables read it too (`shared`). Raises InvalidInput for a data type that we do not know, and for what
    TorchRec cannot shard."""
    check_config(config)
    names = config.feature_names
    features = [{"name": name, "pooling_factor": one} for name, one in zip(names, pooling_factors, strict=True)]
    return {
        "name": config.name,
        "rows": config.num_embeddings,
        "dim": config.embedding_dim,
        "pooling_factor": math.fsum(pooling_factors),
        "features": features if len(names) > 1 or shared.intersection(names) else [],
        "pooling": config.pooling.name.lower() if hasattr(config, "pooling") else "none",
        "weighted": weighted,
        "element_bytes": width_of(config.data_type, f"table {config.name!r}"),
        **({} if id_map is None else {"id_map": id_map.model_dump()}),
    }
