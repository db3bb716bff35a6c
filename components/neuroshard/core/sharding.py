"""The ways to hold a table: TorchRec's sharding types, and what is true of each.

A plan has rectangles of tables on devices. What these are to TorchRec is found by `sharding_of` and nowhere else; what it
launches for them, what they cost, in which order outputs come, how optimizers train them and what reports call them follows from
the facts here. docs/architecture.md says what else a new way to hold a table needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask


@dataclass(frozen=True)
class Sharding:
    """A sharding type: its `name` in constraints, what TorchRec calls it, and the `words` of reports.

    Optimizers with state by the row train a table otherwise where its columns are split; copies are trained by the dense one.
    """

    name: str
    torchrec: str
    words: str
    splits_rows: bool = False
    splits_columns: bool = False
    spread: bool = False  # each device of a set has a piece: all devices, or those of one domain or of several
    over_domains: bool = False  # that set is of whole domains: sums are added up inside, and sent on to the others
    copied: bool = False  # every device has all of it, and looks its own samples up
    over: str = ""  # where its pieces lie, of so many devices, in words
    collectives: int = 1  # of its outputs, each way
    permutes: bool = False  # puts the outputs of all tables of a collection that run with it into the tables' order
    kernel: str = "fused"  # TorchRec's compute kernel

    def runs_as(self, *, sequences: bool) -> "Sharding":
        """The type whose operators and collectives its tables share: TorchRec runs whole tables as uncut column-wise ones, except
        those of sequences."""
        return COLUMN_WISE if self is TABLE_WISE and not sequences else self

    def __repr__(self) -> str:
        return self.name


TABLE_WISE = Sharding("table-wise", "table_wise", "whole")
COLUMN_WISE = Sharding("column-wise", "column_wise", "column-wise", splits_columns=True, permutes=True)
ROW_WISE = Sharding("row-wise", "row_wise", "row-wise", splits_rows=True, spread=True, over="over all {} devices")
TABLE_ROW_WISE = Sharding(
    "table-row-wise",
    "table_row_wise",
    "table-row-wise",
    splits_rows=True,
    spread=True,
    over_domains=True,
    over="over the devices of a domain",
    collectives=2,
)
GRID = Sharding(
    "grid",
    "grid_shard",
    "in a grid",
    splits_rows=True,
    splits_columns=True,
    spread=True,
    over_domains=True,
    over="in a grid, columns over domains and rows over their devices",
    collectives=2,
    permutes=True,
)
DATA_PARALLEL = Sharding(
    "data-parallel", "data_parallel", "data-parallel", spread=True, copied=True, collectives=0, kernel="dense"
)
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
