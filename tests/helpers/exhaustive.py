"""Every plan of a tiny task, priced: the exact optimum, and what a search must do beside it."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st

from helpers.analytic import AnalyticModel
from neuroshard.core.errors import Infeasible
from neuroshard.core.launches import launches, operators_of
from neuroshard.core.part import Part
from neuroshard.core.plan import Shard, sharding_of
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import DomainMs, MoreColumns, for_task, sending_more
from neuroshard.costmodel.pricing import HostColumns, block_columns, copies_ms, launch_ms
from neuroshard.costmodel.protocol import CostModel, Floats, Ints, device_costs
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings


def _tiny_table(name: str, rows: int, units: int, lookups: float, pooling: str, features: int, per_row: int) -> Table:
    each = [{"name": str(number), "pooling_factor": lookups / features} for number in range(features)]
    return Table.model_validate(
        {"name": name, "rows": rows, "dim": 4 * units, "pooling_factor": lookups, "pooling": pooling, "features": each}
        | {"reuse_bins": (0.0,) * 17, "optimizer_bytes_per_row": per_row}
    )


tiny_tables = st.builds(
    _tiny_table,
    name=st.uuids().map(str),
    rows=st.integers(1, 1000),
    units=st.integers(1, 3),
    lookups=st.floats(0, 200),
    pooling=st.sampled_from(["sum", "sum", "mean", "none"]),
    features=st.sampled_from([1, 1, 3]),
    per_row=st.sampled_from([0, 4, 16]),
)


_KNOWN: tuple[Pipeline, ...] = ("none", "sparse-dist", "prefetch")
pipelines = st.none() | st.sampled_from(_KNOWN)


def memory_of_devices(
    draw: st.DrawFn, tables: Sequence[Table], shares: Sequence[float], batch_size: int, pipeline: Pipeline | None
) -> tuple[int, ...]:
    """Memory of devices with these shares of it: little to spare, or too little."""
    need = sum(Part.of(table).memory(batch_size, pipeline).total for table in tables)
    room = draw(st.floats(0.8, 1.8)) * need
    return tuple(int(room * share / sum(shares)) + 1 for share in shares)


def check_against_optimum(task: ShardingTask) -> None:
    """A plan is found wherever there is one, and its bound is not above the optimum."""
    model = AnalyticModel(1024)
    best = optimum_ms(task, model)
    if best == np.inf:
        with pytest.raises(Infeasible, match=r"short; |no packing exists|has a shard|can hold tables"):
            search(task, model)
        return
    plan = search(task, model, SearchSettings(rounds=2))
    assert best * (1 - 1e-12) <= plan.cost_ms
    assert plan.lower_bound_ms <= best * (1 + 1e-9)


def optimum_ms(task: ShardingTask, model: CostModel) -> float:
    """The least cost of any plan that is allowed: every way to deal tables' columns to devices, and blocks of their rows where a
    search may, beside the copies that the task asks for. Infinite where there is none."""
    model, constraints = for_task(model, task), task.constraints
    copied = [table for table in task.tables if table.name in constraints.data_parallel]
    tables = [table for table in task.tables if table.name not in constraints.data_parallel]
    usable = np.array(task.usable_bytes) - sum(
        task.memory(Part.of(table, copies=task.devices)).total for table in copied
    )
    rules, together = constraints.rules(), {name: group for group in constraints.together for name in group}
    row_wise = set(task.may_split_rows)
    domain = task.topology.domain if task.topology and task.topology.domains(task.devices) > 1 else 1
    rates = DomainMs.of(model, task) if domain > 1 else None
    # of each table: its shards by way; vectors (ways, devices, K); columns as they are sent, those that are sent beyond these
    # in a domain and out of it, and encoded, and bytes, (ways, devices) each
    shards: list[list[list[Shard]]] = []
    vectors, columns, near, far, encoded, nbytes = [], [], [], [], [], []
    for table in tables:
        least, most = constraints.allowed(rules.get(table.name), table.dim)
        least, most_blocks = max(least, table.narrowest_cut), most or task.devices
        most = 1 if table.name in together or not constraints.may_use("column-wise") else most or task.devices
        rule = rules.get(table.name)
        pinned = range(task.devices) if rule is None or rule.devices is None else rule.devices
        steps = range(table.dim // 4 + 1)
        widths = [4 * np.array(w) for w in itertools.product(steps, repeat=task.devices) if sum(w) * 4 == table.dim]
        rectangles = [
            [(table.rows, int(dim)) for dim in w]
            for w in widths
            if (w[w > 0] >= least).all() and (w > 0).sum() <= most and set(np.flatnonzero(w)) <= set(pinned)
        ]
        split_over = [task.devices] * len(rectangles)
        everywhere = table.has_rows_for(task.devices) and task.devices <= most_blocks
        if table.name in row_wise and everywhere and constraints.may_use("row-wise"):
            rectangles.append([(rows, table.dim) for _, rows in table.row_blocks(task.devices)])
            split_over.append(task.devices)
        over_domains = 0
        in_domains = table.name in row_wise and domain > 1 and table.pooling != "none" and table.has_rows_for(domain)
        if in_domains and domain <= most_blocks and constraints.may_use("table-row-wise"):
            over_domains = task.devices // domain
            blocks = [(rows, table.dim) for _, rows in table.row_blocks(domain)]
            for first in range(0, task.devices, domain):
                rectangles.append([(0, 0)] * first + blocks + [(0, 0)] * (task.devices - first - domain))
                split_over.append(domain)
        grids: list[int] = []  # the columns of a part of each
        for number in range(2, task.devices // domain + 1 if in_domains and constraints.may_use("grid") else 0):
            part, each = table.dim // number, number * domain
            if (task.devices // domain) % number or table.dim % (4 * number) or part < least or each > most_blocks:
                continue
            for first in range(0, task.devices, each):
                blocks = [(rows, part) for _, rows in table.row_blocks(domain)] * number
                rectangles.append([(0, 0)] * first + blocks + [(0, 0)] * (task.devices - first - each))
                grids.append(part)
                split_over.append(domain)
        if not rectangles:
            return float("inf")
        shards.append([_shards(table, way) for way in rectangles])
        flat = [one for way in rectangles for one in way]
        dims = np.array([dim for _, dim in flat])
        parts = model.part_vectors([Part(table, rows or table.rows, max(dim, 4)) for rows, dim in flat])
        shape = (len(rectangles), task.devices)
        vectors.append((parts * (dims > 0)[:, None]).reshape(*shape, -1))
        over = np.repeat(split_over, task.devices).tolist()
        sent = [
            part.sent_columns if part.rows == table.rows else block_columns(model, part)
            for part in (Part(table, *one) for one in flat)
        ]
        columns.append(np.array(sent).reshape(shape) * (dims > 0).reshape(shape))
        near.append(np.zeros(shape))
        far.append(np.zeros(shape))
        encoded.append(np.zeros(shape))
        dims_of = [table.dim] * over_domains + grids
        for row, wide in enumerate(dims_of, len(rectangles) - len(dims_of)):
            assert rates is not None
            host = HostColumns.of(model, [Part(table, table.block_rows(domain), wide)], task.devices, domain, rates)
            for amount, to in ((host.inside, near), (host.out, far), (host.encoded, encoded)):
                to[-1][row] = np.where(columns[-1][row] > 0, amount - columns[-1][row], 0.0)
        parts_of = [1 if one[0] == table.rows else of for one, of in zip(flat, over, strict=True)]
        sizes = [
            task.memory(Part(table, *one, of)).total if one[1] else 0 for one, of in zip(flat, parts_of, strict=True)
        ]
        nbytes.append(np.array(sizes).reshape(shape))
    ways = np.array(list(itertools.product(*(range(len(one)) for one in columns))))
    names = [table.name for table in tables]
    for group in constraints.together:
        at = np.stack([columns[i][ways[:, i]] > 0 for i in map(names.index, group)], axis=1)
        ways = ways[(at == at[:, :1]).all(axis=(1, 2))]
    sums, dims, used, *more = (
        sum(one[ways[:, i]] for i, one in enumerate(of_tables))
        for of_tables in (vectors, columns, nbytes, near, far, encoded)
    )
    between = model if rates is None else sending_more(model, MoreColumns(*more))
    cost = np.sum(device_costs(between, sums, dims), axis=0).max(axis=-1) + _launched_ms(task, model, shards, ways)
    cost += copies_ms(model, copied, task).total_ms
    return float(cost[(used <= usable).all(axis=-1)].min(initial=np.inf))


def _shards(table: Table, way: Sequence[tuple[int, int]]) -> list[Shard]:
    """Shards of these rows and columns, one a device, none of no columns; where they begin does not matter here."""
    return [Shard(table=table.name, rows=rows, dim=int(dim), device=d) for d, (rows, dim) in enumerate(way) if dim]


def _launched_ms(
    task: ShardingTask, model: CostModel, shards: Sequence[Sequence[Sequence[Shard]]], ways: Ints
) -> Floats:
    """What launches take in each of these ways (W, T), apart from the operators of copies: (W,)."""
    copied = task.constraints.data_parallel
    tables = [table for table in task.tables if table.name not in copied]
    copies = [
        Shard(table=table.name, rows=table.rows, dim=table.dim, device=device)
        for table in task.tables
        for device in range(task.devices)
        if table.name in copied
    ]
    own = launches(task, copies).kinds_of_operators + operators_of(tables)
    known: dict[object, float] = {}
    kinds = [[sharding_of(task, t, way) for way in of] for t, of in zip(tables, shards, strict=True)]
    found = []
    for way in ways.tolist():
        key = tuple(kinds[table][one] for table, one in enumerate(way))
        if key not in known:
            held = [shard for table, one in enumerate(way) for shard in shards[table][one]]
            counted = launches(task, [*held, *copies])
            more = counted.kinds_of_operators - own
            inputs = counted.inputs if task.pipeline == "none" else 0
            known[key] = launch_ms(model, task.devices, more, counted.outputs - 1, inputs, counted.reordered).total_ms
        found.append(known[key])
    return np.array(found)
