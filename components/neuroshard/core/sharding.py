"""The ways to hold a table: TorchRec's sharding types, and what is true of each.

A plan has rectangles of tables on devices. `sharding_of` says what these are to TorchRec. What it launches for them, what they
cost and in which order outputs come follows from the facts here. The shards that TorchRec gets are checked, and classified, in
client/torchrec_shards.py. docs/architecture.md says what else a new way to hold a table needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from neuroshard.core.constraints import ShardingName
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask


@dataclass(frozen=True)
class Sharding:
    """A sharding type: its `name` in constraints, and the `words` of reports."""

    name: ShardingName
    words: str
    splits_rows: bool = False
    over_domains: bool = False  # its pieces are on whole domains: sums are added up inside, and sent on to the others
    copied: bool = False  # every device has all of it, and looks its own samples up
    over: str = ""  # where its row blocks lie, of so many devices, in words
    collectives: int = 1  # of its outputs, each way
    permutes: bool = False  # puts the outputs of all tables of a collection that run with it into the tables' order

    def runs_as(self, *, sequences: bool) -> "Sharding":
        """The type whose operators and collectives its tables share: TorchRec runs whole tables as uncut column-wise ones, except
        those of sequences."""
        return COLUMN_WISE if self is TABLE_WISE and not sequences else self

    def __repr__(self) -> str:
        return self.name


TABLE_WISE = Sharding("table-wise", "whole")
COLUMN_WISE = Sharding("column-wise", "column-wise", permutes=True)
ROW_WISE = Sharding("row-wise", "row-wise", splits_rows=True, over="over all {} devices")
TABLE_ROW_WISE = Sharding(
    "table-row-wise",
    "table-row-wise",
    splits_rows=True,
    over_domains=True,
    over="over the devices of a domain",
    collectives=2,
)
GRID = Sharding(
    "grid",
    "in a grid",
    splits_rows=True,
    over_domains=True,
    over="in a grid, columns over domains and rows over their devices",
    collectives=2,
    permutes=True,
)
DATA_PARALLEL = Sharding("data-parallel", "data-parallel", copied=True, collectives=0)
SHARDINGS = (TABLE_WISE, COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, GRID, DATA_PARALLEL)


def sharding_of(task: ShardingTask, table: Table, shards: Sequence[Shard]) -> Sharding:
    """What these shards of a table are. The task says whether they are copies: one on one device looks whole."""
    if table.name in task.constraints.data_parallel:
        return DATA_PARALLEL
    rows, columns = any(s.rows < table.rows for s in shards), any(s.dim < table.dim for s in shards)
    if not rows:
        return COLUMN_WISE if columns else TABLE_WISE
    if columns:
        return GRID
    return ROW_WISE if len(shards) == task.devices else TABLE_ROW_WISE
