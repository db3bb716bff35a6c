"""Tables cut into equal shards, several of them on a rank, as a search cuts those that are too wide: real trainers on gloo
compute what unsharded tables do."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
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

from helpers.gloo import on_ranks
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

pytestmark = pytest.mark.slow

ROWS, DIM, SAMPLES, STEPS, LEARNING_RATE = 30, 3000, 5, 3, 0.1
FUSED: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}


def plan_for(ranks: int) -> Plan:
    """Pooled, weighted and sequences, by costs of GPUs."""
    kinds: dict[str, dict[str, object]] = {"p": {}, "w": {"weighted": True}, "s": {"pooling": "none"}}
    tables = [
        Table.model_validate({"name": name, "rows": ROWS, "dim": DIM, "pooling_factor": 2.0, "module": name, **fields})
        for name, fields in kinds.items()
    ]
    task = ShardingTask(tables=tuple(tables), device_memory_bytes=(2**30,) * ranks, batch_size=SAMPLES * ranks)
    return search(task, analytic_model("h100", SAMPLES * ranks), SearchSettings(rounds=2))


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        of: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM}
        on = torch.device(device)
        self.p = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name="p", feature_names=["p"], **of)], device=on)
        self.w = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="w", feature_names=["w"], **of)], is_weighted=True, device=on
        )
        self.s = EmbeddingCollection(tables=[EmbeddingConfig(name="s", feature_names=["s"], **of)], device=on)

    def forward(self, features: KeyedJaggedTensor, weighted: KeyedJaggedTensor) -> list[Tensor]:
        return [self.p(features)["p"], self.w(weighted)["w"], self.s(features)["s"].values()]


def batch(seed: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    draw = torch.Generator().manual_seed(seed)

    def drawn(*keys: str) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(0, 4, (len(keys) * SAMPLES,), generator=draw)
        return torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw), lengths

    values, lengths = drawn("p", "s")
    ids, counts = drawn("w")
    weights = torch.rand(len(ids), generator=draw)
    return (
        KeyedJaggedTensor(keys=["p", "s"], values=values, lengths=lengths),
        KeyedJaggedTensor(keys=["w"], values=ids, lengths=counts, weights=weights),
    )


def trained(rank: int, plan: Plan) -> float:
    """How far outputs were from those of unsharded tables, at most, in some steps."""
    torch.manual_seed(0)
    whole, meta, ranks = Model("cpu"), Model("meta"), dist.get_world_size()
    sharded = DistributedModelParallel(
        meta,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=to_torchrec(plan, meta, device_type="cpu"),
        sharders=[EmbeddingBagCollectionSharder(fused_params=FUSED), EmbeddingCollectionSharder(fused_params=FUSED)],
    )
    weights = whole.state_dict()
    for name, of_table in sharded.state_dict().items():
        for shard in of_table.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weights[name][row : row + rows, column : column + columns])
    off = 0.0
    for step in range(STEPS):
        features = batch(10 * step + rank)
        got, wanted = sharded(*features), whole(*features)
        off = max([off, *(float((a - b).detach().abs().max()) for a, b in zip(got, wanted, strict=True) if a.numel())])
        torch.stack([(one * one).sum() for one in got]).sum().backward()
        whole.zero_grad()
        torch.stack([(one * one).sum() for one in wanted]).sum().backward()
        for parameter in whole.parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            parameter.data -= LEARNING_RATE * gradient / ranks
    return off


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_equal_shards_of_a_table_on_a_rank_train_as_the_unsharded_table(ranks: int, tmp_path: Path) -> None:
    plan = plan_for(ranks)
    assert max(shard.dim for shard in plan.shards) <= 1024
    held = [[shard.device for shard in shards] for shards in plan.by_table().values()]
    assert all(len(devices) > len(set(devices)) for devices in held)
    assert max(on_ranks(ranks, tmp_path, trained, plan)) < 1e-6
