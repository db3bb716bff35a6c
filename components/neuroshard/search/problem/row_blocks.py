"""Tables split row-wise, over all devices, over those of one domain, or in a grid: what each device holds of them.

Each of these devices has a block of a table's rows, as TorchRec's ROW_WISE, TABLE_ROW_WISE and GRID_SHARD deal them out; the
last has what is left. A block is priced as a table of its own (`Table.part`). Of a pooled table every one of them has sums for
all samples, so it sends all columns, or more (`pricing.block_columns`); of a sequence what it looked up, which is taken to be
the same everywhere. Over a domain, sums are added up inside it, and each device sends its share of them on
(`pricing.HostColumns`). In a grid each domain has as many of the columns, and their rows are split over its devices.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import InvalidInput
from neuroshard.core.operator_limits import widest_shard
from neuroshard.core.plan import Shard
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import DomainMs, MoreColumns
from neuroshard.costmodel.pricing import HostColumns, block_columns
from neuroshard.costmodel.protocol import CostModel, Floats, Ints, trains_on

# In place of a domain: all devices. Numbers below it are grids: several domains, each of which has a part of the columns
EVERYWHERE = -1
# The ways to split rows; in a grid of 2, 3, … parts of the columns from the third on
OVER_ALL, OVER_DOMAIN, FIRST_GRID = 0, 1, 2


class BlockLoad(NamedTuple):
    """What row blocks are on each device: sums of `vectors` (D, K), columns by `dims` (D,), those sent beyond these (`more`),
    and bytes (D,)."""

    vectors: Floats
    dims: Floats
    more: MoreColumns
    nbytes: Ints


class RowBlocks:
    """The blocks of P tables on the D devices of a task. `groups` (P,), in order, are the numbers of their table groups in the
    problem. There are W ways to split them: over all devices and, if `domains` is more than 1, over those of one domain, or in
    a grid of `parts` of the columns, each over a domain. Grids lie on neighbouring domains, and their number divides that of all.

    Of each table and way:
    `allowed` (P, W);
    `rows`, `nbytes`, `dims` (P, W, 2) and `vectors` (P, W, 2, K): of a block, and of the last one of a domain; `dims` are how
    many columns take as long to send as what a device with the block sends;
    `widths` (P, W): columns of a block;
    `more` (P, W): columns that a device sends beyond those of the whole table, in the mean of all devices;
    `least` (P, W): columns that a device with a block sends at least;
    `near`, `far`, `encoded` (P, W): columns beyond `dims` that such a device sends inside its domain, sends out of it, and
    encodes (`pricing.HostColumns`).
    """

    def __init__(self, groups: Ints, tables: Sequence[Table], task: ShardingTask, model: CostModel) -> None:
        self.groups, self.tables, self.devices, self.model = groups, tables, task.devices, model
        may_use = task.constraints.may_use
        several = task.topology is not None and (may_use("table-row-wise") or may_use("grid"))
        domain = task.topology.domain if several and task.topology is not None else 1
        self.domains = task.devices // domain if domain > 1 else 1
        self.parts: tuple[int, ...] = (1,)
        if self.domains > 1:
            self.parts = (1, *(parts for parts in range(1, self.domains + 1) if self.domains % parts == 0))
        ways = len(self.parts)
        self.split_over = (task.devices, *(domain for _ in self.parts[1:]))  # row blocks of each way
        starts = [(way, first) for way in range(ways - 1, 0, -1) for first in range(0, self.domains, self.parts[way])]
        grids = [one for one in starts if one[0] >= FIRST_GRID]
        # by place, from the last grid (the lowest number) to the last domain: its way and its first domain
        self._places = [*grids, (OVER_ALL, 0), *((OVER_DOMAIN, h) for h in range(self.domains) if ways > 1)]
        self._first_place = EVERYWHERE - len(grids)
        rows = np.array([table.rows for table in tables], dtype=np.int64)
        block = np.array([[t.block_rows(n) for n in self.split_over] for t in tables], dtype=np.int64)
        block = block.reshape(-1, ways)
        last = rows[:, None] - block * (np.array(self.split_over) - 1)
        self.rows: Ints = np.stack([block, np.maximum(last, 1)], axis=-1)  # no such way is allowed where none are left
        self.allowed = np.array([self._allowed(table, task.constraints) for table in tables], dtype=bool)
        self.allowed = self.allowed.reshape(block.shape)
        widths = [[max(t.dim // n, DIM_STEP) for n in self.parts] for t in tables]
        self.widths: Ints = np.array(widths, dtype=np.int64).reshape(block.shape)
        pairs = zip(tables, self.rows[:, OVER_ALL].tolist(), strict=True)
        over_all = [[block_columns(model, table.part(n, table.dim)) for n in pair] for table, pair in pairs]
        self.dims: Floats = np.zeros(self.rows.shape)
        self.dims[:, OVER_ALL] = np.reshape(over_all, (-1, 2))  # also of no tables
        self.least: Floats = self.dims.min(axis=-1)
        self.near, self.far, self.encoded = np.zeros((3, *block.shape))
        if self.domains > 1:
            rates = DomainMs.of(model, task)
            for way in range(OVER_DOMAIN, ways):
                cut = [table.with_dim(dim) for table, dim in zip(tables, self.widths[:, way].tolist(), strict=True)]
                over = HostColumns.of(model, cut, task.devices, domain, rates)
                longest = np.maximum(over.inside * rates.near, over.out * rates.far)
                felt = longest / max(rates) if max(rates) > 0 else over.inside
                self.dims[:, way], self.least[:, way] = felt[:, None], over.least
                self.near[:, way], self.far[:, way] = over.inside - felt, over.out - felt
                self.encoded[:, way] = over.encoded - felt
        sent = np.array([table.sent_columns for table in tables], dtype=np.float64)
        self.more: Floats = (self._of_all_blocks(self.dims[..., None])[..., 0] - sent[:, None]) / task.devices
        each = zip(tables, self.rows.tolist(), self.widths.tolist(), strict=True)
        sizes = [
            [
                [task.shard_bytes(table, n, dim, over) for n in pair]
                for pair, dim, over in zip(of_table, dims, self.split_over, strict=True)
            ]
            for table, of_table, dims in each
        ]
        self.nbytes: Ints = np.array(sizes, dtype=np.int64).reshape(self.rows.shape)
        self._vectors: Floats | None = None

    def _allowed(self, table: Table, constraints: Constraints) -> list[bool]:
        """In which ways. TorchRec has no table-row-wise sequences, the parts of a grid are equally wide, and the operator holds
        no wider ones."""
        least, most = constraints.allowed(constraints.rules().get(table.name), table.dim)
        least, pooled, grid = max(least, table.narrowest_cut), table.pooling != "none", constraints.may_use("grid")
        fits = [table.dim % (n * DIM_STEP) == 0 and table.dim // n >= least for n in self.parts[FIRST_GRID:]]
        over_domain = [pooled and constraints.may_use("table-row-wise")] * (len(self.parts) > 1)
        may = [constraints.may_use("row-wise"), *over_domain, *(pooled and grid and fit for fit in fits)]
        widest = widest_shard(table, trains_on(self.model)) or table.dim
        return [
            one and table.has_rows_for(over) and (most is None or over * parts <= most) and table.dim <= parts * widest
            for one, over, parts in zip(may, self.split_over, self.parts, strict=True)
        ]

    @property
    def vectors(self) -> Floats:
        """Priced in one batch when first needed. Raises InvalidInput where the cost model predicts no finite cost."""
        if self._vectors is None:
            each = zip(self.tables, self.rows.reshape(len(self.tables), -1).tolist(), strict=True)
            parts = [table.part(rows, table.dim) for table, of in each for rows in of]
            dims = np.repeat(self.widths.ravel(), 2)
            vectors = finite_vectors(self.model, parts, dims, lambda bad: f"{parts[bad].rows:,} rows")
            self._vectors = vectors.reshape(*self.rows.shape, -1)
        return self._vectors

    @property
    def all_blocks(self) -> Floats:
        """The vectors of all blocks of each table, summed: (P, W, K)."""
        return self._of_all_blocks(self.vectors)

    def _of_all_blocks(self, of_each: Floats) -> Floats:
        """The sum over all blocks of what a block and the last one are: (P, W, 2, K) -> (P, W, K)."""
        others, parts = np.array(self.split_over)[:, None] - 1, np.array(self.parts)[:, None]
        total: Floats = (of_each[:, :, 0] * others + of_each[:, :, 1]) * parts
        return total

    def positions(self, groups: Ints) -> Ints:
        """Where these table groups stand among the P."""
        return np.searchsorted(self.groups, groups)

    def way_of(self, domains: Ints) -> Ints:
        """The way that each table over the devices of these domains is split."""
        ways: Ints = np.array([way for way, _ in self._places])[domains - self._first_place]
        return ways

    def places(self) -> Ints:
        """All domains, and what stands in place of one."""
        return np.arange(self._first_place, self._first_place + len(self._places))

    def place_of(self, way: int, first_domain: int) -> int:
        """The place that stands for the domains of a table split in this way, of which this is the first."""
        return self._places.index((way, first_domain)) + self._first_place

    def shards(self, table: Table, domain: int) -> list[Shard]:
        """The shards of a table over the devices of a domain, or of what stands in place of one."""
        way, first = self._places[domain - self._first_place]
        if way == OVER_ALL:
            return row_shards(table, range(self.devices))
        width, each = table.dim // self.parts[way], self.split_over[way]
        return [
            shard.model_copy(update={"column_offset": part * width, "dim": width})
            for part in range(self.parts[way])
            for shard in row_shards(table, range((first + part) * each, (first + part + 1) * each))
        ]

    def _devices_of(self, domain: int) -> tuple[slice, Ints]:
        """The devices of a domain, and for each of them 1 if it has the last rows, else 0."""
        way, first = self._places[domain - self._first_place]
        each, begin = self.split_over[way], first * self.split_over[-1]
        devices = np.arange(begin, begin + each * self.parts[way])
        return slice(begin, begin + len(devices)), (devices % each == each - 1).astype(np.int64)

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
            way, (there, which) = int(self.way_of(np.array(domain))), self._devices_of(domain)
            chosen = positions[domains == domain]
            found.vectors[there] += self.vectors[chosen, way].sum(axis=0)[which]
            found.nbytes[there] += self.nbytes[chosen, way].sum(axis=0)[which]
            dims[there] += self.dims[chosen, way].sum(axis=0)[which]
            for more, of_block in ((near, self.near), (far, self.far), (encoded, self.encoded)):
                more[there] += of_block[chosen, way].sum()
        return found

    def ms(self, groups: Ints, domains: Ints, devices: Ints, slope: Floats) -> Floats:
        """What the block of each group, over the devices of its domain, takes on each of these devices (N,) by a linear estimate
        of `slope` (N, K): (P, N). NaN where the device has none of it."""
        positions, way = self.positions(groups), self.way_of(domains)
        of_block, of_last = (np.einsum("pk,nk->pn", self.vectors[positions, way, part], slope) for part in range(2))
        found: Floats = np.full(of_block.shape, np.nan)
        for domain in np.unique(domains).tolist():
            of, which = self._devices_of(domain)
            there = np.flatnonzero((devices >= of.start) & (devices < of.stop))
            rows = np.flatnonzero(domains == domain)[:, None]
            is_last = which[devices[there] - of.start] == 1
            found[rows, there] = np.where(is_last, of_last[rows, there], of_block[rows, there])
        return found


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
