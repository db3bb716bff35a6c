"""Several plans of one task that are changed in lockstep: a NumPy call on few numbers takes as long as on many."""

from collections.abc import Sequence

import numpy as np

from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State


class Plans:
    """The arrays of `State` for B plans, changed in place; and `slope` (B, D, K), ms that a unit of a vector adds to a device.

    Once all shards are priced, `slot_ms` (B, D, slots) is what each width of each group adds to a device by that. Descents take 5
    to 10 % less time with these kept up to date than with products for each width that a move may have.

    The plans' `problems` may differ in which tables are row-wise, and so in what all-to-alls take. All else is the same, and
    `problem` is the first.
    """

    def __init__(self, states: Sequence[State]) -> None:
        self.problems = [state.problem for state in states]
        problem = self.problem = self.problems[0]
        self.launched_ms = np.array([s.launched_ms for s in states])
        # in memory device by device, since moves ask for all of a device's groups
        self.widths = np.stack([s.widths.T for s in states]).swapaxes(1, 2)
        self.held = np.stack([s.widths.T > 0 for s in states])  # (B, D, G): which widths are not 0
        self.shards = np.stack([s.shards for s in states])
        self.sums, self.dims = np.stack([s.sums for s in states]), np.stack([s.dims for s in states])
        self.free, self.compute = np.stack([s.free for s in states]), np.stack([s.compute for s in states])
        self.slope = problem.model.compute_slope(self.sums)
        problem.price_rest()
        vectors = problem.slot_vectors
        self.slot_ms = np.zeros(0) if vectors is None else self.slope @ vectors.T
        self.cost: Floats = np.array([s.cost for s in states])

    def replace(self, place: int, state: State) -> None:
        """Take another plan in place of one."""
        self.problems[place] = state.problem
        self.launched_ms[place], self.cost[place] = state.launched_ms, state.cost
        self.widths[place], self.held[place], self.shards[place] = state.widths, state.widths.T > 0, state.shards
        self.free[place] = state.free
        self._hold(place, slice(None), state.sums, state.dims, state.compute)

    @staticmethod
    def at_once(problem: Problem) -> int:
        """How many plans of a problem are changed in lockstep."""
        tuning, cells = problem.tuning, problem.devices * len(problem.whole)
        return min(max(tuning.lockstep_cells // cells, 1), tuning.lockstep_plans)

    def __len__(self) -> int:
        return len(self.widths)

    def added(self, plan: Ints, devices: Ints, groups: Ints, most: Ints) -> tuple[Floats, Ints]:
        """Ms that 0 to `most` units of a group add to each of R devices, by a linear estimate: (N,), (N, R), (N,), (N,) -> a flat
        array, and where in it the estimates of 0 units begin, (N, R)."""
        problem = self.problem
        if self.slot_ms.size:
            return self.slot_ms.reshape(-1), self._row(plan[:, None], devices) + problem.slots.take(groups)[:, None]
        width = np.arange(int(most.max(initial=0)) + 1)
        shards = np.where((width > 0) & (width <= most[:, None]), problem.first.take(groups)[:, None] + width, 0)
        problem.price(shards.ravel())
        estimated = np.matmul(self.slope[plan[:, None], devices], problem.vectors[shards].swapaxes(1, 2))
        return estimated.reshape(-1), len(width) * np.arange(devices.size).reshape(devices.shape)

    def added_each(self, plan: Ints, devices: Ints, groups: Ints, units: Ints) -> Floats:
        """Ms that so many units of a group add to a device, by a linear estimate: `plan` (J, 1), `devices` (J, S) or (J, 1),
        `groups` and `units` (J, S) -> (J, S)."""
        problem = self.problem
        slots = problem.slots.take(groups) + units
        if self.slot_ms.size:
            known: Floats = self.slot_ms.take(self._row(plan, devices) + slots)
            return known
        shards = problem.slot_shards.take(slots)
        problem.price(shards.ravel())
        vectors, slope = problem.vectors.take(shards, axis=0), self.slope[plan, devices]
        estimated: Floats
        if devices.shape[1] == 1:
            estimated = np.matmul(vectors, slope.swapaxes(1, 2))[..., 0]
        else:
            estimated = np.einsum("jsk,jsk->js", vectors, slope)
        return estimated

    def _row(self, plan: Ints, devices: Ints) -> Ints:
        """Where the ms of a device of a plan begin in `slot_ms`."""
        row: Ints = (plan * self.slot_ms.shape[1] + devices) * self.slot_ms.shape[2]
        return row

    def put(self, plan: Ints, devices: Ints, sums: Floats, dims: Floats, compute: Floats) -> None:
        """Update N devices whose `widths` and `free` bytes have changed already: (N,), (N,), (N, K), (N,), (N,)."""
        self._hold(plan, devices, sums, dims, compute)
        forward, backward = self._transfers_ms()
        ready = self.compute + backward
        for one in set(plan.tolist()):
            self.launched_ms[one] = self.problems[one].launched_ms(self.shards[one])
        self.cost = ready.max(axis=1) + forward.max(axis=1) + self.launched_ms

    def _hold(self, plan: Ints | int, devices: Ints | slice, sums: Floats, dims: Floats, compute: Floats) -> None:
        """What some devices hold now."""
        self.sums[plan, devices], self.dims[plan, devices], self.compute[plan, devices] = sums, dims, compute
        slope = self.slope[plan, devices] = self.problem.model.compute_slope(sums)
        if (vectors := self.problem.slot_vectors) is not None and self.slot_ms.size:
            self.slot_ms[plan, devices] = slope @ vectors.T

    def _transfers_ms(self) -> tuple[Floats, Floats]:
        """Forward and backward all-to-all ms of every device, without waiting: two (B, D)."""
        if all(one.model is self.problem.model for one in self.problems):
            return transfers_ms(self.problem.model, self.dims)
        each = [transfers_ms(one.model, dims) for one, dims in zip(self.problems, self.dims, strict=True)]
        return np.stack([forward for forward, _ in each]), np.stack([backward for _, backward in each])
