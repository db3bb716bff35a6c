"""One greedy for everything: the next shard goes on the cheapest device that has room. Many placements in lockstep.

A row is one placement being made: a beam state under one cap on each device's columns. One step places the i-th shard of
every row with a few array operations, so a cost model is asked about all rows at once and nothing loops over devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import transfers

# Of a device, from the sum of its shards' vectors: (…, K) -> (…). A cost model's compute_ms, or a baseline's plain sum.
Weigh = Callable[[Floats], Floats]
NO_CAP = 2**60  # columns


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
    orders: Ints,
    dims: Ints,
    nbytes: Ints,
    caps: Floats,
    memory: Ints,
    weigh: Weigh,
    allowed: NDArray[np.bool_] | None = None,
    ground: tuple[Floats, int] | None = None,
    soft: bool = False,
) -> Placed:
    """Place S shards each, in their `orders` (B, S), in B x G rows.

    vectors (V, K), dims (V,) in columns, nbytes (V,) and the devices that are `allowed` (V, D) describe the shards that are in
    orders; caps (B, G) is how many columns a device may hold, memory (D,) how many bytes. Among equally light devices the one
    with the most free memory is taken, then the first. A shard of no columns changes nothing, so orders of different lengths
    may be padded. `ground` is what sums begin with (D, K), and how many columns lie on each device beforehand. Caps that are
    `soft` give way where no device has room under them: to the one of the fewest columns.
    """
    (batch, grid), steps = caps.shape, orders.shape[1]
    rows, count = batch * grid, len(memory)
    sums, load = np.empty((rows * count, vectors.shape[1]), vectors.dtype), np.zeros((rows, count))
    sums.reshape(rows, count, -1)[:] = 0.0 if ground is None else ground[0]
    left = np.empty((2, rows, count), dtype=np.int64)  # bytes, and columns under the cap
    left[0], left[1] = memory, np.minimum(caps, NO_CAP).astype(np.int64).reshape(rows, 1)
    columns = left[1].copy()
    if ground is not None and ground[1]:
        load += weigh(ground[0])
        left[1] -= ground[1]
    devices = np.empty((steps, rows), dtype=np.int64)
    fits, excess = np.ones(rows, dtype=bool), np.zeros(rows)
    free, spare, loads = left[0], left.reshape(-1), load.reshape(-1)  # views
    begins = count * np.arange(2 * rows).reshape(2, rows)
    placing = np.repeat(orders.T, grid, axis=1)  # (S, rows)
    needs = np.stack([nbytes[placing], dims[placing]], axis=1)  # (S, 2, rows)
    padding = (needs[:, 1] == 0).any(axis=1).tolist()

    for step in range(steps):
        need, shard = needs[step], placing[step]
        roomy = left >= need[..., None]
        room = np.logical_and(roomy[0], roomy[1])
        if allowed is not None:
            room &= allowed[shard]
        price = np.where(room, load, np.inf)
        chosen = price.argmin(axis=1)
        least = price.take(begins[0] + chosen)
        lightest = price == least[:, None]
        alone = count > 1 and np.count_nonzero(lightest) == rows  # and not infinite, as that of all devices would be
        if not alone:
            chosen = np.where(lightest, free, -1).argmax(axis=1)
        if alone or least.max() < np.inf:
            devices[step] = chosen
            both = begins + chosen
        else:
            found = least < np.inf
            if soft:
                lost = np.flatnonzero(~found)
                there = roomy[0, lost] if allowed is None else roomy[0, lost] & allowed[shard[lost]]
                chosen[lost] = np.where(there, left[1, lost], -NO_CAP).argmax(axis=1)
                found[lost] = there.any(axis=1)
            fits &= found
            excess += np.where(found, 0, np.maximum(need[0] - free.max(axis=1), 0))
            devices[step] = np.where(found, chosen, -1)
            both, need, shard = (begins + chosen)[:, found], need[:, found], shard[found]
        at = both[0]
        placed = sums.take(at, axis=0)
        placed += vectors.take(shard, axis=0)
        sums[at] = placed
        spare[both] -= need
        weighed = weigh(placed)
        loads[at] = np.where(need[1] > 0, weighed, loads[at]) if padding[step] else weighed
    shape = (batch, grid)
    columns -= left[1]
    return Placed(
        devices.T.reshape(*shape, steps),
        fits.reshape(shape),
        load.reshape(*shape, count),
        columns.reshape(*shape, count).astype(np.float64),
        excess.reshape(shape),
    )


def costliest_first(problem: Problem, lists: Sequence[Ints]) -> list[Ints]:
    """Each list of shards in order of what they cost on devices of their own, then of bytes."""
    shards, _ = _asked(problem, lists)
    alone_ms = np.zeros(len(problem.item))
    alone_ms[shards] = problem.alone_ms(shards)
    return [one[np.lexsort((one, -problem.nbytes[one], -alone_ms[one]))] for one in lists]


def padded(lists: Sequence[Ints]) -> Ints:
    """Lists as rows of one array, filled up with shard 0."""
    rows = np.zeros((len(lists), max(map(len, lists))), dtype=np.int64)
    for row, shards in zip(rows, lists, strict=True):
        row[: len(shards)] = shards
    return rows


def _asked(problem: Problem, lists: Sequence[Ints]) -> tuple[Ints, Ints]:
    """The shards that are in any of the lists, and shard 0; and the place of every shard among them."""
    asked = np.zeros(len(problem.item), dtype=bool)
    asked[np.concatenate(lists)] = asked[0] = True
    return np.flatnonzero(asked), np.cumsum(asked) - 1


def place_lists(problem: Problem, lists: Sequence[Ints], caps: Floats, soft: bool = False) -> tuple[Placed, Floats]:
    """Place B lists of shards under G caps on each device's columns, as shares of the mean, by the cost model.

    Returns them with what each costs (B, G), in ms; infinite where a shard found no room.
    """
    model = problem.model
    orders = padded(lists)
    shards, number = _asked(problem, lists)
    problem.price(shards)
    # sums of what vectors are lifted to are faster to weigh
    head = model.nets.compute.mean if isinstance(model, TrainedCostModel) else None
    vectors, base = problem.vectors[shards], problem.base
    if soft and head is not None:  # plans are taken from them and priced anew
        head, vectors, base = head.single, vectors.astype(np.float32), base.astype(np.float32)
    caps = problem.mean_columns * caps
    placed = place(
        vectors if head is None else head.lifted(vectors),
        number[orders],
        problem.dims[shards],
        problem.nbytes[shards],
        np.broadcast_to(caps, (len(orders), len(caps))),
        problem.memory,
        model.compute_ms if head is None else head.ms,
        None if problem.free_to_go else problem.allowed[problem.item[shards]] | (shards == 0)[:, None],
        (base if head is None else head.lifted(base) + head.ground, problem.base_dims),
        soft,
    )
    forward, backward = transfers(problem, placed.dims)
    costs = (placed.load + backward).max(axis=-1) + forward.max(axis=-1)
    return placed, np.where(placed.fits, costs, np.inf)
