"""DLRMv4 of MLPerf Training (mlcommons/training, recommendation/) on 8 MI350X of 288 GB: what its makers say that a rank holds,
beside what is counted of the plan that TorchRec's planner makes for it."""

import warnings

import pytest
import torch
from torch import nn

with warnings.catch_warnings():  # FBGEMM warns about itself while it is imported
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from neuroshard.client.torchrec import from_torchrec

RANKS, COLUMNS, SAMPLES = 8, 512, 1024
HBM_BYTES = 288_000_000_000
HELD_GIB = (73.7, 71.1, 69.7, 69.2, 95.9, 80.6, 65.3, 37.4)
OFF = 0.05
ROWS = {
    "item_id": 9_390_624,
    "artist_id": 1_293_395,
    "album_id": 3_367_692,
    "uid": 1_000_001,
    "user_x_artist": 100_000_000,
    "user_x_album": 40_000_000,
    "item_x_hour": 40_000_000,
    "user_x_artist_x_hour": 40_000_000,
    "user_x_hour": 24_000_000,
    "artist_x_hour": 32_000_000,
    "user_x_is_organic": 2_000_000,
}


def model() -> nn.Module:
    tables = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=COLUMNS, feature_names=[f"{name}_ids"])
        for name, rows in ROWS.items()
    ]
    return nn.ModuleDict({"sequences": EmbeddingCollection(tables=tables, device=torch.device("meta"))})


@pytest.mark.filterwarnings("ignore")  # of TorchRec's planner, about its own defaults
def test_ranks_hold_what_the_makers_of_dlrmv4_say() -> None:
    of = model()
    topology = Topology(RANKS, "cuda", hbm_cap=HBM_BYTES, local_world_size=RANKS)
    theirs = EmbeddingShardingPlanner(topology=topology).plan(of, [EmbeddingCollectionSharder()])
    plan = from_torchrec(theirs, of, device_memory_bytes=[HBM_BYTES] * RANKS, batch_size=RANKS * SAMPLES)
    cuts = {name: sum(shard.table == name for shard in plan.shards) for name in ROWS}
    assert {name for name, count in cuts.items() if count == 4} == {"user_x_artist", "user_x_album", "item_x_hour"}
    held = [one.weights + one.optimizer for one in plan.device_memory()]
    assert [nbytes / 2**30 for nbytes in held] == [pytest.approx(gib, rel=OFF) for gib in HELD_GIB]
