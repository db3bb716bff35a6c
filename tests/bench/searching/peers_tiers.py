"""Optima that plans of tables beyond HBM are held against: a mixed integer programme like RecShard's, and a linear one.

RecShard (Sethi et al., ASPLOS 2022) places whole tables and chooses the share of each that is in HBM by a MILP over points of its
access curve. Here a table has a tier and a device, and a cached one a convex combination of the points of its cache, by our
price: the slowest device's forward and backward, each a maximum of two sums, and what tiers take. Collectives, which no linear
programme has, are left out of both sides (`WithoutCollectives`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import WAYS, Tier
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.cache import convex_hull, miss_curve
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.tiers import BeyondHbm, with_tiers
from neuroshard.search.tiers.division import Tiers
from neuroshard.search.tiers.points import PartPoints, Points

GAP = 5e-4  # relative, at which a MILP counts as solved to the end
MOST_POINTS = 14  # of a cache's curve, of its hull
IN_HBM, IN_HOST = 0, 1


class WithoutCollectives(Analytic):
    """The analytic model of devices whose collectives take no time."""

    def for_task(self, task: ShardingTask, *, waiting: bool) -> Analytic:
        found = super().for_task(task, waiting=waiting)
        free = WithoutCollectives(self.name.partition(":")[2], self.batch_size)
        free.__dict__.update(found.__dict__)
        return free

    def _transfer_ms(self, device_dims: Floats, way: int) -> Floats:
        return np.zeros_like(np.asarray(device_dims, dtype=np.float64))


class MissedBytes(Analytic):
    """A model that counts bytes of rows that a batch reads from host memory, and calls them ms."""

    operator_ms = 0.0

    def for_task(self, task: ShardingTask, *, waiting: bool) -> Analytic:
        return self

    def beyond_hbm(self, parts: Sequence[Part]) -> BeyondHbm:
        read = [miss_curve(part.table, self.batch_size).distinct_rows * part.rows / part.table.rows for part in parts]
        row = np.array([float(part.dim * part.table.element_bytes) for part in parts])
        nothing = np.zeros(len(parts))
        return BeyondHbm(nothing, row, np.array(read) * row, nothing, nothing, nothing, nothing)


class Solved(NamedTuple):
    """What a programme found: the plan's shards and tiers, its cost in ms by price_shards, and no plan's cost below
    `bound_ms`."""

    shards: tuple[Shard, ...]
    tiers: Tiers
    cost_ms: float
    bound_ms: float


def recshard(task: ShardingTask, model: Analytic, time_limit_s: float) -> Solved | None:
    """The cheapest plan of whole tables; None where there is none, or the solver did not get to the end."""
    tables, devices, hbm = task.placed, task.devices, float(min(task.placeable_bytes))
    priced = with_tiers(for_task(model, task))
    parts = list(map(Part.of, tables))
    vectors, points = priced.part_vectors(parts), PartPoints(task, priced)(parts)
    columns: list[tuple[int, float, float, Floats, bool]] = []  # table, bytes, ms, vector, of a cache
    for number, of_table in enumerate(points):
        for at in _few(of_table):
            inside = 0 < at < len(of_table.ms) - 1
            columns.append((number, float(of_table.nbytes[at]), float(of_table.ms[at]), vectors[number], inside))
    of_columns = len(columns)
    cached = lambda table, device: of_columns * devices + table * devices + device  # noqa: E731
    passes = of_columns * devices + len(tables) * devices  # then forward and backward of each device, and the cost
    count = passes + 2 * devices + 1

    rows, low, high = [], [], []

    def add(entries: dict[int, float], least: float, most: float) -> None:
        rows.append(entries)
        low.append(least)
        high.append(most)

    for table in range(len(tables)):
        own = [number for number, column in enumerate(columns) if column[0] == table]
        once = {cached(table, device): 1.0 for device in range(devices)}
        once |= {n * devices + d: 1.0 for n in own if not columns[n][4] for d in range(devices)}
        add(once, 1.0, 1.0)
        for device in range(devices):
            combined = {n * devices + device: 1.0 for n in own if columns[n][4]}
            add(combined | {cached(table, device): -1.0}, 0.0, 0.0)
    scale = 1.0 / hbm
    for device in range(devices):
        on = [(n * devices + device, column) for n, column in enumerate(columns)]
        add({place: column[1] * scale for place, column in on}, -np.inf, 1.0)
        for each_way in (0, 1):
            for resource in (0, 1):
                time = {place: float(column[3][2 * each_way + resource]) for place, column in on}
                add(time | {passes + 2 * device + each_way: -1.0}, -np.inf, 0.0)
        total = {place: column[2] + float(column[3][4]) for place, column in on}
        total |= {passes + 2 * device: 1.0, passes + 2 * device + 1: 1.0, count - 1: -1.0}
        add(total, -np.inf, 0.0)
    matrix = lil_matrix((len(rows), count))
    for number, entries in enumerate(rows):
        for place, value in entries.items():
            matrix[number, place] = value
    whole = np.zeros(count)
    upper = np.full(count, np.inf)
    upper[:passes] = 1.0
    for number, column in enumerate(columns):
        whole[number * devices : (number + 1) * devices] = not column[4]
    whole[of_columns * devices : passes] = 1.0
    heaviest = np.argsort([-vector.sum() for vector in vectors], kind="stable")
    for rank, table in enumerate(
        heaviest[: devices - 1].tolist()
    ):  # devices are alike: number them by the heaviest tables
        for device in range(rank + 1, devices):
            upper[cached(table, device)] = 0.0
            for number, column in enumerate(columns):
                if column[0] == table:
                    upper[number * devices + device] = 0.0
    least = np.zeros(count)
    least[-1] = 1.0
    found = milp(
        least,
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=whole,
        bounds=Bounds(np.zeros(count), upper),
        options={"time_limit": time_limit_s, "mip_rel_gap": GAP},
    )
    if found.status != 0:
        return None
    launches = float(priced.compute_ms(np.zeros(vectors.shape[1])))
    shards, tiers = list[Shard](), dict[str, tuple[Tier, int | None]]()
    for number, one in enumerate(tables):
        share = np.array([[found.x[n * devices + d] for d in range(devices)] for n in range(of_columns)])
        own = [n for n in range(of_columns) if columns[n][0] == number]
        device = int(share[own].sum(axis=0).argmax())
        weights = share[own, device] / share[own, device].sum()
        kept = _few(points[number])
        shards.append(Shard(table=one.name, column_offset=0, dim=one.dim, device=device, row_offset=0, rows=one.rows))
        if weights[0] > 0.5:
            continue
        if weights[-1] > 0.5:
            tiers[one.name] = ("host", None)
            continue
        cached_rows = int(weights @ points[number].rows[kept]) // WAYS * WAYS
        tiers[one.name] = ("cached", cached_rows) if cached_rows else ("host", None)
    prices = price_shards(priced, task.with_tiers(tiers), shards)
    assert prices is not None
    bound = float(found.mip_dual_bound) + launches
    return Solved(tuple(shards), tiers, float(prices.total_ms.max()), bound)


def _few(points: Points) -> list[int]:
    """In HBM, the hull of the caches, at most so many, and in host memory."""
    inside = np.arange(1, len(points.ms) - 1)
    hull = inside[convex_hull(points.nbytes[inside], points.ms[inside])]
    kept = np.unique(np.linspace(0, len(hull) - 1, min(len(hull), MOST_POINTS)).astype(int))
    return [0, *hull[kept].tolist(), len(points.ms) - 1]


def least_ms(parts: Sequence[Points], free: float, *, whole: bool = False) -> float:
    """The least ms of parts beyond HBM that share `free` bytes more than all take in host memory.

    By a linear programme over the hulls of their points, in which a part may be half cached and half in host memory, with half
    of a map of its rows; with `whole` by an integer programme, in which it is one or the other: no division takes less.
    """
    costs, nbytes, owner, in_host = list[float](), list[float](), list[int](), list[bool]()
    for number, part in enumerate(parts):
        order = np.array([len(part.ms) - 1, *range(1, len(part.ms) - 1)])
        size, ms = part.nbytes[order] - part.nbytes[-1], part.ms[order]
        hull = (
            np.append(0, 1 + convex_hull(size[1:], ms[1:])) if whole else convex_hull(size, np.minimum.accumulate(ms))
        )
        costs += ms[hull].tolist()
        nbytes += size[hull].tolist()
        owner += [number] * len(hull)
        in_host += [True, *[False] * (len(hull) - 1)]
    once = np.zeros((len(parts), len(owner)))
    once[owner, np.arange(len(owner))] = 1.0
    unit = max(free, 1.0)
    found = milp(
        costs,
        constraints=[
            LinearConstraint(np.array([nbytes]) / unit, -np.inf, free / unit),
            LinearConstraint(once, 1.0, 1.0),
        ],
        integrality=np.array(in_host) & whole,
        options={"mip_rel_gap": 1e-6},
    )
    assert found.status == 0, found.message
    return float(found.fun)
