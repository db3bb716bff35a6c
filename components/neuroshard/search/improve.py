"""Improve a plan in small steps, from its slowest devices, until no step helps.

A step hands a shard, or half or a quarter of its columns, to another device; or hands columns to another shard of the same
table; or swaps two shards. All steps from a device are ranked by a linear guess, the most promising are priced by the cost
model in one batch, and the best is taken. A local optimum of these steps is not the optimum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints, device_costs, exchange_costs
from neuroshard.progress import progress
from neuroshard.search.problem import Placement, Problem

SWAP_PARTNERS = 16  # each way, on each other device
PRICED_DEVICES = 50_000  # steps x devices priced in a batch: some 10 ms with the paper's nets; more find little more
MIN_EASE = 1e-6  # share of `busy` that a step must take off: with 100 equally slow devices one of them is little of it
SHARPNESS = 16  # of the soft maximum that breaks ties: a device at 90 % of the slowest counts a fifth of it


@dataclass(frozen=True)
class _Steps:
    """C possible steps from one device `a`: shard `give` of `a` becomes `kept`, and on device `to` (which may be `a`) shard
    `take` (or none, -1) becomes `gained`. `give` and `take` are places in the plan, `kept` and `gained` are shards."""

    give: Ints
    kept: Ints
    take: Ints
    gained: Ints
    to: Ints

    def __getitem__(self, chosen: Ints) -> "_Steps":
        return _Steps(*(column[chosen] for column in vars(self).values()))


def improve(problem: Problem, placements: Sequence[Placement], max_steps: int) -> Placement:
    """Improve each of the placements, which must fit, by at most `max_steps` steps; return the best, which is never worse.

    A step is better where the slowest device gets faster; ties are broken by how busy all are, since with several equally
    slow devices no single step makes the slowest faster.
    """
    best, best_ms = placements[0], np.inf
    with progress("improve", total=len(placements), unit="plans") as bar:
        for placement in placements:
            for plan in _descent(problem, merge(problem, placement), max_steps):
                if plan.worst_ms < best_ms:
                    best, best_ms = plan.placement, plan.worst_ms
                bar.advance(0, f"best {best_ms:.3f} ms")
            bar.advance(1)
    return best


def _descent(problem: Problem, placement: Placement, max_steps: int) -> Iterator["_Plan"]:
    """The placement, then the one after each step, until no step from the slowest devices is better."""
    yield (plan := _Plan(problem, placement))
    for _ in range(max_steps):
        better = next((step for a in plan.slowest() if (step := plan.best_step(a)) is not None), None)
        if better is None:
            return
        yield (plan := _Plan(problem, better))


def merge(problem: Problem, placement: Placement) -> Placement:
    """Shards of one table on one device become one wider shard, on the devices that compute no slower with it.

    Never wider than the cost model has seen, and never where the slowest device gets slower.
    """
    pair = placement.devices * len(problem.whole) + problem.table[placement.shards]
    _, first, group = np.unique(pair, return_index=True, return_inverse=True)
    units = np.bincount(group, weights=problem.units[placement.shards]).astype(np.int64)
    one = Placement(problem.cut(placement.shards[first], units), placement.devices[first])
    too_wide = (problem.dims[one.shards] > problem.model.max_dim) & (one.shards != placement.shards[first])
    before, after = problem.costs([placement, one])[0]
    merges = after <= before
    merges[one.devices[too_wide]] = False
    into, kept = merges[one.devices], ~merges[placement.devices]
    merged = Placement(
        np.append(one.shards[into], placement.shards[kept]), np.append(one.devices[into], placement.devices[kept])
    )
    merged_ms, unmerged_ms = problem.worst_ms([merged, placement])
    return merged if merged_ms <= unmerged_ms else placement


class _Plan:
    """A placement with its sums and costs per device, and the steps that lead away from it."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self.problem, self.placement = problem, placement
        self.shards, self.devices = placement.shards, placement.devices
        self.vectors, self.dims, nbytes = problem.sums(placement)
        self.free = problem.memory - nbytes
        self.compute, forward, backward = device_costs(problem.model, self.vectors, self.dims)
        self.ready, self.total = self.compute + backward, self.compute + forward + backward
        self.worst_ms = float(self.total.max())
        self.busy = self._busy(self.ready, self.total)
        self.column_ms = 2 * backward.sum() / self.dims.sum()
        alone_ms = problem.alone_ms[self.shards].sum()
        self.fusion = self.compute.sum() / alone_ms if alone_ms > 0 else 1.0
        self.load = self.compute + self.column_ms * self.dims

    def slowest(self) -> list[int]:
        """The device that ends last and the one that the others wait for; the forward exchange hides the second in the
        totals, since it includes the waiting."""
        return list(dict.fromkeys([int(self.total.argmax()), int(self.ready.argmax())]))

    def worth(self, shards: Ints) -> Floats:
        """A linear guess of what each shard adds to its device's ms: what it costs alone, as much less as all shards gain
        by being fused, and its columns at what a column's exchange costs now."""
        ms: Floats = self.fusion * self.problem.alone_ms[shards] + self.column_ms * self.problem.dims[shards]
        return ms

    def best_step(self, a: int) -> Placement | None:
        """The placement after the best step from device `a`, or None where none is better."""
        steps = self._promising(a, self._steps(a))
        if not len(steps.give):
            return None
        compute, dims = self._after(a, steps)
        forward, backward = exchange_costs(self.problem.model, compute, dims)
        ready, total = compute + backward, compute + forward + backward
        worst = np.round(total.max(axis=-1) / self.worst_ms, 9) if self.worst_ms else total.max(axis=-1)
        busy = self._busy(ready, total)
        best = np.lexsort((busy, worst))[0]
        if worst[best] > 1 or (worst[best] == 1 and busy[best] >= self.busy * (1 - MIN_EASE)):
            return None
        return self._take(steps, best)

    def _steps(self, a: int) -> _Steps:
        """Every step from device `a`."""
        problem, shards, devices = self.problem, self.shards, self.devices
        mine = np.flatnonzero(devices == a)
        units = problem.units[shards[mine]]
        giver = np.concatenate([mine, mine[units > 1], mine[units > 2]])
        part = np.concatenate([units, -(-units // 2)[units > 1], -(-units // 4)[units > 2]])

        siblings = problem.table[shards[giver]][:, None] == problem.table[shards]
        siblings &= giver[:, None] != np.arange(len(shards))
        move, to = _pairs(np.arange(len(giver)), np.delete(np.arange(problem.devices), a))
        hand, sibling = np.nonzero(siblings)
        row = np.concatenate([move, hand])
        take = np.concatenate([np.full(len(move), -1), sibling])
        gains = part[row] + np.where(take >= 0, problem.units[shards[take]], 0)
        kept = problem.cut(shards[giver[row]], problem.units[shards[giver[row]]] - part[row])
        gained = problem.cut(shards[giver[row]], gains)
        splits = _Steps(giver[row], kept, take, gained, np.concatenate([to, devices[sibling]]))
        splits = splits[np.flatnonzero((take < 0) | (problem.dims[gained] <= problem.model.max_dim))]

        swaps = self._swaps(a, mine)
        columns = zip(vars(splits).values(), vars(swaps).values(), strict=True)
        return _Steps(*(np.concatenate(both) for both in columns))

    def _swaps(self, a: int, mine: Ints) -> _Steps:
        """Swaps of the shards `mine` of device `a` with the shards of each other device nearest in worth to what would leave
        both devices equally loaded: SWAP_PARTNERS on either side, which is all of them in most tasks."""
        worth = self.worth(self.shards)
        rank = np.lexsort((worth, self.devices))
        scale = 2 * (worth.max() + self.load.max()) + 1
        keys = self.devices[rank] * scale + worth[rank]
        give, to = _pairs(mine, np.delete(np.arange(self.problem.devices), a))
        wanted = worth[give] - (self.load[a] - self.load[to]) / 2
        near = np.searchsorted(keys, to * scale + wanted)[:, None] + np.arange(-SWAP_PARTNERS, SWAP_PARTNERS)
        take = rank[near.clip(0, len(rank) - 1)]
        row, column = np.nonzero((self.devices[take] == to[:, None]) & (near >= 0) & (near < len(rank)))
        give, take = give[row], take[row, column]
        return _Steps(give, self.shards[take], take, self.shards[give], self.devices[take])

    def _promising(self, a: int, steps: _Steps) -> _Steps:
        """The steps that fit in memory, and of those the ones with the best linear guess of the slower of both devices."""
        problem = self.problem
        problem.price(np.concatenate([steps.kept, steps.gained]))
        given, taken = self._before(steps)
        same = steps.to == a
        spare = self.free[a] + problem.nbytes[given] - problem.nbytes[steps.kept]
        spare_there = np.where(same, spare, self.free[steps.to]) + problem.nbytes[taken] - problem.nbytes[steps.gained]
        fitting = np.flatnonzero((spare_there >= 0) & (same | (spare >= 0)))

        here = self.load[a] - self.worth(given) + self.worth(steps.kept)
        there = np.where(same, here, self.load[steps.to]) - self.worth(taken) + self.worth(steps.gained)
        guess = np.where(same, there, np.maximum(here, there))[fitting]
        most = max(64, PRICED_DEVICES // problem.devices)
        return steps[fitting[np.argpartition(guess, most)[:most]] if len(guess) > most else fitting]

    def _after(self, a: int, steps: _Steps) -> tuple[Floats, Floats]:
        """Compute ms and columns of every device after each step: two (C, D)."""
        given, taken = self._before(steps)
        rows, same = np.arange(len(steps.give)), steps.to == a
        dims = np.tile(self.dims, (len(rows), 1))
        dims[:, a] += self.problem.dims[steps.kept] - self.problem.dims[given]
        dims[rows, steps.to] += self.problem.dims[steps.gained] - self.problem.dims[taken]

        vectors = self.problem.vectors
        here = self.vectors[a] - vectors[given] + vectors[steps.kept]
        there = np.where(same[:, None], here, self.vectors[steps.to]) - vectors[taken] + vectors[steps.gained]
        asked = self.problem.model.compute_ms(np.concatenate([here, there]))
        compute = np.tile(self.compute, (len(rows), 1))
        compute[:, a] = asked[: len(rows)]
        compute[rows, steps.to] = asked[len(rows) :]
        return np.where(dims > 0, compute, 0.0), dims

    def _before(self, steps: _Steps) -> tuple[Ints, Ints]:
        """The shards that a step changes: on the giving and on the taking side."""
        return self.shards[steps.give], np.where(steps.take >= 0, self.shards[steps.take], 0)

    def _take(self, steps: _Steps, step: int) -> Placement:
        shards, devices = np.append(self.shards, 0), np.append(self.devices, steps.to[step])
        shards[steps.give[step]] = steps.kept[step]
        shards[steps.take[step]] = steps.gained[step]  # place -1, the one just added, where it takes from none
        return Placement(shards[shards > 0], devices[shards > 0])

    def _busy(self, ready: Floats, total: Floats) -> Floats:
        """How busy all devices are, slow ones most: (…, D) -> (…)."""
        scale = self.worst_ms or 1.0
        busy: Floats = ((ready / scale) ** SHARPNESS + (total / scale) ** SHARPNESS).sum(axis=-1)
        return busy


def _pairs(one: Ints, other: Ints) -> tuple[Ints, Ints]:
    """Every element of one with every element of the other."""
    return np.repeat(one, len(other)), np.tile(other, len(one))
