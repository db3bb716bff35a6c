"""The rule of HugeCTR's DLRM sample for several nodes (`hier_auto`), written anew: samples/dlrm/sharding/planner.py there.

Tables below a size are data-parallel. The others are dealt out to nodes, those of most work first, each to the node of least
work; all devices of a node share its tables row-wise. Then the table of most work is split over twice as many nodes, and all are
dealt out again, 20 times.

The rule takes the deal that its own two constants say is cheapest. Here each deal is a plan to be priced, so the caller may take
the cheapest by a better cost model. HugeCTR's tables have one width, so work is counted in columns here. Its tables over
several nodes have row blocks on all their devices; TorchRec's nearest type is a grid, which sends less.
"""

from collections.abc import Iterator

from neuroshard.core.plan import Shard, device_memory
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask

COPIED_BYTES = (
    0.0125 * 2**30
)  # of weights, below which NVIDIA's runs of MLPerf copy a table (config_DGXH100_8x8x2112.sh)
WORK_RATIO = 4.0  # of communication and memory: the sample's default
DEALS = 20


def plans(
    task: ShardingTask, memory_bytes_per_s: float, copied_bytes: float
) -> Iterator[tuple[ShardingTask, list[Shard]]]:
    """The plans of the rule that fit, with the task that they are plans of: tables below `copied_bytes` are copied."""
    assert task.topology is not None
    assert task.topology.network_bytes_per_s is not None
    small = [table.name for table in task.tables if table.rows * table.dim * table.element_bytes < copied_bytes]
    if small:
        task = task.with_copies(small)
    dealt = [table for table in task.tables if table.name not in small]
    a_shard = memory_bytes_per_s / task.topology.network_bytes_per_s / WORK_RATIO
    nodes, ways = task.topology.domains(task.devices), {table.name: 1 for table in dealt}
    copies = [
        Shard(table=table.name, rows=table.rows, dim=table.dim, device=device)
        for table in task.tables
        if table.name in small
        for device in range(task.devices)
    ]
    for _ in range(DEALS):
        shards = copies + _deal(dealt, ways, nodes, task.devices, a_shard)
        used = device_memory(task, shards)
        if all(memory.total <= have for memory, have in zip(used, task.usable_bytes, strict=True)):
            yield task, shards
        may = [table for table in dealt if _more_ways(table, ways[table.name], nodes)]
        if not may:
            return
        hot = max(may, key=lambda table: _work(table, ways[table.name], 0.0))
        ways[hot.name] = _more_ways(hot, ways[hot.name], nodes)


def _work(table: Table, ways: int, a_shard: float) -> float:
    """Of a node that has one of so many parts of a table: lookups, and what a part adds however small it is, in columns."""
    return table.dim * (table.pooling_factor / ways + a_shard)


def _more_ways(table: Table, ways: int, nodes: int) -> int:
    """Twice as many nodes, if a grid can have as many parts; all nodes always, row-wise; 0 if it is on all already."""
    if ways == nodes:
        return 0
    return ways * 2 if ways * 2 < nodes and table.dim % (ways * 2 * DIM_STEP) == 0 else nodes


def _deal(tables: list[Table], ways: dict[str, int], nodes: int, devices: int, a_shard: float) -> list[Shard]:
    each, work, shards = devices // nodes, [0.0] * nodes, list[Shard]()
    for table in sorted(tables, key=lambda t: -_work(t, ways[t.name], 0.0)):
        parts = ways[table.name]
        on = sorted(sorted(range(nodes), key=work.__getitem__)[:parts])
        for node in on:
            work[node] += _work(table, parts, a_shard)
        whole = not table.has_rows_for(each)
        if whole:
            shards.append(Shard(table=table.name, rows=table.rows, dim=table.dim, device=on[0] * each))
            continue
        if parts == nodes and table.has_rows_for(devices):
            shards += _rows(table, 0, table.dim, range(devices))
            continue
        width = table.dim // parts if table.dim % (parts * DIM_STEP) == 0 else table.dim
        for place, node in enumerate(on[: table.dim // width]):
            shards += _rows(table, place * width, width, range(node * each, (node + 1) * each))
    return shards


def _rows(table: Table, offset: int, width: int, devices: range) -> list[Shard]:
    blocks = zip(devices, table.row_blocks(len(devices)), strict=True)
    return [
        Shard(table=table.name, row_offset=first, rows=rows, column_offset=offset, dim=width, device=device)
        for device, (first, rows) in blocks
    ]
