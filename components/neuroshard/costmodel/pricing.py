"""The predicted cost of given shards on given devices: for a plan, a live plan, and each shard by itself."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.costmodel.protocol import CostModel, Floats, device_costs


def check_searched_with(plan: Plan, model: CostModel, begins: str) -> None:
    """Raise InvalidInput, whose message begins with `begins`, unless the plan was searched with this cost model."""
    by = plan.provenance.cost_model
    if by != model.name:
        had = f"cost model {by[:12]}" if by else "no cost model"
        raise InvalidInput(f"{begins} {model.name[:12]}, but the plan was searched with {had}")


class Prices(NamedTuple):
    """Predicted ms: three of each device (D,), and two of each shard (S,).

    `alone_ms` is the compute of a device that holds the shard alone; `adds_ms` is what its device would save without it.
    """

    compute_ms: Floats
    forward_collective_ms: Floats
    backward_collective_ms: Floats
    alone_ms: Floats
    adds_ms: Floats

    @property
    def total_ms(self) -> Floats:
        total: Floats = self.compute_ms + self.forward_collective_ms + self.backward_collective_ms
        return total


def price_shards(model: CostModel, tables: Mapping[str, Table], shards: Sequence[Shard], devices: int) -> Prices | None:
    """Prices of shards of these tables; None if a shard is a row block and the model cannot price rows.

    A row block is priced as a table of its own (`Table.part`). It sends as many bytes as a shard with all rows: each device that
    holds rows sends its partial sums for all samples.
    """
    if not model.prices_rows and any(shard.rows != tables[shard.table].rows for shard in shards):
        return None
    # shards of one shape are priced once: hundreds of devices hold blocks of equally many rows
    shapes: dict[tuple[str, int, int], int] = {}
    kinds = [shapes.setdefault((shard.table, shard.rows, shard.dim), len(shapes)) for shard in shards]
    parts = [tables[table].part(rows, tables[table].dim) for table, rows, _ in shapes]
    vectors = model.table_vectors(parts, np.array([dim for _, _, dim in shapes]))[kinds]
    dims = np.array([shard.dim for shard in shards])
    holders = np.array([shard.device for shard in shards])
    sums, device_dims = np.zeros((devices, vectors.shape[1])), np.zeros(devices, dims.dtype)
    np.add.at(sums, holders, vectors)
    np.add.at(device_dims, holders, dims)
    compute, forward, backward = device_costs(model, sums, device_dims)
    others = np.where(device_dims[holders] > dims, model.compute_ms(sums[holders] - vectors), 0.0)
    return Prices(compute, forward, backward, model.compute_ms(vectors), compute[holders] - others)
