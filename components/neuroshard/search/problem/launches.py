"""What the launches of a plan take beyond those of one operator and one exchange: it depends on which tables are row-wise, and
which sequences are cut.
"""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.launches import Group, operators_of
from neuroshard.core.table import Table
from neuroshard.costmodel.pricing import LaunchMs, launch_ms
from neuroshard.costmodel.protocol import CostModel, Ints

NONE: Ints = np.zeros(0, dtype=np.int64)


class LaunchCosts:
    """Of a task's table groups, on so many devices."""

    def __init__(self, table_groups: Sequence[Sequence[Table]], devices: int, model: CostModel) -> None:
        self.devices, self.model = devices, model
        tables = [(place, table) for place, group in enumerate(table_groups) for table in group]
        self.group: Ints = np.array([place for place, _ in tables])
        self.measured = operators_of(table for _, table in tables)
        outputs: dict[object, int] = {}
        operators: dict[object, int] = {}
        # of each table, where it is whole, row-wise and cut: the number of its collective and of its operator, two (T, 3)
        self.output: Ints = np.array([[outputs.setdefault(one, len(outputs)) for one in _ways(t)] for _, t in tables])
        self.operator: Ints = np.array(
            [
                [operators.setdefault((one, t.element_bytes, t.pooling), len(operators)) for one in _ways(t)]
                for _, t in tables
            ]
        )

    def of(self, row_wise: Ints, cut: Ints = NONE) -> LaunchMs:
        """Where these table groups are row-wise, these cut column-wise, and all others whole."""
        way = np.zeros(len(self.output), dtype=np.int64)
        way[np.isin(self.group, row_wise)], way[np.isin(self.group, cut)] = 1, 2
        numbers = (np.take_along_axis(each, way[:, None], axis=1).ravel() for each in (self.output, self.operator))
        outputs, operators = (int(np.count_nonzero(np.bincount(each))) for each in numbers)
        return launch_ms(self.model, self.devices, operators - self.measured, outputs - 1)

    def least(self, row_wise: Ints, may_be: Ints) -> float:
        """The least ms of a plan in which the table groups `row_wise` are so, and no others than `may_be`.

        It has the collectives and operators of every collection at least once; and of those twice that have both a table that is
        row-wise and one that cannot be.
        """
        rows, stay = np.isin(self.group, row_wise), ~np.isin(self.group, may_be)
        counts = []
        for each in (self.output, self.operator):
            whole, of_rows = each[:, 0], each[:, 1]
            counts.append(len(np.unique(whole)) + len(np.intersect1d(of_rows[rows], of_rows[stay])))
        outputs, operators = counts
        return launch_ms(self.model, self.devices, operators - self.measured, outputs - 1).total_ms


def _ways(table: Table) -> tuple[Group, Group, Group]:
    """The groups that the table is in where it is whole, row-wise and cut column-wise."""
    sequences = table.pooling == "none"
    whole, rows, cut = ("whole" if sequences else "columns", "rows", "columns")
    return (
        Group(table.module, table.weighted, sequences, whole),
        Group(table.module, table.weighted, sequences, rows),
        Group(table.module, table.weighted, sequences, cut),
    )
