"""A sharding task as arrays: every column shard that its tables can be cut into, each priced once by the cost model."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import MOST_PREDICTED_MS
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import sending_more, waiting_ms
from neuroshard.costmodel.protocol import CostModel, Floats, Ints, device_costs
from neuroshard.search.problem.launches import NONE, LaunchCosts, distinct
from neuroshard.search.problem.row_blocks import EVERYWHERE, RowBlocks, finite_vectors
from neuroshard.search.problem.wide_tables import WideTable
from neuroshard.search.tuning import TUNING, Tuning

Widths = NDArray[np.int64]  # (G, D): how many units of each table group each device holds


@dataclass(frozen=True)
class Placement:
    """Shards (S,) and the device of each (S,), -1 if it found no room. Of the `row_wise` groups (R,) every device of their
    `domains` (R,) has a block: all devices where that is EVERYWHERE."""

    shards: Ints
    devices: Ints
    row_wise: Ints = field(default_factory=lambda: NONE)
    domains: Ints = field(default_factory=lambda: NONE)

    @property
    def fits(self) -> bool:
        return bool((self.devices >= 0).all())


class Problem:
    """The task's G table groups, and every shard of them by number.

    A table group is a table, or several tables kept together on one device, which are never cut. The columns of a table are
    alike, so its shards differ by width only: shard `first[g] + u` is the shard of group `g` that is `u` units wide. A unit is
    4 columns, or the whole group if it is never cut. Of a table that is wider than the operator holds it is one of its equal
    shards (`wide_tables.py`): "shard" `u` of these groups is `u` of them, on one device. Shard 0 stands for no
    shard: no columns, no bytes, a vector of zeros.

    Per shard (S,): `group`, `units`, `columns` (its width), `dims` (columns that it sends for a sample: its width once a feature,
    or a lookup of a sequence), `nbytes` (as a plan counts them), `vectors` (S, K) once `price` was called for it. Per group
    (G,): `tables`, `all_units`, `whole` (its widest shard), `min_units` and `max_units` of a shard, `max_shards`, `allowed`
    devices (G, D), `max_devices` (that can hold a shard of it at the same time), `operator_units` (that the operator holds on a
    device; 0 where the group cannot be whole or cut column-wise at all) and `in_equal_shards`.

    `row_blocks` has the groups that may be split row-wise. In each Problem a fixed set of them is (`row_wise`, each over the
    devices of its `domains`); in a new Problem none is. `with_row_wise` gives the problem for another set. There the devices
    already hold the row blocks (`base`, `base_dims`, and less `memory`), and `whole` of these groups is shard 0.
    """

    def __init__(
        self, task: ShardingTask, model: CostModel, tuning: Tuning = TUNING, cut_before: Collection[str] = ()
    ) -> None:
        """Tables `cut_before` may have any shards: those of a plan to start from, whose cuts are kept."""
        self.task, self.model, self.tuning = task, model, tuning
        self.tables = _table_groups(task)
        self._count = np.array([len(tables) for tables in self.tables])
        rules, constraints = task.constraints.rules(), task.constraints
        cuts = [constraints.allowed(rules.get(tables[0].name), tables[0].dim) for tables in self.tables]
        may_cut = constraints.may_use("column-wise")
        pairs = zip(self.tables, cuts, strict=True)
        never = np.array([len(tables) > 1 or most == 1 or not may_cut for tables, (_, most) in pairs])
        self.allowed = np.ones((len(self.tables), self.devices), dtype=bool)
        for group, tables in enumerate(self.tables if rules else ()):
            for table in tables:
                rule = rules.get(table.name)
                if rule is not None and rule.devices is not None:
                    self.allowed[group] &= np.isin(np.arange(self.devices), rule.devices)
        self.any_device = bool(self.allowed.all())
        self.wide = self._wide_tables(cut_before)
        equal = np.array([self.wide[group].shards if group in self.wide else 0 for group in range(len(self.tables))])
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
        unit = np.where(never, columns, columns // self.all_units)  # where it is cut anywhere: DIM_STEP
        self.columns: Ints = self.units * unit[self.group]
        sent = np.array([sum(table.sent_columns for table in tables) for tables in self.tables])
        of_unit = unit * np.array([tables[0].vectors for tables in self.tables])
        self.dims: Floats = self.units * np.where(never, sent, of_unit)[self.group]
        self.memory = _counted(task.usable_bytes)
        self.nbytes = self._count_bytes(never)
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

        splittable = set(task.may_split_rows)
        permitted = [group for group, tables in enumerate(self.tables) if tables[0].name in splittable]
        # blocks have all columns, but for those of grids
        seen = [group for group in permitted if self.all_units[group] <= self.max_units[group] or group in self.wide]
        self.too_wide_for_row_wise = [self.tables[group][0] for group in permitted if group not in set(seen)]
        self.mean_columns = float(self.dims[self.whole].sum()) / self.devices
        self.row_blocks = self._row_blocks(seen)
        if self.wide:
            some = np.flatnonzero(self.row_blocks.allowed.any(axis=1)).tolist()
            self.row_blocks = self._row_blocks([seen[one] for one in some])
        self.root = self
        self.row_wise, self.domains = NONE, NONE
        self.base_dims: Floats = np.zeros(self.devices)
        self._base: Floats = np.zeros((1, 1))
        self.launches = LaunchCosts(self.tables, self.devices, model, task.pipeline)
        self._launched_ms: dict[bytes, float] = {}  # by what cuts change in it

        self.vectors: Floats = np.zeros((len(self.group), 0))
        self._priced = np.zeros(len(self.group), dtype=bool)
        self._priced[0] = True
        self._all_priced = False
        self._alone = np.where(self._priced, 0.0, np.nan)  # ms of the shards that `alone_ms` was called for

    def _wide_tables(self, cut_before: Collection[str]) -> dict[int, WideTable]:
        """The table groups that the operator does not hold whole, and how they are cut."""
        pairs = zip(self.tables, self.allowed.sum(axis=1).tolist(), strict=True)
        found = (WideTable.of(tables, self.task, self.model, devices=devices) for tables, devices in pairs)
        names = [tables[0].name for tables in self.tables]
        return {g: wide for g, wide in enumerate(found) if wide is not None and names[g] not in cut_before}

    def _operator_units(self) -> Ints:
        units = self.all_units.copy()
        for group, wide in self.wide.items():
            if not wide.shards:
                units[group] = 0 if wide.why else wide.widest // DIM_STEP
        return units

    def _row_blocks(self, groups: list[int]) -> RowBlocks:
        tables = [self.tables[group][0] for group in groups]
        return RowBlocks(np.array(groups, dtype=np.int64), tables, self.task, self.model)

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

    @property
    def devices(self) -> int:
        return self.task.devices

    def launched_ms(self, shards: Ints) -> float:
        """Ms of launches, and of putting outputs into order, in a plan with so many shards (G,) of each group not row-wise.

        Raises what the cost model raises for unknown devices.
        """
        shards = shards + (self.in_equal_shards & (shards > 0))  # on one device too there are several
        key = self.root.launches.cut(shards)
        if key not in self._launched_ms:
            cut = np.flatnonzero(shards > 1)
            self._launched_ms[key] = self.root.launches.of(self.row_wise, self.domains, cut).total_ms
        return self._launched_ms[key]

    def uncut(self) -> "Problem | None":
        """The same problem without plans that cut a pooled table; None if some table has to be cut or row-wise. It shares prices
        with this one."""
        root, pooled = self.root, self.launches.collection >= 0
        if ((root.all_units > root.max_units) | root.in_equal_shards)[pooled].any():
            return None
        new = self._new_root()
        new.min_units, new.max_shards = root.min_units.copy(), root.max_shards.copy()
        new.max_devices = root.max_devices.copy()
        new.__dict__.pop("narrowest", None)  # it follows from these
        new.min_units[pooled], new.max_shards[pooled], new.max_devices[pooled] = root.all_units[pooled], 1, 1
        return new

    @property
    def base(self) -> Floats:
        """Sum of the vectors (D, K) of the row blocks that each device holds."""
        return np.broadcast_to(self._base, (self.devices, self.vectors.shape[1]))

    def with_row_wise(self, groups: Ints, domains: Ints | None = None) -> "Problem | None":
        """The same problem with these table groups row-wise and no others; None if a device has no room for its blocks.

        Each is split over the devices of its domain; without `domains`, all are over all devices. Problems made from one another
        share their prices.
        """
        root = self.root
        if not len(groups):
            return root
        over = np.full(len(groups), EVERYWHERE) if domains is None else domains
        load = root.row_blocks.load(groups, over)
        if (load.nbytes > root.memory).any():
            return None
        root.price(root.first + root.max_units)
        new, order = copy.copy(root), np.argsort(groups, kind="stable")
        new.row_wise, new.domains, new.memory = groups[order], over[order], root.memory - load.nbytes
        if (over != EVERYWHERE).any():
            new.model = sending_more(root.model, load.more)
        new._launched_ms = {}
        new._base, new.base_dims = load.vectors, load.dims
        new.whole = root.whole.copy()
        new.whole[groups] = 0
        new.mean_columns = float(new.dims[new.whole].sum()) / new.devices + float(load.dims.mean())
        return new

    def with_less_memory(self, nbytes: Ints) -> "Problem":
        """The same problem, without row-wise tables so far, on devices with so many bytes (D,) less. It shares prices with this
        one."""
        new = self._new_root()
        new.memory = np.maximum(new.memory - nbytes, 0)
        return new

    def without_row_wise(self, task: ShardingTask) -> "Problem":
        """The same problem for the same task without tables that may be row-wise. It shares prices with this one."""
        new = self._new_root()
        new.task, new.too_wide_for_row_wise = task, []
        new.row_blocks = RowBlocks(NONE, [], task, self.model)
        return new

    def _new_root(self) -> "Problem":
        """A copy of the problem without row-wise tables, to be changed. Both share their prices, whose arrays are made here if
        there are none yet."""
        self.root.price(self.root.first + self.root.max_units)
        new = copy.copy(self.root)
        new.root = new
        return new

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

    def price(self, shards: Ints) -> None:
        """Fill `vectors` of these shards, those that are still unknown in one batch."""
        if self._all_priced or self._priced[shards].all():
            return
        # a batch of one takes as long as some hundred shards, so a task of few shards has all priced at once
        wanted = np.full(len(self._priced), len(self._priced) <= self.tuning.price_all_up_to)
        wanted[shards] = True
        self._price(np.flatnonzero(wanted & ~self._priced))
        self._all_priced = bool(self._priced.all())

    def price_rest(self) -> None:
        """Fill `vectors` of all other shards too, unless they are more than one batch."""
        if not self._all_priced and np.count_nonzero(~self._priced) <= self.tuning.price_at_once:
            self.price(np.arange(len(self._priced)))

    def _price(self, new: Ints) -> None:
        for begin in range(0, len(new), self.tuning.price_at_once):
            some = new[begin : begin + self.tuning.price_at_once]
            vectors = self._vectors_of(some)
            if not self.vectors.shape[1]:
                self.vectors = np.zeros((len(self.group), vectors.shape[1]))  # pages never touched cost no memory
            self.vectors[some] = vectors
            self._priced[some] = True

    def _vectors_of(self, shards: Ints) -> Floats:
        """Vectors of shards, or sums of the vectors of tables kept together, or of equal shards: (N, K)."""
        groups, dims, row = self.group[shards], self.columns[shards], np.arange(len(shards))
        times = np.where(self.in_equal_shards[groups], self.units[shards], 1)
        dims = dims // times
        counts = self._count[groups]
        tables = [table for group in groups.tolist() for table in self.tables[group]]
        if counts.max() > 1:
            row = np.repeat(row, counts)
            dims = np.where(counts[row] == 1, dims[row], [table.dim for table in tables])
        vectors = finite_vectors(self.model, tables, dims, lambda bad: f"{dims[bad]} columns")
        if len(row) > len(shards):
            vectors = np.add.reduceat(vectors, np.flatnonzero(np.diff(row, prepend=-1)))
        return vectors * times[:, None] if self.wide else vectors

    def alone_ms(self, shards: Ints) -> Floats:
        """Compute ms of each of these shards on a device of its own. Raises InvalidInput where that is not a valid cost."""
        self.price(shards)
        new = shards[np.isnan(self._alone[shards])]
        if len(new):
            self._alone[new] = self.model.compute_ms(self.vectors[new])
        alone: Floats = self._alone[shards]
        invalid = ~((alone >= 0) & (alone <= MOST_PREDICTED_MS))
        if invalid.any():
            bad = shards[invalid][0]
            raise InvalidInput(
                f"cost model {self.model.name} predicts {alone[invalid][0]} ms for {self.columns[bad]} columns of "
                f"{self.name(self.group[bad])}; train it again"
            )
        return alone

    def narrowest_ms(self) -> Floats:
        """What the `narrowest` shard of each group takes alone, infinite if no device has room for it: (G,)."""
        fits = self.nbytes[self.narrowest] <= self.roomiest()
        return np.where(fits, self.alone_ms(self.narrowest), np.inf)

    def sums(self, placement: Placement) -> tuple[Floats, Floats, Ints]:
        """What each device holds: sum of vectors (D, K), columns sent (D,), bytes (D,) of what is not row-wise."""
        self.price(placement.shards)
        order = np.argsort(placement.devices, kind="stable")
        shards, devices = placement.shards[order], placement.devices[order]
        begins = np.flatnonzero(np.diff(devices, prepend=-1))
        vectors = np.zeros((self.devices, self.vectors.shape[1]))
        if len(shards):
            vectors[devices[begins]] = np.add.reduceat(self.vectors[shards], begins)
        dims: Floats = np.bincount(devices, weights=self.dims[shards], minlength=self.devices).astype(np.float64)
        nbytes = np.zeros(self.devices, dtype=np.int64)
        np.add.at(nbytes, devices, self.nbytes[shards])
        if len(placement.row_wise):
            load = self.row_blocks.load(placement.row_wise, placement.domains)
            vectors, dims = vectors + load.vectors, dims + load.dims
        return vectors, dims, nbytes

    def costs(self, placements: Sequence[Placement]) -> tuple[Floats, Floats, Floats]:
        """Compute, forward all-to-all and backward all-to-all ms of P placements that fit: three (P, D)."""
        each = [self._costs(placement) for placement in placements]
        compute, forward, backward = (np.stack(of) for of in zip(*each, strict=True))
        return compute, forward, backward

    def _costs(self, placement: Placement) -> tuple[Floats, Floats, Floats]:
        """The same of one placement: three (D,)."""
        model, (vectors, dims, _) = self.root.model, self.sums(placement)
        if (placement.domains != EVERYWHERE).any():
            model = sending_more(model, self.row_blocks.load(placement.row_wise, placement.domains).more)
        launched = self.launches.of(placement.row_wise, placement.domains, self._cut(placement))
        compute, forward, backward = (
            ms + more for ms, more in zip(device_costs(model, vectors, dims), launched, strict=True)
        )
        waiting = waiting_ms(self.model, vectors)
        return compute - waiting, forward + waiting, backward

    def _cut(self, placement: Placement) -> Ints:
        """The table groups of which a placement has shards that are not whole: also those on one device in equal shards."""
        groups = self.group[placement.shards]
        cut = (self.units[placement.shards] < self.all_units[groups]) | self.in_equal_shards[groups]
        return distinct(groups[cut])

    def widths(self, placement: Placement) -> Widths:
        """A placement as units of each group on each device; shards of one group on one device become one."""
        widths = np.zeros((len(self.whole), self.devices), dtype=np.int64)
        np.add.at(widths, (self.group[placement.shards], placement.devices), self.units[placement.shards])
        return widths

    def _count_bytes(self, never: NDArray[np.bool_]) -> Ints:
        """What every shard takes, as int64: `feasible` refuses tasks that need more."""
        rows = np.array([tables[0].rows for tables in self.tables])
        element = np.array([t[0].element_bytes + t[0].optimizer_bytes_per_element for t in self.tables])
        per_row = np.array([tables[0].optimizer_bytes_per_row for tables in self.tables])
        step = np.array([self.task.step_bytes(tables[0]) for tables in self.tables])
        per_column, per_shard = rows * element + step[:, 1], rows * per_row + step[:, 0]
        shards = np.where(self.in_equal_shards[self.group], self.units, 1)
        nbytes: Ints = self.columns * per_column[self.group] + per_shard[self.group] * shards
        nbytes[0] = 0
        nbytes[self.whole[never]] = [
            sum(self.task.shard_bytes(t, t.rows, t.dim) for t in self.tables[g]) for g in np.flatnonzero(never)
        ]
        unheld = [group for group, wide in self.wide.items() if wide.why]
        nbytes[np.isin(self.group, unheld) & (self.units > 0)] = self.memory.max() + 1  # no device has room for them
        return nbytes

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
    """Tables that are kept together, and each other table by itself, in the order of the task."""
    together = {name: names for names in task.constraints.together for name in names}
    if not together:
        return [(table,) for table in task.tables]
    tables = {table.name: table for table in task.tables}
    groups = {together.get(table.name, (table.name,)): None for table in task.tables}
    return [tuple(tables[name] for name in names) for names in groups]


def _counted(memory_bytes: Sequence[int]) -> Ints:
    """Memory as int64. More than 2^60 bytes a device count as 2^60: `feasible` refuses tasks that need as much."""
    return np.array([min(count, 2**60) for count in memory_bytes], dtype=np.int64)
