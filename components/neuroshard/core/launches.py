"""The operators and collectives that TorchRec runs for a plan in each step.

TorchRec runs one embedding operator for each (collection x sharding type x element type x pooling), on each device that has
tables of it, and one for each cached table, whose cache is its own (client/torchrec/tiers.py); and for each (collection x
sharding type) three all-to-alls of the input (how many lookups go where, their lengths, the ids; a fourth for the weights of
weighted lookups), one collective of the output forward and one backward (torchrec 1.8, distributed/embeddingbag.py and
embedding.py; counted on gloo in tests/client/test_launches.py).

Outputs may be copied once more each way. Those of sequences always are, and again where they are cut (`joined_again`). Pooled:
once a table of a collection is cut column-wise, those of all its whole and cut tables are put into order
(`PermutePooledEmbeddingsSplit` of cw_sharding.py); those of grids always are. Of several sharding types in a collection, all are
concatenated (`construct_output_kt`). The wrapper of tables by access joins its outputs (client/rows/), and a copied hot part is
an operator of its own, as any copy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neuroshard.core.part import Part
from neuroshard.core.plan import Shard, shardings_in
from neuroshard.core.sharding import Group, Sharding
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask


@dataclass(frozen=True)
class Launches:
    """`operators` of each device (D,), forward and backward each. Of every step on every device: `outputs`, collectives forward
    and as many backward, and `inputs`, all-to-alls before the operators."""

    operators: tuple[int, ...]
    outputs: int
    inputs: int
    kinds_of_operators: int  # of all devices together, as if cached tables shared operators with others of their group
    reordered: float  # columns of outputs that are copied once more, forward and backward


def launches(task: ShardingTask, shards: Sequence[Shard]) -> Launches:
    """What is launched for these shards of the task's tables."""
    task = task.parted
    tables = {table.name: table for table in task.tables}
    held = shardings_in(task, shards)
    groups = {name: Group.of(tables[name], sharding) for name, sharding in held.items()}
    on_device: list[set[object]] = [set() for _ in range(task.devices)]
    kinds: set[object] = set()
    beyond = task.constraints.beyond_hbm
    for shard in shards:
        table = tables[shard.table]
        kind = groups[shard.table], table.element_bytes, table.pooling
        kinds.add(kind)
        has_cache = table.name in beyond and beyond[table.name].in_tier.cached
        on_device[shard.device].add((*kind, table.name) if has_cache else kind)
    distinct = set(groups.values())
    return Launches(
        operators=tuple(map(len, on_device)),
        outputs=sum(group.outputs for group in distinct),
        inputs=sum(group.inputs for group in distinct),
        kinds_of_operators=len(kinds),
        reordered=task.joined_columns
        + reordered_columns(
            (groups[name], Part.of(tables[name]).sent_columns, sharding.splits_columns)
            for name, sharding in held.items()
        )
        + sum(joined_again(tables[name], sharding) for name, sharding in held.items()),
    )


def joined_again(table: Table, sharding: Sharding) -> float:
    """Columns of a sequence that its sharding type has copied once more each way: what row blocks send, into the order of lookups
    (`SequenceEmbeddingsAllToAll`); column shards to be joined, repeats too (`construct_jagged_tensors`)."""
    if table.pooling != "none" or sharding.copied:
        return 0.0
    return sharding.splits_rows * Part.of(table).sent_columns + sharding.splits_columns * table.every_lookup * table.dim


def reordered_columns(tables: Iterable[tuple[Group, float, bool]]) -> float:
    """Columns of pooled outputs that are copied once more each way. Of each table: its group, columns, whether they are split."""
    collections: dict[tuple[str, bool], dict[Sharding, float]] = {}
    permuting: set[Group] = set()
    for group, columns, split in tables:
        if not group.sequences:
            of_type = collections.setdefault((group.module, group.weighted), {})
            of_type[group.sharding] = of_type.get(group.sharding, 0.0) + columns
            if split:
                permuting.add(group)
    permuted = sum(collections[group.module, group.weighted][group.sharding] for group in permuting)
    concatenated = sum(sum(of_type.values()) for of_type in collections.values() if len(of_type) > 1)
    return permuted + concatenated


def operators_of(tables: Iterable[Table]) -> int:
    """Operators of a device with these tables if all are in one collection, as they are when compute costs are measured."""
    return len({(table.element_bytes, table.pooling, table.weighted) for table in tables})
