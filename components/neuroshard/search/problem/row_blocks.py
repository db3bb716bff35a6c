"""Tables split row-wise over all devices: what each device holds of them.

Every device has a block of a table's rows at full width, as TorchRec's ROW_WISE deals them out; the last has what is left. A
block is priced as a table of its own (`Table.part`). Of a pooled table every device has sums for all samples, so it sends all
columns, or more (`pricing.block_columns`); of a sequence what it looked up, which is taken to be the same everywhere.
"""

from collections.abc import Callable, Sequence

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.pricing import block_columns
from neuroshard.costmodel.protocol import CostModel, Floats, Ints


class RowBlocks:
    """The blocks of P tables on the D devices of a task. `groups` (P,), in order, are the numbers of their table groups in the
    problem.

    Of each table: `nbytes` (P, 2), of a block and of the last; `dims` (P,), columns that a device sends for a sample, and `more`
    (P,), how many that are on average beyond those of the whole table; `vectors` (P, 2, K).
    """

    def __init__(self, groups: Ints, tables: Sequence[Table], task: ShardingTask, model: CostModel) -> None:
        devices = task.devices
        self.groups, self.tables, self.devices, self.model = groups, tables, devices, model
        rows = np.array([table.rows for table in tables], dtype=np.int64)
        block = np.array([table.block_rows(devices) for table in tables], dtype=np.int64)
        self.rows: Ints = np.stack([block, rows - block * (devices - 1)], axis=1)
        self.widths: Ints = np.array([table.dim for table in tables], dtype=np.int64)
        blocks = [block_columns(model, t.part(n, t.dim)) for t, n in zip(tables, block.tolist(), strict=True)]
        self.dims: Floats = np.array(blocks, dtype=np.float64)
        self.more: Floats = self.dims - np.array([table.sent_columns for table in tables], dtype=np.float64) / devices
        pairs = zip(tables, self.rows.tolist(), strict=True)
        sizes = [[task.shard_bytes(table, n, table.dim, devices) for n in pair] for table, pair in pairs]
        self.nbytes: Ints = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        self._vectors: Floats | None = None

    @property
    def vectors(self) -> Floats:
        """Priced in one batch when first needed. Raises InvalidInput where the cost model predicts no finite cost."""
        if self._vectors is None:
            parts = [t.part(n, t.dim) for t, pair in zip(self.tables, self.rows.tolist(), strict=True) for n in pair]
            dims = np.repeat(self.widths, 2)
            vectors = finite_vectors(self.model, parts, dims, lambda bad: f"{parts[bad].rows:,} rows")
            self._vectors = vectors.reshape(len(self.groups), 2, -1)
        return self._vectors

    def positions(self, groups: Ints) -> Ints:
        """Where these table groups stand among the P."""
        return np.searchsorted(self.groups, groups)

    def load(self, groups: Ints) -> tuple[Floats, float, Ints]:
        """What the blocks of these table groups add to each device: vectors (D, K), columns sent, bytes (D,)."""
        chosen = self.positions(groups)
        on = np.append(np.zeros(self.devices - 1, dtype=np.int64), 1)
        return self.vectors[chosen].sum(axis=0)[on], float(self.dims[chosen].sum()), self.nbytes[chosen].sum(axis=0)[on]


def finite_vectors(model: CostModel, tables: Sequence[Table], dims: Ints, part: Callable[[int], str]) -> Floats:
    """The cost model's vectors of tables at these widths: (N, K). Raises InvalidInput where one is not finite; `part` says how
    much of its table was priced."""
    vectors = model.table_vectors(tables, dims)
    finite = np.isfinite(vectors).all(axis=-1)
    if not finite.all():
        bad = int(finite.argmin())
        what = f"{part(bad)} of table {tables[bad].name!r}"
        raise InvalidInput(f"cost model {model.name} knows no finite cost of {what}; train it again")
    return vectors


def row_shards(table: Table, devices: int) -> list[Shard]:
    """The shards of a table that is split row-wise over all devices."""
    return [
        Shard(table=table.name, row_offset=first, rows=rows, dim=table.dim, device=device)
        for device, (first, rows) in enumerate(table.row_blocks(devices))
    ]
