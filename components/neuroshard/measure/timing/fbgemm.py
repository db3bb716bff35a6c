"""The steps of a table set: FBGEMM's table-batched embedding operator, forward and backward.

One operator serves all tables of a device that have the same element type, pooling and weighting, as TorchRec groups them, and
of sequences those of one width. A table of several features is looked up once for each.
Forward checks that ids are within their tables, as it does for TorchRec by default, and runs the operators of a device one after
another, as a trainer does. So does backward, which includes the optimizer that FBGEMM fuses into it. Weights are on the device
that is measured: HOST for the CPU, DEVICE for CUDA; beyond HBM (timing/beyond_hbm.py) MANAGED_CACHING or MANAGED.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from neuroshard import system
from neuroshard.core.case import ComputeCase
from neuroshard.core.errors import MeasureError
from neuroshard.core.part import Part
from neuroshard.core.table import ELEMENT_BYTES, OPTIMIZER_BYTES, Table
from neuroshard.core.tiers import TIERS, Tier
from neuroshard.core.value import canonical_json, sha256
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.rowcap import MOST_LOOKUP_BYTES, SHARE_OF_AVAILABLE, MemoryQuotas, capped_rows, case_cap
from neuroshard.measure.timing.clocks import open_device

if TYPE_CHECKING:
    import torch

# So small that a million repeats leave the weights as they are, but not 0: a library may skip work for 0.
LEARNING_RATE = 1e-9
GRADIENT = 1e-3
WEIGHT = 0.5
MOMENT = 1.0
SAMPLE_WEIGHT = 0.5  # of each lookup of a weighted table

ALIGNED = 16  # floats in a cache line; torch begins each of its own buffers on one
# Of a lookup, in backward on a CPU (32 to 48 were seen): what we ask to be free, so that a case that is too large fails alone
BACKWARD_BYTES = 48
MOST_OPERATORS = 256  # of a device: for fp32 or fp16, sums or means, weighted or not; for sequences of each width


class HostBuffers:
    """Weights and optimizer state of all cases on the CPU: allocated and written once, then sliced for each case.

    Writing gigabytes for each case would take longer than measuring it. Memory that was never written is no alternative: it is
    one shared page of zeros, which stays in the cache.
    """

    def __init__(self, weight_bytes: int, state_bytes: int) -> None:
        import torch

        spare = MOST_OPERATORS * ALIGNED  # since each operator's slice begins on a cache line
        self.weights = torch.full((-(-weight_bytes // 4) + spare,), WEIGHT)
        self.state = torch.full((-(-state_bytes // 4) + spare,), MOMENT)
        self.used = {"weights": 0, "state": 0}

    def rewind(self) -> None:
        """Free all slices, for the next case."""
        self.used = {"weights": 0, "state": 0}

    def take(self, tables: Sequence[Table], rows: Sequence[int], optimizer: str) -> "dict[str, torch.Tensor]":
        """FBGEMM's preallocated host buffers for these tables, cut to `rows`."""
        import torch

        per_row, per_element = OPTIMIZER_BYTES[optimizer]
        elements = sum(r * t.dim for t, r in zip(tables, rows, strict=True))
        dtype = torch.float32 if tables[0].element_bytes == ELEMENT_BYTES["fp32"] else torch.float16
        taken = {"weights": self._slice("weights", elements * tables[0].element_bytes).view(dtype)}
        if per_row or per_element:
            taken["momentum1"] = self._slice("state", per_row * sum(rows) + per_element * elements)
        return taken

    def _slice(self, name: str, size: int) -> "torch.Tensor":
        """The next `size` bytes (a multiple of 4) of a buffer. The slice after it begins on a cache line."""
        buffer: torch.Tensor = getattr(self, name)
        begin = self.used[name]
        self.used[name] = begin + -(-size // 4 // ALIGNED) * ALIGNED
        return buffer[begin : begin + size // 4]


class TableBatchedEmbedding:
    """Makes the steps of compute cases, on one device. On the CPU only the latest case's steps are valid: cases share buffers."""

    def __init__(
        self, kind: str, index: int, settings: MeasureSettings, limit: int | None, weight_bytes: int, state_bytes: int
    ) -> None:
        self.settings, self.limit = settings, limit
        self.device = open_device(kind, index, settings.threads)
        self.lookups = TableLookups(
            settings.seed, settings.traces, MemoryQuotas.here().lookup_bytes if kind == "cpu" else host_share_bytes()
        )
        self.buffers = HostBuffers(weight_bytes, state_bytes) if kind == "cpu" else None

    def steps(self, case: ComputeCase) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """Forward, and backward, which takes what forward returned."""
        import torch

        if self.buffers is not None:
            self.buffers.rewind()
        batch_size = case.batch_size or self.settings.batch_size
        groups = fused_groups(case.tables)
        cap = case_cap(case.tables, self.settings.optimizer, self.limit)
        rows = [[capped_rows(table, self.settings.optimizer, cap) for table in tables] for tables in groups]
        operators = [self.operator(*group) for group in zip(groups, rows, strict=True)]
        batches = [self._batch(*group, batch_size) for group in zip(groups, rows, strict=True)]
        gradients = [
            torch.full(output_shape(tables, len(batch[0]), batch_size), GRADIENT, device=self.device.torch)
            for tables, batch in zip(groups, batches, strict=True)
        ]
        if self.buffers is not None:  # a MemoryError here, before FBGEMM's steps begin
            outputs = 2 * sum(gradient.nbytes for gradient in gradients)  # and what becomes of them in backward
            np.empty(outputs + BACKWARD_BYTES * max(len(batch[0]) for batch in batches), dtype=np.uint8)

        def forward() -> "list[torch.Tensor]":
            return [operator(*batch) for operator, batch in zip(operators, batches, strict=True)]

        def backward(outputs: "list[torch.Tensor]") -> None:
            torch.autograd.backward(outputs, gradients)

        return forward, backward

    def operator(self, tables: Sequence[Table], rows: Sequence[int], tier: Tier = "hbm", cache_sets: int = 0) -> Any:
        """FBGEMM's operator (a torch.nn.Module) of these tables, cut to `rows`, all in one tier; cached ones behind a cache of
        so many sets."""
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm, EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        optimizer = self.settings.optimizer
        on_host = self.device.torch.type == "cpu"
        if on_host and tier != "hbm":
            raise MeasureError("a CPU has no tiers")
        place = (
            (EmbeddingLocation.HOST, ComputeDevice.CPU)
            if on_host
            else (EmbeddingLocation[TIERS[tier].place], ComputeDevice.CUDA)
        )
        # fbgemm-gpu 1.6 does not know the argument preallocated_host_buffers, so it is left out on CUDA
        buffers = {"preallocated_host_buffers": self.buffers.take(tables, rows, optimizer)} if self.buffers else {}
        cache: dict[str, Any] = {}
        if tier == "cached":  # the counters' memory; who counts switches them on
            algorithm = CacheAlgorithm.LRU
            cache = {"cache_algorithm": algorithm, "cache_sets": cache_sets, "gather_uvm_cache_stats": True}
        operator = SplitTableBatchedEmbeddingBagsCodegen(
            [(r, table.dim, *place) for r, table in zip(rows, tables, strict=True)],
            weights_precision=SparseType.FP32 if tables[0].element_bytes == ELEMENT_BYTES["fp32"] else SparseType.FP16,
            optimizer=EmbOptimType[f"EXACT_{optimizer.upper()}"],
            learning_rate=LEARNING_RATE,
            feature_table_map=[place for place, table in enumerate(tables) for _ in range(max(len(table.features), 1))],
            pooling_mode=PoolingMode[tables[0].pooling.upper()],
            device=self.device.torch,
            **buffers,
            **cache,
        )
        if cache:
            operator.gather_uvm_cache_stats = False
        return operator

    def write_weights(self, operators: Sequence[Any]) -> None:
        """Write all weights: host memory that nobody wrote is one page of zeros."""
        import torch

        with torch.no_grad():
            for operator in operators:
                for weights in operator.split_embedding_weights():
                    weights.fill_(WEIGHT)

    def _batch(self, tables: Sequence[Table], rows: Sequence[int], batch_size: int) -> "tuple[torch.Tensor, ...]":
        """Indices and offsets of one batch, feature after feature, on the device; with a weight for each lookup if weighted."""
        import torch

        drawn = [self.lookups.of(table, count, batch_size) for table, count in zip(tables, rows, strict=True)]
        indices = np.concatenate([indices for indices, _ in drawn])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths for _, lengths in drawn]))])
        weights = [np.full(len(indices), SAMPLE_WEIGHT, dtype=np.float32)] if tables[0].weighted else []
        return tuple(torch.from_numpy(array).to(self.device.torch) for array in (indices, offsets, *weights))


def output_shape(tables: Sequence[Table], lookups: int, batch_size: int) -> tuple[int, int]:
    """The shape of an operator's output: a row a sample, or a lookup of sequences."""
    if tables[0].pooling == "none":
        return lookups, tables[0].dim
    return batch_size, round(sum(Part.of(table).sent_columns for table in tables))


def host_share_bytes() -> int:
    """Host memory for the lookups of one GPU. At batch 65,536, those of `meta-production-1935` take 23 GiB; drawing one lookup
    takes about 50 ns."""
    import torch

    return max(MOST_LOOKUP_BYTES, int(system.available_bytes() * SHARE_OF_AVAILABLE) // torch.cuda.device_count())


def fused_groups(tables: Sequence[Table]) -> list[list[Table]]:
    """Tables that share an operator; the groups are in the order of their first tables."""
    groups: dict[tuple[object, ...], list[Table]] = {}
    for table in tables:
        groups.setdefault(table.operator_key, []).append(table)
    return list(groups.values())


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
