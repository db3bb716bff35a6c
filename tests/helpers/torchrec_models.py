"""Models of TorchRec drawn at random, and ways to hold their tables."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType, PoolingType

from helpers.drawn import drawn_shards
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table

ROWS, DIM = 16, 8


def random_tables(
    rng: random.Random, *, rows: Sequence[int] = (ROWS,), dims: Sequence[int] = (DIM,)
) -> tuple[Table, ...]:
    """Of up to four collections: pooled ones, weighted or not, and sequences, whose tables have one width a collection."""
    tables = []
    for module in range(rng.randint(1, 4)):
        sequences = rng.random() < 0.3
        weighted = not sequences and rng.random() < 0.3
        of_sequences = rng.choice(dims)
        for place in range(rng.randint(1, 4)):
            features = rng.choice([1, 1, 2])
            tables.append(
                Table.model_validate(
                    {
                        "name": f"m{module}t{place}",
                        "module": f"m{module}",
                        "rows": rng.choice(rows),
                        "dim": of_sequences if sequences else rng.choice(dims),
                        "pooling": "none" if sequences else rng.choice(["sum", "sum", "mean"]),
                        "weighted": weighted,
                        "element_bytes": 4 if sequences else rng.choice([4, 2]),
                        "features": [
                            {"name": f"m{module}t{place}f{f}", "pooling_factor": 2.0} for f in range(features)
                        ],
                    }
                )
            )
    return tuple(tables)


def random_shards(
    tables: tuple[Table, ...], ranks: int, domain: int, rng: random.Random
) -> tuple[list[Shard], list[str]]:
    """Of every way to hold a table, and which tables are copied. Means are not row-wise, which TorchRec computes wrongly."""
    shards: list[Shard] = []
    drawn, copied = np.random.default_rng(rng.randrange(2**32)), []
    for table in tables:
        if table.pooling != "none" and rng.random() < 0.2:
            copied.append(table.name)
            shards += [Shard(table=table.name, rows=table.rows, dim=table.dim, device=rank) for rank in range(ranks)]
        else:
            shards += drawn_shards(table, ranks, domain, drawn)
    return shards, copied


def module_of(tables: tuple[Table, ...]) -> nn.Module:
    made, meta = nn.ModuleDict(), torch.device("meta")
    for path in dict.fromkeys(table.module for table in tables):
        held = [table for table in tables if table.module == path]
        shape = [
            {
                "name": t.name,
                "num_embeddings": t.rows,
                "embedding_dim": t.dim,
                "feature_names": [f.name for f in t.features],
            }
            | {"data_type": DataType.FP16 if t.element_bytes == 2 else DataType.FP32}
            for t in held
        ]
        if held[0].pooling == "none":
            made[path] = EmbeddingCollection(tables=[EmbeddingConfig(**one) for one in shape], device=meta)
        else:
            configs = [
                EmbeddingBagConfig(**one, pooling=PoolingType[table.pooling.upper()])
                for one, table in zip(shape, held, strict=True)
            ]
            made[path] = EmbeddingBagCollection(tables=configs, is_weighted=held[0].weighted, device=meta)
    return made
