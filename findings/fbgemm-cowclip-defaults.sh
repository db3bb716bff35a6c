#!/usr/bin/env bash
# One would guess: FBGEMM's CowClip, asked for by CowClipDefinition() with nothing said, clips by useful limits, or not at all.
# What happens: both of its limits (weight_norm_coefficient, lower_bound) are 0 by default, so every update is clipped to 0. No
# row ever changes, though the optimizer's state grows, and nothing is raised. With a lower_bound of 1 rows change.
# Seen with: fbgemm-gpu-cpu 1.8.0 on a CPU, on 28 November 2026.
# Why it matters: embeddings stay as they were drawn while the loss falls by the dense layers alone.
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
    CowClipDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

print(*(f"{name} {version(name)}" for name in ("torch", "fbgemm-gpu-cpu")), sep=", ")


def trained(**options):
    """How far a weight of 1 moved at most in three steps, and the sum of the optimizer's state."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        device=torch.device("cpu"),
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.5,
        **options,
    )
    table.split_embedding_weights()[0].data.fill_(1.0)
    for _ in range(3):
        table(torch.tensor([1, 2, 3]), torch.tensor([0, 3])).sum().backward()
    moved = (1 - table.split_embedding_weights()[0]).abs().max().item()
    return moved, table.split_optimizer_states()[0][0].sum().item()


def clipped(**limits):
    return trained(weight_decay_mode=WeightDecayMode.COWCLIP, cowclip_regularization=CowClipDefinition(**limits))


(plain, _), (default, state), (bounded, _) = trained(), clipped(), clipped(lower_bound=1.0)
print("expected: weights move with CowClipDefinition() too")
print(f"seen: they move by {default:.3f} (its state: {state:.3f}); by {bounded:.3f} with lower_bound=1, {plain:.3f} without CowClip")
sys.exit(not (default == 0 < state and 0 < bounded < plain))
END
"$work/venv/bin/python" -W ignore "$work/check.py"
