"""Tables -> the shards that random sets are drawn from, sets of them that fit a device, and the tables held out to test on."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.core.operator_limits import widest_cut, widest_shard
from neuroshard.core.table import DIM_STEP, MAX_ROWS, Table
from neuroshard.files.access import Ints, rows_at_rates


@dataclass(frozen=True)
class Choice:
    """A shard to draw, and the rows that its table's reuse bins require, which limit how it can be varied."""

    shard: Table
    rows_needed: float


@dataclass(frozen=True)
class Pool:
    """Shards that fit a device alone, the smallest first, with their bytes (N,); and their tables, uncut."""

    choices: tuple[Choice, ...]
    memory_bytes: Ints
    tables: tuple[Choice, ...]

    @classmethod
    def of(cls, tables: Sequence[Table], max_dim: int, memory_bytes: int) -> "Pool":
        """Every table at every width that fits `memory_bytes`. The pool may be empty.

        A table wider than a GPU's operator holds, or than `max_dim` if that is more, is there as the widest shard of it that a
        search would make: timed whole, it could come back as zeros, and fast.
        """
        held = [shard for table in tables for shard in held_shard(table, max_dim)]
        whole = [Choice(table, rows_at_rates(table)) for table in held]
        choices = [
            Choice(shard, table.rows_needed)
            for table in whole
            for dim in widths(table.shard, max_dim)
            if (shard := table.shard.with_dim(dim)).memory_bytes <= memory_bytes
        ]
        choices.sort(key=lambda choice: choice.shard.memory_bytes)
        nbytes = np.array([choice.shard.memory_bytes for choice in choices], dtype=np.int64)
        some_fits = {choice.shard.name for choice in choices}
        return cls(tuple(choices), nbytes, tuple(table for table in whole if table.shard.name in some_fits))

    @property
    def max_dim(self) -> int:
        return max((choice.shard.dim for choice in self.choices), default=0)


def widths(table: Table, max_dim: int) -> list[int]:
    """4, 8, … max_dim; and for a wider table its own width and the halves of it, as a search splits it. For a sequence its own
    width and those of equal shards, which are all that a plan can have."""
    dim, wider = table.dim, set()
    if table.pooling == "none":
        return [width for width in range(DIM_STEP, dim, DIM_STEP) if dim % width == 0] + [dim]
    while dim > max_dim and dim % DIM_STEP == 0:
        wider.add(dim)
        dim //= 2
    return [*range(DIM_STEP, max_dim + 1, DIM_STEP), *sorted(wider)]


def held_shard(table: Table, max_dim: int) -> list[Table]:
    """The table, or the widest shard of it that a GPU's operator holds, or that `max_dim` allows if that is more; none where a
    sequence has no such shards."""
    dim = widest_cut(table, max(max_dim, widest_shard(table, "cuda") or table.dim))
    return [] if dim is None else [table.with_dim(dim)]


def fitting(tables: Sequence[Table], memory_bytes: int) -> list[Table]:
    """The tables of which the narrowest shard fits a device."""
    return [table for table in tables if table.with_dim(table.narrowest_cut).memory_bytes <= memory_bytes]


def trait(table: Table) -> tuple[object, ...]:
    """What makes tables different in kind to a cost model, whatever their sizes."""
    return table.element_bytes, table.pooling, table.weighted, len(table.features) > 1


def hold_out(
    tables: Sequence[Table], share: float, rng: np.random.Generator
) -> tuple[tuple[Table, ...], tuple[Table, ...]]:
    """Tables to train on, and tables to test on, which training never sees.

    Tables that differ only in name and dim are one kind to a cost model, so they stay together. A `share` of the kinds, at least
    one, is held out if there are 3 or more. They are one from each stratum of rows x pooling factor, so both small and large
    kinds are tested. The only kind with a trait is trained on: a model that never saw a sequence cannot price one.
    """
    kinds: dict[tuple[object, ...], list[Table]] = {}
    for table in tables:
        shape = (table.rows, table.pooling_factor, table.reuse_bins, table.reuse_batch_size, *trait(table))
        kinds.setdefault(shape, []).append(table)
    ordered = sorted(kinds.values(), key=lambda kind: kind[0].rows * kind[0].pooling_factor)
    if len(ordered) < 3 or share <= 0:
        return tuple(tables), ()
    strata = np.array_split(np.arange(len(ordered)), min(max(round(share * len(ordered)), 1), len(ordered) - 1))
    left = Counter(trait(kind[0]) for kind in ordered)
    held_out: set[str] = set()
    for stratum in strata:
        spared = [place for place in stratum if left[trait(ordered[place][0])] > 1]
        if spared:
            kind = ordered[rng.choice(spared)]
            left[trait(kind[0])] -= 1
            held_out |= {table.name for table in kind}
    return (
        tuple(table for table in tables if table.name not in held_out),
        tuple(table for table in tables if table.name in held_out),
    )


