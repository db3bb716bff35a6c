"""A sharding task as arrays: its placed and its spread sharding options, each priced once by the cost model."""

import copy
from collections.abc import Collection
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.errors import InvalidInput
from neuroshard.core.part import Part
from neuroshard.core.plan import MOST_PREDICTED_MS
from neuroshard.core.sharding import DATA_PARALLEL, SHARDINGS, Sharding
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import sending_more
from neuroshard.costmodel.pricing import CopyPrices, LaunchMs
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.search.problem.column_shards import ColumnShards
from neuroshard.search.problem.equal_shards import HALVES
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.problem.launches import CUT, NONE, WHOLE, LaunchCosts
from neuroshard.search.problem.spread import SpreadOptions, blocks_of_mapped, finite_vectors
from neuroshard.search.tuning import TUNING, Tuning


class Problem(ColumnShards):
    """The options of a task, priced, with the table groups `spread` (R,) held at `places` (R,), and all others to be placed in
    column shards. The blocks of tables that give rows to ids as they train (`mapped`) are on all devices anyway.

    `options` has the groups that may be spread, and how. In a new Problem none is, apart from the tables that the task has
    data-parallel (`copied`). `with_spread` gives the problem for another set. There the devices already hold the pieces of these
    groups (`base`, `base_dims`, and less `memory`), and `whole` of these groups is shard 0. `copies_ms` is what copies take. Of
    column shards, `vectors` (S, K) are known once `price` was called for them. All problems made from one `root` share them.
    """

    def __init__(
        self,
        task: ShardingTask,
        model: CostModel,
        tuning: Tuning = TUNING,
        *,
        cut_before: Collection[str] = (),
        may: MayHold = MappingProxyType({}),
        pieces: Collection[str] = (),
        cut_into: int = HALVES,
    ) -> None:
        """`may` says which tables may be held in ways that the task's constraints do not name; `pieces` are each a shard of a cut
        table (`kept_cuts.py`); `cut_before` and `cut_into` as in ColumnShards."""
        self.model, self.tuning, self.may, self.cut_into = model, tuning, may, cut_into
        self.copied, self.mapped = task.copied, task.mapped
        super().__init__(task, model, cut_before, cut_into)
        splittable = set(task.may_split_rows)
        permitted = [group for group, tables in enumerate(self.tables) if tables[0].name in splittable]
        # blocks have all columns, but for those of grids
        seen = {group for group in permitted if self.all_units[group] <= self.max_units[group] or group in self.wide}
        self.too_wide_for_row_wise = [self.tables[group][0] for group in permitted if group not in seen]
        self._split_rows = {self.tables[group][0].name for group in seen}
        self.mean_columns = float(self.dims[self.whole].sum()) / self.devices
        self.root = self
        self.spread, self.places = NONE, NONE
        self._base, self.base_dims = blocks_of_mapped(task, model)
        self.mean_columns += float(self.base_dims.mean())
        self.launches = LaunchCosts(self.tables, self.copied, self.mapped, pieces, task, model)
        self.kept_beside_blocks = 0  # bytes that devices keep free more where some table is split row-wise
        self._launched_ms: dict[bytes, float] = {}  # by what cuts change in it
        copies = [*self.copied, *(self.options.tables if self.may_copy else ())]
        self._copy_prices = CopyPrices(model, copies, task) if copies else None
        self.copies_ms = self._copies_ms(NONE)
        self._count = np.array([len(tables) for tables in self.tables])
        # their width is not known before some are priced
        self.vectors: Floats = np.zeros((len(self.group), self._base.shape[1] if self.mapped else 0))
        self._priced = np.zeros(len(self.group), dtype=bool)
        self._priced[0] = True
        self._all_priced = False
        self._alone = np.where(self._priced, 0.0, np.nan)  # ms of the shards that `alone_ms` was called for

    @cached_property
    def options(self) -> SpreadOptions:
        """The groups that may be spread, and how; made when first needed, since the first column-wise plans ask for none."""
        return self._options(self.may)

    def _options(self, may: MayHold) -> SpreadOptions:
        """The spread options of the groups whose rows may be split, and of those that `may` names."""
        may = {**{one: self._split_rows for one in SHARDINGS if one.splits_rows}, **may}
        names = {name for some in may.values() for name in some}
        groups = [group for group, tables in enumerate(self.tables) if tables[0].name in names]
        return SpreadOptions(groups, [self.tables[group][0] for group in groups], self.task, self.model, may)

    @property
    def may_copy(self) -> bool:
        """Whether a table may be copied beside those that the task has data-parallel."""
        return bool(self.may.get(DATA_PARALLEL))

    @property
    def may_split_rows(self) -> bool:
        """Whether the rows of some group may be split."""
        rows = [kind.sharding.splits_rows for kind in self.options.kinds]
        return bool(self.options.allowed[:, rows].any())

    @property
    def may_spread(self) -> bool:
        """Whether some group may be spread, otherwise than as a copy."""
        others = [not kind.sharding.copied for kind in self.options.kinds]
        return bool(self.options.allowed[:, others].any())

    @property
    def is_full(self) -> bool:
        """Whether uncut tables take nearly all memory."""
        return bool(self.nbytes[self.whole].sum() >= self.tuning.nearly_full * self.memory.sum())

    @property
    def spread_as(self) -> dict[str, Sharding]:
        """How each of the spread tables is held, by its name."""
        if not len(self.spread):
            return {}
        kinds, ways = self.options.kinds, self.options.way_of[self.places].tolist()
        return {self.tables[g][0].name: kinds[way].sharding for g, way in zip(self.spread.tolist(), ways, strict=True)}

    @property
    def splits_rows(self) -> bool:
        """Whether some of the spread tables are split by their rows."""
        return any(one.splits_rows for one in self.spread_as.values())

    @property
    def copies_some(self) -> bool:
        """Whether some of the spread tables are copies."""
        return any(one.copied for one in self.spread_as.values())

    def launched_ms(self, shards: Ints) -> float:
        """Ms of launches, of putting outputs into order, and of copies, with so many shards (G,) of each group not spread.

        Raises what the cost model raises for unknown devices.
        """
        shards = shards + ((self.times[self.whole] > 1) & (shards > 0))  # on one device too there are several
        key = self.root.launches.cut(shards)
        if key not in self._launched_ms:
            held = np.where(shards > 1, CUT, WHOLE)
            held[self.spread] = [SHARDINGS.index(one) for one in self.spread_as.values()]
            self._launched_ms[key] = float(self.root.launches.of(held[None])[0]) + self.copies_ms.total_ms
        return self._launched_ms[key]

    def _copies_ms(self, groups: Ints) -> LaunchMs:
        """What the data-parallel tables take, and copies of these groups."""
        if self._copy_prices is None:
            return LaunchMs(0.0, 0.0, 0.0)
        fixed = len(self.copied)
        return self._copy_prices.ms([*range(fixed), *(fixed + self.options.positions(groups)).tolist()])

    def copying_ms(self, groups: Ints) -> Floats:
        """What one copy more of each of these groups (C,), or one less, takes more than all copies here, in ms."""
        there = self.spread[self.options.way_of[self.places] == self.options.copied]
        others = [there[there != group] if group in there else np.append(there, group) for group in groups.tolist()]
        return np.array([self._copies_ms(one).total_ms for one in others]) - self.copies_ms.total_ms

    @property
    def orders_cut(self) -> bool:
        """Whether a plan may cut a pooled table, and then takes some ms to put outputs into order."""
        may_cut = self.root.max_shards[self.launches.collection >= 0] > 1
        return bool(may_cut.any()) and self.launches.least_reorder_ms() > 0

    def uncut(self) -> "Problem | None":
        """The same problem without plans that cut a pooled table; None if some table has to be cut or spread."""
        root, pooled = self.root, self.launches.collection >= 0
        if ((root.all_units > root.max_units) | root.in_equal_shards)[pooled].any():
            return None
        return root.uncut_groups(pooled)

    def uncut_groups(self, groups: NDArray[np.bool_]) -> "Problem":
        """The same problem, without spread tables so far, without plans that cut these table groups (G,) by columns."""
        least, most, devices = self.min_units.copy(), self.max_shards.copy(), self.max_devices.copy()
        least[groups], most[groups], devices[groups] = self.all_units[groups], 1, 1
        new = self.root._changed(min_units=least, max_shards=most, max_devices=devices)
        new.__dict__.pop("narrowest", None)  # it follows from these
        return new

    @property
    def base(self) -> Floats:
        """Sum of the vectors (D, K) of the spread pieces that each device holds."""
        return np.broadcast_to(self._base, (self.devices, self.vectors.shape[1]))

    def with_spread(self, groups: Ints, places: Ints) -> "Problem | None":
        """The same problem with these table groups spread, each at its place, and no others; None if a device has no room for its
        pieces, or if a plan would have nothing but copies."""
        root = self.root
        if not len(groups):
            return root
        load, order = root.options.load(groups, places), np.argsort(groups, kind="stable")
        whole, ways = root.whole.copy(), root.options.way_of[places]
        copied = groups[ways == root.options.copied]
        memory = root.memory - load.nbytes - root.kept_beside_blocks * (len(copied) < len(groups))
        if memory.min() < 0 or (len(copied) == len(whole) and not self.mapped):
            return None
        whole[groups] = 0
        new = root._changed(spread=groups[order], places=places[order], memory=memory, whole=whole)
        new.root = root
        if any(root.options.kinds[way].sharding.over_domains for way in set(ways.tolist())):
            new.model = sending_more(root.model, load.more)
        new._base, new.base_dims = load.vectors + root._base, load.dims + root.base_dims
        new.mean_columns = float(new.dims[whole].sum()) / new.devices + float(new.base_dims.mean())
        if len(copied):
            new.copies_ms = root._copies_ms(copied)
        return new

    def with_base(self, vectors: Floats) -> "Problem":
        """The same problem, without spread tables so far, on devices that hold vectors (D, K) anyway, beside what they do."""
        return self.root._changed(_base=vectors + self.root._base)

    @property
    def has_base(self) -> bool:
        """Whether devices hold anything whatever the placed tables."""
        return bool(len(self.spread)) or self._base.size > 1

    def with_less_memory(self, nbytes: Ints) -> "Problem":
        """The same problem, without spread tables so far, on devices with so many bytes (D,) less."""
        return self.root._changed(memory=np.maximum(self.root.memory - nbytes, 0))

    def keeping_free(self, nbytes: Ints, beside_blocks: int, counts_sent: bool) -> "Problem":
        """The same problem, without spread tables so far, of the task on whose devices a search keeps so many bytes (D,) free for
        a step (`ShardingTask.keeping_free`), and some more where a table is split row-wise."""
        task = self.task.keeping_free(nbytes.tolist(), counts_sent=counts_sent)
        new = self.root._changed(task=task, kept_beside_blocks=beside_blocks)
        new.memory, new.nbytes = new._count_memory(), new._count_bytes()
        new._forget_bytes()
        if "options" in new.__dict__:
            new.options = self.root.options.counted_for(new.task)
        return new

    def _forget_bytes(self) -> None:
        """Make what follows from the bytes of shards anew when it is next needed."""
        for follows in ("narrowest", "slot_bytes", "_slot_vectors", "shard_bytes", "unit_bytes"):
            self.__dict__.pop(follows, None)

    def with_options_of(self, other: "Problem", groups: NDArray[np.bool_]) -> "Problem":
        """The same problem, without spread tables so far, in which these table groups (G,) take the bytes and have the vectors of
        `other`, a root problem of the same tables. Both have all shards priced."""
        some = groups[self.group]
        some[0] = False
        taken = self.options.with_tables_of(other.options, groups[self.options.groups])
        new = self.root._changed(
            vectors=np.where(some[:, None], other.vectors, self.root.vectors),
            nbytes=np.where(some, other.nbytes, self.root.nbytes),
            options=taken,
            _alone=np.where(self._priced & (self.group == 0), 0.0, np.nan),
        )
        new._forget_bytes()
        return new

    def without_copies(self) -> "Problem":
        """The same problem, without copies beside those that the task has."""
        if not self.may_copy:
            return self.root
        rest = {sharding: names for sharding, names in self.may.items() if not sharding.copied}
        return self.root._changed(may=rest, options=self._options(rest))

    def for_planned(self, task: ShardingTask) -> "Problem":
        """The same problem for the same task, in which no table may be copied, and perhaps none row-wise."""
        new = self.without_copies()
        if new.may_split_rows and not task.may_split_rows:
            options = SpreadOptions([], [], task, self.model, {})
            return new._changed(task=task, too_wide_for_row_wise=[], options=options)
        return new._changed(task=task)

    def _changed(self, **attributes: object) -> "Problem":
        """A copy of a root problem with other values of some attributes; a root itself. Both share their prices, whose arrays are
        made here if there are none yet."""
        self.price(self.first + self.max_units)
        new = copy.copy(self)
        new.__dict__.update(attributes, root=new, _launched_ms={})
        return new

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

    @property
    def slot_vectors(self) -> Floats | None:
        """The vector of each slot (slots, K); None until all shards are priced."""
        return self.root._slot_vectors if self._all_priced else None

    @cached_property
    def _slot_vectors(self) -> Floats:
        return self.vectors[self.slot_shards]

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
        times = self.times[shards]
        dims = dims // times
        counts = self._count[groups]
        tables = [table for group in groups.tolist() for table in self.tables[group]]
        if counts.max() > 1:
            row = np.repeat(row, counts)
            dims = np.where(counts[row] == 1, dims[row], [table.dim for table in tables])
        parts = [Part(table, table.rows, dim) for table, dim in zip(tables, dims.tolist(), strict=True)]
        vectors = finite_vectors(self.model, parts)
        if len(row) > len(shards):
            vectors = np.add.reduceat(vectors, np.flatnonzero(np.diff(row, prepend=-1)))
        return vectors * times[:, None] if self.in_equal_shards.any() else vectors

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
