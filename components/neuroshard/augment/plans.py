"""A pool of tables -> what one device holds in a plan of some of them: the sets whose costs a search needs.

These differ from random sets. All devices of a plan cost about the same, so one holds a few heavy tables, often narrow shards, or
many light ones, or both. A table that is too heavy for one device is on several: column-wise, or row-wise on all. A net trained
on random sets alone predicted other random sets well, but was 9 to 13 % too low for the slowest devices of plans.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from neuroshard.augment.pools import LARGE_SHARE, USUAL_TABLES, Choice, Pool, in_order, log_uniform, varied
from neuroshard.core.part import Part
from neuroshard.core.table import DIM_STEP, MAX_DIM, Table
from neuroshard.costmodel.protocol import Floats, Ints

ALL_TABLES_SHARE: Final = 0.5  # of the plans have all tables, if that is no more than the usual number a device
OWN_WIDTHS_SHARE: Final = 0.5  # of the plans have each table in its own width; in the others a table has any width
TIGHT_SHARE: Final = 0.5  # of the plans have little more memory than they need …
TIGHTEST, LOOSEST = 1.05, 2.0  # … between so many times what the tables need
# The load of a shard is a random mixture of these, from a Dirichlet distribution with these concentrations: mostly one or two.
LOADS: Final = {"tables": 0.3, "columns": 0.5, "lookups": 1.0, "columns looked up": 1.0, "bytes": 0.3}
FINEST, COARSEST = 0.15, 1.5  # a plan's most load of one shard, as times a device's fair share
MOST_CUT_FURTHER: Final = 0.2  # share of the tables that have one shard more than this most load requires
EVEN_SHARE: Final = 0.5  # of the cut tables are in equal shards; the others are cut anywhere
MOST_NOISE: Final = 0.5  # standard deviation of the logarithm of a shard's guessed load
MOST_AT_RANDOM: Final = 0.3  # share of the shards that go to any device
ROW_WISE_SHARE: Final = 0.25  # of the plans have their heaviest tables row-wise on all devices
MOST_ROW_WISE: Final = 30  # tables that are row-wise in a plan; a public model has 26 tables


class ColumnShards(NamedTuple):
    """P column shards: of each the number of its table, its columns, bytes and load; (P,) each."""

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
    """The shards of one device in a random plan of up to `tables` tables for `devices` of `memory_bytes` each.

    In some plans the heaviest tables are row-wise on all devices. The other tables are cut column-wise until no shard has more
    than some share of a device's fair load. Then the shards go, heaviest first by a noisy guess, to the device with the least
    load, and some of them to any device. A shard that fits no device is left out. `vary_share` of the tables are varied. If the
    pool has fewer tables than the plan, some occur twice.
    """
    chosen = _draw_tables(pool, tables, devices, memory_bytes, vary_share, rng)
    dims = _draw_dims(chosen, max_dim, rng)
    narrowest = max(table.with_dim(table.narrowest_cut).memory_bytes for table in chosen)
    if rng.random() < TIGHT_SHARE:
        tight = sum(table.memory_bytes for table in chosen) * rng.uniform(TIGHTEST, LOOSEST) / devices
        memory_bytes = min(memory_bytes, max(int(tight), narrowest))
    row_wise = _row_wise(chosen, dims, devices, memory_bytes - narrowest, rng)
    memory_bytes -= sum(_block(chosen[t], int(dims[t]), devices, 0).memory_bytes for t in row_wise)
    others = np.setdiff1d(np.arange(len(chosen)), row_wise)
    shards = _cut([chosen[t] for t in others], dims[others], devices, memory_bytes, rng)
    device = _place(shards, devices, memory_bytes, rng)
    placed = device[device >= 0]
    here = int(rng.choice(placed if len(placed) else devices))
    blocks = [_block(chosen[t], int(dims[t]), devices, here) for t in row_wise]
    own = np.flatnonzero(device == here)
    columns = [chosen[others[shards.table[shard]]].with_dim(int(shards.dim[shard])) for shard in own]
    return in_order(blocks + columns)


def _draw_tables(
    pool: Pool, tables: int, devices: int, memory_bytes: int, vary_share: float, rng: np.random.Generator
) -> list[Table]:
    """The tables of a plan, `vary_share` of them varied."""
    count = _draw_count(tables, devices, rng)
    places = rng.choice(len(pool.tables), size=count, replace=count > len(pool.tables))
    chosen = []
    for place, vary in zip(places.tolist(), (rng.random(count) < vary_share).tolist(), strict=True):
        table, rows_needed = pool.tables[place].shard, pool.tables[place].rows_needed
        if vary:  # at the narrowest width, of which a shard must fit a device
            other = varied(Choice(table.with_dim(table.narrowest_cut), rows_needed), memory_bytes, rng)
            table = other.with_dim(table.dim)
        chosen.append(table)
    return chosen


def _draw_count(tables: int, devices: int, rng: np.random.Generator) -> int:
    """How many tables a plan has: log-uniform up to the usual number a device.

    With more tables than that, some plans have up to all of them. With fewer, half of the plans have all tables.
    """
    few = USUAL_TABLES * devices
    if tables > few and rng.random() < LARGE_SHARE:
        return min(int(log_uniform(few, tables + 1, rng)), tables)
    if tables <= few and rng.random() < ALL_TABLES_SHARE:
        return tables
    most = min(tables, few)
    return min(int(log_uniform(min(devices, most), most + 1, rng)), most)


def _draw_dims(tables: Sequence[Table], max_dim: int, rng: np.random.Generator) -> Ints:
    """Columns of each table (T,): each table's own width, or log-uniform up to `max_dim`. Sequences keep their own."""
    own = np.array([table.dim for table in tables], dtype=np.int64)
    if rng.random() < OWN_WIDTHS_SHARE:
        return own
    most = max_dim // DIM_STEP
    steps = np.exp(rng.uniform(0, np.log(most + 1), len(tables))).astype(np.int64)
    sequences = np.array([table.pooling == "none" for table in tables])
    return np.where(sequences, own, DIM_STEP * np.minimum(steps, most))


