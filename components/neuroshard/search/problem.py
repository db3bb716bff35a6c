"""A sharding task as arrays: every column shard that its tables can be cut into, each priced once by the cost model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import DIM_STEP
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, Floats, Ints, device_costs


@dataclass(frozen=True)
class Placement:
    """Shards (S,) and the device of each (S,); device -1 is a shard that found no room."""

    shards: Ints
    devices: Ints

    @property
    def fits(self) -> bool:
        return bool((self.devices >= 0).all())

    @property
    def key(self) -> bytes:
        """The same for placements that differ only in the order of their shards."""
        order = np.lexsort((self.devices, self.shards))
        return np.stack([self.shards, self.devices])[:, order].tobytes()


class Problem:
    """The task's possible shards, by number. A table's columns are alike, so its shards differ by width only.

    Shard `first[t] + u` is the one of table `t` that is `u` steps of 4 columns wide. Shard 0 is no shard: no columns, no
    bytes, a vector of zeros. Per shard: `table`, `units` (columns / 4), `dims` (columns), `nbytes` (weights and optimizer
    state), and, once `price` has seen it, `vectors` (K) and `alone_ms` (compute on a device of its own).
    """

    def __init__(self, task: ShardingTask, model: CostModel) -> None:
        self.task, self.model = task, model
        widest = np.array([table.dim // DIM_STEP for table in task.tables])
        first = np.concatenate([[0], np.cumsum(widest)[:-1]])
        self.table = np.concatenate([[0], np.repeat(np.arange(len(widest)), widest)])
        self.units = np.arange(len(self.table)) - first[self.table]
        self.dims = self.units * DIM_STEP
        rows = np.array([table.rows for table in task.tables])[self.table]
        element = np.array([table.element_bytes + table.optimizer_bytes_per_element for table in task.tables])
        per_row = np.array([table.optimizer_bytes_per_row for table in task.tables])
        self.nbytes = rows * (self.dims * element[self.table] + per_row[self.table])
        self.nbytes[0] = 0
        self.whole: Ints = first + widest  # the shard of each table that is the table
        self.memory = _counted(task.device_memory_bytes)

        self.vectors: Floats = np.zeros((len(self.table), 0))
        self.alone_ms: Floats = np.zeros(len(self.table))
        self._priced = np.zeros(len(self.table), dtype=bool)
        self._priced[0] = True
        self.price(self.whole)

    @property
    def devices(self) -> int:
        return len(self.memory)

    def cut(self, shards: Ints, units: Ints) -> Ints:
        """The shards of the same tables that are `units` steps of 4 columns wide; 0 steps is no shard."""
        return np.where(units > 0, shards - self.units[shards] + units, 0)

    def price(self, shards: Ints) -> None:
        """Make `vectors` and `alone_ms` of these shards known; those that are not yet are asked for in one batch."""
        wanted = np.unique(shards)
        new = wanted[~self._priced[wanted]]
        if not len(new):
            return
        tables = [self.task.tables[table] for table in self.table[new]]
        vectors = self.model.table_vectors(tables, self.dims[new])
        if not self.vectors.shape[1]:
            self.vectors = np.zeros((len(self.table), vectors.shape[1]))  # untouched pages cost no memory
        self.vectors[new] = vectors
        self.alone_ms[new] = self.model.compute_ms(vectors)
        if not np.isfinite(self.alone_ms[new]).all():
            bad = new[~np.isfinite(self.alone_ms[new])][0]
            raise InvalidInput(
                f"cost model {self.model.name} predicts {self.alone_ms[bad]} ms for {self.dims[bad]} columns of table "
                f"{self.task.tables[self.table[bad]].name!r}; train it again"
            )
        self._priced[new] = True

    def sums(self, placement: Placement) -> tuple[Floats, Floats, Ints]:
        """What lies on each device: sum of vectors (D, K), columns (D,), bytes (D,)."""
        self.price(placement.shards)
        vectors = np.zeros((self.devices, self.vectors.shape[1]))
        dims, nbytes = np.zeros(self.devices), np.zeros(self.devices, dtype=np.int64)
        np.add.at(vectors, placement.devices, self.vectors[placement.shards])
        np.add.at(dims, placement.devices, self.dims[placement.shards])
        np.add.at(nbytes, placement.devices, self.nbytes[placement.shards])
        return vectors, dims, nbytes

    def costs(self, placements: Sequence[Placement]) -> tuple[Floats, Floats, Floats]:
        """Compute, forward exchange and backward exchange ms of P whole placements, in one batch: three (P, D)."""
        sums = [self.sums(placement) for placement in placements]
        return device_costs(self.model, np.stack([s[0] for s in sums]), np.stack([s[1] for s in sums]))

    def worst_ms(self, placements: Sequence[Placement]) -> Floats:
        """Predicted ms of the slowest device of P whole placements: (P,)."""
        compute, forward, backward = self.costs(placements)
        worst: Floats = (compute + forward + backward).max(axis=-1)
        return worst


def _counted(memory_bytes: Sequence[int]) -> Ints:
    """Memory as int64. More than 2^60 bytes a device is as good as 2^60: feasibility.py lets no task need as much."""
    return np.array([min(count, 2**60) for count in memory_bytes], dtype=np.int64)
