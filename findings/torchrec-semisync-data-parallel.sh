#!/usr/bin/env bash
# One would guess: TrainPipelineSemiSync trains a model with a data-parallel table, or refuses it when it is made.
# What happens: it trains until batch `start_batch` (900 if not said). From then on it looks up the next batch before the dense
# optimizer steps; that step changes the data-parallel table in place, and the backward pass of the next batch raises a
# RuntimeError. Without a data-parallel table, or before start_batch, it trains.
# Seen with: torchrec 1.8.0, torch 2.13.0, on 28 November 2026.
# Why it matters: a short trial run passes, and the long one ends after minutes or hours. Choose another pipeline for plans
# with data-parallel tables.
#
# Ends with 0 if that holds, with 1 if it changed, with 2 if the packages could not be installed.
set -euo pipefail
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || exit 2; }
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 tqdm==4.70.1 pyre-extensions==0.0.32
install --no-deps torchrec==1.8.0 # its own requirements name the CUDA build of FBGEMM

cat > "$work/check.py" <<'END'
import logging
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist

logging.disable(logging.CRITICAL)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, table_wise
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

print(*(f"{name} {version(name)}" for name in ("torch", "torchrec")), sep=", ")
BATCHES = 10

# The pipeline asks for CUDA's streams, which a CPU has none of. All it does then comes one after another.
torch.cuda.current_stream = lambda *args, **kwargs: None
for kind in (KeyedJaggedTensor, JaggedTensor, KeyedTensor, torch.Tensor):
    kind.record_stream = lambda self, stream: None

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [EmbeddingBagConfig(name=n, num_embeddings=8, embedding_dim=4, feature_names=[n]) for n in "xy"]
        self.sparse = EmbeddingBagCollection(tables=tables)
        self.dense = torch.nn.Linear(8, 1)

    def forward(self, batch):
        loss = self.dense(self.sparse(batch).values()).square().mean()
        return loss, loss.detach()


def trained(way, start_batch):
    """How many batches are trained, and the error that ended it, if any."""
    torch.manual_seed(0)
    model, sharder, device = Model(), EmbeddingBagCollectionSharder(), torch.device("cpu")
    ways = {"x": table_wise(rank=0, compute_kernel="fused"), "y": way}
    plan = construct_module_sharding_plan(
        model.sparse, ways, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"sparse": plan}),
        sharders=[sharder],
    )
    dense = [parameter for _, parameter in in_backward_optimizer_filter(sharded.named_parameters())]
    pipeline = TrainPipelineSemiSync(sharded, torch.optim.SGD(dense, lr=0.1), device, start_batch=start_batch)
    lengths = torch.ones(8, dtype=torch.int32)
    batches = iter([KeyedJaggedTensor(["x", "y"], torch.arange(8), lengths=lengths) for _ in range(BATCHES)])
    done = 0
    try:
        while True:
            pipeline.progress(batches)
            done += 1
    except StopIteration:
        return done, "no error"
    except RuntimeError as error:
        return done, "changed in place" if "inplace operation" in str(error) else str(error)


found = {
    "data-parallel, start_batch=3": trained(data_parallel(), 3),
    "data-parallel, start_batch=900": trained(data_parallel(), 900),
    "table-wise, start_batch=3": trained(table_wise(rank=0, compute_kernel="fused"), 3),
}
print(f"expected: {BATCHES} batches are trained, or the data-parallel table is refused before the first")
print("seen:", "; ".join(f"{name}: {done} batches, {error}" for name, (done, error) in found.items()))
dist.destroy_process_group()
sys.exit([*found.values()] != [(4, "changed in place"), (BATCHES, "no error"), (BATCHES, "no error")])
END
"$work/venv/bin/python" -W ignore "$work/check.py"
