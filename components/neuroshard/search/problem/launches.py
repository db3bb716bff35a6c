"""What the launches of a plan take beyond those of one operator and one exchange: it depends on which tables are row-wise, over
which devices, and which sequences are cut.
"""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.launches import Group, operators_of
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import Table
from neuroshard.costmodel.pricing import LaunchMs, launch_ms
from neuroshard.costmodel.protocol import CostModel, Ints
from neuroshard.search.problem.row_blocks import EVERYWHERE

NONE: Ints = np.zeros(0, dtype=np.int64)


class LaunchCosts:
    """Of a task's table groups, on so many devices. With the pipeline none, also what the input's all-to-alls take
    with nothing to send."""

    def __init__(
        self, table_groups: Sequence[Sequence[Table]], devices: int, model: CostModel, pipeline: Pipeline | None
    ) -> None:
        self.devices, self.model = devices, model
        tables = [(place, table) for place, group in enumerate(table_groups) for table in group]
        self.group: Ints = np.array([place for place, _ in tables])
        self.measured = operators_of(table for _, table in tables)
        outputs: dict[Group, int] = {}
        operators: dict[object, int] = {}
        # of each table, where it is whole, row-wise, cut, table-row-wise, in a grid: numbers of its collectives and its operator
        self.output: Ints = np.array([[outputs.setdefault(one, len(outputs)) for one in _ways(t)] for _, t in tables])
        self.operator: Ints = np.array(
            [
                [operators.setdefault((one, t.element_bytes, t.pooling), len(operators)) for one in _ways(t)]
                for _, t in tables
            ]
        )

        self.inputs: Ints = np.array([group.inputs if pipeline == "none" else 0 for group in outputs])
        self.collectives: Ints = np.array([group.outputs for group in outputs])

    def of(self, row_wise: Ints, domains: Ints, cut: Ints = NONE) -> LaunchMs:
        """Where these table groups are row-wise, each over its domain, these cut column-wise, and all others whole."""
        way = np.zeros(len(self.output), dtype=np.int64)
        way[np.isin(self.group, row_wise)], way[np.isin(self.group, cut)] = 1, 2
        way[np.isin(self.group, row_wise[domains >= 0])] = 3
        way[np.isin(self.group, row_wise[domains < EVERYWHERE])] = 4
        outputs, operators = (
            distinct(np.take_along_axis(each, way[:, None], axis=1)) for each in (self.output, self.operator)
        )
        return self._ms(len(operators), outputs)

    def least(self, row_wise: Ints, may_be: Ints) -> float:
        """The least ms of a plan in which the table groups `row_wise` are so, and no others than `may_be`.

        It has the collectives and operators of every collection at least once; and of those twice that have both a table that is
        row-wise and one that cannot be.
        """
        rows, stay = np.isin(self.group, row_wise), ~np.isin(self.group, may_be)
        outputs, operators = (
            np.concatenate([distinct(each[:, 0]), np.intersect1d(each[rows, 1], each[stay, 1])])
            for each in (self.output, self.operator)
        )
        return self._ms(len(operators), outputs).total_ms

    def _ms(self, operators: int, outputs: Ints) -> LaunchMs:
        """Of so many operators, and the collectives with these numbers."""
        inputs = int(self.inputs[outputs].sum())
        count = int(self.collectives[outputs].sum())
        return launch_ms(self.model, self.devices, operators - self.measured, count - 1, inputs)


def distinct(numbers: Ints) -> Ints:
    """Each of some small numbers once, in order. np.unique would first load numpy.ma, half of the time to a first plan."""
    found: Ints = np.flatnonzero(np.bincount(numbers.ravel()))
    return found


def _ways(table: Table) -> tuple[Group, ...]:
    """The groups that the table is in where it is whole, row-wise, cut column-wise, table-row-wise, and in a grid."""
    sequences = table.pooling == "none"
    whole, rows, cut = ("whole" if sequences else "columns", "rows", "columns")
    return (
        Group(table.module, table.weighted, sequences, whole),
        Group(table.module, table.weighted, sequences, rows),
        Group(table.module, table.weighted, sequences, cut),
        Group(table.module, table.weighted, sequences, "host rows"),
        Group(table.module, table.weighted, sequences, "grid"),
    )
