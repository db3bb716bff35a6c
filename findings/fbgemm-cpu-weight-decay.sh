#!/usr/bin/env bash
# One would guess: FBGEMM's row-wise Adagrad, given a weight_decay, decays weights on a CPU as it does on a GPU, or refuses it.
# What happens: on a CPU the operator takes weight_decay, in both of its modes (L2 and DECOUPLE), says nothing, and leaves it out:
# weights after some steps are bit for bit those without. gradient_clipping, beside it, is applied.
# Seen with: fbgemm-gpu-cpu 1.8.0 on a CPU, on 29 November 2026.
# Why it matters: a regulariser that is tuned, or tested, on CPUs has never been there, and the same job on a GPU trains otherwise.
#
# Ends with 0 if that holds, with 1 if it changed, with 2 if the packages could not be installed.
set -euo pipefail
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || exit 2; }
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
install torch==2.13.0 fbgemm-gpu-cpu==1.8.0

cat > "$work/check.py" <<'END'
import logging
import sys
from importlib.metadata import version

import torch

logging.disable(logging.CRITICAL)
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

print(*(f"{name} {version(name)}" for name in ("torch", "fbgemm-gpu-cpu")), sep=", ")


def trained(**options):
    """The weights of a row, all 1 at first, after three steps whose gradient is that of its first column alone."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        device=torch.device("cpu"),
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.5,
        **options,
    )
    table.split_embedding_weights()[0].data.fill_(1.0)
    for _ in range(3):
        table(torch.tensor([1]), torch.tensor([0, 1]))[:, 0].mul(4).sum().backward()
    return table.split_embedding_weights()[0][1]


plain = trained()
l2 = trained(weight_decay=0.5, weight_decay_mode=WeightDecayMode.L2)
decoupled = trained(weight_decay=0.5, weight_decay_mode=WeightDecayMode.DECOUPLE)
clipped = trained(gradient_clipping=True, max_gradient=1.0, eps=1.0)
unclipped = trained(eps=1.0)
print("expected: with weight_decay=0.5 columns without a gradient shrink below 1 (or the option is refused)")
print(f"seen: without {plain.tolist()}, L2 {l2.tolist()}, DECOUPLE {decoupled.tolist()}")
sys.exit(not (torch.equal(plain, l2) and torch.equal(plain, decoupled) and not torch.equal(clipped, unclipped)))
END
"$work/venv/bin/python" -W ignore "$work/check.py"
