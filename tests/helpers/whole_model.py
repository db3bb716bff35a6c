"""A model of every kind of collection, with its tables and batches: pooled, of two features, sequences, position weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from neuroshard.core.table import Feature, Table

SAMPLES = 8
TABLES = (
    Table(
        name="shared",
        module="bags",
        rows=20,
        dim=16,
        features=(Feature(name="a", pooling_factor=2.0), Feature(name="b", pooling_factor=2.0)),
        pooling_factor=4.0,
    ),
    Table(name="wide", module="bags", rows=30, dim=16, pooling_factor=2.0),
    Table(name="tiny", module="bags", rows=5, dim=8, pooling_factor=2.0),
    Table(name="read", module="sequences", rows=24, dim=16, pooling_factor=2.0, pooling="none"),
    Table(name="seen", module="sequences", rows=16, dim=16, pooling_factor=2.0, pooling="none"),
    Table(name="placed", module="positions", rows=12, dim=16, pooling_factor=2.0, weighted=True),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")

        def configs(module: str, kind: Any) -> list[Any]:
            return [
                kind(
                    name=t.name,
                    num_embeddings=t.rows,
                    embedding_dim=t.dim,
                    feature_names=[feature.name for feature in t.features] or [t.name],
                )
                for t in TABLES
                if t.module == module
            ]

        self.bags = EmbeddingBagCollection(tables=configs("bags", EmbeddingBagConfig), device=meta)
        self.sequences = EmbeddingCollection(tables=configs("sequences", EmbeddingConfig), device=meta)
        inner = EmbeddingBagCollection(tables=configs("positions", EmbeddingBagConfig), is_weighted=True, device=meta)
        weights = PositionWeightedModuleCollection({"placed": 4}, device=torch.device("cpu"))
        self.positions = FeatureProcessedEmbeddingBagCollection(inner, weights)

    def forward(self, features: dict[str, KeyedJaggedTensor]) -> Tensor:
        parts = list(self.bags(features["bags"]).to_dict().values())
        parts += [of.values().reshape(-1, 2, 16).sum(1) for of in self.sequences(features["sequences"]).values()]
        parts += list(self.positions(features["positions"]).to_dict().values())
        return torch.cat(parts, dim=1)


def batch(step: int, rank: int, ranks: int) -> dict[str, KeyedJaggedTensor]:
    """This rank's samples of a step: the same for any number of ranks in all."""
    generator = torch.Generator().manual_seed(step)
    mine, found = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks), {}
    for module in dict.fromkeys(table.module for table in TABLES):
        keys, values = [], []
        for table in TABLES:
            for name in [feature.name for feature in table.features] or [table.name]:
                ids = torch.randint(table.rows, (SAMPLES, 2), generator=generator)
                if table.module == module:
                    keys.append(name)
                    values.append(ids[mine].flatten())
        flat = torch.cat(values)
        found[module] = KeyedJaggedTensor(keys=keys, values=flat, lengths=torch.full((len(flat) // 2,), 2))
    return found
