"""A plan as TorchRec's planners give theirs: one sharding option a table, with the memory that the plan counts for each shard.

TorchRec 1.9 asks every planner for them: its dry run and its reports show the memory of a rank as their sum.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import Shard as PlannedShard
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner

from neuroshard.client.load import load_plan
from neuroshard.client.model.tables import collections_of, places_of
from neuroshard.client.ranks import load_plan_on_all_ranks
from neuroshard.client.rows.held import check_by_access
from neuroshard.client.torchrec.plan import device_type_of, to_torchrec
from neuroshard.client.torchrec.shards import shards_of
from neuroshard.client.torchrec.trainer import batch_of_group
from neuroshard.core.errors import UsageError
from neuroshard.core.part import Memory
from neuroshard.core.plan import Plan, device_memory, shard_memory
from neuroshard.core.store_url import StoreUrl
from neuroshard.files.importers.torchrec_collections import weight_of

Sharders = Sequence[ModuleSharder[nn.Module]]


class NeuroShardPlanner(ShardingPlanner):
    """The live plan of a store where TorchRec wants a planner: `planner.collective_plan(model, sharders, pg)`.

    `store_url`, `name` and `digest` are as in `load_plan`, `how` are the keyword arguments of `to_torchrec`, whose sharders
    are those that TorchRec gives. `loaded` is the plan that was given out last.
    """

    def __init__(self, store_url: StoreUrl, name: str, *, digest: str | None = None, **how: Any) -> None:
        self.store_url, self.name, self.digest, self.how = store_url, name, digest, how
        self.loaded: Plan | None = None
        # the last one that was planned, and what it got; its weights are the trainer's to keep or to drop
        self._module: Callable[[], nn.Module | None] = lambda: None
        self._given: ShardingPlan | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The sharding plan, loaded by this process alone. Raises what `load_plan` and `to_torchrec` raise, and InvalidInput
        for a module that none of the sharders is for, where TorchRec would raise a bare KeyError."""
        loaded = load_plan(self.store_url, self.name, digest=self.digest)
        return self._sharding_plan(loaded, module, sharders, self.how.get("world_size"))

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The same, loaded by rank 0 for all ranks of the process group; every rank must call it.

        The plan must be for as many ranks as the group has, or as the planner's `world_size` says.
        """
        world_size = self.how.get("world_size")
        loaded = load_plan_on_all_ranks(self.store_url, self.name, group=pg, digest=self.digest, world_size=world_size)
        if world_size is None:
            world_size = dist.get_world_size(pg)  # by default to_torchrec would take the world's, not the group's
        sharders = get_default_sharders() if sharders is None else sharders
        return self._sharding_plan(loaded, module, sharders, world_size)

    def _sharding_plan(
        self, loaded: Plan, module: nn.Module, sharders: Sharders, world_size: int | None
    ) -> ShardingPlan:
        given = to_torchrec(loaded, module, **{**self.how, "world_size": world_size, "sharders": sharders})
        self.loaded, self._module, self._given = loaded, weakref.ref(module), given
        return given

    def get_selected_options(self) -> list[ShardingOption]:
        """The options of the plan that was given out last, for TorchRec 1.9's reports and dry runs: the memory of each shard.

        Raises UsageError where the model that it was given out for is gone."""
        module = self._module()
        if self.loaded is None or self._given is None or module is None:
            raise UsageError(
                "a planner has options of the model that it planned last, and there is none: plan one, and keep it"
            )
        task, batch_size = self.loaded.task, self.how.get("batch_size")
        own = {
            "batch_size": task.batch_size if batch_size is None else batch_of_group(batch_size, task),
            "pipeline": self.how.get("pipeline") or task.pipeline,
        }
        counted_for = self.loaded.model_copy(update={"task": task.model_copy(update=own)})
        return options_of(counted_for, module, self._given, device_type_of(self.how.get("device_type")) == "cuda")

    def get_search_space(self) -> None:
        """None: TorchRec 1.9 asks every planner what it chose from, and this one has searched nothing."""


def options_of(plan: Plan, module: nn.Module, given: ShardingPlan, on_gpus: bool) -> list[ShardingOption]:
    """The options of the sharding plan that `to_torchrec` has given for this plan and module. On GPUs memory of devices is HBM,
    and what tables take of the host's is DDR; else all is DDR. A ledger's step of a device is with its first shard. They say no
    times: a plan's cost is of all tables of a device, and no sum over tables.
    """
    whose = f"plan {plan.digest()[:12]}"
    plan, collections = check_by_access(module, plan, whose), collections_of(module, by_access=True)
    task = plan.task
    places = places_of(task.tables, collections, whose)
    steps = {device: held.step for device, held in enumerate(device_memory(task, plan.shards)) if task.counts_steps}
    options = []
    for table in task.tables:
        path, config, _ = places[table.name]
        parameter = given.plan[path][config.name]
        shards = shards_of(table, parameter, task.devices)
        placed = [
            PlannedShard(
                size=[shard.rows, shard.dim],
                offset=[shard.row_offset, shard.column_offset],
                storage=storage(memory._replace(step=steps.pop(shard.device, memory.step)), on_gpus),
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