USUAL_TABLES = 15  # the most in a usual set, as in the paper
# Of the sets, where devices have more tables: without larger sets, 480 tables a device were 7 % off.
LARGE_SHARE = 0.2
LARGE_MEANS = 1.3  # the largest set, in times the average number of tables a device
MIN_ROWS_FACTOR, MAX_ROWS_FACTOR = 1 / 8, 2
MAX_POOLING_CHANGE = 4


@dataclass(frozen=True)
class SetSizes:
    """How many shards a set has: 1 to `usual`, uniform; but up to `largest`, log-uniform, in a LARGE_SHARE of the sets."""

    usual: int = USUAL_TABLES
    largest: int = 0

    @classmethod
    def for_plans(cls, tables: int, devices: int) -> "SetSizes":
        """The sizes for plans of this many tables on this many devices."""
        return cls(largest=math.ceil(LARGE_MEANS * tables / devices))

    def draw(self, most: int, rng: np.random.Generator) -> int:
        """A size of at most `most`."""
        usual, largest = min(self.usual, most), min(self.largest, most)
        if largest > usual and rng.random() < LARGE_SHARE:
            return min(int(log_uniform(usual + 1, largest + 1, rng)), largest)
        return int(rng.integers(usual)) + 1


def draw_set(
    pool: Pool, *, sizes: SetSizes, memory_bytes: int, vary_share: float, rng: np.random.Generator
) -> tuple[Table, ...]:
    """Shards that fit `memory_bytes` together, as many as `sizes` draws. `vary_share` of them are varied.

    Each is drawn from the shards that leave room for the smallest shard in every place that is still empty, so every draw
    succeeds.
    """
    smallest = int(pool.memory_bytes[0])
    drawn: list[Table] = []
    free = memory_bytes
    for others in reversed(range(sizes.draw(memory_bytes // smallest, rng))):
        room = free - others * smallest
        choice = pool.choices[rng.integers(np.searchsorted(pool.memory_bytes, room, side="right"))]
        shard = varied(choice, room, rng) if rng.random() < vary_share else choice.shard
        drawn.append(shard)
        free -= shard.memory_bytes
    return in_order(drawn)


def in_order(shards: Iterable[Table]) -> tuple[Table, ...]:
    """The shards sorted, so that equal sets have equal case ids."""
    return tuple(sorted(shards, key=lambda shard: (shard.name, shard.dim, shard.rows, shard.pooling_factor)))


def varied(choice: Choice, room: int, rng: np.random.Generator) -> Table:
    """The shard with other rows (1/8 to 2 times) and pooling factor (1/4 to 4 times), log-uniform, in at most `room` bytes.

    The reuse bins stay the same and stay true: each row is read as often as before, and as many rows are read as the pooling
    factor requires. So the least number of rows is proportional to the pooling factor. A pooling factor of 1 or more does not
    fall below 1.
    """
    table = choice.shard
    needed = min(choice.rows_needed, table.rows)
    most = min(table.rows * MAX_ROWS_FACTOR, room // (table.memory_bytes // table.rows), MAX_ROWS)
    least_scale = max(1 / MAX_POOLING_CHANGE, 1 / table.pooling_factor if table.pooling_factor >= 1 else 0.0)
    scale = log_uniform(least_scale, min(MAX_POOLING_CHANGE, most / needed if needed else np.inf), rng)
    rows = log_uniform(max(table.rows * MIN_ROWS_FACTOR, needed * scale, 1), most, rng)
    return table.resized(min(max(round(rows), 1), most), table.dim, table.pooling_factor * scale)


def log_uniform(low: float, high: float, rng: np.random.Generator) -> float:
    """A value between `low` and `high`, log-uniform; `high` for an empty range."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high)))) if low < high else float(high)
