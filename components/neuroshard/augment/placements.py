"""Dims of tables -> random all-to-alls between devices, from balanced to lopsided, as `measure` times them."""

import heapq
from typing import NamedTuple

import numpy as np

from neuroshard.core.table import DIM_STEP
from neuroshard.files.access import Ints

ALL_TABLES_SHARE = 0.5  # of the all-to-alls have all tables, as every plan does
SAME_START_SHARE = 0.2
NARROWEST_CUT = 16  # columns
# Concentration of the Dirichlet distribution of the devices' shares. The largest share of 4 devices is then on average 2.1 to 1.2
# times the mean share, that of 96 devices 5.1 to 1.5 times.
EVENNESS = (1.0, 30.0)


class AllToAll(NamedTuple):
    """The summed dims of each device, and how many ms after the first device it starts."""

    device_dims: tuple[int, ...]
    start_delays_ms: tuple[float, ...]


def draw_all_to_all(dims: Ints, devices: int, max_delay_ms: float, rng: np.random.Generator) -> AllToAll:
    """A random placement of tables with `dims` (T,) columns on `devices`, and random start delays.

    Half of the placements have all tables, the others some of them, cut into column shards no wider than a random w. A share
    1 - p of the shards, with p uniform, goes greedily to the emptiest device. The others go to random devices with unequal
    probabilities, so that even 2,000 tables are placed lopsided, and a device may stay empty. In a fifth of the all-to-alls all
    devices start together. In the others one starts first, and the rest within u x `max_delay_ms` of it, with u uniform.
    """
    if rng.random() >= ALL_TABLES_SHARE:
        dims = rng.choice(dims, size=rng.integers(1, len(dims) + 1), replace=False)
    shards = rng.permutation(_cut(dims, rng))
    at_random = round(rng.random() * len(shards))
    device_dims = _greedy(shards[at_random:], devices)
    likely = rng.dirichlet(np.full(devices, rng.uniform(*EVENNESS)))
    np.add.at(device_dims, rng.choice(devices, size=at_random, p=likely), shards[:at_random])

    delays = np.zeros(devices)
    if rng.random() >= SAME_START_SHARE:
        # NumPy refuses a range that ends at -0.0
        delays = rng.uniform(0, rng.random() * abs(max_delay_ms), size=devices)
    delays = np.round(delays - delays.min(), 3)  # no process starts with more precision than a microsecond
    return AllToAll(tuple(device_dims.tolist()), tuple(delays.tolist()))


def _cut(dims: Ints, rng: np.random.Generator) -> Ints:
    """Each table in shards of at most w columns, equal up to steps of 4 columns; w is log-uniform from 16 up."""
    widest = np.exp(rng.uniform(np.log(NARROWEST_CUT), np.log(max(dims.max(), NARROWEST_CUT))))
    steps, pieces = dims // DIM_STEP, np.ceil(dims / widest).astype(np.int64)
    place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    each, over = np.repeat(steps // pieces, pieces), np.repeat(steps % pieces, pieces)
    cut: Ints = DIM_STEP * (each + (place < over))
    return cut


def _greedy(shards: Ints, devices: int) -> Ints:
    """Summed dims of each device, with each shard, the widest first, on the device that is then emptiest."""
    emptiest = [(0, device) for device in range(devices)]
    for dim in np.sort(shards)[::-1].tolist():
        filled, device = emptiest[0]
        heapq.heapreplace(emptiest, (filled + dim, device))
    device_dims = np.zeros(devices, dtype=np.int64)
    for filled, device in emptiest:
        device_dims[device] = filled
    return device_dims
