"""The placement as columns: devices with their costs and memory, tables, and their shards."""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.plan import Plan, host_memory, shard_memory
from neuroshard.costmodel.pricing import Prices
from neuroshard.costmodel.protocol import Ints
from neuroshard.report.evaluated import Evaluated
from neuroshard.report.numbers import Columns, row_wise_tables, short

MOST_SHARDS = 20_000  # in a page: about 60 bytes each, as many as a browser can draw


def device_columns(plan: Plan, live_ms: Sequence[float] | None) -> Columns:
    """A value for each device. Costs are predicted ms, memory is exact bytes; `live_ms` is of the live plan's devices."""
    memory, caches = plan.device_memory(), _caches(plan)
    columns: Columns = {
        "shards": list(plan.shards_by_device()),
        "memory": [device.total for device in memory],
        "weights": [device.weights - cache for device, cache in zip(memory, caches, strict=True)],
        **({"caches": caches} if any(caches) else {}),
        "optimizer": [device.optimizer for device in memory],
        **({"maps": [device.maps for device in memory]} if any(device.maps for device in memory) else {}),
        "step": [device.step for device in memory],
        "limit": list(plan.task.usable_bytes),
    }
    if plan.predicted:
        columns["compute"] = short(cost.compute_ms for cost in plan.predicted)
        columns["forward"] = short(cost.forward_collective_ms for cost in plan.predicted)
        columns["backward"] = short(cost.backward_collective_ms for cost in plan.predicted)
        if any(cost.averaging_ms for cost in plan.predicted):
            columns["averaging"] = short(cost.averaging_ms for cost in plan.predicted)
    if plan.predicted_ms:
        columns["total"] = short(plan.predicted_ms)
    if live_ms is not None:
        columns["live"] = short(live_ms)
    return columns


def _caches(plan: Plan) -> list[int]:
    """Bytes of the caches on each device."""
    beyond, caches = plan.parted.constraints.beyond_hbm, [0] * plan.task.devices
    if beyond:
        for shard, memory in zip(plan.shards, shard_memory(plan.held, plan.shards), strict=True):
            caches[shard.device] += memory.weights if shard.table in beyond else 0
    return caches


def evaluated_columns(plan: Plan, evaluated: Evaluated) -> Columns:
    """A value for each device: measured ms, None where measuring failed, and the same part of the predicted ms."""
    measured = [None if ms is None else short([ms])[0] for ms in evaluated.ms()]
    return {"measured": measured, "predicted": short(evaluated.predicted_ms(plan)) or [None] * len(measured)}


def table_columns(plan: Plan, prices: Prices | None) -> Columns:
    """A value for each table, or part of one held in two, in the order of the task.

    `count`, `rowWise` and `bytes` are of the table's shards, `adds` is their predicted ms of compute. `devices` are ranges of
    devices, as pairs of the first and the last. Where some are beyond HBM, `tier` is each one's, `cached` its cached rows or
    null, and `host` its bytes of host memory.
    """
    tables = plan.parted.tables
    shards, row_wise = plan.by_table(), row_wise_tables(plan)
    nbytes = dict.fromkeys(shards, 0)
    for shard, memory in zip(plan.shards, shard_memory(plan.held, plan.shards), strict=True):
        nbytes[shard.table] += memory.total
    columns: Columns = {
        "name": [table.name for table in tables],
        "rows": [table.rows for table in tables],
        "dim": [table.dim for table in tables],
        "pooling": short(table.pooling_factor for table in tables),
        "element": [table.element_bytes for table in tables],
        "count": [len(shards[table.name]) for table in tables],
        "rowWise": [table.name in row_wise for table in tables],
        "bytes": list(nbytes.values()),
        "devices": [_spans({shard.device for shard in shards[table.name]}) for table in tables],
    }
    if beyond := plan.parted.constraints.beyond_hbm:
        columns["tier"] = [beyond[table.name].tier if table.name in beyond else "hbm" for table in tables]
        columns["cached"] = [beyond[table.name].cached_rows if table.name in beyond else None for table in tables]
        columns["host"] = [sum(host_memory(plan.held, shards[table.name])) for table in tables]
    if prices is not None:
        columns["adds"] = short(np.bincount(_places(plan), weights=prices.adds_ms, minlength=len(tables)))
    return columns


def shard_columns(plan: Plan, prices: Prices | None) -> tuple[Columns, Columns | None]:
    """A value for each shard; and where there are more than MOST_SHARDS, the sums of the smaller ones on each device.

    `table` is the index of the shard's table. `alone` and `adds` are predicted ms of compute.
    """
    place, nbytes = _places(plan), [memory.total for memory in shard_memory(plan.held, plan.shards)]
    listed = sorted(sorted(range(len(nbytes)), key=lambda shard: -nbytes[shard])[:MOST_SHARDS])
    shards = [plan.shards[shard] for shard in listed]
    columns: Columns = {
        "table": [place[shard] for shard in listed],
        "device": [shard.device for shard in shards],
        "column": [shard.column_offset for shard in shards],
        "dim": [shard.dim for shard in shards],
        "row": [shard.row_offset for shard in shards],
        "rows": [shard.rows for shard in shards],
        "bytes": [nbytes[shard] for shard in listed],
    }
    if prices is not None:
        columns |= {"alone": short(prices.alone_ms[listed]), "adds": short(prices.adds_ms[listed])}
    others = np.delete(np.arange(len(nbytes)), listed)
    return columns, _in_sum(plan, others, nbytes, prices) if len(others) else None


def _in_sum(plan: Plan, shards: Ints, nbytes: Sequence[int], prices: Prices | None) -> Columns:
    """A value for each device with any of these shards: their count, their bytes, and their mean columns and predicted ms."""
    on = np.array([plan.shards[shard].device for shard in shards.tolist()])
    devices, device, count = np.unique(on, return_inverse=True, return_counts=True)
    size = [0] * len(devices)
    for place, shard in zip(device.tolist(), shards.tolist(), strict=True):
        size[place] += nbytes[shard]
    dims = np.array([plan.shards[shard].dim for shard in shards.tolist()])
    columns: Columns = {"device": devices.tolist(), "count": count.tolist(), "bytes": size}
    columns["dim"] = short(np.bincount(device, weights=dims) / count)
    if prices is not None:
        columns["adds"] = short(np.bincount(device, weights=prices.adds_ms[shards]) / count)
    return columns


def _places(plan: Plan) -> list[int]:
    """The index of each shard's table."""
    place = {table.name: index for index, table in enumerate(plan.parted.tables)}
    return [place[shard.table] for shard in plan.shards]


def _spans(devices: set[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for device in sorted(devices):
        first = spans.pop()[0] if spans and spans[-1][1] == device - 1 else device
        spans.append((first, device))
    return spans
