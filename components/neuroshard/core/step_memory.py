"""What TorchRec estimates that a training step needs in memory for the shards of a device, besides weights and optimizer state.

Plans of formats 1 to 5 count this; real steps need two to four times as much (core/step_ledger.py). The rules are those of TorchRec 1.8's `EmbeddingStorageEstimator` (planner/shard_estimators.py, `calculate_pipeline_io_cost`),
for tables in device memory. They depend on the trainer's pipeline: how many batches of lookups are on the device at a time. Not
covered: the weights of weighted lookups, copies inside the all-to-alls, and with a pipeline outputs and their gradients, which
live only while memory is below its peak (the end of the dense forward pass). A reserve covers what is left out.
"""

import math
from typing import Literal

from neuroshard.core.table import Table

Pipeline = Literal[
    "none", "base", "sparse-dist", "sparse-dist-lite", "fused-sparse-dist", "semi-sync", "prefetch"
]  # a plain loop, and TorchRec's TrainPipelineBase, SparseDist, SparseDistLite, FusedSparseDist, SemiSync and PrefetchSparseDist
DEFAULT_PIPELINE: Pipeline = "sparse-dist"  # TorchRec's TrainPipelineSparseDist, which most trainers run

LOOKUP_BYTES = 8  # the operator's row indices are int64, whatever the batch holds
BATCHES: dict[Pipeline, int] = {"none": 1, "sparse-dist": 2, "prefetch": 3}  # of lookups on the device at a time


def step_bytes(
    table: Table,
    dim: int,
    samples: int,
    pipeline: Pipeline | None,
    row_blocks: int = 1,
    lookup_share: float | None = None,
) -> int:
    """The bytes of a shard of `dim` columns of this table, for so many samples of all devices; 0 where no pipeline is given.

    A shard of some rows is one of `row_blocks`, and gets an equal share of the lookups, as TorchRec counts, where its
    `lookup_share` is not known. Of a pooled table it still has an output for every sample and feature, which the ranks sum up;
    of a sequence it has one for each of its lookups.
    """
    if pipeline is None:
        return 0
    of_all = table.pooling_factor * samples
    lookups = math.ceil(of_all / row_blocks if lookup_share is None else of_all * lookup_share)
    kept = BATCHES.get(pipeline, 1) * lookups * LOOKUP_BYTES
    if pipeline != "none":
        return kept
    outputs = lookups if table.pooling == "none" else math.ceil(_pooled(table) * samples)
    return kept + outputs * dim * table.element_bytes


def _pooled(table: Table) -> float:
    """Pooled vectors of a sample: one a feature. TorchRec assumes that a sample without lookups has none."""
    each = [feature.pooling_factor for feature in table.features] or [table.pooling_factor]
    return sum(min(lookups, 1.0) for lookups in each)
