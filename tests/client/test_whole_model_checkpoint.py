"""A checkpoint of a model of every kind of collection under another plan: sequences, feature processors and copies too."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from helpers.gloo import on_ranks
from helpers.trainers import Saved, cut_plan
from neuroshard.client.torchrec import to_torchrec
from neuroshard.client.torchrec_optimizer import load_resharded
from neuroshard.core.plan import Plan
from neuroshard.core.table import Feature, Table

pytestmark = pytest.mark.slow

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
plan = partial(cut_plan, TABLES, batch_size=SAMPLES, copied={"tiny"})
ONE = plan(
    2, {"shared": [(8, 1), (8, 0)], "wide": [(16, 0)], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []}
)
OTHER = plan(2, {"shared": [(16, 0)], "wide": [], "read": [(8, 1), (8, 0)], "seen": [], "placed": [(4, 0), (12, 1)]})
FOUR = plan(
    4, {"shared": [], "wide": [(4, 3), (12, 1)], "read": [(8, 2), (8, 3)], "seen": [(16, 0)], "placed": [(16, 2)]}
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


class Trainer(Saved):
    def __init__(self, given: Plan, seed: int) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # what every rank has a copy of begins alike
        meta = Model()
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
        bags = EmbeddingBagCollectionSharder(fused_params=fused)
        self.model = DistributedModelParallel(
            meta,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=to_torchrec(given, meta),
            sharders=[
                bags,
                FeatureProcessedEmbeddingBagCollectionSharder(bags),
                EmbeddingCollectionSharder(fused_params=fused),
            ],
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.model(batch(step, dist.get_rank(), dist.get_world_size())).square().sum().backward()

    def outputs(self) -> np.ndarray:
        """Of all samples of a batch."""
        ranks = dist.get_world_size()
        with torch.no_grad():
            mine = self.model(batch(99, dist.get_rank(), ranks))
        every = [torch.zeros_like(mine) for _ in range(ranks)]
        dist.all_gather(every, mine)
        return torch.cat(every).numpy()


def save_under(rank: int, old: Plan, folder: Path) -> np.ndarray:
    trainer = Trainer(old, seed=1)
    trainer.train(3)
    save(trainer.state(), checkpoint_id=folder)
    assert any(isinstance(value, ShardedTensor) for value in trainer.model.state_dict().values())
    return trainer.outputs()


def load_under(rank: int, old: Plan, new: Plan, folder: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    trainer = Trainer(new, seed=2)
    trainer.train(1)  # what a model had before must not stay
    before = trainer.outputs()
    estimated = load_resharded(trainer.state(), folder, old_plan=old, new_plan=new)
    return before, trainer.outputs(), estimated


@pytest.mark.parametrize(("old", "new"), [(ONE, OTHER), (OTHER, ONE), (ONE, FOUR), (FOUR, OTHER), (ONE, ONE)])
def test_a_model_of_every_kind_of_collection_answers_alike_under_another_plan(
    old: Plan, new: Plan, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    for meeting in ("old", "new"):
        (tmp_path / meeting).mkdir()
    saved = on_ranks(old.task.devices, tmp_path / "old", save_under, old, folder)[0]
    loaded = on_ranks(new.task.devices, tmp_path / "new", load_under, old, new, folder)
    for before, after, _ in loaded:
        assert np.abs(before - saved).max() > 1e-3
        np.testing.assert_allclose(after, saved, rtol=1e-6, atol=1e-7)
    if old is new:
        assert not any(estimated for _, _, estimated in loaded)
