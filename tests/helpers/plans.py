"""Small valid plans."""

from datetime import UTC, datetime

from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

NOW = datetime(2025, 11, 20, 12, 0, 0, tzinfo=UTC)  # when plans are deployed
TABLES = (
    Table(name="user", rows=1000, dim=16, pooling_factor=2.5),
    Table(name="item", rows=300, dim=8, pooling_factor=1),
    Table(name="country", rows=7, dim=4, pooling_factor=1),
)


def make_plan(note: str = "", devices: int = 2, memory_bytes: int = 2**20, tables: tuple[Table, ...] = TABLES) -> Plan:
    """The first table's columns dealt out in fours, from the last device on; the others whole, table i on device i."""
    first, *others = tables
    split = [
        Shard(table=first.name, rows=first.rows, column_offset=4 * i, dim=4, device=-1 - i % devices + devices)
        for i in range(first.dim // 4)
    ]
    whole = [Shard(table=t.name, rows=t.rows, dim=t.dim, device=i % devices) for i, t in enumerate(others, 1)]
    return Plan(
        task=ShardingTask(tables=tables, device_memory_bytes=(memory_bytes,) * devices, batch_size=64),
        shards=(*split, *whole),
        predicted_ms=(1.5,) * devices,
        provenance=Provenance(neuroshard_version="0", algorithm="by hand", notes=(note,)),
    )


def row_wise(table: Table, devices: int) -> tuple[Shard, ...]:
    """Shards of a table over all devices, as far as it has rows for them."""
    return tuple(
        Shard(table=table.name, row_offset=first, rows=rows, dim=table.dim, device=device)
        for device, (first, rows) in enumerate(table.row_blocks(devices))
        if rows
    )


def row_plan(devices: int = 2) -> Plan:
    """The first table's rows over all devices, the second's columns in two, the third whole on the last device."""
    columns = [Shard(table="item", rows=300, column_offset=4 * i, dim=4, device=i % devices) for i in (0, 1)]
    whole = Shard(table="country", rows=7, dim=4, device=devices - 1)
    return Plan(
        task=ShardingTask(tables=TABLES, device_memory_bytes=(2**20,) * devices, batch_size=64),
        shards=(*row_wise(TABLES[0], devices), *columns, whole),
        provenance=Provenance(neuroshard_version="0", algorithm="by hand"),
    )
