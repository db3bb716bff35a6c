"""A sharding task as arrays: every column shard that its tables can be cut into, each priced once by the cost model."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import MOST_PREDICTED_MS
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, Floats, Ints, device_costs
from neuroshard.search.problem.row_blocks import RowBlocks

if TYPE_CHECKING:
    from neuroshard.search.problem.current import Held

Widths = NDArray[np.int64]  # (I, D): how many units of each item lie on each device
AT_ONCE = 8192  # shards priced in one batch
AT_A_GO = 1000  # shards that are all priced once any is


@dataclass(frozen=True)
class Placement:
    """Shards (S,) and the device of each (S,); device -1 is a shard that found no room. Items `row_wise` lie on all devices."""

    shards: Ints
    devices: Ints
    row_wise: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def fits(self) -> bool:
        return bool((self.devices >= 0).all())


class Problem:
    """The task's items, and every shard of them by number.

    An item is a table, or a set of tables kept together, which is never cut. Its columns are alike, so its shards differ by
    width only: shard `first[i] + u` is the one of item `i` that is `u` units wide. A unit is 4 columns, or the whole item where
    it is never cut. Shard 0 is no shard: no columns, no bytes, a vector of zeros.

    Per shard: `item`, `units`, `dims` (columns), `nbytes` (weights and optimizer state), and, once `price` has seen it, `vectors`
    (K) and, for guesses about many, `rough`, the same in single precision. Per item: `whole` (its widest shard), `least` and
    `cap` (units of a shard), `most` (shards), `allowed` (I, D), `places` (devices that can hold one of its shards at once).

    Items that may be split row-wise over all devices are those of `row_blocks`. Which of them are is fixed: none here, others in
    a problem that `with_rows` gives, where all devices hold their blocks beforehand (`base`, and less `memory`) and their `whole`
    is shard 0.
    """

    def __init__(self, task: ShardingTask, model: CostModel) -> None:
        self.task, self.model = task, model
        self.members = _items(task)
        self._count = np.array([len(one) for one in self.members])
        rules, constraints = task.constraints.rules(), task.constraints
        cuts = [constraints.allowed(rules.get(one[0].name), one[0].dim) for one in self.members]
        never = np.array([len(one) > 1 or most == 1 for one, (_, most) in zip(self.members, cuts, strict=True)])
        steps = np.array([one[0].dim // DIM_STEP for one in self.members])
        self.widest: Ints = np.where(never, 1, steps)
        self.least: Ints = np.where(never, 1, [-(-least // DIM_STEP) for least, _ in cuts])
        self.most: Ints = np.where(never, 1, [self.devices if most is None else most for _, most in cuts])

        first = np.concatenate([[0], np.cumsum(self.widest)[:-1]])
        self.first: Ints = first
        self.item = np.concatenate([[0], np.repeat(np.arange(len(first)), self.widest)])
        self.units: Ints = np.arange(len(self.item)) - first[self.item]
        self.whole: Ints = first + self.widest
        dims = np.array([sum(table.dim for table in one) for one in self.members])
        self.dims: Ints = self.units * np.where(never, dims, DIM_STEP)[self.item]
        self.nbytes = self._count_bytes(never)
        self.memory = _counted(task.usable_bytes)

        self.allowed = np.ones((len(first), self.devices), dtype=bool)
        for item, one in enumerate(self.members if rules else ()):
            for table in one:
                rule = rules.get(table.name)
                if rule is not None and rule.devices is not None:
                    pinned = np.zeros(self.devices, dtype=bool)
                    pinned[list(rule.devices)] = True
                    self.allowed[item] &= pinned
        self.free_to_go = bool(self.allowed.all())
        # Wider shards than the cost model has seen only where a table has too many columns for narrower ones
        self.places: Ints = np.minimum(self.allowed.sum(axis=1), self.most)
        self.cap: Ints = np.minimum(self.widest, np.maximum(model.max_dim // DIM_STEP, -(-self.widest // self.places)))
        self.cap[never] = 1

        splittable = set(constraints.may_split_rows(task.tables, self.devices))
        allowed = [i for i, one in enumerate(self.members) if one[0].name in splittable]
        rows = [i for i in allowed if self.widest[i] <= self.cap[i]]  # blocks are as wide as the table
        self.too_wide_for_rows = [self.members[i][0] for i in allowed if self.widest[i] > self.cap[i]]
        self.row_blocks = RowBlocks(
            np.array(rows, dtype=np.int64), [self.members[i][0] for i in rows], self.devices, model
        )
        self.root = self
        self.row_wise: Ints = np.zeros(0, dtype=np.int64)
        self.mean_columns = float(self.dims[self.whole].sum()) / self.devices
        self.base_dims, self._base = 0, np.zeros((1, 1))

        self.held: Held | None = None  # what lies where already, where a plan is to be changed
        self.vectors: Floats = np.zeros((len(self.item), 0))
        self.rough: NDArray[np.float32] = np.zeros((len(self.item), 0), dtype=np.float32)
        self._priced = np.zeros(len(self.item), dtype=bool)
        self._priced[0] = True
        self._all_priced = False
        self._alone = np.where(self._priced, 0.0, np.nan)  # what `alone_ms` has been asked

    @cached_property
    def slots(self) -> Ints:
        """Of each item the slot of no units of it: units u of item i have slot `slots[i] + u` (I,)."""
        return self.first + np.arange(len(self.first))

    @cached_property
    def slot_shards(self) -> Ints:
        """The shard of each slot, 0 where there are no units: what goes by slots need not ask whether an item is there."""
        shards = np.zeros(len(self.item) + len(self.first) - 1, dtype=np.int64)
        numbers = np.arange(1, len(self.item))
        shards[numbers + self.item[1:]] = numbers
        return shards

    @cached_property
    def slot_bytes(self) -> Ints:
        """The bytes of each slot."""
        return self.nbytes[self.slot_shards]

    @property
    def all_priced(self) -> bool:
        """Whether `vectors` of all shards are known."""
        return bool(self._priced.all())

    @property
    def devices(self) -> int:
        return self.task.devices

    @property
    def base(self) -> Floats:
        """Sum of the vectors (D, K) of the blocks of rows that lie on each device whatever is done with the other items."""
        return np.broadcast_to(self._base, (self.devices, self.vectors.shape[1]))

    def with_rows(self, items: Ints) -> "Problem | None":
        """The same problem with these items split row-wise and no others; None where a device has no room for its blocks.

        What is priced for one is known to all.
        """
        root = self.root
        if not len(items):
            return root
        base, columns, nbytes = root.row_blocks.load(items)
        if (nbytes > root.memory).any():
            return None
        root.price(root.first + root.cap)
        new = copy.copy(root)
        new.row_wise, new.memory = np.sort(items), root.memory - nbytes
        new._base, new.base_dims = base, columns
        new.whole = root.whole.copy()
        new.whole[items] = 0
        new.mean_columns = float(new.dims[new.whole].sum()) / new.devices + columns
        if root.held is not None:
            new.held = root.held.with_rows(new)
        return new

    def name(self, item: int) -> str:
        """The item in words."""
        names = [repr(table.name) for table in self.members[item]]
        return f"table {names[0]}" if len(names) == 1 else f"tables {', '.join(names)} (kept together)"

    def roomiest(self) -> Ints:
        """The most memory that a device has which may hold an item: (I,)."""
        most: Ints = np.where(self.allowed, self.memory, 0).max(axis=1)
        return most

    def cut(self, shards: Ints, units: Ints) -> Ints:
        """The shards of the same items that are `units` wide; 0 units is no shard."""
        return np.where(units > 0, shards - self.units[shards] + units, 0)

    def numbers(self, items: Ints, units: Ints) -> Ints:
        """Shards of these items that are `units` wide; 0 units is shard 0."""
        return np.where(units > 0, self.first[items] + units, 0)

    def price(self, shards: Ints) -> None:
        """Make `vectors` of these shards known; those that are not yet are asked for in one batch."""
        if self._all_priced or self._priced[shards].all():
            return
        # a question takes as long as some hundred shards do, so few are all asked about in one
        wanted = np.full(len(self._priced), len(self._priced) <= AT_A_GO)
        wanted[shards] = True
        new = np.flatnonzero(wanted & ~self._priced)
        for begin in range(0, len(new), AT_ONCE):
            self._price(new[begin : begin + AT_ONCE])
        self._all_priced = bool(self._priced.all())

    def roughly(self, shards: Ints) -> NDArray[np.float32]:
        """Vectors of shards that are priced, in single precision: of few they are not kept so."""
        return self.rough[shards] if self.rough.shape[1] else self.vectors[shards].astype(np.float32)

    def price_rest(self) -> None:
        """Make the vectors of all other shards known too, unless they are more than one batch."""
        if not self._all_priced and np.count_nonzero(~self._priced) <= AT_ONCE:
            self.price(np.arange(len(self._priced)))

    def _price(self, new: Ints) -> None:
        # all at once are kept as they come; no shard, the first, asks as the next one does
        every = len(new) == len(self.item) - 1
        if every:
            new = np.arange(len(self.item))
        dims, row, items = self.dims[np.maximum(new, 1)], np.arange(len(new)), self.item[new]
        counts = self._count[items]
        tables = [table for item in items.tolist() for table in self.members[item]]
        if counts.max() > 1:
            row = np.repeat(row, counts)
            alone = counts[row] == 1
            dims = np.where(alone, dims[row], [table.dim for table in tables])
        vectors = self.model.table_vectors(tables, dims)
        if not np.isfinite(vectors).all():
            bad = int(np.flatnonzero(~np.isfinite(vectors).all(axis=-1))[0])
            raise InvalidInput(
                f"cost model {self.model.name} knows no finite cost of {dims[bad]} columns of table "
                f"{tables[bad].name!r}; train it again"
            )
        if len(row) > len(new):
            vectors = np.add.reduceat(vectors, np.flatnonzero(np.diff(row, prepend=-1)))
        if every:
            vectors[0] = 0.0
            self.vectors = vectors
        elif not self.vectors.shape[1]:
            self.vectors = np.zeros((len(self.item), vectors.shape[1]))  # untouched pages cost no memory
        if not self.rough.shape[1] and len(self.item) > AT_A_GO:
            self.rough = np.zeros(self.vectors.shape, dtype=np.float32)
        if not every:
            self.vectors[new] = vectors
        if self.rough.shape[1]:
            self.rough[new] = vectors
        self._priced[new] = True

    def alone_ms(self, shards: Ints) -> Floats:
        """Compute ms of each of these shards on a device of its own. Raises InvalidInput where that is no cost."""
        self.price(shards)
        new = shards[np.isnan(self._alone[shards])]
        if len(new):
            self._alone[new] = self.model.compute_ms(self.vectors[new])
        alone: Floats = self._alone[shards]
        none = ~((alone >= 0) & (alone <= MOST_PREDICTED_MS))
        if none.any():
            bad = shards[none][0]
            raise InvalidInput(
                f"cost model {self.model.name} predicts {alone[none][0]} ms for {self.dims[bad]} columns of "
                f"{self.name(self.item[bad])}; train it again"
            )
        return alone

    def sums(self, placement: Placement) -> tuple[Floats, Floats, Ints]:
        """What lies on each device: sum of vectors (D, K), columns (D,), bytes of what is not row-wise (D,)."""
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
            base, columns, _ = self.row_blocks.load(placement.row_wise)
            vectors, dims = vectors + base, dims + columns
        return vectors, dims, nbytes

    def costs(self, placements: Sequence[Placement]) -> tuple[Floats, Floats, Floats]:
        """Compute, forward all-to-all and backward all-to-all ms of P whole placements, in one batch: three (P, D)."""
        sums = [self.sums(placement) for placement in placements]
        return device_costs(self.model, np.stack([s[0] for s in sums]), np.stack([s[1] for s in sums]))

    def worst_ms(self, placements: Sequence[Placement]) -> Floats:
        """Predicted ms of the slowest device of P whole placements: (P,)."""
        compute, forward, backward = self.costs(placements)
        worst: Floats = (compute + forward + backward).max(axis=-1)
        return worst

    def widths(self, placement: Placement) -> Widths:
        """A placement as units of each item on each device; shards of one item on one device become one."""
        widths = np.zeros((len(self.whole), self.devices), dtype=np.int64)
        np.add.at(widths, (self.item[placement.shards], placement.devices), self.units[placement.shards])
        return widths

    def placement(self, widths: Widths) -> Placement:
        """The shards of units of each item on each device."""
        items, devices = np.nonzero(widths)
        return Placement(self.first[items] + widths[items, devices], devices, self.row_wise)

    def _count_bytes(self, never: NDArray[np.bool_]) -> Ints:
        """Weights and optimizer state of every shard, as int64: feasibility.py lets no task need more."""
        rows = np.array([one[0].rows for one in self.members])[self.item]
        element = np.array([one[0].element_bytes + one[0].optimizer_bytes_per_element for one in self.members])
        per_row = np.array([one[0].optimizer_bytes_per_row for one in self.members])
        nbytes: Ints = rows * (self.dims * element[self.item] + per_row[self.item])
        nbytes[0] = 0
        nbytes[self.whole[never]] = [sum(t.memory_bytes for t in self.members[i]) for i in np.flatnonzero(never)]
        return nbytes


def _items(task: ShardingTask) -> list[tuple[Table, ...]]:
    """Tables that lie on one device together, and each other table by itself, in the order of the task."""
    group = {name: names for names in task.constraints.together for name in names}
    if not group:
        return [(table,) for table in task.tables]
    tables = {table.name: table for table in task.tables}
    items = {group.get(table.name, (table.name,)): None for table in task.tables}
    return [tuple(tables[name] for name in names) for names in items]


def _counted(memory_bytes: Sequence[int]) -> Ints:
    """Memory as int64. More than 2^60 bytes a device is as good as 2^60: feasibility.py lets no task need as much."""
    return np.array([min(count, 2**60) for count in memory_bytes], dtype=np.int64)
