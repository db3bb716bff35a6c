"""The kinds of spread options: an enumerator makes those of a task, by what its rules, TorchRec and the operator allow."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from neuroshard.core.operator_limits import widest_shard
from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.sharding import DATA_PARALLEL, GRID, ROW_WISE, TABLE_ROW_WISE, Sharding
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, trains_on

MayHold = Mapping[Sharding, Collection[str]]  # names of the tables that may be held so
OVER_ALL, OVER_DOMAIN = 0, 1  # the first kinds: row blocks on all devices and, where there are domains, on those of one


@dataclass(frozen=True)
class Spread:
    """A kind of spread options: `parts` of the columns of a table, the rows of each in `blocks`, on `devices` neighbouring
    devices from one of `starts` on."""

    sharding: Sharding
    blocks: int
    parts: int
    devices: int
    starts: tuple[int, ...]

    def allows(self, table: Table, task: ShardingTask, model: CostModel, may: MayHold) -> bool:
        """Whether a table may be held so. TorchRec has no table-row-wise sequences and cannot train every grid, the parts of a
        grid are equally wide, and the operator holds no wider ones."""
        permitted = table.name in may.get(self.sharding, ())
        if not permitted or not self.sharding.splits_rows:
            return permitted
        constraints = task.constraints
        least, most = constraints.allowed(constraints.rules().get(table.name), table.dim)
        widest = widest_shard(table, trains_on(model)) or table.dim
        width, rest = divmod(table.dim, self.parts)
        wide_enough = self.parts == 1 or not (rest or width % DIM_STEP or width < max(least, table.narrowest_cut))
        return (
            constraints.may_use(self.sharding.name)
            and (table.pooling != "none" or not self.sharding.over_domains)
            and self.sharding.trains(table.optimizer_bytes_per_row, task.topology)
            and wide_enough
            and table.has_rows_for(self.blocks)
            and (most is None or self.blocks * self.parts <= most)
            and width <= widest
        )

    def width(self, table: Table) -> int:
        """Columns of a piece."""
        return max(table.dim // self.parts, DIM_STEP)

    def part(self, task: ShardingTask, table: Table, rows: int, first: int) -> Part:
        """A piece of so many rows of one of the task's tables, from the first on."""
        share = task.lookup_share(table, first, rows, self.blocks)
        return Part(table, rows, self.width(table), self.blocks, self.devices * self.sharding.copied, share)

    def shards(self, table: Table, start: int) -> list[Shard]:
        """The shards of a table on the devices from `start` on."""
        if self.sharding.copied:
            return copies_of([table], self.devices)
        width, blocks = self.width(table), table.row_blocks(self.blocks)
        return [
            Shard(
                table=table.name,
                row_offset=first,
                rows=rows,
                column_offset=part * width,
                dim=width,
                device=start + part * self.blocks + number,
            )
            for part in range(self.parts)
            for number, (first, rows) in enumerate(blocks)
        ]


def enumerated(task: ShardingTask, may: MayHold) -> tuple[Spread, ...]:
    """The kinds of spread options of a task. Grids lie on neighbouring domains, and their number divides that of all. In domains
    of one device there are no blocks of rows."""
    devices, topology, may_use = task.devices, task.topology, task.constraints.may_use
    found = [over_all(devices)]
    if topology is not None and 1 < topology.domain < devices and (may_use("table-row-wise") or may_use("grid")):
        domain, domains = topology.domain, topology.domains(devices)
        found.append(Spread(TABLE_ROW_WISE, domain, 1, domain, tuple(range(0, devices, domain))))
        found += [
            Spread(GRID, domain, parts, domain * parts, tuple(range(0, devices, domain * parts)))
            for parts in range(2, domains + 1)
            if domains % parts == 0
        ]
    if may.get(DATA_PARALLEL):
        found.append(Spread(DATA_PARALLEL, 1, 1, devices, (0,)))
    return tuple(found)


def over_all(devices: int) -> Spread:
    """Row blocks on all devices."""
    return Spread(ROW_WISE, devices, 1, devices, (0,))


def blocks_over_all(tables: Sequence[Table], devices: int) -> list[Shard]:
    """The row blocks of each of these tables on all devices."""
    return [shard for table in tables for shard in over_all(devices).shards(table, 0)]


def copies_of(tables: Sequence[Table], devices: int) -> list[Shard]:
    """A shard of each of these tables on every device."""
    return [Shard(table=t.name, rows=t.rows, dim=t.dim, device=device) for t in tables for device in range(devices)]
