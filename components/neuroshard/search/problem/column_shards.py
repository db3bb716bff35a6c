"""Placed sharding options: every column shard that a task's tables can be cut into, each on one device, as arrays."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.search.problem.equal_shards import HALVES, WideTable, equal_sequence
from neuroshard.search.problem.room import searched_bytes

Widths = NDArray[np.int64]  # (G, D): how many units of each table group each device holds


@dataclass(frozen=True)
class Placement:
    """Shards (S,) and the device of each (S,), -1 if it found no room."""

    shards: Ints
    devices: Ints

    @property
    def fits(self) -> bool:
        return bool((self.devices >= 0).all())


class ColumnShards:
    """The task's G table groups, and every column shard of them by number.

    A table group is a table, or several tables kept together on one device, which are never cut. Tables that the task has
    data-parallel, or that give rows to ids as they train, are in none. The columns of a table are alike, so its shards differ by
    width only: shard `first[g] + u` is the shard of group `g` that is `u` units wide. A unit is 4 columns, or the whole group if
    it is never cut. Of a table that is wider than the operator holds, or of a sequence that is cut into more than halves, it is
    one of its equal shards (`equal_shards.py`): "shard" `u` of these groups is `u` of them, on one device,
    or the whole table where the operator holds it. Shard 0 stands for no shard: no columns, no bytes, a vector of zeros.

    Per shard (S,): `group`, `units`, `columns` (its width), `times` (equal shards that it is), `dims` (columns that it sends for
    a sample: its width once a feature, or a lookup of a sequence), `nbytes` (as a plan counts them). Per group (G,): `tables`,
    `all_units`, `whole` (its widest shard), `min_units` and `max_units` of a shard, `max_shards`, `allowed` devices (G, D),
    `max_devices` (that can hold a shard of it at the same time), `operator_units` (that the operator holds on a device; 0 where
    the group cannot be whole or cut column-wise at all) and `in_equal_shards`. `memory` (D,) is what devices have for them.
    """

    def __init__(
        self, task: ShardingTask, model: CostModel, cut_before: Collection[str] = (), cut_into: int = HALVES
    ) -> None:
        """Tables `cut_before` may have any shards: those of a plan to start from, whose cuts are kept. Sequences that are cut are
        in `cut_into` shards, or in the next fewer that are equal."""
        self.task, self.devices = task, task.devices
        # more than 2^60 bytes a device count as 2^60: `feasible` refuses tasks that need as much
        self.memory = self._count_memory()
        self.tables = _table_groups(task)
        rules, constraints = task.constraints.rules(), task.constraints
        cuts = [constraints.allowed(rules.get(tables[0].name), tables[0].dim) for tables in self.tables]
        may_cut = constraints.may_use("column-wise")
        pairs = zip(self.tables, cuts, strict=True)
        never = self.never_cut = np.array([len(tables) > 1 or most == 1 or not may_cut for tables, (_, most) in pairs])
        self.allowed = np.ones((len(self.tables), self.devices), dtype=bool)
        for group, tables in enumerate(self.tables if rules else ()):
            for table in tables:
                rule = rules.get(table.name)
                if rule is not None and rule.devices is not None:
                    self.allowed[group] &= np.isin(np.arange(self.devices), rule.devices)
        self.any_device = bool(self.allowed.all())
        self.wide = self._wide_tables(model, cut_before)
        in_shards = [equal_sequence(tables, task, cut_into) for tables in self.tables]
        free = [not never[g] and tables[0].name not in cut_before for g, tables in enumerate(self.tables)]
        equal = np.array([self.wide[g].shards if g in self.wide else n * free[g] for g, n in enumerate(in_shards)])
        self.in_equal_shards = equal > 0

        steps = np.where(equal, equal, [tables[0].dim // DIM_STEP for tables in self.tables])
        self.all_units: Ints = np.where(never, 1, steps)
        least_columns = np.maximum([least for least, _ in cuts], [tables[0].narrowest_cut for tables in self.tables])
        self.min_units: Ints = np.where(never | self.in_equal_shards, 1, -(-least_columns // DIM_STEP))
        self.max_shards: Ints = np.where(never, 1, [self.devices if most is None else most for _, most in cuts])

        first = np.concatenate([[0], np.cumsum(self.all_units)[:-1]])
        self.first: Ints = first
        self.group = np.concatenate([[0], np.repeat(np.arange(len(first)), self.all_units)])
        self.units: Ints = np.arange(len(self.group)) - first[self.group]
        self.whole: Ints = first + self.all_units
        columns = np.array([sum(table.dim for table in tables) for tables in self.tables])
        wide = np.isin(np.arange(len(self.tables)), list(self.wide)) | (columns > max(model.max_dim, DIM_STEP))
        apart = self.in_equal_shards[self.group] & (wide[self.group] | (self.units < self.all_units[self.group]))
        self.times: Ints = np.where(apart, self.units, 1)
        unit = np.where(never, columns, columns // self.all_units)  # where it is cut anywhere: DIM_STEP
        self.columns: Ints = self.units * unit[self.group]
        sent = np.array([sum(Part.of(table).sent_columns for table in tables) for tables in self.tables])
        of_unit = unit * np.array([Part.of(tables[0]).vectors for tables in self.tables])
        self.dims: Floats = self.units * np.where(never, sent, of_unit)[self.group]
        self.nbytes = self._count_bytes()
        # Wider shards than the cost model has seen only where a table has too many columns for narrower ones
        self.max_devices: Ints = np.minimum(self.allowed.sum(axis=1), self.max_shards)
        fewest_units = -(-self.all_units // self.max_devices)
        widest = np.maximum(np.maximum(model.max_dim // DIM_STEP, fewest_units), self.min_units)
        self.max_units: Ints = np.minimum(self.all_units, widest)
        # or where narrower ones would be too narrow
        stuck = -(-self.all_units // self.max_units) * self.min_units > self.all_units
        self.max_units[stuck] = self.all_units[stuck]
        self.max_units[never] = 1
        self.operator_units = self._operator_units()
        self.max_units = np.where(self.in_equal_shards, self.all_units, np.minimum(self.max_units, self.operator_units))
        self.max_units = np.maximum(self.max_units, 1)

    def _wide_tables(self, model: CostModel, cut_before: Collection[str]) -> dict[int, WideTable]:
        """The table groups that the operator does not hold whole, and how they are cut."""
        pairs = zip(self.tables, self.allowed.sum(axis=1).tolist(), strict=True)
        found = (WideTable.of(tables, self.task, model, devices=devices) for tables, devices in pairs)
        names = [tables[0].name for tables in self.tables]
        return {g: wide for g, wide in enumerate(found) if wide is not None and names[g] not in cut_before}

    def _operator_units(self) -> Ints:
        units = self.all_units.copy()
        for group, wide in self.wide.items():
            if not wide.shards:
                units[group] = 0 if wide.why else wide.widest // DIM_STEP
        return units

    def _count_memory(self) -> Ints:
        return np.array([min(count, 2**60) for count in self.task.placeable_bytes], dtype=np.int64)

    def _count_bytes(self) -> Ints:
        """What every shard takes, as int64: `feasible` refuses tasks that need more."""
        firsts, never = [tables[0] for tables in self.tables], self.never_cut
        per_shard, one_wide = (  # the bytes of a shard are linear in its columns
            np.array(searched_bytes(self.task, [Part(table, table.rows, dim) for table in firsts])) for dim in (0, 1)
        )
        nbytes: Ints = self.columns * (one_wide - per_shard)[self.group] + per_shard[self.group] * self.times
        nbytes[0] = 0
        nbytes[self.whole[never]] = [
            sum(searched_bytes(self.task, list(map(Part.of, self.tables[g])))) for g in np.flatnonzero(never)
        ]
        unheld = [group for group, wide in self.wide.items() if wide.why]
        nbytes[np.isin(self.group, unheld) & (self.units > 0)] = self.memory.max() + 1  # no device has room for them
        return nbytes

    @cached_property
    def narrowest(self) -> Ints:
        """The widest shard of each group where it is cut as far as it may be: (G,)."""
        narrowest: Ints = self.first + np.maximum(self.min_units, -(-self.all_units // self.max_devices))
        return narrowest

    @cached_property
    def slots(self) -> Ints:
        """Slots number the widths of every group from 0 units on: u units of group g are slot `slots[g] + u`. (G,)"""
        return self.first + np.arange(len(self.first))

    @cached_property
    def slot_shards(self) -> Ints:
        """The shard of each slot, 0 for no units. So code that counts in slots needs no case for an absent group."""
        shards = np.zeros(len(self.group) + len(self.first) - 1, dtype=np.int64)
        numbers = np.arange(1, len(self.group))
        shards[numbers + self.group[1:]] = numbers
        return shards

    @cached_property
    def slot_bytes(self) -> Ints:
        """The bytes of each slot."""
        return self.nbytes[self.slot_shards]

    @cached_property
    def shard_bytes(self) -> Ints:
        """Bytes that a group needs more for each shard more, since bytes are linear in the width of a shard: (G,)."""
        one = self.first + 1
        two = np.where(self.all_units > 1, one + 1, 0)
        more: Ints = np.where(two > 0, 2 * self.nbytes[one] - self.nbytes[two], 0)
        return more

    @cached_property
    def unit_bytes(self) -> Ints:
        """Bytes of a unit of each group, without those of a shard: (G,)."""
        units: Ints = self.nbytes[self.first + 1] - self.shard_bytes
        return units

    def name(self, group: int) -> str:
        """The table group in words."""
        names = [repr(table.name) for table in self.tables[group]]
        return f"table {names[0]}" if len(names) == 1 else f"tables {', '.join(names)} (kept together)"

    def roomiest(self) -> Ints:
        """The most memory of a device that may hold a group: (G,)."""
        most: Ints = np.where(self.allowed, self.memory, 0).max(axis=1)
        return most

    def shards_of(self, groups: Ints, units: Ints) -> Ints:
        """The shards of these groups that are `units` wide; 0 units are shard 0."""
        return np.where(units > 0, self.first[groups] + units, 0)

    def widths(self, placement: Placement) -> Widths:
        """A placement as units of each group on each device; shards of one group on one device become one."""
        widths = np.zeros((len(self.whole), self.devices), dtype=np.int64)
        np.add.at(widths, (self.group[placement.shards], placement.devices), self.units[placement.shards])
        return widths

    def dealt(self, group: int, table: Table, widths: Ints, order: Sequence[int]) -> list[Shard]:
        """The shards of a table for these units (D,) of its group, with columns from left to right in an order of devices."""
        shards, offset = list[Shard](), 0
        for device in order:
            end = offset + self.dim_of(group, table, int(widths[device]))
            shards += self.shards_on(group, table, device, offset, end)
            offset = end
        return shards

    def shards_on(self, group: int, table: Table, device: int, begin: int, end: int) -> list[Shard]:
        """A device's columns of a table: one shard, or the equal ones that its operator holds."""
        units = (end - begin) // self.dim_of(group, table, 1)
        width = self.dim_of(group, table, 1) if self.times[self.first[group] + units] > 1 else end - begin
        return [
            Shard(table=table.name, rows=table.rows, column_offset=at, dim=width, device=device)
            for at in range(begin, end, width)
        ]

    def dim_of(self, group: int, table: Table, units: int) -> int:
        """The columns of a table that so many units of its group have."""
        return table.dim if len(self.tables[group]) > 1 else int(self.columns[self.first[group] + units])

    @property
    def capped(self) -> NDArray[np.bool_]:
        """The groups that are cut anywhere, but not into shards as wide as the group: (G,)."""
        capped: NDArray[np.bool_] = (self.operator_units < self.all_units) & (self.operator_units > 0)
        return capped

    def held(self, placement: Placement) -> Placement:
        """The placement without shards of a table that are together on a device wider than its operator holds; they become -1."""
        if not self.capped.any():
            return placement
        placed = placement.devices >= 0
        widths = self.widths(Placement(placement.shards[placed], placement.devices[placed]))
        group = self.group[placement.shards]
        wide = (widths > self.operator_units[:, None])[group, placement.devices] & placed & self.capped[group]
        return replace(placement, devices=np.where(wide, -1, placement.devices))


def _table_groups(task: ShardingTask) -> list[tuple[Table, ...]]:
    """Tables that are kept together, and each other table by itself, in the order of the task; only those it places."""
    together = {name: names for names in task.constraints.together for name in names}
    tables = {table.name: table for table in task.tables}
    placed = {table.name for table in task.placed}
    groups = {together.get(name, (name,)): None for name in tables if name in placed}
    return [tuple(tables[name] for name in names) for names in groups]
