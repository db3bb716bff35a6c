"""The ways to hold a table: TorchRec's sharding types, and what is true of each.

A plan has rectangles of tables on devices. `sharding_of` of core/plan.py says what these are to TorchRec. What it launches for
them, what they cost, in which order outputs come, how they are trained and what reports say of them follows from the facts here.
The shards that TorchRec gets are checked and made in client/torchrec/shards.py. docs/architecture.md says what else a new way to
hold a table needs.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from neuroshard.core.table import Table
from neuroshard.core.tiers import IN_HBM
from neuroshard.core.topology import Topology

ShardingTypeName = Literal["table-wise", "column-wise", "row-wise", "table-row-wise", "grid"]
ShardingName = ShardingTypeName | Literal["data-parallel"]  # which a rule of its own allows
Collective = Literal["reduce-scatter", "all-to-all"]


@dataclass(frozen=True)
class Sharding:
    """A sharding type: its `name` in constraints, the `words` of reports, and its name in TorchRec's plans."""

    name: ShardingName
    words: str
    torchrec: str
    splits_rows: bool = False
    # Then the outputs of all tables of a collection that run with it are permuted into order
    splits_columns: bool = False
    # Its pieces are on whole domains: sums are added up inside, and sent on. Not for sequences
    over_domains: bool = False
    copied: bool = False  # every device has all of it, and looks its own samples up
    over: str = ""  # where its row blocks lie, of so many devices, in words
    on_hosts: str = ""  # where a plan of TorchRec, which says nothing of domains, has them
    collectives: tuple[Collective, ...] = ("all-to-all",)  # of its pooled outputs, forward and, the other way, backward
    divides_means: bool = False  # of its sums the collection makes means, and divides those of all its tables
    kernel: str = IN_HBM.kernel  # TorchRec's: the fused optimizer trains it, or as `dense` the trainer's own

    def runs_as(self, *, sequences: bool) -> "Sharding":
        """The type whose operators and collectives its tables share: whole pooled tables run as uncut column-wise ones."""
        return COLUMN_WISE if self is TABLE_WISE and not sequences else self

    def trains(self, optimizer_bytes_per_row: int, topology: Topology | None) -> bool:
        """Whether TorchRec can train a table held so with this state per row. It takes the rows of a grid to be split over the
        ranks of a host; where a domain is several hosts, it fails to make the state (1.8 and 1.9: `Total volume of shards …`,
        `get_optimizer_rowwise_shard_metadata_and_global_metadata` of batched_embedding_kernel.py)."""
        several_hosts = topology is not None and topology.domain > topology.local_world_size
        in_a_grid = self.splits_rows and self.splits_columns
        return not (in_a_grid and several_hosts and optimizer_bytes_per_row)

    def __repr__(self) -> str:
        return self.name


TABLE_WISE = Sharding("table-wise", "whole", "table_wise")
COLUMN_WISE = Sharding("column-wise", "column-wise", "column_wise", splits_columns=True)
ROW_WISE = Sharding(
    "row-wise",
    "row-wise",
    "row_wise",
    splits_rows=True,
    over="over all {} devices",
    collectives=("reduce-scatter",),
    divides_means=True,
)
TABLE_ROW_WISE = Sharding(
    "table-row-wise",
    "table-row-wise",
    "table_row_wise",
    splits_rows=True,
    over_domains=True,
    over="over the devices of a domain",
    on_hosts="row-wise over the ranks of a host",
    collectives=("reduce-scatter", "all-to-all"),
    divides_means=True,
)
GRID = Sharding(
    "grid",
    "in a grid",
    "grid_shard",
    splits_rows=True,
    splits_columns=True,
    over_domains=True,
    over="in a grid, columns over domains and rows over their devices",
    on_hosts="column-wise over hosts and row-wise over their ranks",
    collectives=("reduce-scatter", "all-to-all"),
)
DATA_PARALLEL = Sharding("data-parallel", "data-parallel", "data_parallel", copied=True, collectives=(), kernel="dense")
SHARDINGS = (TABLE_WISE, COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, GRID, DATA_PARALLEL)

INPUT_ALL_TO_ALLS = 3  # of a group; one more for weights


class Group(NamedTuple):
    """Tables of one collection that run together. A collection is known by its module, weights, and being of sequences."""

    module: str
    weighted: bool
    sequences: bool
    sharding: Sharding

    @classmethod
    def of(cls, table: Table, sharding: Sharding) -> "Group":
        """The group of a table that is held so."""
        sequences = table.pooling == "none"
        return cls(table.module, table.weighted, sequences, sharding.runs_as(sequences=sequences))

    @property
    def inputs(self) -> int:
        """All-to-alls of its input in a step."""
        return 0 if self.sharding.copied else INPUT_ALL_TO_ALLS + self.weighted

    @property
    def outputs(self) -> int:
        """Collectives of its output, each way."""
        return len(self.sharding.collectives)