def _row_wise(tables: Sequence[Table], dims: Ints, devices: int, room: int, rng: np.random.Generator) -> list[int]:
    """Places of the tables that are row-wise on all devices: mostly none, or the heaviest whose blocks fit `room` bytes."""
    if devices == 1 or rng.random() >= ROW_WISE_SHARE:
        return []
    whole = _amounts(_facts(tables), dims)
    heaviest = np.argsort(-(whole @ _mixture(whole, rng)), kind="stable")
    count = int(log_uniform(1, min(len(tables), MOST_ROW_WISE) + 1, rng))
    chosen = []
    for place in heaviest[:count].tolist():
        table, dim = tables[place], int(dims[place])
        nbytes = _block(table, dim, devices, 0).memory_bytes
        if nbytes <= room and table.has_rows_for(devices):
            chosen.append(place)
            room -= nbytes
    return chosen


def _block(table: Table, dim: int, devices: int, device: int) -> Table:
    """The row block on `device` of a table that is row-wise on all devices. The last block may be smaller than the others."""
    block = table.block_rows(devices)
    return Part(table, min(block, table.rows - device * block), dim).as_table()


def _cut(
    tables: Sequence[Table], dims: Ints, devices: int, memory_bytes: int, rng: np.random.Generator
) -> ColumnShards:
    """Shards that are light enough; some tables are cut further than that. At least one shard of each table fits a device.
    Sequences that are cut are in one number of equal shards, as TorchRec has them (search/cut_sequences.py), or in halves."""
    of = _facts(tables)
    whole = _amounts(of, dims)
    mixture = _mixture(whole, rng)
    pieces = np.ceil(whole @ mixture * devices / log_uniform(FINEST, COARSEST, rng))
    pieces += rng.random(len(tables)) < rng.uniform(0, MOST_CUT_FURTHER)

    steps, even = dims // DIM_STEP, rng.random(len(tables)) < EVEN_SHARE
    fitting = [(memory_bytes - own) // (DIM_STEP * column) for column, own in map(_bytes, tables)]
    pieces = np.maximum(pieces, -(-steps // np.minimum(fitting, MAX_DIM)))
    sequences = np.array([table.pooling == "none" for table in tables], dtype=bool)
    alike = int(log_uniform(2, max(devices, 2) + 1, rng)) if sequences.any() else 1
    most = np.where(sequences, [table.dim // table.narrowest_cut for table in tables], steps)
    most = np.where(sequences & (steps % alike == 0), alike, most)
    pieces, even = np.where(sequences & (pieces > 1), most, np.clip(pieces, 1, most)).astype(np.int64), even | sequences
    widths = [_widths(*one, rng) for one in zip(steps.tolist(), pieces.tolist(), even.tolist(), strict=True)]
    table, dim = np.repeat(np.arange(len(tables)), pieces), DIM_STEP * np.concatenate([steps[:0], *widths])
    amounts = _amounts(of[table], dim)
    return ColumnShards(table, dim, amounts[:, -1], amounts @ mixture)


def _facts(tables: Sequence[Table]) -> Floats:
    """Pooling factor, bytes of a column, and bytes of a shard however narrow, for each table: (T, 3)."""
    return np.array([(t.pooling_factor, *_bytes(t)) for t in tables], dtype=np.float64).reshape(-1, 3)


def _mixture(whole: Floats, rng: np.random.Generator) -> Floats:
    """Random weights of LOADS with which all tables, with amounts (T, len(LOADS)), weigh 1 together: (len(LOADS),)."""
    counts: Floats = rng.dirichlet(list(LOADS.values())) / np.maximum(whole.sum(axis=0), 1e-9)
    return counts


def _bytes(table: Table) -> tuple[int, int]:
    """Memory of a column, and of a shard however narrow."""
    own, with_column = (table.with_dim(dim).memory_bytes for dim in (0, 1))  # what is measured has no id map
    return with_column - own, own


def _amounts(of: Floats, dims: Ints) -> Floats:
    """The amount of each of LOADS in each table, from `_facts` (T, 3) and columns (T,): (T, len(LOADS))."""
    pooling, of_column, of_shard = of.T
    return np.stack([np.ones(len(dims)), dims, pooling, pooling * dims, dims * of_column + of_shard], axis=1)


def _widths(steps: int, pieces: int, even: bool, rng: np.random.Generator) -> Ints:
    """`steps` split into `pieces` parts, none of them empty: (pieces,)."""
    if pieces == 1 or even:
        return np.full(pieces, steps // pieces) + (np.arange(pieces) < steps % pieces)
    places = np.sort(rng.choice(np.arange(1, steps), size=pieces - 1, replace=False))
    return np.diff(places, prepend=0, append=steps)


def _place(shards: ColumnShards, devices: int, memory_bytes: int, rng: np.random.Generator) -> Ints:
    """The device of each shard, -1 if it fits none: (P,)."""
    count = len(shards.table)
    guessed = shards.load * np.exp(rng.uniform(0, MOST_NOISE) * rng.standard_normal(count))
    anywhere = rng.random(count) < rng.uniform(0, MOST_AT_RANDOM)
    placed, load, free = np.full(count, -1), np.zeros(devices), np.full(devices, float(memory_bytes))
    for shard in np.argsort(-guessed, kind="stable").tolist():
        room = free >= shards.nbytes[shard]
        if not room.any():
            continue
        wanted = rng.random(devices) if anywhere[shard] else load
        device = int(np.where(room, wanted, np.inf).argmin())
        placed[shard] = device
        load[device] += guessed[shard]
        free[device] -= shards.nbytes[shard]
    return placed
