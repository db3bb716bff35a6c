"""Run FBGEMM's fused operator once and compare it with plain torch: `python -m neuroshard.doctor.operator cpu` (or cuda).

It runs in a process of its own, since an operator that was built for another torch may crash. Prints JSON.
"""

import json
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

ROWS, DIM, BATCH, LOOKUPS, LEARNING_RATE = 1000, 16, 64, 4, 0.5


def fused(sizes: Sequence[tuple[int, int]], device: str, location: str = "DEVICE", **settings: Any) -> Any:
    """FBGEMM's fused operator of tables of these rows and columns: on cpu, or on cuda with weights in that EmbeddingLocation."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as ops

    place = ops.EmbeddingLocation["HOST" if device == "cpu" else location], ops.ComputeDevice[device.upper()]
    return ops.SplitTableBatchedEmbeddingBagsCodegen([(*size, *place) for size in sizes], device=device, **settings)


def main(kind: str) -> None:
    """Compare forward, and backward with the fused optimizer, with torch's own. Raises ArithmeticError where they differ."""
    warnings.simplefilter("ignore")
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    device, generator = torch.device(kind), torch.Generator().manual_seed(0)
    operator = fused([(ROWS, DIM)], kind, optimizer=EmbOptimType.EXACT_SGD, learning_rate=LEARNING_RATE)
    weights = torch.randn(ROWS, DIM, generator=generator)
    operator.split_embedding_weights()[0].data.copy_(weights)
    indices = torch.randint(ROWS, (BATCH * LOOKUPS,), generator=generator)
    offsets = torch.arange(0, BATCH * LOOKUPS + 1, LOOKUPS)

    expected = torch.nn.EmbeddingBag.from_pretrained(weights.clone(), freeze=False, mode="sum")
    pooled = expected(indices.view(BATCH, LOOKUPS))
    pooled.sum().backward()
    assert expected.weight.grad is not None
    trained = weights - LEARNING_RATE * expected.weight.grad

    moved = indices.to(device), offsets.to(device)
    seconds = []
    for _ in range(3):  # the first one builds and loads kernels
        began = time.perf_counter()
        output = operator(*moved)
        if kind == "cuda":
            torch.cuda.synchronize()  # otherwise only the launch is timed
        seconds.append(time.perf_counter() - began)
    if not torch.allclose(output.detach().cpu(), pooled.detach(), atol=1e-4):
        raise ArithmeticError("forward differs from torch.nn.EmbeddingBag")
    output.sum().backward()
    if not torch.allclose(operator.split_embedding_weights()[0].detach().cpu(), trained, atol=1e-4):
        raise ArithmeticError("backward differs from SGD")
    name = torch.cuda.get_device_name(0) if kind == "cuda" else "CPU"
    print(json.dumps({"device": name, "forward_ms": min(seconds) * 1e3}))


if __name__ == "__main__":
    main(sys.argv[1])
