#!/usr/bin/env bash
# One would guess: a sharded EmbeddingBagCollection of TorchRec reorders every KeyedJaggedTensor whose keys are in another
# order than its tables', whatever it was given before.
# What happens: once it saw a batch of any kind and then a TensorDict, it no longer does. Features are looked up in each
# other's tables, and nothing is raised.
# Seen with: torchrec 1.8.0, on 28 November 2026.
# Why it matters: a trainer that gets both kinds of input (training batches of one, evaluation of the other) goes on with the
# rows of other features.
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
from tensordict import TensorDict
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

print(*(f"{name} {version(name)}" for name in ("torch", "tensordict", "torchrec")), sep=", ")
IDS = {"x": [0, 1, 2, 3], "y": [4, 5, 6, 7]}  # four samples, one id each

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tables = [EmbeddingBagConfig(name=n, num_embeddings=8, embedding_dim=4, feature_names=[n]) for n in IDS]
model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(tables=tables)})
sharder = EmbeddingBagCollectionSharder()
ways = {n: table_wise(rank=0, compute_kernel="fused") for n in IDS}
plan = construct_module_sharding_plan(
    model["bags"], ways, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
)
sharded = DistributedModelParallel(
    model,
    env=ShardingEnv.from_process_group(dist.group.WORLD),
    device=torch.device("cpu"),
    plan=ShardingPlan({"bags": plan}),
    sharders=[sharder],
).module["bags"]


def jagged():
    ids = torch.tensor(IDS["y"] + IDS["x"])
    return KeyedJaggedTensor(["y", "x"], ids, lengths=torch.ones(8, dtype=torch.int32))


def tensordict():
    each = torch.arange(5)
    return TensorDict({n: torch.nested.nested_tensor_from_jagged(torch.tensor(IDS[n]), offsets=each) for n in "yx"})


def outputs(batch):
    return {name: pooled.detach().clone() for name, pooled in sharded(batch).to_dict().items()}


def same(these, those):
    return all(torch.equal(these[name], those[name]) for name in IDS)


first = outputs(jagged())
again = same(first, outputs(jagged()))
of_tensordict = same(first, outputs(tensordict()))
after = outputs(jagged())
print("expected: the same batch has the same outputs, before and after a TensorDict")
print(f"seen: again before it: {again}; as a TensorDict: {of_tensordict}; after it: {same(first, after)}")
dist.destroy_process_group()
sys.exit(not (again and of_tensordict and not same(first, after)))
END
"$work/venv/bin/python" -W ignore "$work/check.py"
