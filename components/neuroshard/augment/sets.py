"""A pool of shards -> random sets that fit a device."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from neuroshard.augment.pools import Choice, Pool
from neuroshard.core.table import MAX_ROWS, Table

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
