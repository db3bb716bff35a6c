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
class Shards:
    """The V shards that rows are made of: what each adds to a device, and where it may go. A shard of no columns changes nothing,
    so orders of different lengths can be padded."""

    vectors: Floats  # (V, K)
    dims: Floats  # (V,) columns
    nbytes: Ints  # (V,)
    allowed: NDArray[np.bool_] | None = None  # (V, D)
    apart: Ints | None = None  # (V,), their group, no two shards of which go on one device

    @classmethod
    def of(cls, problem: Problem, shards: Ints, vectors: Floats, apart: Ints | None = None) -> "Shards":
        """These shards of a problem, with other vectors than its own."""
        allowed = None if problem.any_device else problem.allowed[problem.group[shards]] | (shards == 0)[:, None]
        return cls(vectors, problem.dims[shards], problem.nbytes[shards], allowed, apart)


@dataclass(frozen=True)
class Devices:
    """The D devices: their bytes, how their load is weighed, and what they hold beforehand, if anything."""

    memory: Ints  # (D,) bytes
    weigh: Weigh
    base: tuple[Floats, Floats] | None = None  # sums of vectors (D, K), and columns (D,)


@dataclass(frozen=True)
class Placed:
    """Placements of B orders under G caps. `load` is what `weigh` says of each device."""

    devices: Ints  # (B, G, S), -1 where a shard found no room
    fits: NDArray[np.bool_]  # (B, G): every shard found room
    load: Floats  # (B, G, D)
    dims: Floats  # (B, G, D), columns


def place(shards: Shards, devices: Devices, orders: Ints, caps: Floats, soft: bool = False) -> Placed:
    """Place S of the shards each, in their `orders` (B, S), in B x G rows, under `caps` (B, G) on the columns of a device.

    Of equally loaded devices the one with the most free memory is taken, then the first. With `soft` caps, a shard for which no
    device has room under its cap goes to the device of the fewest columns.
    """
    (batch, grid), steps = caps.shape, orders.shape[1]
    rows = _Rows(shards, devices, caps)
    placing = np.repeat(orders.T, grid, axis=1)  # (S, rows)
    sent = np.rint(shards.dims * VECTOR_STEPS).astype(np.int64)
    needs = np.stack([shards.nbytes[placing], sent[placing]], axis=1)  # (S, 2, rows)
    padding = (needs[:, 1] == 0).any(axis=1).tolist()
    placed = np.empty((steps, batch * grid), dtype=np.int64)
    for step in range(steps):
        need, shard = needs[step], placing[step]
        chosen, found = rows.choose(need, shard, soft)
        if found.all():
            rows.put(chosen, need, shard, padding=padding[step])
            placed[step] = chosen
        else:
            rows.put(chosen, need, shard, padding=padding[step], only=found)
            placed[step] = np.where(found, chosen, -1)
    fits = (placed >= 0).all(axis=0)
    shape = (batch, grid, len(devices.memory))
    columns = (rows.columns - rows.left[1]).reshape(shape) / VECTOR_STEPS
    return Placed(placed.T.reshape(batch, grid, steps), fits.reshape(batch, grid), rows.load.reshape(shape), columns)


