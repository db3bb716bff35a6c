"""The memory that a plan counts against TorchRec's `EmbeddingStorageEstimator`, fed with the sharding plan that we emit."""

import random
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Shard as EstimatedShard
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
from torchrec.distributed.types import PipelineType
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad

from helpers.plans import row_wise
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.task import ShardingTask

PIPELINES = {
    "none": PipelineType.NONE,
    "sparse-dist": PipelineType.TRAIN_SPARSE_DIST,
    "prefetch": PipelineType.TRAIN_PREFETCH_SPARSE_DIST,
}
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}


def random_plan(rng: random.Random, optimizer: str, devices: int, pipeline: str | None) -> Plan:
    """A plan of up to 20 tables: whole, cut column-wise, or row-wise. Tables are as TorchRec counts their optimizer's state:
    moments as wide as the weights, and row-wise Adagrad's of uncut rows."""
    weighted, pooling = rng.random() < 0.5, rng.choice(["sum", "mean"])
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    tables: list[Table] = []
    shards: list[Shard] = []
    for number in range(rng.randint(2, 20)):
        table = Table(
            name=f"t{number}",
            rows=rng.randint(devices**2, 2_000_000),
            dim=4 * rng.randint(1, 64),
            pooling_factor=rng.choice([0.3, 1, 1.5, 20, 333.3]),
            element_bytes=4 if per_row or per_element else rng.choice([2, 4]),
            optimizer_bytes_per_row=per_row,
            optimizer_bytes_per_element=per_element,
            weighted=weighted,
            pooling=pooling,
        )
        tables.append(table)
        kind = rng.choice(["whole", "columns", "rows"])
        if kind == "rows" and pooling == "sum":
            shards += row_wise(table, devices)
        else:
            cuts = min(table.dim // 4, devices) if kind == "columns" and optimizer != "rowwise_adagrad" else 1
            shards += columns(table, rng.randint(1, cuts), rng.randrange(devices), devices)
    task = ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=(2**60,) * devices,
        batch_size=devices * rng.choice([1, 100, 4096]),
        pipeline=pipeline,
    )
    return Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def columns(table: Table, cuts: int, first: int, devices: int) -> list[Shard]:
    """A table cut into column shards as equal as can be, on devices in order from `first`."""
    ends = [4 * (table.dim // 4 * cut // cuts) for cut in range(cuts + 1)]
    return [
        Shard(table=table.name, rows=table.rows, column_offset=begin, dim=end - begin, device=(first + cut) % devices)
        for cut, (begin, end) in enumerate(pairwise(ends))
    ]


def estimated(plan: Plan, optimizer: str) -> list[int]:
    """Bytes on each rank by TorchRec's estimator, for the sharding plan that a trainer gets."""
    task = plan.task
    pooled = collection(task.tables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharding: Any = to_torchrec(plan, torch.nn.ModuleDict({"ebc": pooled}), optimizer=optimizer).plan["ebc"]
    options = []
    for table in task.tables:
        weight = pooled.get_parameter(f"embedding_bags.{table.name}.weight")
        weight._optimizer_classes = [OPTIMIZERS[optimizer]]  # where TorchRec looks for it
        given = sharding[table.name]
        placed = [(shard, shard.placement.rank()) for shard in given.sharding_spec.shards]
        shards = [EstimatedShard(shard.shard_sizes, shard.shard_offsets, rank=rank) for shard, rank in placed]
        options.append(
            ShardingOption(
                table.name,
                weight,
                ("ebc", pooled),
                [table.pooling_factor],
                task.batch_size // task.devices,
                given.sharding_type,
                "device",
                given.compute_kernel,
                shards,
            )
        )
    sharder = EmbeddingBagCollectionSharder()
    sharders = build_sharder_data_map({sharder_name(sharder.module_type): sharder})
    topology = Topology(world_size=task.devices, compute_device="cuda")
    EmbeddingStorageEstimator(topology, pipeline_type=PIPELINES[task.pipeline]).estimate(options, sharders)
    used = [0] * task.devices
    for shard in (shard for option in options for shard in option.shards):
        used[shard.rank] += shard.storage.hbm
    return used


def collection(tables: tuple[Table, ...]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[table.name],
            pooling=PoolingType[table.pooling.upper()],
            data_type=DataType.FP16 if table.element_bytes == 2 else DataType.FP32,
        )
        for table in tables
    ]
    return EmbeddingBagCollection(configs, is_weighted=tables[0].weighted, device=torch.device("meta"))


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("seed", range(20))
def test_a_plan_counts_the_memory_that_torchrecs_planner_counts(seed, pipeline):
    rng = random.Random(seed)
    optimizer, devices = list(OPTIMIZERS)[seed % 4], (2, 4, 8)[seed % 3]
    plan = random_plan(rng, optimizer, devices, pipeline)

    assert plan.memory_bytes() == pytest.approx(estimated(plan, optimizer), rel=0.001, abs=0)


def test_each_column_shard_keeps_row_wise_adagrads_moments_though_torchrec_counts_them_once():
    table = Table(name="t", rows=1000, dim=64, pooling_factor=2)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**30,) * 2, batch_size=64, pipeline="sparse-dist")
    by_hand = Provenance(neuroshard_version="0", algorithm="by hand")
    plan = Plan(task=task, shards=tuple(columns(table, 2, 0, 2)), provenance=by_hand)

    assert [
        used - theirs for used, theirs in zip(plan.memory_bytes(), estimated(plan, "rowwise_adagrad"), strict=True)
    ] == [4 * 1000 // 2] * 2
