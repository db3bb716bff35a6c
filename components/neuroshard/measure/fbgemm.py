"""The steps of a table set: FBGEMM's table-batched embedding operator, forward and backward.

One operator serves all tables of a device that are alike in element type, pooling and weighting, as TorchRec groups them;
where there are several, forward is that of all of them, one after another as a trainer runs them, and backward likewise.
Backward includes the optimizer, which FBGEMM fuses into it. Weights lie on the device measured: HOST for the CPU, DEVICE
for CUDA.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from neuroshard import system
from neuroshard.core.case import ComputeCase
from neuroshard.core.table import ELEMENT_BYTES, OPTIMIZER_BYTES, Table
from neuroshard.measure.backends import Settings
from neuroshard.measure.harness import open_device
from neuroshard.measure.lookups import TableLookups
from neuroshard.measure.room import MOST_LOOKUP_BYTES, Room
from neuroshard.measure.rowcap import SHARE_OF_AVAILABLE, capped_rows, case_cap

if TYPE_CHECKING:
    import torch

# So small that weights stay as they are through a million repeats, and not 0, which a BLAS may take as leave to do nothing.
LEARNING_RATE = 1e-9
GRADIENT = 1e-3
WEIGHT = 0.5
MOMENT = 1.0
SAMPLE_WEIGHT = 0.5  # of each lookup of a weighted table

ALIGNED = 16  # floats in a cache line, on which torch would have begun each buffer
MOST_OPERATORS = 8  # that tables are told apart into: of fp32 or fp16, sums or means, weighted or not


class HostBuffers:
    """Weights and optimizer state of all cases on the CPU: allocated and touched once, then sliced for each case.

    Zeroing gigabytes for each case would take longer than measuring it, and memory that was never written is one shared
    page of zeros, which would be read from the cache.
    """

    def __init__(self, weight_bytes: int, state_bytes: int) -> None:
        import torch

        spare = MOST_OPERATORS * ALIGNED  # each begins on a cache line
        self.weights = torch.full((-(-weight_bytes // 4) + spare,), WEIGHT)
        self.state = torch.full((-(-state_bytes // 4) + spare,), MOMENT)
        self.used = {"weights": 0, "state": 0}

    def rewind(self) -> None:
        """All of it is free again, for the next case."""
        self.used = {"weights": 0, "state": 0}

    def take(self, tables: Sequence[Table], rows: Sequence[int], optimizer: str) -> "dict[str, torch.Tensor]":
        """What FBGEMM calls preallocated host buffers, for these tables cut to `rows`."""
        import torch

        per_row, per_element = OPTIMIZER_BYTES[optimizer]
        elements = sum(r * t.dim for t, r in zip(tables, rows, strict=True))
        dtype = torch.float32 if tables[0].element_bytes == ELEMENT_BYTES["fp32"] else torch.float16
        taken = {"weights": self._slice("weights", elements * tables[0].element_bytes).view(dtype)}
        if per_row or per_element:
            taken["momentum1"] = self._slice("state", per_row * sum(rows) + per_element * elements)
        return taken

    def _slice(self, name: str, size: int) -> "torch.Tensor":
        """The next `size` bytes, which are a multiple of 4, of a buffer; the one after begins on a cache line."""
        buffer: torch.Tensor = getattr(self, name)
        begin = self.used[name]
        self.used[name] = begin + -(-size // 4 // ALIGNED) * ALIGNED
        return buffer[begin : begin + size // 4]


class TableBatchedEmbedding:
    """Makes the steps of compute cases, on one device. On the CPU those of one case at a time: the next has the same buffers."""

    def __init__(
        self, kind: str, index: int, settings: Settings, limit: int | None, weight_bytes: int, state_bytes: int
    ) -> None:
        self.settings, self.limit = settings, limit
        self.device = open_device(kind, index, settings.threads)
        self.lookups = TableLookups(
            settings.seed, settings.traces, Room.here().lookup_bytes if kind == "cpu" else host_share_bytes()
        )
        self.buffers = HostBuffers(weight_bytes, state_bytes) if kind == "cpu" else None

    def steps(self, case: ComputeCase) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """Forward, and backward from what forward returned."""
        import torch

        if self.buffers is not None:
            self.buffers.rewind()
        batch_size = case.batch_size or self.settings.batch_size
        groups = fused_groups(case.tables)
        cap = case_cap(case.tables, self.settings.optimizer, self.limit)
        rows = [[capped_rows(table, self.settings.optimizer, cap) for table in tables] for tables in groups]
        operators = [self._operator(*group) for group in zip(groups, rows, strict=True)]
        batches = [self._batch(*group, batch_size) for group in zip(groups, rows, strict=True)]
        gradients = [
            torch.full((batch_size, sum(t.dim for t in tables)), GRADIENT, device=self.device.torch)
            for tables in groups
        ]

        def forward() -> "list[torch.Tensor]":
            return [operator(*batch) for operator, batch in zip(operators, batches, strict=True)]

        def backward(outputs: "list[torch.Tensor]") -> None:
            torch.autograd.backward(outputs, gradients)

        return forward, backward

    def _operator(self, tables: Sequence[Table], rows: Sequence[int]) -> "torch.nn.Module":
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        optimizers = {
            "sgd": EmbOptimType.EXACT_SGD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
        }
        optimizer = self.settings.optimizer
        on_host = self.device.torch.type == "cpu"
        place = (
            (EmbeddingLocation.HOST, ComputeDevice.CPU) if on_host else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        )
        # fbgemm-gpu 1.6 does not know preallocated_host_buffers, so CUDA goes without even naming it
        buffers = {"preallocated_host_buffers": self.buffers.take(tables, rows, optimizer)} if self.buffers else {}
        operator: torch.nn.Module = SplitTableBatchedEmbeddingBagsCodegen(
            [(r, table.dim, *place) for r, table in zip(rows, tables, strict=True)],
            weights_precision=SparseType.FP32 if tables[0].element_bytes == ELEMENT_BYTES["fp32"] else SparseType.FP16,
            optimizer=optimizers[optimizer],
            learning_rate=LEARNING_RATE,
            pooling_mode=PoolingMode.SUM if tables[0].pooling == "sum" else PoolingMode.MEAN,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=self.device.torch,
            **buffers,
        )
        return operator

    def _batch(self, tables: Sequence[Table], rows: Sequence[int], batch_size: int) -> "tuple[torch.Tensor, ...]":
        """Indices and offsets of one batch, table after table, on the device; and a weight of each lookup if weighted."""
        import torch

        drawn = [self.lookups.of(table, count, batch_size) for table, count in zip(tables, rows, strict=True)]
        indices = np.concatenate([indices for indices, _ in drawn])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths for _, lengths in drawn]))])
        weights = [np.full(len(indices), SAMPLE_WEIGHT, dtype=np.float32)] if tables[0].weighted else []
        return tuple(torch.from_numpy(array).to(self.device.torch) for array in (indices, offsets, *weights))


def host_share_bytes() -> int:
    """Of the host's memory, for lookups of one of its GPUs: at batch 65,536 those of `meta-production-1935` are 23 GiB, and
    drawing one takes some 50 ns."""
    import torch

    return max(MOST_LOOKUP_BYTES, int(system.available_bytes() * SHARE_OF_AVAILABLE) // torch.cuda.device_count())


def fused_groups(tables: Sequence[Table]) -> list[list[Table]]:
    """Tables that share an operator, the groups in the order of their first tables."""
    groups: dict[tuple[object, ...], list[Table]] = {}
    for table in tables:
        groups.setdefault(table.operator_key, []).append(table)
    return list(groups.values())
