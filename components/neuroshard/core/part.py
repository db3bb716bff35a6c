"""A part of a table: what is weighed and priced, one formula for a plan's checks, the search, the client and reports."""

import math
from typing import NamedTuple

from neuroshard.core.reuse import distinct_rows, expected_touches, uniform_bins
from neuroshard.core.step_memory import Pipeline, step_bytes
from neuroshard.core.table import DENSE_STATE, VECTOR_STEPS, DenseOptimizer, Table

GRADIENT_BYTES = 4  # of an element of a data-parallel table, where the dense optimizer is not known
# A gradient of all elements is kept in DistributedDataParallel's buckets (TorchRec makes them the gradients themselves, by
# gradient_as_bucket_view). The backward pass makes another, which is then copied into them (seen on gloo, torchrec 1.8).
GRADIENTS = 2


class Memory(NamedTuple):
    """Bytes of parts of tables. In HBM: weights, or their cache, the optimizer's state, and what a step needs for them; and what
    they take of the `host`'s memory; and the `id_map` of tables that give rows to ids. Of a device also `row_maps`."""

    weights: int
    optimizer: int
    step: int
    host: int = 0
    id_map: int = 0
    row_maps: int = 0

    @property
    def maps(self) -> int:
        """All maps of ids."""
        return self.id_map + self.row_maps

    @property
    def total(self) -> int:
        """In HBM."""
        return self.weights + self.optimizer + self.step + self.maps


class Part(NamedTuple):
    """`rows` x `dim` of a table on a device: one of `row_blocks` that share the rows of these columns, or one of `copies` of the
    table, 0 if it is no copy. A copy looks up the samples of its own device. `lookup_share` is the share of the table's lookups
    that its rows are taken to have (`ShardingTask.lookup_share`); None where all rows are looked up equally often.

    A tuple, for a search makes thousands: with trained nets these take 0.5 % of its time more than arrays of tables and widths.
    """

    table: Table
    rows: int
    dim: int
    row_blocks: int = 1
    copies: int = 0
    lookup_share: float | None = None

    @classmethod
    def of(cls, table: Table, copies: int = 0) -> "Part":
        """All of a table, or one of so many copies."""
        return cls(table, table.rows, table.dim, copies=copies)

    @property
    def pooling_factor(self) -> float:
        """Lookups a sample: the share of the table's that its rows have."""
        table = self.table
        if self.copies:
            return table.pooling_factor / self.copies
        if self.lookup_share is not None:
            return table.pooling_factor * self.lookup_share
        return table.pooling_factor if self.rows == table.rows else table.pooling_factor * self.rows / table.rows

    def distinct_rows(self, samples: float) -> float:
        """How many of its rows so many samples look up."""
        table, share, rows = self.table, self.share_of_lookups, self.rows / self.table.rows
        lookups = table.pooling_factor * share * samples
        if table.access is not None:
            touched = expected_touches(table.access.of_rows(rows, share).rates(samples))
            return min(math.fsum(touched), self.rows, lookups)
        if table.reuse_bins == uniform_bins(table.rows, table.pooling_factor, table.reuse_batch_size):
            return -self.rows * math.expm1(-lookups / self.rows)
        times = share / rows  # as often as all rows are looked up, on average
        return distinct_rows(self.rows, lookups, table.reuse_bins, samples * times / table.reuse_batch_size)

    @property
    def share_of_lookups(self) -> float:
        """Of the table's, if it is no copy."""
        return self.rows / self.table.rows if self.lookup_share is None else self.lookup_share

    @property
    def share_of_misses(self) -> float:
        """Of those of the table's cache. Hashed hot rows make a block's lookups more than its share, but stay in the cache."""
        return self.share_of_lookups if self.table.knows_ids else self.rows / self.table.rows

    @property
    def vectors(self) -> float:
        """Vectors of `dim` columns that it gives for a sample: of a sequence one for each lookup, else one a feature, in steps
        of 1/256."""
        if self.table.pooling == "none":
            return max(round(self.pooling_factor * VECTOR_STEPS), 1) / VECTOR_STEPS
        return float(max(len(self.table.features), 1))

    @property
    def sent_columns(self) -> float:
        """Columns that its device sends for a sample."""
        return self.dim * self.vectors

    @property
    def input_columns(self) -> float:
        """What its device receives for a sample, in columns of fp32: two a lookup (int64), one a weight, one a feature."""
        return self.pooling_factor * (2 + self.table.weighted) + max(len(self.table.features), 1)

    @property
    def size(self) -> tuple[int, int, float | None]:
        """What parts of one table that are no copies differ in: rows, columns, and the share of lookups."""
        return self.rows, self.dim, self.lookup_share

    def as_table(self) -> Table:
        """A table of the same size, with as many lookups: what is measured for the part."""
        return self.table.resized(self.rows, self.dim, self.pooling_factor)

    def memory(
        self,
        batch_size: int = 0,
        pipeline: Pipeline | None = None,
        dense_optimizer: DenseOptimizer | None = None,
        *,
        sent_bytes: float = 0.0,
    ) -> Memory:
        """What it takes of its device, for a global batch of `batch_size`: row-wise state is kept once by every column shard.

        Without a `pipeline`, inputs and outputs of a step are not counted; with `sent_bytes` of an element of outputs as they are
        sent, they are the least that the ledger of a step has (core/step_memory.py). A copy's gradients always are.
        With a `dense_optimizer`, a copy has its state and GRADIENTS gradients, as wide as the weights are. Without one, the
        state that the table says its fused optimizer has, and one gradient in fp32.
        """
        weights, state = (self.rows * each for each in self.table.row_bytes(self.dim))
        samples = -(-batch_size // max(self.copies, 1))
        step = step_bytes(self.table, self.dim, samples, pipeline, self.row_blocks, self.lookup_share, sent_bytes)
        if not self.copies:
            return Memory(weights, state, step, id_map=self._id_map_bytes(batch_size))
        if dense_optimizer is None:
            return Memory(weights, state, step + self.rows * self.dim * GRADIENT_BYTES)
        per_row, per_element = DENSE_STATE[dense_optimizer]
        state = self.rows * (per_row + per_element * self.dim) * self.table.element_bytes
        return Memory(weights, state, step + GRADIENTS * weights)

    def _id_map_bytes(self, batch_size: int) -> int:
        """What the table's id map takes. Ranks have equal shares of the ids, also where the last has fewer rows."""
        if self.table.id_map is None:
            return 0
        return self.table.id_map.nbytes(self.rows, self.table.pooling_factor * batch_size / self.row_blocks)
