"""The operators and collectives that TorchRec runs for a plan in each step.

TorchRec runs one embedding operator for each (collection x sharding type x element type x pooling), on each device that has
tables of it; and for each (collection x sharding type) three all-to-alls of the input (how many lookups go where, their lengths,
the ids; a fourth for the weights of weighted lookups), one collective of the output forward and one backward (torchrec 1.8,
distributed/embeddingbag.py and embedding.py; counted on gloo in tests/client/test_launches.py).

Pooled outputs may be copied once more each way. Once a table of a collection is cut column-wise, the outputs of all its whole and
cut tables are put into the tables' order (`PermutePooledEmbeddingsSplit` of cw_sharding.py); those of grids always are. Where
tables of a collection have several sharding types, all its outputs are concatenated (`construct_output_kt` of embeddingbag.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

INPUT_ALL_TO_ALLS = 3  # of a group; one more for weights
COPIES = "data-parallel"  # needs no all-to-alls: every device looks its own samples up


class Group(NamedTuple):
    """Tables of one collection that have one sharding type. A collection is known by its module, and by what all its tables
    share: weights, and whether they are sequences."""

    module: str
    weighted: bool
    sequences: bool
    kind: str  # "columns", whole tables included; of sequences "whole" or "columns"; "rows", "host rows", "grid", or COPIES

    @property
    def inputs(self) -> int:
        """All-to-alls of its input in a step."""
        return INPUT_ALL_TO_ALLS + self.weighted

    @property
    def outputs(self) -> int:
        """Collectives of its output, each way: rows split inside a host are added up there, and sent on to the others."""
        return 2 if self.kind in ("host rows", "grid") else 1


@dataclass(frozen=True)
class Launches:
    """`operators` of each device (D,), forward and backward each. Of every step on every device: `outputs`, collectives forward
    and as many backward, and `inputs`, all-to-alls before the operators."""

    operators: tuple[int, ...]
    outputs: int
    inputs: int
    kinds_of_operators: int  # those of all devices together
    reordered: float  # columns of pooled outputs that are copied once more, forward and backward


def launches(task: ShardingTask, shards: Sequence[Shard]) -> Launches:
    """What is launched for these shards of the task's tables."""
    tables = {table.name: table for table in task.tables}
    of_table: dict[str, list[Shard]] = {}
    for shard in shards:
        of_table.setdefault(shard.table, []).append(shard)
    groups = {name: group_of(task, tables[name], held) for name, held in of_table.items()}
    on_device: list[set[object]] = [set() for _ in range(task.devices)]
    for shard in shards:
        table = tables[shard.table]
        on_device[shard.device].add((groups[shard.table], table.element_bytes, table.pooling))
    sends = {group for group in groups.values() if group.kind != COPIES}
    return Launches(
        operators=tuple(map(len, on_device)),
        outputs=sum(group.outputs for group in sends),
        inputs=sum(group.inputs for group in sends),
        kinds_of_operators=len(set().union(*on_device)),
        reordered=reordered_columns(
            (groups[name], tables[name].sent_columns, len(held) > 1) for name, held in of_table.items()
        ),
    )


def reordered_columns(tables: Iterable[tuple[Group, float, bool]]) -> float:
    """Columns of pooled outputs that are copied once more each way. Of each table: its group, its columns, whether it is cut."""
    collections: dict[tuple[str, bool], dict[str, float]] = {}
    cut: set[tuple[str, bool]] = set()
    for group, columns, is_cut in tables:
        if not group.sequences:
            key = group.module, group.weighted
            kinds = collections.setdefault(key, {})
            kinds[group.kind] = kinds.get(group.kind, 0.0) + columns
            if is_cut and group.kind == "columns":
                cut.add(key)
    permuted = sum(
        kinds.get("grid", 0.0) + kinds.get("columns", 0.0) * (key in cut) for key, kinds in collections.items()
    )
    concatenated = sum(sum(kinds.values()) for kinds in collections.values() if len(kinds) > 1)
    return permuted + concatenated


def group_of(task: ShardingTask, table: Table, shards: Sequence[Shard]) -> Group:
    """The group of a table with these shards. The task says whether they are copies: one on one device looks whole."""
    rows, columns = any(s.rows < table.rows for s in shards), any(s.dim < table.dim for s in shards)
    sequences = table.pooling == "none"
    if table.name in task.constraints.data_parallel:
        kind = COPIES
    elif rows:
        kind = "grid" if columns else "rows" if len(shards) == task.devices else "host rows"
    else:
        kind = "whole" if sequences and not columns else "columns"
    return Group(table.module, table.weighted, sequences, kind)


def operators_of(tables: Iterable[Table]) -> int:
    """Operators of a device with these tables if all are in one collection, as they are when compute costs are measured."""
    return len({(table.element_bytes, table.pooling, table.weighted) for table in tables})
