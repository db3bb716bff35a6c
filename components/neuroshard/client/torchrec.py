"""A plan as a TorchRec ShardingPlan. Needs torch and torchrec.

TorchRec's DistributedModelParallel shards nothing where a module's path is wrong, ignores tables that it does not know, and
dies inside a collective where shapes or ranks do not hold (seen with torchrec 1.8). So all of that is checked here.
Not covered: row-wise shards, and EmbeddingCollections (sequences).
"""

import warnings

import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from neuroshard.client.load import check_shapes, check_world_size
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import OPTIMIZER_BYTES
from neuroshard.core.units import format_bytes

DEVICE_TYPES = ("cpu", "cuda")


class ShardingWarning(UserWarning):
    """The plan can be used, but not everything is as one may think."""


def to_torchrec(
    plan: Plan,
    module: nn.Module,
    *,
    device_type: str = "cpu",
    compute_kernel: str = "fused",
    local_world_size: int | None = None,
    world_size: int | None = None,
    optimizer: str | None = None,
) -> ShardingPlan:
    """What DistributedModelParallel takes as `plan` to shard the EmbeddingBagCollections in `module` (its whole model).

    Device d of the plan is rank d; with `device_type` cuda it is GPU d % `local_world_size` of its host (by default as
    LOCAL_WORLD_SIZE says, which torchrun sets). `world_size` is by default that of torch.distributed, if initialised.
    `optimizer` (sgd, rowwise_adagrad, adagrad, adam) is the fused one: its state is counted into the memory instead of what
    the plan's tables say, and a ShardingWarning is given where a column split changes the training.

    Raises InvalidInput that names table, rank and value unless the collections hold exactly the plan's tables, with the same
    rows, dims and element size, on the same number of ranks, in whole columns, within the memory of every rank. UsageError
    for a wrong argument.
    """
    if device_type not in DEVICE_TYPES:
        raise UsageError(f"device_type {device_type!r} is none of {', '.join(DEVICE_TYPES)}")
    if compute_kernel not in {kernel.value for kernel in EmbeddingComputeKernel}:
        raise UsageError(f"compute_kernel {compute_kernel!r} is not one of TorchRec's; the usual one is fused")
    if optimizer is not None and optimizer not in OPTIMIZER_BYTES:
        raise UsageError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZER_BYTES)}")

    whose = f"plan {plan.digest()[:12]}"
    plan = Plan.parse(plan.model_dump(), whose)  # pydantic's model_copy and model_construct check nothing
    collections = find_collections(module)
    check_tables(plan, collections, whose)
    if world_size is None and dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    if world_size is not None:
        check_world_size(plan, world_size, whose)
    shards = shards_by_table(plan, whose)
    if optimizer is not None:
        check_memory(plan, optimizer, whose)
        warn_of_split_state(shards, optimizer)

    local = local_world_size or (get_local_size(plan.task.devices) if device_type == "cuda" else 1)
    return ShardingPlan(
        plan={
            path: EmbeddingModuleShardingPlan(
                {
                    config.name: parameter_sharding(shards[config.name], device_type, compute_kernel, local)
                    for config in collection.embedding_bag_configs()
                }
            )
            for path, collection in collections.items()
        }
    )


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
    for table in plan.task.tables:
        data_type = configs[table.name].data_type
        if DATA_TYPE_NUM_BITS.get(data_type) != 8 * table.element_bytes:
            raise InvalidInput(
                f"table {table.name!r} is {data_type.value} in module {paths[table.name]!r}, but {whose} is for "
                f"{table.element_bytes} bytes an element; search a plan for today's tables"
            )


def shards_by_table(plan: Plan, whose: str) -> dict[str, list[Shard]]:
    """The column shards of each table, from left to right. Raises InvalidInput where rows are split."""
    rows = {table.name: table.rows for table in plan.task.tables}
    shards: dict[str, list[Shard]] = {}
    for shard in sorted(plan.shards, key=lambda s: s.column_offset):
        if shard.rows != rows[shard.table]:
            raise InvalidInput(
                f"table {shard.table!r} has a row-wise shard on rank {shard.device} (rows {shard.row_offset:,} to "
                f"{shard.row_offset + shard.rows:,} of {rows[shard.table]:,}); {whose} must keep rows whole for TorchRec"
            )
        shards.setdefault(shard.table, []).append(shard)
    return shards


def check_memory(plan: Plan, optimizer: str, whose: str) -> None:
    """Raise InvalidInput where a rank has no room for weights and this optimizer's state."""
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
    """Row-wise Adagrad keeps one moment a row and shard: cut columns learn at rates of their own."""
    split = [name for name, parts in shards.items() if len(parts) > 1]
    if optimizer == "rowwise_adagrad" and split:
        warnings.warn(
            f"{len(split)} tables are split by columns ({split[0]!r} into {len(shards[split[0]])}): row-wise Adagrad keeps one "
            "moment per row and shard, so training differs from that of the unsplit tables",
            ShardingWarning,
            stacklevel=3,
        )


def parameter_sharding(
    shards: list[Shard], device_type: str, compute_kernel: str, local_size: int
) -> ParameterSharding:
    """TorchRec's record of one table: table-wise in one piece, column-wise in several."""
    kind = ShardingType.TABLE_WISE if len(shards) == 1 else ShardingType.COLUMN_WISE
    return ParameterSharding(
        sharding_type=kind.value,
        compute_kernel=compute_kernel,
        ranks=[shard.device for shard in shards],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[0, shard.column_offset],
                    shard_sizes=[shard.rows, shard.dim],
                    placement=placement(device_type, shard.device, local_size),
                )
                for shard in shards
            ]
        ),
    )
