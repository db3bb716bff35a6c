"""A model with tables that give rows to ids as they train: pooled, of two features, and sequences, beside a plain collection."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

SAMPLES, ROWS, HASHED, INTERVAL = 8, 40, 2**40, 2
FEATURES = {"ads": ["ad", "shown"], "users": ["user"], "clicks": ["click"], "plain": ["day"]}
IDS = 37_000_003 * torch.arange(14) + 11  # far beyond the rows


def spread(ids: Tensor, size: int) -> Tensor:
    """A hash of ids over [0, size)."""
    return (ids * 2_654_435_761) % size


def steady(weights: Tensor) -> Tensor:
    """The same first values for every row, whichever rank makes it."""
    with torch.no_grad():
        return weights.fill_(0.1)


def maps(configs: list[Any], device: torch.device, *, hashed: bool = True) -> ManagedCollisionCollection:
    policies = {"ads": LFU_EvictionPolicy, "users": DistanceLFU_EvictionPolicy}
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=device,
            eviction_policy=policies.get(config.name, LFU_EvictionPolicy)(),
            eviction_interval=INTERVAL,
            input_hash_size=HASHED,
            input_hash_func=spread if hashed else None,
        )
        for config in configs
    }
    return ManagedCollisionCollection(modules, configs)


class Model(nn.Module):
    def __init__(self, device: str = "cpu", rows: int = ROWS, *, hashed: bool = True, remapped: bool = False) -> None:
        super().__init__()
        where, tables = torch.device(device), {"num_embeddings": rows, "embedding_dim": 8, "init_fn": steady}
        bags: Any = [EmbeddingBagConfig(name=n, feature_names=FEATURES[n], **tables) for n in ("ads", "users")]
        lists: Any = [EmbeddingConfig(name="clicks", feature_names=FEATURES["clicks"], **tables)]
        plain: Any = [EmbeddingBagConfig(name="plain", feature_names=FEATURES["plain"], **tables)]
        self.bags = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=bags, device=where),
            maps(bags, where, hashed=hashed),
            return_remapped_features=remapped,
        )
        self.lists = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=lists, device=where), maps(lists, where, hashed=hashed)
        )
        self.plain = EmbeddingBagCollection(tables=plain, device=where)

    def forward(self, bags: KeyedJaggedTensor, lists: KeyedJaggedTensor, plain: KeyedJaggedTensor) -> Any:
        pooled, remapped = self.bags(bags)
        return pooled, self.lists(lists)[0], self.plain(plain), remapped


def batch(step: int, rank: int, samples: int = SAMPLES) -> list[KeyedJaggedTensor]:
    """A rank's samples of a step."""
    drawn = torch.Generator().manual_seed(1000 * step + rank)

    def of(*names: str, ids: Tensor = IDS) -> KeyedJaggedTensor:
        lengths = torch.randint(0, 4, (len(names) * samples,), generator=drawn, dtype=torch.int32)
        values = ids[torch.randint(0, len(ids), (int(lengths.sum()),), generator=drawn)]
        return KeyedJaggedTensor(keys=list(names), values=values, lengths=lengths)

    return [of("user", "ad", "shown"), of("click"), of("day", ids=torch.arange(ROWS))]
