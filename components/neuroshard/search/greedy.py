"""One greedy for everything: the next shard goes on the cheapest device that has room. Many placements in lockstep.

A row is one placement being made: a beam state under one cap on each device's columns. One step places the i-th shard of
every row with a few array operations, so a cost model is asked about all rows at once and nothing loops over devices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints

# Of a device, from the sum of its shards' vectors: (…, K) -> (…). A cost model's compute_ms, or a baseline's plain sum.
Weigh = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Placed:
    """Placements of B orders under G caps. `load` is what `weigh` says of each device."""

    devices: Ints  # (B, G, S), -1 where a shard found no room
    fits: NDArray[np.bool_]  # (B, G): every shard found room
    load: Floats  # (B, G, D)
    dims: Floats  # (B, G, D), columns
    excess_bytes: Floats  # (B, G): how much the shards without room exceed the room that the roomiest device then had


def place(
    vectors: Floats,
    dims: Ints,
    nbytes: Ints,
    caps: Floats,
    memory: Ints,
    weigh: Weigh,
    allowed: NDArray[np.bool_] | None = None,
) -> Placed:
    """Place S shards, in their order, in B x G rows.

    vectors (B, S, K), dims (B, S) in columns, nbytes (B, S) and the devices that are `allowed` (B, S, D) describe the shards;
    caps (B, G) is how many columns a device may hold, memory (D,) how many bytes. Among equally light devices the one with the
    most free memory is taken, then the first. A shard of no columns changes nothing, so orders of different lengths
    may be padded.
    """
    (batch, grid), (steps, depth) = caps.shape, vectors.shape[1:]
    shape = (batch, grid, len(memory))
    sums, load, columns = np.zeros((*shape, depth)), np.zeros(shape), np.zeros(shape)
    free = np.broadcast_to(memory, shape).copy()
    devices = np.empty((batch, grid, steps), dtype=np.int64)
    fits, excess = np.ones((batch, grid), dtype=bool), np.zeros((batch, grid))
    rows = np.ix_(np.arange(batch), np.arange(grid))

    for step in range(steps):
        size, width = nbytes[:, step, None], dims[:, step, None]
        room = (free >= size[..., None]) & (columns + width[..., None] <= caps[..., None])
        if allowed is not None:
            room &= allowed[:, step, None]
        price = np.where(room, load, np.inf)
        lightest = price.min(axis=-1, keepdims=True)
        chosen = np.where(price == lightest, free, -1).argmax(axis=-1)
        found = np.isfinite(lightest[..., 0])
        devices[..., step] = np.where(found, chosen, -1)
        fits &= found
        excess += np.where(found, 0, np.maximum(size - free.max(axis=-1), 0))

        at = (*rows, chosen)
        sums[at] += np.where(found[..., None], vectors[:, step, None], 0.0)
        columns[at] += np.where(found, width, 0)
        free[at] -= np.where(found, size, 0)
        load[at] = np.where(columns[at] > 0, weigh(sums[at]), 0.0)
    return Placed(devices, fits, load, columns, excess)
