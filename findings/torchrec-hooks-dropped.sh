#!/usr/bin/env bash
# One would guess: hooks that were registered on an EmbeddingBagCollection still run once DistributedModelParallel has sharded the
# model, or sharding refuses them.
# What happens: forward hooks of the collection and gradient hooks of its tables are dropped, and no warning is given: the module
# is replaced by another, whose weights are others. Hooks on modules that are not sharded still run.
# Seen with: torchrec 1.8.0, torch 2.13.0, on 29 November 2026.
# Why it matters: a hook that clips gradients, masks outputs or counts lookups works in the unsharded model that one tests, and
# does nothing in the job. Register forward hooks after sharding; of fused tables no gradient exists at all.
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
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, table_wise
from torchrec.distributed.types import ShardingPlan

print(*(f"{name} {version(name)}" for name in ("torch", "torchrec")), sep=", ")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ran = set()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])]
        self.sparse = EmbeddingBagCollection(tables=tables)
        self.dense = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.dense(self.sparse(batch).values()).sum()


def hooks_run(how):
    """Which of three hooks run in a step of a model that is sharded so, or not at all."""
    ran.clear()
    model = Model()
    model.sparse.register_forward_hook(lambda *_: ran.add("forward of the collection"))
    model.sparse.embedding_bags["t"].weight.register_hook(lambda _: ran.add("gradient of the table"))
    model.dense.register_forward_hook(lambda *_: ran.add("forward of a dense layer"))
    if how is not None:
        sharder = EmbeddingBagCollectionSharder()
        of_table = construct_module_sharding_plan(model.sparse, {"t": how}, sharder, 1, 1, "cpu")
        model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"sparse": of_table}),
            sharders=[sharder],
        )
    lengths = torch.tensor([1, 1])
    model(KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]), lengths=lengths)).backward()
    return sorted(ran)


whole, one_rank, copied = hooks_run(None), hooks_run(table_wise(rank=0)), hooks_run(data_parallel())
print(f"expected: {whole}, as in the unsharded model")
print(f"seen: table-wise {one_rank}, data-parallel {copied}")
sys.exit(not (len(whole) == 3 and one_rank == copied == ["forward of a dense layer"]))
END
"$work/venv/bin/python" -W ignore "$work/check.py"