class _Rows:
    """R placements in the making: `load` (R, D), and what is `left` (2, R, D): bytes, and steps of columns under the cap."""

    def __init__(self, shards: Shards, devices: Devices, caps: Floats) -> None:
        self.shards, self.weigh, count = shards, devices.weigh, len(devices.memory)
        self.sums, self.load = np.zeros((caps.size * count, shards.vectors.shape[1])), np.zeros((caps.size, count))
        self.left = np.empty((2, caps.size, count), dtype=np.int64)
        self.left[0] = devices.memory
        self.left[1] = np.minimum(caps * VECTOR_STEPS, NO_CAP).astype(np.int64).reshape(-1, 1)
        self.columns = self.left[1].copy()
        if devices.base is not None:
            vectors, columns = devices.base
            self.sums.reshape(caps.size, count, -1)[:] = vectors
            self.load += np.where(columns > 0, devices.weigh(vectors), 0.0)
            self.left[1] -= np.rint(columns * VECTOR_STEPS).astype(np.int64)
        self.begins = count * np.arange(2 * caps.size).reshape(2, caps.size)
        most = 0 if shards.apart is None else int(shards.apart.max(initial=0)) + 1
        self.holds = np.zeros((caps.size, count, most), dtype=bool)  # shards of which groups

    def choose(self, need: Ints, shard: Ints, soft: bool) -> tuple[Ints, NDArray[np.bool_]]:
        """The device for one more shard in each row, (R,), that needs so much (2, R), and whether it has room."""
        allowed, apart = self.shards.allowed, self.shards.apart
        roomy = self.left >= need[..., None]
        room = np.logical_and(roomy[0], roomy[1])
        if allowed is not None:
            room &= allowed[shard]
        if apart is not None:
            room &= ~self.holds[np.arange(len(room)), :, apart[shard]]
        load = np.where(room, self.load, np.inf)
        chosen = load.argmin(axis=1)
        least = load.take(self.begins[0] + chosen)
        lightest = load == least[:, None]
        if load.shape[1] == 1 or np.count_nonzero(lightest) != len(load):  # equally loaded devices, or none with room
            chosen = np.where(lightest, self.left[0], -1).argmax(axis=1)
        found = least < np.inf
        if soft and not found.all():
            lost = np.flatnonzero(~found)
            there = roomy[0, lost] if allowed is None else roomy[0, lost] & allowed[shard[lost]]
            chosen[lost] = np.where(there, self.left[1, lost], -NO_CAP).argmax(axis=1)
            found[lost] = there.any(axis=1)
        return chosen, found

    def put(
        self, chosen: Ints, need: Ints, shard: Ints, *, padding: bool, only: NDArray[np.bool_] | None = None
    ) -> None:
        """Put each row's shard on its chosen device, in `only` some rows; with `padding` some of the shards may be none."""
        both = self.begins + chosen
        if only is not None:
            both, need, shard = both[:, only], need[:, only], shard[only]
        at, loads = both[0], self.load.reshape(-1)
        placed = self.sums.take(at, axis=0)
        placed += self.shards.vectors.take(shard, axis=0)
        self.sums[at] = placed
        self.left.reshape(-1)[both] -= need
        weighed = self.weigh(placed)
        loads[at] = np.where(need[1] > 0, weighed, loads[at]) if padding else weighed
        if self.shards.apart is not None:
            self.holds.reshape(len(loads), -1)[at, self.shards.apart[shard]] |= need[1] > 0


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
    """Place V shards of fixed loads (V,), in orders (B, S), whatever the columns of a device. `apart` is as in `Shards`."""
    devices = Devices(problem.memory, weigh=lambda sums: sums[..., 0])
    return place(Shards.of(problem, shards, loads[:, None], apart), devices, orders, np.full((len(orders), 1), np.inf))


def place_lists(problem: Problem, lists: Sequence[Ints], caps: Floats, soft: bool = False) -> tuple[Placed, Floats]:
    """Place B lists of shards by the cost model, under G caps on each device's columns, as multiples of the mean.

    Returns them with what each costs in ms (B, G), with the launches of tables that are not cut; infinite where a shard found
    no room.
    """
    orders = padded(lists)
    shards, number = _in_use(problem, lists)
    problem.price(shards)
    summed = summands(problem.model, problem.vectors[shards], problem.base)
    devices = Devices(problem.memory, summed.ms, (summed.base, problem.base_dims))
    each = np.broadcast_to(problem.mean_columns * caps, (len(orders), len(caps)))
    placed = place(Shards.of(problem, shards, summed.vectors), devices, number[orders], each, soft)
    forward, backward = transfers_ms(problem.model, placed.dims)
    costs = (placed.load + backward).max(axis=-1) + forward.max(axis=-1)
    costs += problem.launched_ms(np.ones_like(problem.whole))
    return placed, np.where(placed.fits, costs, np.inf)
