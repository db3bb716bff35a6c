"""What tables beyond HBM take more, by constants that were measured on the device itself (costmodel/manifest.py).

The terms are those of the datasheet (`Analytic.beyond_hbm`), but each pass also has a part that every table takes, and rows have
one beside their bytes: so narrow rows need not move as fast as wide ones. Nets know no tiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.core.part import Part
from neuroshard.costmodel.analytic import OUTPUT_BYTES, Datasheet, rows_lost
from neuroshard.costmodel.features import distinct_rows, facts_of, rounded_up, widths_of
from neuroshard.costmodel.manifest import MeasuredTiers
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.tiers import BeyondHbm


def beyond_hbm(measured: MeasuredTiers, parts: Sequence[Part], batch_size: int, sheet: Datasheet) -> BeyondHbm:
    """As in tiers.KnowsTiers. L2 and sectors are those of the datasheet."""
    state = np.array([part.table.optimizer_bytes_per_element for part in parts], dtype=np.float64)
    work = Work.of(parts, batch_size, state, sheet)
    updated = measured.host_backward.ms(work.state)
    return BeyondHbm(
        measured.cached_forward.ms(work.through_a_cache),
        measured.cached_forward.row_ms + work.row_bytes * measured.cached_forward.byte_ms,
        measured.host_forward.ms(work.read),
        measured.cached_backward.ms(work.through_a_cache) + updated,
        measured.host_backward.ms(work.written) + updated,
        work.lookups * measured.cached_forward.lookup_ms,
        updated,
    )


@dataclass(frozen=True, eq=False)
class Work:
    """What N tables move more beyond HBM: lookups (N,), distinct rows (N,), reads of rows that L2 does not answer (N,), bytes of
    a row (N,), and bytes of a row's state of elements (N,)."""

    lookups: Floats
    distinct_rows: Floats
    reads: Floats
    row_bytes: Floats
    state_bytes: Floats

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        batch_size: int,
        state: Floats,
        sheet: Datasheet,
        distinct: Floats | None = None,
    ) -> "Work":
        """Of parts with `state` (N,) bytes of state an element. Distinct rows are estimated where they were not counted."""
        (rows, pooling, vectors, element, counted_on), bins = facts_of(parts)
        lookups, columns = pooling * batch_size, widths_of(parts)
        if distinct is None:
            distinct = distinct_rows(rows, pooling, bins, counted_on, batch_size)
        row = rounded_up(columns * element, sheet.sector_bytes)
        output = batch_size * vectors * columns * OUTPUT_BYTES
        lost = rows_lost(distinct, lookups, row, output, sheet.cache_bytes)
        return cls(lookups, distinct, distinct + (lookups - distinct) * lost, row, columns * state)

    def _rows(self, rows: Floats, row_bytes: Floats) -> Floats:
        """Work of each table (N, 4), as `Rates.ms` has it: itself, and rows of so many bytes."""
        return np.column_stack([np.ones_like(rows), np.zeros_like(rows), rows, rows * row_bytes])

    def missing(self, missed_rows: Floats) -> Floats:
        """Forward through a cache that misses so many rows: (N,) -> (N, 4)."""
        work = self._rows(missed_rows, self.row_bytes)
        work[:, 1] = self.lookups
        return work

    @property
    def through_a_cache(self) -> Floats:
        """A pass through a cache that misses nothing: (N, 4)."""
        return self.missing(np.zeros_like(self.lookups))

    @property
    def read(self) -> Floats:
        """Forward in host memory: (N, 4)."""
        return self._rows(self.reads, self.row_bytes)

    @property
    def written(self) -> Floats:
        """Backward in host memory, without state: (N, 4)."""
        return self._rows(self.distinct_rows, self.row_bytes)

    @property
    def state(self) -> Floats:
        """State of elements, in host memory whatever the tier: rows and bytes, (N, 4)."""
        work = self._rows(self.distinct_rows * (self.state_bytes > 0), self.state_bytes)
        work[:, 0] = 0.0
        return work
