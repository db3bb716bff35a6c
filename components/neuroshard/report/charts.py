"""What the page of a plan draws and lists: columns of devices, tables, shards and the rest, and the charts that show them.

The charts are those of page/charts.json, in which `$word` is a word or number of this plan, and a colour `--name` one of
page/style.css.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from neuroshard.core.constraints import TableRule
from neuroshard.core.cost import Costs
from neuroshard.core.part import Memory
from neuroshard.core.plan import Plan, shard_memory
from neuroshard.costmodel.pricing import Prices
from neuroshard.costmodel.protocol import CostModel, Ints
from neuroshard.report.live import PlanChange
from neuroshard.report.numbers import Columns, measured, row_wise_tables, short
from neuroshard.report.page import charts
from neuroshard.report.trust import Evaluated, curves, error_columns, points

MOST_SHARDS = 20_000  # in a page: about 60 bytes each, as many as a browser can draw
DEVICES_NAMED = 8  # of a table, in its line of the list
HOSTS_NAMED = 8  # in a chart: more would overlap on a phone
BAR_HEIGHT = 27
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
COSTS = ("compute", "forward all-to-all", "backward all-to-all", "averaging replicas")
MEMORY = ("weights", "caches", "optimizer state", "id maps", "inputs and outputs of a step")


def chart_data(
    plan: Plan,
    changed: PlanChange | None,
    evaluated: Evaluated | None,
    prices: Prices | None,
    model: CostModel | None,
    costs: Costs | None,
) -> dict[str, Any]:
    """`sets`, columns by name, of which every chart takes what it names, and `charts`, some with `sets` of their own."""
    manifest = None if model is None else model.manifest
    sets = _sets(plan, changed, prices)
    errors = sets["errors"] = {"what": []} if manifest is None else error_columns(manifest.report)
    found = charts("charts.json", _words(plan, sets))
    empty = {name for name, columns in sets.items() if not any(columns.values())}
    for chart in found.values():  # Vega-Lite warns of layers without rows
        layers = [(one, one.get("data", chart.get("data", {})).get("name")) for one in chart.get("layer", ())]
        chart |= {"layer": [one for one, rows in layers if rows not in empty]} if layers else {}
    found["bars"]["height"] = BAR_HEIGHT * len(sets["bars"]["name"])
    found["errors"]["height"] = BAR_HEIGHT * len(errors["what"])
    unknown = {"tier"} - sets["tables"].keys() | (set() if prices else {"addsText", "aloneText"})
    block = found["map"]["encoding"]
    block["tooltip"] = [each for each in block["tooltip"] if each["field"] not in unknown]
    if changed is not None and changed.live_ms is not None:
        devices = sets["devices"]
        both = {"live plan": devices["live"], "this plan": devices.get("total", [None] * len(devices["live"]))}
        found["before"] = _between(both, "ms a step, predicted")
    if evaluated is not None:
        found["evaluated"] = _between(_evaluated(plan, evaluated), "ms a step")
    each = {"points": {}, "curves": {}} if manifest is None else {"points": {}, "curves": curves(manifest.report)}
    if model is not None and costs is not None:
        each["points"] = points(model, costs)
    for chart_of, titled in each.items():
        for place, (title, own) in enumerate(titled.items()):
            found[f"{chart_of}-{place}"] = {**found[chart_of], "title": title, "sets": own}
    return {"sets": sets, "charts": found}


def _sets(plan: Plan, changed: PlanChange | None, prices: Prices | None) -> dict[str, Columns]:
    of_shards = shard_memory(plan.held, plan.shards)
    shards, smaller = shard_columns(plan, prices, of_shards)
    bound = [] if plan.lower_bound_ms is None else short([plan.lower_bound_ms])
    better = plan.improvements
    return {
        "bars": _bars(plan, changed),
        "bound": {"ms": bound, "what": [f"no plan below {ms:.3f} ms" for ms in bound]},
        "devices": device_columns(plan, None if changed is None else changed.live_ms, of_shards),
        "hosts": _hosts(plan),
        "tables": table_columns(plan, prices, of_shards),
        "shards": shards,
        **({} if smaller is None else {"smaller": smaller}),
        **({"change": changed.devices, "moves": changed.moves} if changed is not None and changed.counted else {}),
        "search": {"step": [one.step for one in better], "ms": short(one.cost_ms for one in better)},
    }


def _words(plan: Plan, sets: Mapping[str, Columns]) -> dict[str, Any]:
    devices, priced = sets["devices"], "adds" in sets["tables"]
    longest = f"{max(sets['bars']['ms'], default=0.0):.3f}"
    return {
        "room": 7 * len(longest) + 10,  # pixels of the figure next to the longest bar
        "cost_parts": [part for part in COSTS if part in devices],
        "memory_parts": [part for part in MEMORY if part in devices],
        "devices": plan.task.devices,
        "shade": "adds" if priced else "dim",
        "shade_title": "ms it adds, predicted" if priced else "columns",
        "truth": measured(plan.provenance.cost_model_backend),
        **_unit("limit", devices["limit"]),
        **_unit("device", devices["memory"]),
        **_unit("moved", [*chain(*sets.get("change", {}).values())]),
    }


def _between(two: Columns, title: str) -> dict[str, Any]:
    """Two costs of every device, joined by a line."""
    first, second = two
    chart = charts("charts.json", {"first": first, "second": second, "between": title})["between"]
    return {**chart, "sets": {"between": {"device": [*range(len(two[first]))], **two}}}


def _unit(name: str, sizes: Sequence[int]) -> dict[str, Any]:
    """One unit for a whole axis, and its bytes."""
    power = min(max(max(sizes, default=1), 1).bit_length() - 1, 10 * len(UNITS) - 1) // 10
    return {f"{name}_unit": UNITS[power], f"{name}_bytes": 1024**power}


def _bars(plan: Plan, change: PlanChange | None) -> Columns:
    """Predicted ms of the slowest device for this plan, the live plan, and the plan of each heuristic."""
    named = [("this plan", "plan", plan.cost_ms), ("live plan", "live", change.cost_ms if change else None)]
    named += [(f"heuristic: {baseline.algorithm}", "heuristic", baseline.cost_ms) for baseline in plan.baselines]
    known = [(name, kind, cost) for name, kind, cost in named if cost is not None]
    names, kinds, costs = (list(column) for column in zip(*known, strict=True)) if known else ([], [], [])
    return {"name": names, "kind": kinds, "ms": short(costs)}


def _hosts(plan: Plan) -> Columns:
    """The first device of each of several hosts, and the host's name, if these are few."""
    topology = plan.task.topology
    ranks = plan.task.devices if topology is None else topology.local_world_size
    firsts = [*range(0, plan.task.devices, ranks)] if ranks < plan.task.devices else []
    few = len(firsts) <= HOSTS_NAMED
    return {"device": firsts, "name": [f"host {host}" if few else "" for host in range(len(firsts))]}


