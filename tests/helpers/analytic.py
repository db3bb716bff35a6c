"""A small cost model with a real shape, for tests: additive vectors, a nonlinear head, an all-to-all that waits."""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.part import Part
from neuroshard.costmodel.protocol import Floats


class AnalyticModel:
    """Memory traffic at 1 TB/s, 0.2 ns a lookup, 20 us a table; a fused kernel overlaps the first two (a 2-norm).

    The all-to-all takes 50 us and sends fp32 at 20 GB/s; the forward one ends for all when the last has come.
    """

    name, backend, device_name = "analytic", "synthetic", "test device"
    max_dim = 128
    device_counts: tuple[int, ...] = ()
    bounded = True
    prices_rows = True
    error_on_unseen_tables = None
    manifest = None
    stand_ins: tuple[str, ...] = ()
    operator_ms = 0.03
    reorder_ms = 0.0

    def __init__(self, batch_size: int = 65536) -> None:
        self.batch_size = batch_size
        self.asked: list[tuple[int, ...]] = []  # shapes of all questions, to see that they come in batches

    def caveats(self, devices: int, parts: Sequence[Part] = ()) -> tuple[str, ...]:
        return ()

    def part_vectors(self, parts: Sequence[Part]) -> Floats:
        lookups = self.batch_size * np.array([part.pooling_factor for part in parts])
        traffic = lookups * np.array([part.dim * part.table.element_bytes for part in parts])
        return np.stack([traffic / 1e9, lookups * 0.2e-6, np.full(len(parts), 0.02)], axis=-1)

    def compute_ms(self, vector_sums: Floats) -> Floats:
        self.asked.append(vector_sums.shape)
        traffic, lookups, tables = np.moveaxis(vector_sums, -1, 0)
        return np.sqrt(traffic**2 + lookups**2) + tables

    def compute_slope(self, vector_sums: Floats) -> Floats:
        traffic, lookups, _ = np.moveaxis(vector_sums, -1, 0)
        norm = np.maximum(np.hypot(traffic, lookups), 1e-30)
        return np.stack([traffic / norm, lookups / norm, np.ones_like(norm)], axis=-1)

    def forward_collective_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        last = start_delays_ms.max(axis=-1, keepdims=True)
        return last - start_delays_ms + self._all_to_all_ms(device_dims)

    def backward_collective_ms(self, device_dims: Floats) -> Floats:
        return self._all_to_all_ms(device_dims)

    def _all_to_all_ms(self, device_dims: Floats) -> Floats:
        share = self.batch_size / device_dims.shape[-1]
        return np.broadcast_to(0.05 + device_dims.max(axis=-1, keepdims=True) * share * 4 / 20e6, device_dims.shape)
