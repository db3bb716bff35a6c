"""What a plan's launches take beyond one operator and one all-to-all each way, and what it takes to put outputs into order: both
depend on which tables are row-wise, over which devices, and which are cut.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from neuroshard.core.launches import Group, operators_of, reordered_columns
from neuroshard.core.sharding import COLUMN_WISE, GRID, ROW_WISE, TABLE_ROW_WISE, TABLE_WISE
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import Table
from neuroshard.costmodel.pricing import LaunchMs, LaunchPrices
from neuroshard.costmodel.protocol import CostModel, Ints
from neuroshard.search.problem.row_blocks import EVERYWHERE

NONE: Ints = np.zeros(0, dtype=np.int64)
WHOLE, OVER_ALL, CUT, OVER_DOMAIN, IN_GRID = range(5)
HELD = (TABLE_WISE, ROW_WISE, COLUMN_WISE, TABLE_ROW_WISE, GRID)  # the ways that a table can be sharded


class LaunchCosts:
    """Of a task's table groups, on so many devices. With the pipeline none, also what the input's all-to-alls take
    with nothing to send.

    `pieces` are table groups that are each a shard of a cut table (`kept_cuts.py`): a plan has these cuts anyway.
    """

    def __init__(
        self, table_groups: Sequence[Sequence[Table]], devices: int, model: CostModel, pipeline: Pipeline | None
    ) -> None:
        self.model, self.devices = model, devices
        tables = [(place, table) for place, group in enumerate(table_groups) for table in group]
        self.group: Ints = np.array([place for place, _ in tables])
        self.ways = [tuple(Group.of(table, sharding) for sharding in HELD) for _, table in tables]
        self.columns = [table.sent_columns for _, table in tables]
        self.pieces: Ints = NONE
        # of each table, and of each table group: the number of its collection of pooled tables, -1 for sequences; and of each
        # group that of its collection of sequences, -1 for pooled tables
        keys: dict[object, int] = {}
        of: Ints = np.array([keys.setdefault((t.module, t.weighted), len(keys)) for _, t in tables], dtype=np.int64)
        pooled = np.array([table.pooling != "none" for _, table in tables])
        self.of_table: Ints = np.where(pooled, of, -1)
        self.collection, self.sequences = np.full((2, len(table_groups)), -1)
        self.collection[self.group[pooled]] = of[pooled]
        self.sequences[self.group[~pooled]] = of[~pooled]
        self.measured = operators_of(table for _, table in tables)
        outputs: dict[Group, int] = {}
        operators: dict[object, int] = {}
        # of each table and way: numbers of its collectives and of its operator
        self.output: Ints = np.array([[outputs.setdefault(one, len(outputs)) for one in ways] for ways in self.ways])
        self.operator: Ints = np.array(
            [
                [operators.setdefault((one, t.element_bytes, t.pooling), len(operators)) for one in ways]
                for ways, (_, t) in zip(self.ways, tables, strict=True)
            ]
        )

        self.inputs: Ints = np.array([group.inputs if pipeline == "none" else 0 for group in outputs])
        self.collectives: Ints = np.array([group.outputs for group in outputs])

    @cached_property
    def prices(self) -> LaunchPrices:
        """Of one launch of each kind."""
        return LaunchPrices.of(self.model, self.devices)

    def of(self, row_wise: Ints, domains: Ints, cut: Ints = NONE) -> LaunchMs:
        """Where these table groups are row-wise, each over its domain, these cut column-wise, and all others whole."""
        of_group = np.full(len(self.collection), WHOLE)
        of_group[row_wise] = OVER_ALL
        of_group[cut], of_group[self.pieces] = CUT, CUT
        of_group[row_wise[domains >= 0]] = OVER_DOMAIN
        of_group[row_wise[domains < EVERYWHERE]] = IN_GRID
        way = of_group[self.group]
        outputs, operators = (distinct(each[np.arange(len(way)), way]) for each in (self.output, self.operator))
        each = zip(self.ways, self.columns, way.tolist(), strict=True)
        return self._ms(
            len(operators), outputs, reordered_columns((of[at], n, HELD[at].permutes) for of, n, at in each)
        )

    def cut(self, shards: Ints) -> bytes:
        """What these numbers of shards (G,) change in `of`: which sequences are cut, and which collections have a cut table."""
        cut = shards > 1
        sequences, collections = cut & (self.collection < 0), distinct(self.collection[cut] + 1)
        return sequences.tobytes() + collections.tobytes()

    def least_reorder_ms(self) -> float:
        """What a plan takes at least to put outputs into order, if it cuts a pooled table of a collection without `pieces`."""
        free = (self.of_table >= 0) & ~np.isin(self.of_table, self.of_table[np.isin(self.group, self.pieces)])
        numbers, of = distinct(self.of_table[free]), self.of_table[free]
        columns = np.bincount(of, np.array(self.columns)[free])[numbers]
        least = float(columns.min(initial=np.inf)) if len(columns) else 0.0
        return self.prices.ms(0, 0, reordered=least).total_ms

    def least(self, row_wise: Ints, may_be: Ints) -> float:
        """The least ms of a plan in which the table groups `row_wise` are row-wise, and of the others only `may_be` can be.

        It has the collectives and operators of every collection at least once; and of those twice that have both a table that is
        row-wise and one that cannot be.
        """
        rows, stay = np.isin(self.group, row_wise), ~np.isin(self.group, may_be)
        outputs, operators = (
            np.concatenate([distinct(each[:, WHOLE]), np.intersect1d(each[rows, OVER_ALL], each[stay, OVER_ALL])])
            for each in (self.output, self.operator)
        )
        return self._ms(len(operators), outputs).total_ms

    def _ms(self, operators: int, outputs: Ints, reordered: float = 0.0) -> LaunchMs:
        """Of so many operators, the collectives with these numbers, and so many columns put into order."""
        inputs = int(self.inputs[outputs].sum())
        count = int(self.collectives[outputs].sum())
        return self.prices.ms(operators - self.measured, count - 1, inputs, reordered)


def distinct(numbers: Ints) -> Ints:
    """Each of some small numbers once, in order. np.unique would first load numpy.ma, half of the time to a first plan."""
    found: Ints = np.flatnonzero(np.bincount(numbers.ravel()))
    return found
