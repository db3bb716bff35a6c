"""A pool of shards -> random sets that fit a device, as `measure` times them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from neuroshard.augment.pools import Choice, Pool
from neuroshard.core.table import MAX_ROWS, Table

USUAL_TABLES = 15  # in a set at most, as in the paper
LARGE_SHARE = 0.2  # of the sets have more, where a device has: without them a plan of 480 tables a device was 7 % off
LARGE_MEANS = 1.3  # times the tables that a device has on average, the largest set
MIN_ROWS_FACTOR, MAX_ROWS_FACTOR = 1 / 8, 2
MAX_POOLING_CHANGE = 4


@dataclass(frozen=True)
class SetSizes:
    """How many shards a set has: 1 to `usual`, all equally likely; a LARGE_SHARE have up to `largest`, log-uniform."""

    usual: int = USUAL_TABLES
    largest: int = 0

    @classmethod
    def for_plans(cls, tables: int, devices: int) -> "SetSizes":
        """Sizes that occur where so many tables are placed on so many devices."""
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
    """As many shards as `sizes` says that fit into `memory_bytes` together.

    They are drawn one after the other from all that leave room for the smallest choice in each place still to be filled,
    so that no draw is in vain. Of them, `vary_share` are varied.
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
    """A set has no order: sorted, the same set has the same case id."""
    return tuple(sorted(shards, key=lambda shard: (shard.name, shard.dim, shard.rows, shard.pooling_factor)))


def varied(choice: Choice, room: int, rng: np.random.Generator) -> Table:
    """The shard with other rows (1/8 to 2 times) and pooling factor (1/4 to 4 times), log-uniform, in at most `room` bytes.

    The reuse bins stay, and stay true: each row is read as often as before, and there are as many rows that are read as
    the pooling factor asks for. So rows has a lower limit in proportion to the pooling factor. A pooling factor of 1
    or more does not fall below 1.
    """
    table = choice.shard
    needed = min(choice.rows_needed, table.rows)
    most = min(table.rows * MAX_ROWS_FACTOR, room // (table.memory_bytes // table.rows), MAX_ROWS)
    least_scale = max(1 / MAX_POOLING_CHANGE, 1 / table.pooling_factor if table.pooling_factor >= 1 else 0.0)
    scale = log_uniform(least_scale, min(MAX_POOLING_CHANGE, most / needed if needed else np.inf), rng)
    rows = log_uniform(max(table.rows * MIN_ROWS_FACTOR, needed * scale, 1), most, rng)
    return table.model_copy(
        update={"rows": min(max(round(rows), 1), most), "pooling_factor": table.pooling_factor * scale}
    )


def log_uniform(low: float, high: float, rng: np.random.Generator) -> float:
    """Between `low` and `high`, which is what comes where there is nothing between."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high)))) if low < high else float(high)
