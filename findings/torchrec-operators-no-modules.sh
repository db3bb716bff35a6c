#!/usr/bin/env bash
# One would guess: `modules()` of a sharded model has FBGEMM's operators, whose weights are among its `named_parameters()`, and a
# hook registered on every module sees each lookup.
# What happens: it has none of them. A sharded collection keeps its lookups in a plain list, so the innermost module that hooks on
# all modules see is the collection.
# Seen with: torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0, on 29 November 2026.
# Why it matters: whoever times, counts or changes a model module by module (hooks, `apply`) leaves out where most of a
# recommendation model's time goes, and is told nothing. The operators are in `_lookups` of the collections.
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
import tempfile
from importlib.metadata import version

import torch
import torch.distributed as dist

logging.disable(logging.CRITICAL)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as Operator
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

print(*(f"{name} {version(name)}" for name in ("torch", "torchrec", "fbgemm-gpu-cpu")), sep=", ")
rendezvous = tempfile.mktemp()
dist.init_process_group("gloo", f"file://{rendezvous}", rank=0, world_size=1)
config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=10, feature_names=["f"])
model = torch.nn.Sequential(EmbeddingBagCollection(tables=[config], device=torch.device("meta")))
env = ShardingEnv.from_process_group(dist.group.WORLD)
sharders = [EmbeddingBagCollectionSharder()]
table_wise = {"t": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])}
planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"), constraints=table_wise)
plan = planner.plan(model, sharders)
model = DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)

called = []
for module in model.modules():
    module.register_forward_hook(lambda module, *_: called.append(type(module).__name__))
ids = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
model(ids)
weights = [name for name, _ in model.named_parameters()]
operators = [one for one in model.modules() if isinstance(one, Operator)]
hidden = [
    one
    for module in model.modules()
    for lookup in getattr(module, "_lookups", [])
    for one in lookup.modules()
    if isinstance(one, Operator)
]
print("expected: one operator among the modules, and called")
print(f"seen: parameters {weights}; operators among modules {len(operators)}, in _lookups {len(hidden)}; called {called}")
holds = not operators and len(hidden) == 1 and Operator.__name__ not in called and len(weights) == 1
sys.exit(not holds)
END
"$work/venv/bin/python" -W ignore "$work/check.py"
