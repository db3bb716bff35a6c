"""A pool of tables -> what one device holds in a plan of some of them, as a search will ask about it.

A plan's device is no random set. All devices cost about the same, so one holds a few heavy tables, often cut narrow, or many
light ones, or both, and a table that is too heavy for any device lies on several: cut column-wise, or row-wise on all. A net that
learned from random sets alone was right about those and 9 to 13 % too low about the slowest devices of plans
(docs/augment.md).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from neuroshard.augment.pools import Choice, Pool
from neuroshard.augment.sets import LARGE_SHARE, USUAL_TABLES, in_order, log_uniform, varied
from neuroshard.core.table import DIM_STEP, MAX_DIM, Table
from neuroshard.costmodel.protocol import Floats, Ints

WHOLE_SHARE: Final = 0.5  # of the plans are of all tables, where a device then has no more than usual
OWN_WIDTHS_SHARE: Final = 0.5  # of the plans have each table in its own width; in the others it has any
TIGHT_SHARE: Final = 0.5  # of the plans have hardly more memory than they need
TIGHTEST, LOOSEST = 1.05, 2.0  # times what the tables need, the memory of these
# What counts as load is a mixture of these, from a Dirichlet distribution of such concentrations: mostly one or two of them.
LOADS: Final = {"tables": 0.3, "columns": 0.5, "lookups": 1.0, "columns looked up": 1.0, "bytes": 0.3}
FINEST, COARSEST = 0.15, 1.5  # times a device's fair share of the load: what a part has at most
MOST_CUT_FURTHER: Final = 0.2  # share of the tables that are in one part more than that asks for
EVEN_SHARE: Final = 0.5  # of the cut tables are in equal parts; the others are cut anywhere
MOST_NOISE: Final = 0.5  # standard deviation of the logarithm of what a part seems to weigh
MOST_AT_RANDOM: Final = 0.3  # share of the parts that lie anywhere
ROWS_SHARE: Final = 0.25  # of the plans have their heaviest tables row-wise on all devices
MOST_BY_ROWS: Final = 30  # tables of these: 26 are all of a public model; a device holds a part of each


class Parts(NamedTuple):
    """Column shards: the table of each by number, its columns, bytes and load, four (P,)."""

    table: Ints
    dim: Ints
    nbytes: Floats
    load: Floats


def draw_device(
    pool: Pool,
    *,
    tables: int,
    devices: int,
    memory_bytes: int,
    max_dim: int,
    vary_share: float,
    rng: np.random.Generator,
) -> tuple[Table, ...]:
    """The shards of one device in a random plan of up to `tables` tables for so many `devices` of `memory_bytes` each.

    In some plans the heaviest tables lie row-wise on all devices. The others are cut column-wise until no part has more than some
    share of a device's fair load; then the parts go, the heaviest first, to the device with the least, by a guess at what they
    weigh, and some to any; what finds no room is left out. Of the tables, `vary_share` are varied; where the pool has fewer than
    drawn, some occur twice.
    """
    chosen = _draw_tables(pool, tables, devices, memory_bytes, vary_share, rng)
    dims = _draw_dims(chosen, max_dim, rng)
    narrowest = max(table.with_dim(DIM_STEP).memory_bytes for table in chosen)
    if rng.random() < TIGHT_SHARE:
        tight = sum(table.memory_bytes for table in chosen) * rng.uniform(TIGHTEST, LOOSEST) / devices
        memory_bytes = min(memory_bytes, max(int(tight), narrowest))
    row_wise = _row_wise(chosen, dims, devices, memory_bytes - narrowest, rng)
    memory_bytes -= sum(_block(chosen[t], int(dims[t]), devices, 0).memory_bytes for t in row_wise)
    others = np.setdiff1d(np.arange(len(chosen)), row_wise)
    parts = _cut([chosen[t] for t in others], dims[others], devices, memory_bytes, rng)
    device = _place(parts, devices, memory_bytes, rng)
    placed = device[device >= 0]
    here = int(rng.choice(placed if len(placed) else devices))
    blocks = [_block(chosen[t], int(dims[t]), devices, here) for t in row_wise]
    held = np.flatnonzero(device == here)
    columns = [chosen[others[parts.table[part]]].with_dim(int(parts.dim[part])) for part in held]
    return in_order(blocks + columns)


def _draw_tables(
    pool: Pool, tables: int, devices: int, memory_bytes: int, vary_share: float, rng: np.random.Generator
) -> list[Table]:
    """Tables of a plan, varied or not: as many as `_draw_count` says."""
    count = _draw_count(tables, devices, rng)
    places = rng.choice(len(pool.tables), size=count, replace=count > len(pool.tables))
    chosen = []
    for place, vary in zip(places.tolist(), (rng.random(count) < vary_share).tolist(), strict=True):
        table, rows_needed = pool.tables[place].shard, pool.tables[place].rows_needed
        if vary:  # narrow, as at least so much of it must fit
            other = varied(Choice(table.with_dim(DIM_STEP), rows_needed), memory_bytes, rng)
            table = other.with_dim(table.dim)
        chosen.append(table)
    return chosen


def _draw_count(tables: int, devices: int, rng: np.random.Generator) -> int:
    """How many tables a plan has: from one to the usual number a device, log-uniform.

    Where there are more, some plans have up to all of them; where there are fewer, half have just all.
    """
    few = USUAL_TABLES * devices
    if tables > few and rng.random() < LARGE_SHARE:
        return min(int(log_uniform(few, tables + 1, rng)), tables)
    if tables <= few and rng.random() < WHOLE_SHARE:
        return tables
    most = min(tables, few)
    return min(int(log_uniform(min(devices, most), most + 1, rng)), most)


def _draw_dims(tables: Sequence[Table], max_dim: int, rng: np.random.Generator) -> Ints:
    """Columns of each table (T,): all their own, or all log-uniform up to `max_dim`."""
    if rng.random() < OWN_WIDTHS_SHARE:
        return np.array([table.dim for table in tables], dtype=np.int64)
    most = max_dim // DIM_STEP
    steps = np.exp(rng.uniform(0, np.log(most + 1), len(tables))).astype(np.int64)
    return DIM_STEP * np.minimum(steps, most)


def _row_wise(tables: Sequence[Table], dims: Ints, devices: int, room: int, rng: np.random.Generator) -> list[int]:
    """Places of the tables that lie row-wise on all devices: mostly none, else the heaviest whose blocks fit `room` bytes."""
    if devices == 1 or rng.random() >= ROWS_SHARE:
        return []
    whole = _amounts(_facts(tables), dims)
    heaviest = np.argsort(-(whole @ _mixture(whole, rng)), kind="stable")
    count = int(log_uniform(1, min(len(tables), MOST_BY_ROWS) + 1, rng))
    chosen = []
    for place in heaviest[:count].tolist():
        table, dim = tables[place], int(dims[place])
        nbytes = _block(table, dim, devices, 0).memory_bytes
        if nbytes <= room and table.has_rows_for(devices):
            chosen.append(place)
            room -= nbytes
    return chosen


def _block(table: Table, dim: int, devices: int, device: int) -> Table:
    """What of a table that lies row-wise on all devices is on this one: only on the last can it be less than on the first."""
    block = table.block_rows(devices)
    return table.part(min(block, table.rows - device * block), dim)


def _cut(tables: Sequence[Table], dims: Ints, devices: int, memory_bytes: int, rng: np.random.Generator) -> Parts:
    """Parts that are light enough; the parts of some tables are finer than that asks for. Some part of each table fits."""
    of = _facts(tables)
    whole = _amounts(of, dims)
    mixture = _mixture(whole, rng)
    pieces = np.ceil(whole @ mixture * devices / log_uniform(FINEST, COARSEST, rng))
    pieces += rng.random(len(tables)) < rng.uniform(0, MOST_CUT_FURTHER)

    steps, even = dims // DIM_STEP, rng.random(len(tables)) < EVEN_SHARE
    fitting = [
        (memory_bytes // t.rows - a_row) // (DIM_STEP * element) for t in tables for element, a_row in [_bytes(t)]
    ]
    pieces = np.maximum(pieces, -(-steps // np.minimum(fitting, MAX_DIM)))
    pieces = np.clip(pieces, 1, steps).astype(np.int64)
    widths = [_widths(*one, rng) for one in zip(steps.tolist(), pieces.tolist(), even.tolist(), strict=True)]
    table, dim = np.repeat(np.arange(len(tables)), pieces), DIM_STEP * np.concatenate([steps[:0], *widths])
    parts = _amounts(of[table], dim)
    return Parts(table, dim, parts[:, -1], parts @ mixture)


def _facts(tables: Sequence[Table]) -> Floats:
    """Of each table pooling factor, rows, bytes an element and bytes a row besides: (T, 4)."""
    return np.array([(t.pooling_factor, t.rows, *_bytes(t)) for t in tables], dtype=np.float64).reshape(-1, 4)


def _mixture(whole: Floats, rng: np.random.Generator) -> Floats:
    """What each of LOADS counts, of the amounts (T, len(LOADS)) of tables that together weigh 1: (len(LOADS),)."""
    counts: Floats = rng.dirichlet(list(LOADS.values())) / np.maximum(whole.sum(axis=0), 1e-9)
    return counts


def _bytes(table: Table) -> tuple[int, int]:
    """Of memory, for an element and for a row besides."""
    return table.element_bytes + table.optimizer_bytes_per_element, table.optimizer_bytes_per_row


def _amounts(of: Floats, dims: Ints) -> Floats:
    """How much of each of LOADS tables are, from `_facts` (T, 4) and their columns (T,): (T, len(LOADS))."""
    pooling, rows, element_bytes, row_bytes = of.T
    nbytes = rows * (dims * element_bytes + row_bytes)
    return np.stack([np.ones(len(dims)), dims, pooling, pooling * dims, nbytes], axis=1)


def _widths(steps: int, pieces: int, even: bool, rng: np.random.Generator) -> Ints:
    """`steps` in so many pieces, none of them empty: (pieces,)."""
    if pieces == 1 or even:
        return np.full(pieces, steps // pieces) + (np.arange(pieces) < steps % pieces)
    places = np.sort(rng.choice(np.arange(1, steps), size=pieces - 1, replace=False))
    return np.diff(places, prepend=0, append=steps)


def _place(parts: Parts, devices: int, memory_bytes: int, rng: np.random.Generator) -> Ints:
    """The device of each part, -1 where it found no room: (P,)."""
    count = len(parts.table)
    seems = parts.load * np.exp(rng.uniform(0, MOST_NOISE) * rng.standard_normal(count))
    anywhere = rng.random(count) < rng.uniform(0, MOST_AT_RANDOM)
    placed, load, free = np.full(count, -1), np.zeros(devices), np.full(devices, float(memory_bytes))
    for part in np.argsort(-seems, kind="stable").tolist():
        room = free >= parts.nbytes[part]
        if not room.any():
            continue
        wanted = rng.random(devices) if anywhere[part] else load
        device = int(np.where(room, wanted, np.inf).argmin())
        placed[part] = device
        load[device] += seems[part]
        free[device] -= parts.nbytes[part]
    return placed
