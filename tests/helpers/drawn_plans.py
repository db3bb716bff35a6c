"""Drawn plans of pooled tables and sequences, and the models that they are for. Needs torchrec."""

import random
from itertools import pairwise
from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.types import PipelineType
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad

from helpers.plans import row_wise
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
BY_HAND = Provenance(neuroshard_version="0", algorithm="by hand")


def random_plan(rng: random.Random, optimizer: str, devices: int, pipeline: str | None) -> Plan:
    """A plan of up to 20 tables, pooled ones of one to three features and sequences: whole, column-wise, row-wise or copied.

    Tables are as TorchRec counts their optimizer's state: moments as wide as the weights, and row-wise Adagrad's of uncut rows.
    """
    weighted, pooling, width = rng.random() < 0.5, rng.choice(["sum", "mean"]), 8 * rng.randint(1, 32)
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    tables: list[Table] = []
    shards: list[Shard] = []
    copied: list[str] = []
    for number in range(rng.randint(2, 20)):
        sequence = rng.random() < 0.3
        features = [
            {"name": f"f{number}-{feature}", "pooling_factor": rng.choice([0.3, 1, 1.5, 20, 333.3])}
            for feature in range(rng.choice([1, 1, 2, 3]))
        ]
        given = {
            "name": f"t{number}",
            "rows": rng.randint(devices**2, 2_000_000),
            "dim": width if sequence else 4 * rng.randint(1, 64),
            "features": features,
            "element_bytes": 4 if per_row or per_element else rng.choice([2, 4]),
            "optimizer_bytes_per_row": per_row,
            "optimizer_bytes_per_element": per_element,
            "weighted": weighted and not sequence,
            "pooling": "none" if sequence else pooling,
            "module": "sequences" if sequence else "pooled",
        }
        table = Table.parse(given, "the test")
        tables.append(table)
        kind = rng.choice(["whole", "columns", "rows", "copies"])
        if kind == "copies" and not sequence:
            copied.append(table.name)
            shards += [Shard(table=table.name, rows=table.rows, dim=table.dim, device=rank) for rank in range(devices)]
        elif kind == "rows" and table.pooling != "mean":
            shards += row_wise(table, devices)
        else:
            most = 2 if sequence else min(table.dim // 4, devices)
            cuts = rng.randint(1, most) if kind == "columns" and optimizer != "rowwise_adagrad" else 1
            shards += columns(table, cuts, rng.randrange(devices), devices)
    task = ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=(2**60,) * devices,
        batch_size=devices * rng.choice([1, 100, 4096]),
        pipeline=pipeline,
    ).with_copies(copied)
    return Plan(task=task, shards=tuple(shards), provenance=BY_HAND)


def columns(table: Table, cuts: int, first: int, devices: int) -> list[Shard]:
    """A table cut into column shards as equal as can be, on devices in order from `first`."""
    ends = [4 * (table.dim // 4 * cut // cuts) for cut in range(cuts + 1)]
    return [
        Shard(table=table.name, rows=table.rows, column_offset=begin, dim=end - begin, device=(first + cut) % devices)
        for cut, (begin, end) in enumerate(pairwise(ends))
    ]


def model_of(tables: tuple[Table, ...]) -> torch.nn.ModuleDict:
    """The model whose modules hold these tables."""
    modules: dict[str, torch.nn.Module] = {}
    for name in {table.module for table in tables}:
        here = [table for table in tables if table.module == name]
        if name == "sequences":
            modules[name] = EmbeddingCollection(
                [EmbeddingConfig(**config_of(table)) for table in here], device=torch.device("meta")
            )
        else:
            configs = [
                EmbeddingBagConfig(**config_of(table), pooling=PoolingType[table.pooling.upper()]) for table in here
            ]
            modules[name] = EmbeddingBagCollection(configs, is_weighted=here[0].weighted, device=torch.device("meta"))
    return torch.nn.ModuleDict(modules)


def config_of(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "num_embeddings": table.rows,
        "embedding_dim": table.dim,
        "feature_names": [feature.name for feature in table.features],
        "data_type": DataType.FP16 if table.element_bytes == 2 else DataType.FP32,
    }
