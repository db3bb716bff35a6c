"""A plan as TorchRec's planners give theirs: one sharding option a table, with the memory that the plan counts for each shard.

TorchRec 1.9 asks every planner for them: its dry run and its reports show the memory of a rank as their sum.
"""

from collections import Counter

from torch import nn
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import Shard as PlannedShard
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.types import ShardingPlan

from neuroshard.client.rows_plan import check_by_access
from neuroshard.client.torchrec_module import collections_of, places_of
from neuroshard.client.torchrec_shards import shards_of
from neuroshard.core.part import Memory
from neuroshard.core.plan import Plan, shard_memory
from neuroshard.files.importers.torchrec_collections import weight_of


def options_of(plan: Plan, module: nn.Module, given: ShardingPlan, on_gpus: bool) -> list[ShardingOption]:
    """The options of the sharding plan that `to_torchrec` has given for this plan and module.

    On GPUs memory of devices is HBM, and what tables take of the host's is DDR; else all is DDR. They say no times: a plan's cost
    is of all tables of a device, and not a sum over tables.
    """
    whose = f"plan {plan.digest()[:12]}"
    plan, collections = check_by_access(module, plan, whose), collections_of(module, by_access=True)
    task = plan.task
    places = places_of(task.tables, collections, whose)
    options = []
    for table in task.tables:
        path, config, _ = places[table.name]
        parameter = given.plan[path][config.name]
        shards = shards_of(table, parameter, task.devices)
        placed = [
            PlannedShard(
                size=[shard.rows, shard.dim],
                offset=[shard.row_offset, shard.column_offset],
                storage=storage(memory, on_gpus),
                rank=shard.device,
            )
            for shard, memory in zip(shards, shard_memory(task, shards), strict=True)
        ]
        options.append(
            ShardingOption(
                name=config.name,
                tensor=weight_of(collections[path], config.name),
                module=(path, module.get_submodule(path)),
                input_lengths=[feature.pooling_factor for feature in table.features] or [table.pooling_factor],
                batch_size=-(-task.batch_size // task.devices),
                sharding_type=parameter.sharding_type,
                partition_by=get_partition_by_type(parameter.sharding_type),
                compute_kernel=parameter.compute_kernel,
                shards=placed,
                cache_params=parameter.cache_params,
                is_pooled=table.pooling != "none",
                feature_names=list(config.feature_names),
            )
        )
    return options


def storage(memory: Memory, on_gpus: bool) -> Storage:
    return Storage(hbm=memory.total, ddr=memory.host) if on_gpus else Storage(hbm=0, ddr=memory.total + memory.host)


def rank_storage(options: list[ShardingOption], ranks: int) -> list[Storage]:
    """What the options take on each rank."""
    hbm, ddr = Counter[int](), Counter[int]()
    for shard in (shard for option in options for shard in option.shards):
        hbm[shard.rank] += shard.storage.hbm
        ddr[shard.rank] += shard.storage.ddr
    return [Storage(hbm[rank], ddr[rank]) for rank in range(ranks)]
