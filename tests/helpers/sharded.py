"""Models that TorchRec has sharded over the ranks of gloo, on CPUs: how they are made, and their parts of whole tables."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


def sharders_of(optimizer: str, learning_rate: float = 0.05, **fused: object) -> list[Any]:
    """TorchRec's of bags, of bags behind feature processors and of sequences, with these settings of the fused operators."""
    kinds, name = EmbOptimType.__members__, optimizer.upper()
    settings = {"optimizer": kinds.get(f"EXACT_{name}", kinds.get(name)), "learning_rate": learning_rate, **fused}
    bags = EmbeddingBagCollectionSharder(dict(settings))
    return [bags, FeatureProcessedEmbeddingBagCollectionSharder(bags), EmbeddingCollectionSharder(dict(settings))]


def sharded(model: nn.Module, plan: ShardingPlan, sharders: list[Any], group: dist.ProcessGroup | None = None) -> Any:
    """The model over the ranks of a group, of all of them without one."""
    env = ShardingEnv.from_process_group(group or dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)


def local_parts(state: Mapping[str, Any]) -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
    """This rank's tensors of the state of a sharded model: name, place in the whole, values."""
    for name, value in state.items():
        if not isinstance(value, ShardedTensor):
            yield name, (slice(None),) * value.dim(), value.detach()
            continue
        for part in value.local_shards():
            (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
            yield name, (slice(row, row + rows), slice(column, column + columns)), part.tensor.detach()


def table_of(key: str) -> str:
    """The table's name in the key of its weight."""
    return key.split(".")[-2]
