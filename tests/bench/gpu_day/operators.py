"""FBGEMM's operator on a device compared with the same operator on the CPU: outputs, and weights after a step.

On a GPU also with tables beyond HBM, cached and in host memory. A CPU has no such tiers: FBGEMM would take them for host memory.
"""

import warnings
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from neuroshard.core.tiers import TIERS, Tier
from neuroshard.doctor.operator import fused

if TYPE_CHECKING:
    import torch

ROWS, DIMS, BATCH, MOST_LOOKUPS = 1000, (4, 32, 128), 64, 6
LEARNING_RATE = 0.1
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2}  # sums are taken in another order
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
Kind = tuple[str, str, bool, str, Tier]  # pooling, element type, weighted, optimizer, tier
KINDS: tuple[Kind, ...] = tuple(product(("sum", "mean", "none"), ("fp32", "fp16"), (False, True), OPTIMIZERS, ("hbm",)))
BEYOND_HBM: tuple[Kind, ...] = tuple(product(("sum",), ("fp32", "fp16"), (False,), OPTIMIZERS, ("cached", "host")))
CACHE_SETS = 16  # of 32 rows: fewer than a batch reads, so that rows are missed, and some find no slot


@dataclass(frozen=True)
class Checked:
    """One kind of operator, and the largest difference from the CPU's results; `error` where it could not run."""

    what: str
    difference: float
    tolerance: float
    error: str = ""

    @property
    def good(self) -> bool:
        return not self.error and self.difference <= self.tolerance


def check(device: str) -> list[Checked]:
    """Every kind of operator that plans are priced for, on `device` (cuda, or cpu against itself)."""
    found = []
    for pooling, element, weighted, optimizer, tier in KINDS + (() if device == "cpu" else BEYOND_HBM):
        what = f"{pooling}, {element}, {'weighted' if weighted else 'unweighted'}, {optimizer}"
        what += "" if tier == "hbm" else f", {tier}"
        if weighted and pooling != "sum":
            continue  # TorchRec allows weights only with sums
        try:
            with warnings.catch_warnings(action="ignore"):
                here, there = (
                    _step(on, pooling, element, weighted, optimizer, in_tier)
                    for on, in_tier in ((device, tier), ("cpu", "hbm"))
                )
        except Exception as error:  # a kind that this build of FBGEMM lacks is a result, not a failure
            found.append(
                Checked(what, float("inf"), TOLERANCE[element], f"{type(error).__name__}: {error}".splitlines()[0])
            )
            continue
        off = max(float((one.float() - other.float()).abs().max()) for one, other in zip(here, there, strict=True))
        found.append(Checked(what, off, TOLERANCE[element]))
    return found


def _step(
    device: str, pooling: str, element: str, weighted: bool, optimizer: str, tier: Tier = "hbm"
) -> "list[torch.Tensor]":
    """A step of three tables on `device`: its output, and each table's weights after it, all copied to the CPU.

    Where nothing is pooled, the tables have one width.
    """
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

    dims = [DIMS[-1]] * len(DIMS) if pooling == "none" else list(DIMS)
    operator = fused(
        [(ROWS, dim) for dim in dims],
        device,
        TIERS[tier].place,
        optimizer=EmbOptimType[f"EXACT_{optimizer.upper()}"],
        learning_rate=LEARNING_RATE,
        eps=1e-8,
        pooling_mode=PoolingMode[pooling.upper()],
        weights_precision=SparseType(element),
        output_dtype=SparseType.FP32,
        stochastic_rounding=False,
        cache_sets=CACHE_SETS if tier == "cached" else 0,
    )
    generator = torch.Generator().manual_seed(0)
    for weights in operator.split_embedding_weights():
        weights.data.copy_(torch.randn(weights.shape, generator=generator))
    lengths = torch.randint(MOST_LOOKUPS + 1, (len(dims) * BATCH,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = torch.randint(ROWS, (int(offsets[-1]),), generator=generator)
    of_samples = torch.rand(len(indices), generator=generator).to(device) if weighted else None
    output = operator(indices.to(device), offsets.to(device), per_sample_weights=of_samples)
    output.backward(torch.randn(output.shape, generator=generator).to(device))
    if tier == "cached":
        operator.flush()  # rows that only the cache has so far
    return [output.detach().cpu(), *(weights.detach().cpu() for weights in operator.split_embedding_weights())]