def device_columns(plan: Plan, live_ms: Sequence[float] | None, of_shards: Sequence[Memory]) -> Columns:
    """A value for each device. Costs are predicted ms, memory is exact bytes, and `share` what of the limit for tables is used;
    `live` is of the live plan's devices. Costs that are not known, and parts of memory that no device has, are left out."""
    memory, caches, topology = plan.device_memory(), _caches(plan, of_shards), plan.task.topology
    used, limits = [held.total for held in memory], list(plan.task.usable_bytes)
    columns: Columns = {"device": [*range(plan.task.devices)], "shards": [*plan.shards_by_device()]}
    columns |= {"memory": used, "limit": limits, "share": [n / limit for n, limit in zip(used, limits, strict=True)]}
    if topology is not None:
        columns["host"] = [device // topology.local_world_size for device in columns["device"]]
    in_parts = [
        (held.weights - cache, cache, held.optimizer, held.maps, held.step)
        for held, cache in zip(memory, caches, strict=True)
    ]
    columns |= {
        part: list(sizes) for part, sizes in zip(MEMORY, zip(*in_parts, strict=True), strict=True) if any(sizes)
    }
    if plan.predicted:
        ms = [
            (cost.compute_ms, cost.forward_collective_ms, cost.backward_collective_ms, cost.averaging_ms)
            for cost in plan.predicted
        ]
        columns |= {part: short(costs) for part, costs in zip(COSTS, zip(*ms, strict=True), strict=True)}
        if not any(columns[COSTS[-1]]):
            del columns[COSTS[-1]]
    columns |= {name: short(ms) for name, ms in (("total", plan.predicted_ms), ("live", live_ms)) if ms}
    return columns


def _caches(plan: Plan, of_shards: Sequence[Memory]) -> list[int]:
    """Bytes of the caches on each device."""
    beyond, caches = plan.parted.constraints.beyond_hbm, [0] * plan.task.devices
    for shard, memory in zip(plan.shards, of_shards, strict=True):
        caches[shard.device] += memory.weights if shard.table in beyond else 0
    return caches


def _evaluated(plan: Plan, evaluated: Evaluated) -> Columns:
    """A value for each device: measured ms, None where measuring failed, and the same part of the predicted ms."""
    measured = [None if ms is None else short([ms])[0] for ms in evaluated.ms()]
    return {evaluated.how: measured, "predicted": short(evaluated.predicted_ms(plan)) or [None] * len(measured)}


def table_columns(plan: Plan, prices: Prices | None, of_shards: Sequence[Memory]) -> Columns:
    """A value for each table, or part of one held in two, in the order of the task.

    `count`, `rowWise` and `bytes` are of the table's shards, `adds` is their predicted ms of compute. `devices` are ranges of
    devices, as pairs of the first and the last. Where some are beyond HBM, `tier` is each one's in words, and `host` its bytes of
    host memory. What ends in `Text` is how a page shows it.
    """
    tables, by_table, row_wise = plan.parted.tables, plan.by_table(), row_wise_tables(plan)
    nbytes, of_hosts = dict.fromkeys(by_table, 0), dict.fromkeys(by_table, 0)
    for shard, memory in zip(plan.shards, of_shards, strict=True):
        nbytes[shard.table] += memory.total
        of_hosts[shard.table] += memory.host
    devices = [sorted({shard.device for shard in by_table[table.name]}) for table in tables]
    columns: Columns = {
        "name": [table.name for table in tables],
        "rows": [table.rows for table in tables],
        "dim": [table.dim for table in tables],
        "pooling": short(table.pooling_factor for table in tables),
        "element": [table.element_bytes for table in tables],
        "count": [len(by_table[table.name]) for table in tables],
        "rowWise": [table.name in row_wise for table in tables],
        "bytes": list(nbytes.values()),
        "devices": [_spans(some) for some in devices],
        "first": [some[0] for some in devices],
        "firstText": [_listed(some) for some in devices],
    }
    if beyond := plan.parted.constraints.beyond_hbm:
        rules = [beyond.get(table.name, TableRule(table=table.name)) for table in tables]
        columns["tier"] = [r.in_tier.holds(t.rows, r.cached_rows) for t, r in zip(tables, rules, strict=True)]
        columns["host"] = list(of_hosts.values())
    if prices is not None:
        columns["adds"] = short(np.bincount(_places(plan), weights=prices.adds_ms, minlength=len(tables)))
    return columns


def _listed(devices: Sequence[int]) -> str:
    some = ", ".join(map(str, devices[:DEVICES_NAMED]))
    return f"{some}, … ({len(devices)})" if len(devices) > DEVICES_NAMED else some


def shard_columns(plan: Plan, prices: Prices | None, of_shards: Sequence[Memory]) -> tuple[Columns, Columns | None]:
    """A value for each shard; and where there are more than MOST_SHARDS, the sums of the smaller ones on each device.

    `table` is the index of the shard's table. `alone` and `adds` are predicted ms of compute.
    """
    place, nbytes = _places(plan), [memory.total for memory in of_shards]
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


def _spans(devices: Sequence[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for device in devices:
        first = spans.pop()[0] if spans and spans[-1][1] == device - 1 else device
        spans.append((first, device))
    return spans
