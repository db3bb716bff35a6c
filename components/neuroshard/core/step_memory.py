"""Memory that a training step needs for the shards of a device, besides weights and optimizer state: inputs and outputs.

The rules are those of TorchRec 1.8's `EmbeddingStorageEstimator` (planner/shard_estimators.py, `calculate_pipeline_io_cost`),
for tables in device memory. They depend on the trainer's pipeline: how many batches of lookups are on the device at a time. Not
covered: the weights of weighted lookups, copies inside the all-to-alls, and with a pipeline outputs and their gradients, which
live only while memory is below its peak (the end of the dense forward pass). A reserve covers what is left out.
"""

import math
from typing import Literal, NamedTuple

from neuroshard.core.table import Table

Pipeline = Literal["none", "sparse-dist", "prefetch"]
DEFAULT_PIPELINE: Pipeline = "sparse-dist"  # TorchRec's TrainPipelineSparseDist, which most trainers run

LOOKUP_BYTES = 8  # the operator's row indices are int64, whatever the batch holds
BATCHES: dict[Pipeline, int] = {"none": 1, "sparse-dist": 2, "prefetch": 3}  # of lookups on the device at a time


class StepBytes(NamedTuple):
    """Bytes of a shard in a step: `per_shard`, however wide it is, and `per_column` for each of its columns."""

    per_shard: int
    per_column: int

    def of(self, dim: int) -> int:
        """The bytes of a shard of `dim` columns."""
        return self.per_shard + self.per_column * dim


def step_bytes(table: Table, batch_size: int, pipeline: Pipeline | None, row_blocks: int = 1) -> StepBytes:
    """The bytes of a shard of this table for a global batch of `batch_size`; none where no pipeline is given.

    A shard of some rows is one of `row_blocks`, and gets an equal share of the lookups, as TorchRec counts. Of a pooled table it
    still has an output for every sample and feature, which the ranks sum up; of a sequence it has one for each of its lookups.
    """
    if pipeline is None:
        return StepBytes(0, 0)
    lookups = math.ceil(table.pooling_factor * batch_size / row_blocks)
    outputs = lookups if table.pooling == "none" else math.ceil(_pooled(table) * batch_size)
    return StepBytes(
        per_shard=BATCHES[pipeline] * lookups * LOOKUP_BYTES,
        per_column=outputs * table.element_bytes if pipeline == "none" else 0,
    )


def _pooled(table: Table) -> float:
    """Pooled vectors of a sample: one a feature. TorchRec assumes that a sample without lookups has none."""
    each = [feature.pooling_factor for feature in table.features] or [table.pooling_factor]
    return sum(min(lookups, 1.0) for lookups in each)
