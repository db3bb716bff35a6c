"""What a plan's launches take beyond one operator and one all-to-all each way, and what it takes to put outputs into order: both
depend on how each table is held.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.launches import joined_again
from neuroshard.core.part import Part
from neuroshard.core.sharding import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, SHARDINGS, TABLE_WISE, Group
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.pricing import LaunchPrices, map_ms
from neuroshard.costmodel.protocol import CostModel, Floats, Ints

NONE: Ints = np.zeros(0, dtype=np.int64)
WHOLE, CUT, ROWS, COPIED = map(SHARDINGS.index, (TABLE_WISE, COLUMN_WISE, ROW_WISE, DATA_PARALLEL))
SPLITS_COLUMNS = np.array([sharding.splits_columns for sharding in SHARDINGS])


class LaunchCosts:
    """Of a task's table groups, beside the `copied` tables and the `mapped` ones, which are row-wise. With
    the pipeline none, also what the input's all-to-alls take with nothing to send. Operators of copies are part of
    `pricing.CopyPrices`.

    `pieces` are table groups that are each a shard of a cut table (`kept_cuts.py`): a plan has these cuts anyway.
    """

    def __init__(
        self,
        table_groups: Sequence[Sequence[Table]],
        copied: Sequence[Table],
        mapped: Sequence[Table],
        pieces: Collection[str],
        task: ShardingTask,
        model: CostModel,
    ) -> None:
        self.model, self.devices = model, task.devices
        self.map_ms, self.wrapped_columns = map_ms(model, task), task.joined_columns
        self.wrapped_columns += sum(joined_again(table, SHARDINGS[ROWS]) for table in mapped)
        tables = [(place, table) for place, group in enumerate(table_groups) for table in group]
        self.tables = [table for _, table in tables]
        self.group: Ints = np.array([place for place, _ in tables])
        self.columns: Floats = np.array([Part.of(table).sent_columns for table in self.tables])
        self.pieces: Ints = np.flatnonzero([group[0].name in pieces for group in table_groups])
        # of each table, and of each table group: the number of its collection of pooled tables, -1 for sequences; and of each
        # group that of its collection of sequences, -1 for pooled tables
        keys: dict[object, int] = {}
        collections = [keys.setdefault((t.module, t.weighted), len(keys)) for t in self.tables]
        of: Ints = np.array(collections, dtype=np.int64)
        pooled = np.array([table.pooling != "none" for table in self.tables])
        self.of_table: Ints = np.where(pooled, of, -1)
        self.collection, self.sequences = np.full((2, len(table_groups)), -1)
        self.collection[self.group[pooled]] = of[pooled]
        self.sequences[self.group[~pooled]] = of[~pooled]
        # outputs of these collections are concatenated, since some are those of copies
        self.joined = distinct(of[pooled & np.isin(of, [keys.get((t.module, t.weighted), -2) for t in copied])])
        self.copied_columns = sum(
            Part.of(t).sent_columns for t in copied if keys.get((t.module, t.weighted), -2) in self.joined
        )
        # of each table and sharding: columns of sequences that are copied once more
        self.joined_again: Floats = np.array([[joined_again(table, s) for s in SHARDINGS] for table in self.tables])
        outputs: dict[Group, int] = {}
        operators: dict[object, int] = {}
        # tables are alike in all that decides what runs them, so each kind of table is looked at once
        kinds: dict[object, Table] = {}
        alike = [(t.module, t.weighted, t.pooling, t.element_bytes) for t in self.tables]
        for key, table in zip(alike, self.tables, strict=True):
            kinds.setdefault(key, table)
        ways = [[Group.of(table, sharding) for sharding in SHARDINGS] for table in kinds.values()]
        number = {key: place for place, key in enumerate(kinds)}
        kind: Ints = np.array([number[key] for key in alike], dtype=np.int64)
        # of each table and sharding: numbers of its collectives and of its operator
        self.output: Ints = np.array([[outputs.setdefault(one, len(outputs)) for one in some] for some in ways])[kind]
        self.operator: Ints = np.array(
            [
                [operators.setdefault((one, t.element_bytes, t.pooling), len(operators)) for one in some]
                for some, t in zip(ways, kinds.values(), strict=True)
            ]
        )[kind]

        held = [Group.of(table, SHARDINGS[ROWS]) for table in mapped]
        self.mapped_outputs = _numbers(held, outputs)
        self.mapped_operators = _numbers(
            [(group, t.element_bytes, t.pooling) for group, t in zip(held, mapped, strict=True)], operators
        )
        self.operators = len(operators)
        # of each table, and of each mapped one: the number of its operator where all tables are in one collection
        every: dict[object, int] = {}
        self.alone, self.mapped_alone = (
            _numbers([(t.element_bytes, t.pooling, t.weighted) for t in some], every) for some in (self.tables, mapped)
        )
        self.measured = len(every)  # operators that the cost model counts in where no table is copied

        # what has outputs however the table groups are held, and their columns by number of the collectives
        fixed = [*(Group.of(table, DATA_PARALLEL) for table in copied), *held]
        self.fixed = _numbers(fixed, outputs)
        sent = [Part.of(table).sent_columns for table in (*copied, *mapped)]
        self.fixed_columns = np.bincount(self.fixed, sent, len(outputs)).astype(np.float64)
        self.inputs: Ints = np.array([group.inputs if task.exchanges_input else 0 for group in outputs])
        self.collectives: Ints = np.array([group.outputs for group in outputs])
        # whether pooled outputs of a number are of a collection: (outputs, collections)
        named = [None if one.sequences else (one.module, one.weighted) for one in outputs]
        each = dict.fromkeys(filter(None, named))
        self.of_collection: Floats = np.array([[name == one for one in each] for name in named], dtype=np.float64)

    @cached_property
    def prices(self) -> LaunchPrices:
        """Of one launch of each kind."""
        return LaunchPrices.of(self.model, self.devices)

    def of(self, held: Ints) -> Floats:
        """Ms of several plans: where the table groups are held so (N, G), numbers in SHARDINGS."""
        held[:, self.pieces] = CUT
        way, at, plan = held[:, self.group], np.arange(len(self.tables)), np.arange(len(held))[:, None]
        output, most, placed = self.output[at, way], len(self.inputs), way != COPIED

        def there(numbers: Ints, some: NDArray[np.bool_], most: int, own: Ints) -> NDArray[np.bool_]:
            """Which of these numbers (N, T) some tables of a plan have, and which are `own` of all plans: (N, most)."""
            found = np.zeros((len(held), most + 1), dtype=np.bool_)
            found[plan, np.where(some, numbers, most)] = True
            found[:, own] = True
            return found[:, :most]

        operators = there(self.operator[at, way], placed, self.operators, self.mapped_operators).sum(axis=1)
        more = operators - there(self.alone, placed, self.measured, self.mapped_alone).sum(axis=1)
        outputs = there(output, np.ones_like(placed), most, self.fixed)
        columns = np.bincount((plan * most + output).ravel(), np.tile(self.columns, len(held)), outputs.size)
        pooled: Floats = (columns.reshape(outputs.shape) + self.fixed_columns) * self.of_collection.any(axis=1)
        # outputs of cut tables are put into order, and those of a collection that has several kinds are concatenated
        permuted = (pooled * there(output, SPLITS_COLUMNS[way], most, NONE)).sum(axis=1)
        several = outputs @ self.of_collection > 1
        again = permuted + (pooled @ self.of_collection * several).sum(axis=1) + self.joined_again[at, way].sum(axis=1)
        found: Floats = self._ms(more, outputs @ self.collectives, outputs @ self.inputs, again)
        return found

    def cut(self, shards: Ints) -> bytes:
        """What these numbers of shards (G,) change in `of`: which sequences are cut, and which collections have a cut table."""
        cut = shards > 1
        sequences, collections = cut & (self.collection < 0), distinct(self.collection[cut] + 1)
        return sequences.tobytes() + collections.tobytes()

    def least_reorder_ms(self) -> float:
        """What a plan whose tables are not spread takes at least to put outputs into order, if it cuts a pooled table of a
        collection without `pieces`."""
        none = np.zeros(len(self.group), dtype=np.bool_)
        return self.prices.ms(0, 0, reordered=self._least_permuted(none, ~none)).total_ms

    def _least_permuted(self, rows: NDArray[np.bool_], stay: NDArray[np.bool_]) -> float:
        """The columns that a plan with such a cut puts into order at least: of a collection, the tables that `stay`, since they
        are called column-wise too, or the one that is cut; `rows` are row-wise."""
        pieces = self.of_table[np.isin(self.group, self.pieces)]
        free = (self.of_table >= 0) & ~np.isin(self.of_table, pieces) & ~rows
        of, columns = self.of_table[free], self.columns[free]
        least = np.full(int(of.max(initial=-1)) + 1, np.inf)
        np.minimum.at(least, of, columns)
        found = np.maximum(least, np.bincount(of, columns * stay[free], len(least)))[np.isfinite(least)]
        return float(found.min()) if len(found) else 0.0

    def least(
        self, row_wise: Ints, may_be: Ints, used: Mapping[int, Ints] = MappingProxyType({}), *, cuts: bool = False
    ) -> float:
        """The least ms of a plan in which the table groups `row_wise` are row-wise, and of the others only `may_be` can be
        spread; in which some of the groups of each `used` sharding (its number in SHARDINGS) are held so; with `cuts`
        one that cuts a pooled table of a collection without `pieces`. Infinite if there are none.

        It has the collectives and operators of every collection at least once; and of those twice that have both a table that is
        row-wise and one that cannot be. Another sharding comes in the collection where that takes least.
        """
        rows, stay = np.isin(self.group, row_wise), ~np.isin(self.group, may_be)
        outputs, operators = (
            np.concatenate([distinct(np.append(it[:, WHOLE], own)), np.intersect1d(it[rows, ROWS], it[stay, ROWS])])
            for it, own in ((self.output, self.mapped_outputs), (self.operator, self.mapped_operators))
        )
        joined = np.union1d(self.joined, np.intersect1d(self.of_table[rows], self.of_table[stay]))
        columns = self._columns_of(joined) + self.copied_columns
        more = [self._least_more(sharding, np.isin(self.group, groups), stay) for sharding, groups in used.items()]
        columns = max([columns, *(joined for _, joined in more)]) + cuts * self._least_permuted(rows, stay)
        columns += float(self.joined_again[rows, ROWS].sum())
        launched = len(operators) - self.measured, self.collectives[outputs].sum(), self.inputs[outputs].sum()
        return float(self._ms(*launched, columns)) + sum(ms for ms, _ in more)

    def permuted_ms(self, row_wise: Ints, may_be: Ints) -> tuple[float, Floats]:
        """What a plan that cuts a pooled table takes more than `least` with `cuts` for the order of its outputs, if it spreads no
        group but `row_wise`; and what each table group (G,) takes off that at most, if it is spread too."""
        rows, stay = np.isin(self.group, row_wise), ~np.isin(self.group, may_be)
        pooled = self.of_table >= 0
        more = self._least_permuted(rows, ~rows) - self._least_permuted(rows, stay)
        column_ms = self.prices.ms(0, 0, reordered=1.0).total_ms
        off: Floats = np.zeros(len(self.collection))
        np.add.at(off, self.group[pooled], column_ms * self.columns[pooled])
        return more * column_ms, off

    def _least_more(self, sharding: int, tables: NDArray[np.bool_], stay: NDArray[np.bool_]) -> tuple[float, float]:
        """What a sharding takes at least beyond the first operator and collective of each collection, in ms, and the columns that
        are put together with those of other shardings, if one of these tables has it and those that `stay` have another."""
        found = []
        for number in distinct(self.output[tables, sharding]).tolist():
            these = self.output[:, sharding] == number
            beside, operators = stay & these, self.operator[:, sharding]
            count, alone = int(self.collectives[number]), not beside.any()
            one_more = np.isin(operators[tables & these], operators[beside]).all()
            launched = (
                self.prices.ms(0, count - 1)
                if alone
                else self.prices.ms(int(one_more), count, int(self.inputs[number]))
            )
            again = self.prices.ms(0, 0, reordered=float(self.joined_again[tables & these, sharding].min())).total_ms
            found.append((launched.total_ms + again, self._columns_of(distinct(self.of_table[beside] + 1) - 1)))
        return min((ms for ms, _ in found), default=np.inf), min((columns for _, columns in found), default=0.0)

    def _columns_of(self, collections: Ints) -> float:
        """Columns of the pooled tables of these collections."""
        return float(self.columns[np.isin(self.of_table, collections[collections >= 0])].sum())

    def _ms(self, operators: Any, outputs: Any, inputs: Any, reordered: Any) -> Any:
        """Of so many operators beyond those measured, collectives each way, all-to-alls of the input, and columns put into order;
        and what tables by access take of every device. Numbers, or arrays of some for each of several plans."""
        launched = self.prices.ms(operators, np.maximum(outputs - 1, 0), inputs, reordered + self.wrapped_columns)
        return launched.total_ms + self.map_ms


def _numbers(keys: Iterable[Hashable], known: dict[Any, int]) -> Ints:
    """The number of each key, a new one of those that are not `known` yet."""
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def distinct(numbers: Ints) -> Ints:
    """Each of some small numbers once, in order. np.unique would first load numpy.ma, half of the time to a first plan."""
    found: Ints = np.flatnonzero(np.bincount(numbers.ravel()))
    return found
