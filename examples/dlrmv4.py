"""A trainer as DLRMv4's, scaled down: histories of many lengths, candidates that read the same tables, row-wise Adagrad.

    neuroshard tables --from-torchrec examples.dlrmv4:make_model --pooling-factors examples/dlrmv4_lookups.json -o tables.json
    neuroshard search tables.json --model analytic:cpu --batch-size 64 --devices 2 --memory 4GiB --pipeline none -o plan.json
    neuroshard deploy plan.json --store store --name dlrmv4 --model analytic:cpu
    python examples/dlrmv4.py --store store --name dlrmv4 --ranks 2

The benchmark's trainer asks TorchRec's planner: `EmbeddingShardingPlanner(topology, constraints).collective_plan(model, sharders,
pg)`. Here `NeuroShardPlanner(store, name)` stands in its place. Ranks are gloo processes on this machine.
"""

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

with warnings.catch_warnings():  # FBGEMM warns about itself while it is imported
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel, ShardingEnv
    from torchrec.distributed.embedding import EmbeddingCollectionSharder

from neuroshard.client.torchrec import NeuroShardPlanner

COLUMNS, LONGEST, SAMPLES, STEPS = 32, 24, 32, 3
HISTORIES = {"item_id": 9_390, "artist_id": 1_293, "album_id": 3_367}  # rows: a thousandth of the benchmark's
ONCE = {"uid": 1_000, "user_x_artist": 100_000, "item_x_hour": 40_000}  # read once a sample, as its other tables


class Ranker(nn.Module):
    """A history is the mean of its positions here, which the benchmark puts through HSTU; the score is a product."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=COLUMNS, feature_names=features(name))
            for name, rows in (HISTORIES | ONCE).items()
        ]
        self.sequences = EmbeddingCollection(tables=tables, device=device)
        self.dense = nn.Linear(COLUMNS, COLUMNS, device=device)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = self.sequences(ids)
        history = torch.stack([found[name].to_padded_dense(LONGEST).sum(dim=1) for name in HISTORIES]).sum(dim=0)
        of_user = torch.stack([found[name].to_padded_dense(1)[:, 0] for name in ONCE]).sum(dim=0)
        candidate = torch.stack([found[f"candidate_{name}"].to_padded_dense(1)[:, 0] for name in HISTORIES]).sum(dim=0)
        score: Tensor = (self.dense(history / LONGEST + of_user) * candidate).sum(dim=1)
        return score


def make_model() -> nn.Module:
    return Ranker()


def features(table: str) -> list[str]:
    """What reads a table: a history and the candidate, or one id a sample."""
    return [table, f"candidate_{table}"] if table in HISTORIES else [table]


def batch(rng: torch.Generator) -> tuple[KeyedJaggedTensor, Tensor]:
    """Ids by a law with hot ones, histories of 1 to LONGEST positions, and labels."""
    names = [feature for table in HISTORIES | ONCE for feature in features(table)]
    lengths = {name: torch.randint(1, LONGEST + 1, (SAMPLES,), generator=rng) for name in HISTORIES}
    values, counts = [], []
    for name in names:
        rows = (HISTORIES | ONCE)[name.removeprefix("candidate_")]
        counts.append(lengths.get(name, torch.ones(SAMPLES, dtype=torch.int64)))
        values.append((torch.rand(int(counts[-1].sum()), generator=rng) ** 3 * rows).long())
    ids = KeyedJaggedTensor(keys=names, values=torch.cat(values), lengths=torch.cat(counts))
    return ids, torch.randint(2, (SAMPLES,), generator=rng).float()


def train(rank: int, ranks: int, store: str, name: str, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model, rng = make_model(), torch.Generator().manual_seed(rank)
    sharders = [EmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})]

    planner = NeuroShardPlanner(store, name, batch_size=SAMPLES * ranks, pipeline="none")  # the line that changes
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)

    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = torch.optim.SGD(sharded.module.dense.parameters(), lr=0.01)
    for step in range(STEPS):
        ids, labels = batch(rng)
        loss = nn.functional.binary_cross_entropy_with_logits(sharded(ids), labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = asked.ranks, asked.store, asked.name, str(Path(folder, "meeting"))
        spawn(train, arguments, nprocs=asked.ranks)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
