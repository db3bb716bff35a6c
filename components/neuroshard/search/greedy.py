"""One greedy for everything: the next shard goes on the cheapest device that has room. Many placements in lockstep.

A row is one placement being made: a beam state under one cap on each device's columns. One step places the i-th shard of
every row with a few array operations, so a cost model is asked about all rows at once and nothing loops over devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints, exchange_costs
from neuroshard.search.problem import Problem

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
    base: tuple[Floats, int] | None = None,
) -> Placed:
    """Place S shards, in their order, in B x G rows.

    vectors (B, S, K), dims (B, S) in columns, nbytes (B, S) and the devices that are `allowed` (B, S, D) describe the shards;
    caps (B, G) is how many columns a device may hold, memory (D,) how many bytes. Among equally light devices the one with the
    most free memory is taken, then the first. A shard of no columns changes nothing, so orders of different lengths
    may be padded. `base` is what lies on the devices beforehand: vectors (D, K), and columns on each.
    """
    (batch, grid), (steps, depth) = caps.shape, vectors.shape[1:]
    rows, count = batch * grid, len(memory)
    sums, load = np.zeros((rows * count, depth)), np.zeros((rows, count))
    free = np.broadcast_to(memory, (rows, count)).copy()
    columns = np.zeros((rows, count))
    if base is not None and base[1]:
        sums += np.tile(base[0], (rows, 1))
        load += weigh(base[0])
        columns += base[1]
    devices = np.empty((steps, rows), dtype=np.int64)
    fits, excess = np.ones(rows, dtype=bool), np.zeros(rows)
    order, begins = np.repeat(np.arange(batch), grid), count * np.arange(rows)
    spare, held, loads = free.reshape(-1), columns.reshape(-1), load.reshape(-1)  # views
    sizes, widths = nbytes.T[:, order], dims.T[:, order]  # (S, rows)
    limits = caps.reshape(rows) - widths
    padded = (dims == 0).any(axis=0).tolist()

    for step in range(steps):
        size, width = sizes[step], widths[step]
        room = free >= size[:, None]
        room &= columns <= limits[step][:, None]
        if allowed is not None:
            room &= allowed[order, step]
        price = np.where(room, load, np.inf)
        lightest = price == price.min(axis=1, keepdims=True)
        chosen = np.where(lightest, free, -1).argmax(axis=1)
        at, of, to = begins + chosen, order, chosen
        found = room.reshape(-1).take(at)
        if not found.all():
            fits &= found
            excess += np.where(found, 0, np.maximum(size - free.max(axis=1), 0))
            to = np.where(found, chosen, -1)
            at, of, width, size = at[found], order[found], width[found], size[found]
        devices[step] = to
        placed = sums.take(at, axis=0)
        placed += vectors[:, step].take(of, axis=0)
        sums[at] = placed
        held[at] += width
        spare[at] -= size
        weighed = weigh(placed)
        loads[at] = np.where(width > 0, weighed, loads[at]) if padded[step] else weighed
    shape = (batch, grid)
    return Placed(
        devices.T.reshape(*shape, steps),
        fits.reshape(shape),
        load.reshape(*shape, count),
        columns.reshape(*shape, count),
        excess.reshape(shape),
    )


def costliest_first(problem: Problem, lists: Sequence[Ints]) -> list[Ints]:
    """Each list of shards in order of what they cost on devices of their own, then of bytes."""
    asked = np.zeros(len(problem.item), dtype=bool)
    asked[np.concatenate(lists)] = True
    shards = np.flatnonzero(asked)
    alone_ms = np.zeros(len(problem.item))
    alone_ms[shards] = problem.alone_ms(shards)
    return [one[np.lexsort((one, -problem.nbytes[one], -alone_ms[one]))] for one in lists]


def place_lists(problem: Problem, lists: Sequence[Ints], caps: Floats) -> tuple[Placed, Floats]:
    """Place B lists of shards under G caps on each device's columns, as shares of the mean, by the cost model.

    Returns them with what each costs (B, G), in ms; infinite where a shard found no room.
    """
    longest = max(map(len, lists))
    orders = np.stack([np.pad(shards, (0, longest - len(shards))) for shards in lists])
    caps = problem.mean_columns * caps
    placed = place(
        problem.vectors[orders],
        problem.dims[orders],
        problem.nbytes[orders],
        np.broadcast_to(caps, (len(orders), len(caps))),
        problem.memory,
        problem.model.compute_ms,
        None if problem.free_to_go else problem.allowed[problem.item[orders]] | (orders == 0)[..., None],
        (problem.base, problem.base_dims),
    )
    forward, backward = exchange_costs(problem.model, placed.load, placed.dims)
    return placed, np.where(placed.fits, (placed.load + forward + backward).max(axis=-1), np.inf)
