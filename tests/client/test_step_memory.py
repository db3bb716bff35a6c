"""The memory that a plan counts against TorchRec's `EmbeddingStorageEstimator`, fed with the sharding plan that we emit."""

import random
import warnings
from typing import Any

import pytest
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Shard as EstimatedShard
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders

from helpers.drawn_plans import BY_HAND, OPTIMIZERS, PIPELINES, columns, model_of, random_plan
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.part import GRADIENT_BYTES
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask


def estimated(plan: Plan, optimizer: str) -> list[int]:
    """Bytes on each rank by TorchRec's estimator, for the sharding plan that a trainer gets."""
    task, model = plan.task, model_of(plan.task.tables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharding: Any = to_torchrec(plan, model, optimizer=optimizer).plan
    options = []
    for table in task.tables:
        module = model.get_submodule(table.module)
        of_module = "embeddings" if table.pooling == "none" else "embedding_bags"
        weight: Any = module.get_parameter(f"{of_module}.{table.name}.weight")
        weight._optimizer_classes = [OPTIMIZERS[optimizer]]  # where TorchRec looks for it
        given = sharding[table.module][table.name]
        if given.sharding_spec is None:  # copies
            placed = [([table.rows, table.dim], [0, 0], rank) for rank in given.ranks]
        else:
            placed = [(s.shard_sizes, s.shard_offsets, s.placement.rank()) for s in given.sharding_spec.shards]
        options.append(
            ShardingOption(
                table.name,
                weight,
                (table.module, module),
                [feature.pooling_factor for feature in table.features],
                task.batch_size // task.devices,
                given.sharding_type,
                "device",
                given.compute_kernel,
                [EstimatedShard(sizes, offsets, rank=rank) for sizes, offsets, rank in placed],
            )
        )
    sharders = {sharder_name(one.module_type): one for one in get_default_sharders()}
    topology = Topology(world_size=task.devices, compute_device="cuda")
    estimator = EmbeddingStorageEstimator(topology, pipeline_type=PIPELINES[task.pipeline])
    estimator.estimate(options, build_sharder_data_map(sharders))
    used = [0] * task.devices
    for shard in (shard for option in options for shard in option.shards):
        used[shard.rank] += shard.storage.hbm
    return used


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("seed", range(20))
def test_a_plan_counts_the_memory_that_torchrecs_planner_counts(seed, pipeline):
    rng = random.Random(seed)
    optimizer, devices = list(OPTIMIZERS)[seed % 4], (2, 4, 8)[seed % 3]
    plan = random_plan(rng, optimizer, devices, pipeline)

    copied = [table for table in plan.task.tables if table.name in plan.held.constraints.data_parallel]
    gradients = (
        sum(table.rows * table.dim for table in copied) * GRADIENT_BYTES
    )  # which TorchRec's planner does not count
    without = [used - gradients for used in plan.memory_bytes()]
    assert without == pytest.approx(estimated(plan, optimizer), rel=0.001, abs=0)


def test_each_column_shard_keeps_row_wise_adagrads_moments_though_torchrec_counts_them_once():
    given = {"name": "t", "rows": 1000, "dim": 64, "features": [{"name": "f", "pooling_factor": 2}], "module": "pooled"}
    table = Table.parse(given, "the test")
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**30,) * 2, batch_size=64, pipeline="sparse-dist")
    plan = Plan(task=task, shards=tuple(columns(table, 2, 0, 2)), provenance=BY_HAND)

    assert [
        used - theirs for used, theirs in zip(plan.memory_bytes(), estimated(plan, "rowwise_adagrad"), strict=True)
    ] == [4 * 1000 // 2] * 2
