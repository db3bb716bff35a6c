"""A model to try everything on: an ads ranker with a dozen embedding tables, 30 GiB of them.

    neuroshard tables --from-torchrec examples.ads_model:make_model --pooling-factors examples/ads_lookups.json -o tables.json
    python -m examples.ads_model 2> planner.log       what TorchRec's own planner makes of it on 4 GPUs of 16 GiB

docs/tutorial.md goes all the way from here to a live plan. What matters of a model of yours is `make_model`: it takes no
arguments and returns a module. It is called on the meta device, so it may be as large as it likes.
"""

import json
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # FBGEMM and torchrec, while they are imported
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

# name: rows, dim, the features that look it up
TABLES = {
    "user_id": (30_000_000, 128, ["user_id"]),
    "ad_id": (8_000_000, 128, ["shown_ad", "recent_ads"]),
    "page_id": (20_000_000, 64, ["shown_page", "recent_pages"]),
    "advertiser_id": (2_000_000, 128, ["advertiser_id"]),
    "campaign_id": (5_000_000, 64, ["campaign_id"]),
    "query_terms": (10_000_000, 128, ["query_terms"]),
    "city": (60_000, 32, ["city"]),
    "interests": (400_000, 64, ["interests"]),
    "device_model": (25_000, 16, ["device_model"]),
    "category": (3_000, 32, ["category"]),
    "hour_of_week": (168, 16, ["hour_of_week"]),
    "country": (250, 16, ["country"]),
}
DENSE_FEATURES = 13
RANKS, BATCH_SIZE, MEMORY_BYTES = 4, 512, 16 * 2**30  # a rank's batch


class AdsModel(nn.Module):
    """Pooled embeddings and dense features into one logit."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
            for name, (rows, dim, features) in TABLES.items()
        ]
        self.sparse = EmbeddingBagCollection(tables=configs)
        self.features = [feature for _, _, features in TABLES.values() for feature in features]
        width = sum(dim * len(features) for _, dim, features in TABLES.values())
        self.over = nn.Sequential(nn.Linear(width + DENSE_FEATURES, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(batch, 13) dense features and the lookups of every feature -> (batch, 1) logits."""
        pooled = self.sparse(features)
        # by key: the order of the columns in `pooled.values()` is the sharding plan's, and the next plan has another
        logits: Tensor = self.over(torch.cat([dense, *(pooled[feature] for feature in self.features)], dim=1))
        return logits


def make_model() -> AdsModel:
    return AdsModel()


def print_planner() -> None:
    """TorchRec's plan for this model, as its planner prints it: table-wise and column-wise, lookups as in ads_lookups.json."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    logging.getLogger("torchrec.distributed.planner.stats").setLevel(logging.INFO)  # to stderr
    lookups = json.loads(Path(__file__).with_name("ads_lookups.json").read_text())
    constraints = {
        name: ParameterConstraints(
            sharding_types=["table_wise", "column_wise"],
            compute_kernels=["fused"],
            min_partition=min(dim, 32),
            pooling_factors=[lookups[feature] for feature in features],
        )
        for name, (_, dim, features) in TABLES.items()
    }
    with torch.device("meta"):
        model = make_model()
    EmbeddingShardingPlanner(
        topology=Topology(world_size=RANKS, compute_device="cuda", hbm_cap=MEMORY_BYTES, local_world_size=RANKS),
        batch_size=BATCH_SIZE,
        storage_reservation=FixedPercentageStorageReservation(0.1),
        constraints=constraints,
        debug=True,
    ).plan(model, [EmbeddingBagCollectionSharder()])


if __name__ == "__main__":
    print_planner()
