"""The rows that a batch looks up in each table: from traces where they are given, otherwise drawn to match the table.

Each table has its own generator, so its lookups depend neither on the order of the cases nor on a restart.
"""

from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.table import Table
from neuroshard.core.value import canonical_json, sha256

Ints = NDArray[np.int64]


class TableLookups:
    """Lookups of tables. `traces` is a file of `neuroshard tables --traces`. The latest draws are kept, up to `cache_bytes`."""

    def __init__(self, seed: int, traces: Path | None, cache_bytes: int) -> None:
        from neuroshard.files.traces import read_traces

        self.seed, self.cache_bytes = seed, cache_bytes
        self.traces = None if traces is None else read_traces(traces)
        self.kept: OrderedDict[str, tuple[Ints, Ints]] = OrderedDict()
        self.kept_bytes = 0

    def of(self, table: Table, rows: int, batch_size: int) -> tuple[Ints, Ints]:
        """Row indices (L,), folded into the first `rows` rows, and lookups of each sample (batch_size,).

        Of a table with several features, one feature comes after the other, with lookups (features x batch_size,).
        """
        shares = [feature.pooling_factor for feature in table.features[1:]]
        key = sha256(
            canonical_json([batch_size, table.name, table.rows, table.pooling_factor, *table.reuse_bins, *shares])
        )
        if key not in self.kept:
            self._keep(key, self._draw(table, batch_size, key))
        self.kept.move_to_end(key)
        indices, lengths = self.kept[key]
        return (indices if rows >= table.rows else indices % rows), lengths

    def _draw(self, table: Table, batch_size: int, key: str) -> tuple[Ints, Ints]:
        from neuroshard.files.traces import draw_lookups, trace_lookups

        rng = np.random.default_rng([self.seed, int(key[:16], 16)])
        if self.traces is None:
            drawn = draw_lookups(table, batch_size, rng)
        else:
            drawn = trace_lookups(self.traces, table, batch_size, rng)
        return drawn if len(table.features) < 2 else by_feature(table, *drawn, rng)

    def _keep(self, key: str, drawn: tuple[Ints, Ints]) -> None:
        self.kept[key] = drawn
        self.kept_bytes += sum(array.nbytes for array in drawn)
        while self.kept_bytes > self.cache_bytes and len(self.kept) > 1:
            _, dropped = self.kept.popitem(last=False)
            self.kept_bytes -= sum(array.nbytes for array in dropped)


def by_feature(table: Table, indices: Ints, lengths: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """A table's lookups (L,) of samples with lengths (B,), dealt out to its features -> the same lookups, one feature after the
    other, and lengths (features x B,).

    Each feature gets its share. So all features together read rows as often as the table says.
    """
    shares = np.array([feature.pooling_factor for feature in table.features])
    upto = np.concatenate([[0.0], shares.cumsum() / max(shares.sum(), 1e-30)])
    upto[-1] = 1.0
    ends = np.floor(upto[:, None] * lengths + rng.random(len(lengths))).astype(np.int64)
    each = np.diff(ends, axis=0)  # (features, B)
    feature = np.repeat(np.tile(np.arange(len(shares)), len(lengths)), each.T.ravel())
    return indices[np.argsort(feature, kind="stable")], each.ravel()
