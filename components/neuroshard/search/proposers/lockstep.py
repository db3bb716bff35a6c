"""The one greedy: the next shard goes on the least loaded device that has room. Many placements in lockstep.

A row is one placement in the making. One step places the i-th shard of every row with a few array operations, so a cost model
prices all rows at once and nothing loops over devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.table import VECTOR_STEPS
from neuroshard.costmodel.faster import summands, transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem

# Load of a device from the sum of its shards' vectors: (…, K) -> (…). A cost model's compute_ms, or a plain sum.
Weigh = Callable[[Floats], Floats]
NO_CAP = 2**60  # steps of columns


@dataclass(frozen=True)
class Placed:
    """Placements of B orders under G caps. `load` is what `weigh` says of each device."""

    devices: Ints  # (B, G, S), -1 where a shard found no room
    fits: NDArray[np.bool_]  # (B, G): every shard found room
    load: Floats  # (B, G, D)
    dims: Floats  # (B, G, D), columns


def place(
    vectors: Floats,
    orders: Ints,
    dims: Floats | Ints,
    nbytes: Ints,
    caps: Floats,
    memory: Ints,
    weigh: Weigh,
    allowed: NDArray[np.bool_] | None = None,
    base: tuple[Floats, Floats] | None = None,
    soft: bool = False,
    apart: Ints | None = None,
) -> Placed:
    """Place S shards each, in their `orders` (B, S), in B x G rows.

    Of the V shards in the orders: `vectors` (V, K), `dims` (V,) columns, `nbytes` (V,), `allowed` devices (V, D), and their
    group `apart` (V,), no two of which go on one device. `caps` (B, G) are columns of a device, `memory` (D,) bytes. Of equally
    loaded devices the one with the most free memory is taken, then the first. A shard of no columns changes nothing, so
    orders of different lengths can be padded. `base` is what devices hold beforehand: sums of vectors (D, K), and columns (D,).
    With `soft` caps, a shard for which no device has room under its cap goes to the device of the fewest columns.
    """
    (batch, grid), steps = caps.shape, orders.shape[1]
    rows, count = batch * grid, len(memory)
    sums, load = np.zeros((rows * count, vectors.shape[1])), np.zeros((rows, count))
    left = np.empty((2, rows, count), dtype=np.int64)  # bytes, and steps of columns under the cap
    left[0], left[1] = memory, np.minimum(caps * VECTOR_STEPS, NO_CAP).astype(np.int64).reshape(rows, 1)
    columns = left[1].copy()
    if base is not None:
        sums.reshape(rows, count, -1)[:] = base[0]
        load += np.where(base[1] > 0, weigh(base[0]), 0.0)
        left[1] -= np.rint(base[1] * VECTOR_STEPS).astype(np.int64)
    devices = np.empty((steps, rows), dtype=np.int64)
    fits = np.ones(rows, dtype=bool)
    free, spare, loads = left[0], left.reshape(-1), load.reshape(-1)  # views
    begins = count * np.arange(2 * rows).reshape(2, rows)
    placing = np.repeat(orders.T, grid, axis=1)  # (S, rows)
    sent = np.rint(dims * VECTOR_STEPS).astype(np.int64)
    needs = np.stack([nbytes[placing], sent[placing]], axis=1)  # (S, 2, rows)
    padding = (needs[:, 1] == 0).any(axis=1).tolist()
    held = None if apart is None else np.zeros((rows * count, int(apart.max(initial=0)) + 1), dtype=bool)

    for step in range(steps):
        need, shard = needs[step], placing[step]
        roomy = left >= need[..., None]
        room = np.logical_and(roomy[0], roomy[1])
        if allowed is not None:
            room &= allowed[shard]
        if held is not None and apart is not None:
            room &= ~held.reshape(rows, count, -1)[np.arange(rows), :, apart[shard]]
        price = np.where(room, load, np.inf)
        chosen = price.argmin(axis=1)
        least = price.take(begins[0] + chosen)
        lightest = price == least[:, None]
        one_each = count > 1 and np.count_nonzero(lightest) == rows
        if not one_each:  # some row has equally loaded devices, or none with room
            chosen = np.where(lightest, free, -1).argmax(axis=1)
        found = least < np.inf
        if soft and not found.all():
            lost = np.flatnonzero(~found)
            there = roomy[0, lost] if allowed is None else roomy[0, lost] & allowed[shard[lost]]
            chosen[lost] = np.where(there, left[1, lost], -NO_CAP).argmax(axis=1)
            found[lost] = there.any(axis=1)
        both = begins + chosen
        if found.all():
            devices[step] = chosen
        else:
            fits &= found
            devices[step] = np.where(found, chosen, -1)
            both, need, shard = both[:, found], need[:, found], shard[found]
        at = both[0]
        placed = sums.take(at, axis=0)
        placed += vectors.take(shard, axis=0)
        sums[at] = placed
        spare[both] -= need
        weighed = weigh(placed)
        loads[at] = np.where(need[1] > 0, weighed, loads[at]) if padding[step] else weighed
        if held is not None and apart is not None:
            held[at, apart[shard]] |= need[1] > 0
    shape = (batch, grid)
    columns -= left[1]
    return Placed(
        devices.T.reshape(*shape, steps),
        fits.reshape(shape),
        load.reshape(*shape, count),
        columns.reshape(*shape, count) / VECTOR_STEPS,
    )


def costliest_first(problem: Problem, lists: Sequence[Ints]) -> list[Ints]:
    """Each list of shards in order of what they cost on devices of their own, then of bytes."""
    shards, _ = _in_use(problem, lists)
    alone_ms = np.zeros(len(problem.group))
    alone_ms[shards] = problem.alone_ms(shards)
    return [one[np.lexsort((one, -problem.nbytes[one], -alone_ms[one]))] for one in lists]


def padded(lists: Sequence[Ints]) -> Ints:
    """Lists as rows of one array, filled up with shard 0."""
    rows = np.zeros((len(lists), max(map(len, lists))), dtype=np.int64)
    for row, shards in zip(rows, lists, strict=True):
        row[: len(shards)] = shards
    return rows


def _in_use(problem: Problem, lists: Sequence[Ints]) -> tuple[Ints, Ints]:
    """The shards that are in any of the lists, and shard 0; and the place of every shard among them."""
    used = np.zeros(len(problem.group), dtype=bool)
    used[np.concatenate(lists)] = used[0] = True
    return np.flatnonzero(used), np.cumsum(used) - 1


def place_by_load(problem: Problem, shards: Ints, loads: Floats, orders: Ints, apart: Ints | None = None) -> Placed:
    """Place V shards of fixed loads (V,), in orders (B, S), whatever the columns of a device. `apart` is as in `place`."""
    return place(
        vectors=loads[:, None],
        orders=orders,
        dims=problem.dims[shards],
        nbytes=problem.nbytes[shards],
        caps=np.full((len(orders), 1), np.inf),
        memory=problem.memory,
        weigh=lambda sums: sums[..., 0],
        allowed=None if problem.any_device else problem.allowed[problem.group[shards]],
        apart=apart,
    )


def place_lists(problem: Problem, lists: Sequence[Ints], caps: Floats, soft: bool = False) -> tuple[Placed, Floats]:
    """Place B lists of shards by the cost model, under G caps on each device's columns, as multiples of the mean.

    Returns them with what each costs in ms (B, G), with the launches of tables that are not cut; infinite where a shard found
    no room.
    """
    orders = padded(lists)
    shards, number = _in_use(problem, lists)
    problem.price(shards)
    caps = problem.mean_columns * caps
    summed = summands(problem.model, problem.vectors[shards], problem.base)
    placed = place(
        summed.vectors,
        number[orders],
        problem.dims[shards],
        problem.nbytes[shards],
        np.broadcast_to(caps, (len(orders), len(caps))),
        problem.memory,
        summed.ms,
        None if problem.any_device else problem.allowed[problem.group[shards]] | (shards == 0)[:, None],
        (summed.base, problem.base_dims),
        soft,
    )
    forward, backward = transfers_ms(problem.model, placed.dims)
    costs = (
        (placed.load + backward).max(axis=-1) + forward.max(axis=-1) + problem.launched_ms(np.ones_like(problem.whole))
    )
    return placed, np.where(placed.fits, costs, np.inf)
