"""Tables split row-wise, over all devices or over those of one domain: what each device holds of them.

Each of these devices has a block of a table's rows at full width, as TorchRec's ROW_WISE and TABLE_ROW_WISE deal them out; the
last has what is left. A block is priced as a table of its own (`Table.part`). Of a pooled table every one of them has sums for
all samples, so it sends all columns, or more (`pricing.block_columns`); of a sequence what it looked up, which is taken to be
the same everywhere. Over a domain, sums are added up inside it, and each device sends its share of them on
(`pricing.HostColumns`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import DomainMs, MoreColumns
from neuroshard.costmodel.pricing import HostColumns, block_columns
from neuroshard.costmodel.protocol import CostModel, Floats, Ints

EVERYWHERE = -1  # in place of a domain: all devices
OVER_ALL, OVER_DOMAIN = 0, 1  # the ways to split rows


class BlockLoad(NamedTuple):
    """What row blocks are on each device: sums of `vectors` (D, K), columns by `dims` (D,), those sent beyond these (`more`),
    and bytes (D,)."""

    vectors: Floats
    dims: Floats
    more: MoreColumns
    nbytes: Ints


class RowBlocks:
    """The blocks of P tables on the D devices of a task. `groups` (P,), in order, are the numbers of their table groups in the
    problem. There are W ways to split them: over all devices and, if `domains` is more than 1, over those of one domain.

    Of each table and way: `allowed` (P, W); `nbytes` (P, W, 2), of a block and of the last; `dims` (P, W), columns that take a
    device with a block as long to send; `more` (P, W), how many that are on average over all devices beyond those of the whole
    table; `least` (P, W), columns that such a device sends at least; `vectors` (P, W, 2, K).
    """

    def __init__(self, groups: Ints, tables: Sequence[Table], task: ShardingTask, model: CostModel) -> None:
        self.groups, self.tables, self.devices, self.model = groups, tables, task.devices, model
        may_use = task.constraints.may_use
        domain = 1 if task.topology is None or not may_use("table-row-wise") else task.topology.domain
        self.domains = task.devices // domain if domain > 1 else 1
        self.split_over = (task.devices, domain)[: 2 if self.domains > 1 else 1]  # devices of each way
        rows = np.array([table.rows for table in tables], dtype=np.int64)
        block = np.array([[t.block_rows(n) for n in self.split_over] for t in tables], dtype=np.int64)
        block = block.reshape(-1, len(self.split_over))
        self.rows: Ints = np.stack([block, rows[:, None] - block * (np.array(self.split_over) - 1)], axis=-1)
        self.widths: Ints = np.array([table.dim for table in tables], dtype=np.int64)
        # TorchRec has no table-row-wise sequences
        self.allowed = np.array(
            [[may_use("row-wise"), t.pooling != "none"][: len(self.split_over)] for t in tables], dtype=bool
        )
        self.allowed = self.allowed.reshape(block.shape)
        blocks = [t.part(int(n), t.dim) for t, n in zip(tables, block[:, OVER_ALL], strict=True)]
        self.dims: Floats = np.array([block_columns(model, one) for one in blocks], dtype=np.float64)[:, None]
        self.least = self.near = self.far = self.encoded = self.dims
        if self.domains > 1:
            rates = DomainMs.of(model, task)
            over = HostColumns.of(model, tables, task.devices, domain, rates)
            longest = np.maximum(over.inside * rates.near, over.out * rates.far)
            felt = longest / max(rates) if max(rates) > 0 else over.inside
            self.near, self.far, self.least, self.encoded, self.dims = (
                np.concatenate([self.dims, one[:, None]], axis=1) for one in (*over, felt)
            )
        share = np.array(self.split_over) / task.devices
        sent = np.array([table.sent_columns for table in tables], dtype=np.float64) / task.devices
        self.more: Floats = self.dims * share - sent[:, None]
        sizes = [
            [
                [task.shard_bytes(t, n, t.dim, over) for n in pair]
                for pair, over in zip(of, self.split_over, strict=True)
            ]
            for t, of in zip(tables, self.rows.tolist(), strict=True)
        ]
        self.nbytes: Ints = np.array(sizes, dtype=np.int64).reshape(self.rows.shape)
        self._vectors: Floats | None = None

    @property
    def vectors(self) -> Floats:
        """Priced in one batch when first needed. Raises InvalidInput where the cost model predicts no finite cost."""
        if self._vectors is None:
            each = zip(self.tables, self.rows.reshape(len(self.tables), -1).tolist(), strict=True)
            parts = [table.part(rows, table.dim) for table, of in each for rows in of]
            dims = np.repeat(self.widths, 2 * len(self.split_over))
            vectors = finite_vectors(self.model, parts, dims, lambda bad: f"{parts[bad].rows:,} rows")
            self._vectors = vectors.reshape(*self.rows.shape, -1)
        return self._vectors

    @property
    def all_blocks(self) -> Floats:
        """The vectors of all blocks of each table, summed: (P, W, K)."""
        others = np.array(self.split_over)[:, None] - 1
        total: Floats = self.vectors[:, :, 0] * others + self.vectors[:, :, 1]
        return total

    def positions(self, groups: Ints) -> Ints:
        """Where these table groups stand among the P."""
        return np.searchsorted(self.groups, groups)

    def devices_of(self, domain: int) -> range:
        """The devices of a domain, or all for EVERYWHERE."""
        if domain == EVERYWHERE:
            return range(self.devices)
        return range(domain * self.split_over[OVER_DOMAIN], (domain + 1) * self.split_over[OVER_DOMAIN])

    def load(self, groups: Ints, domains: Ints) -> BlockLoad:
        """What the blocks of these table groups, each over the devices of its domain, add to each device."""
        positions = self.positions(groups)
        dims, near, far, encoded = np.zeros((4, self.devices))
        found = BlockLoad(
            np.zeros((self.devices, self.vectors.shape[-1])),
            dims,
            MoreColumns(near, far, encoded),
            np.zeros(self.devices, dtype=np.int64),
        )
        for domain in np.unique(domains).tolist():
            on, way = self.devices_of(domain), int(domain != EVERYWHERE)
            chosen, there = positions[domains == domain], slice(on.start, on.stop)
            which = np.append(np.zeros(len(on) - 1, dtype=np.int64), 1)
            found.vectors[there] += self.vectors[chosen, way].sum(axis=0)[which]
            found.nbytes[there] += self.nbytes[chosen, way].sum(axis=0)[which]
            columns = self.dims[chosen, way].sum()
            dims[there] += columns
            for more, sent in ((near, self.near), (far, self.far), (encoded, self.encoded)):
                more[there] += sent[chosen, way].sum() - columns
        return found

    def ms(self, groups: Ints, domains: Ints, devices: Ints, slope: Floats) -> Floats:
        """What the block of each group, over the devices of its domain, takes on each of these devices (N,) by a linear estimate
        of `slope` (N, K): (P, N). NaN where the device has none of it."""
        positions, way = self.positions(groups), (domains != EVERYWHERE).astype(np.int64)
        first = np.where(way, domains * self.split_over[-1], 0)[:, None]
        last = first + np.array(self.split_over)[way, None] - 1
        of_block, of_last = (np.einsum("pk,nk->pn", self.vectors[positions, way, part], slope) for part in range(2))
        held: Floats = np.where(devices == last, of_last, of_block)
        return np.where((devices >= first) & (devices <= last), held, np.nan)


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


def row_shards(table: Table, devices: range) -> list[Shard]:
    """The shards of a table that is split row-wise over these devices."""
    blocks = zip(devices, table.row_blocks(len(devices)), strict=True)
    return [
        Shard(table=table.name, row_offset=first, rows=rows, dim=table.dim, device=device)
        for device, (first, rows) in blocks
    ]
