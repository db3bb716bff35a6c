"""Several plans of one task that are changed in lockstep: a NumPy call on few numbers takes as long as on many."""

from collections.abc import Sequence

import numpy as np

from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.state import State


class Plans:
    """The arrays of `State` for B plans, changed in place; and `slope` (B, D, K), ms that a unit of a vector adds to a device.

    The plans' `problems` may differ in which tables are row-wise; all else is the same, and `problem` is the first of them.
    """

    def __init__(self, states: Sequence[State]) -> None:
        self.problems = [state.problem for state in states]
        problem = self.problem = self.problems[0]
        self.memory = np.stack([one.memory for one in self.problems])
        self.launched_ms = np.array([s.launched_ms for s in states])
        self.widths, self.shards = np.stack([s.widths for s in states]), np.stack([s.shards for s in states])
        self.sums, self.dims = np.stack([s.sums for s in states]), np.stack([s.dims for s in states])
        self.free, self.compute = np.stack([s.free for s in states]), np.stack([s.compute for s in states])
        self.slope = problem.model.compute_slope(self.sums)
        self._estimated: Floats | None = None  # (B, D, slots)
        problem.price_rest()
        if problem.all_priced and 8 * self.dims.size * len(problem.group) <= problem.tuning.guess_bytes:
            self._estimated = self._estimate(self.slope)
        self.cost: Floats = np.array([s.cost for s in states])

    def __len__(self) -> int:
        return len(self.widths)

    def _estimate(self, slope: Floats) -> Floats:
        """Ms that the units of each slot add to devices of these slopes, by a linear estimate: (…, K) -> (…, slots)."""
        estimated: Floats = np.take(slope @ self.problem.vectors.T, self.problem.slot_shards, axis=-1)
        return estimated

    def added(self, plan: Ints, devices: Ints, groups: Ints, most: Ints) -> tuple[Floats, Ints]:
        """Ms that 0 to `most` units of a group add to each of R devices, by a linear estimate: (N,), (N, R), (N,), (N,) -> a flat
        array, and where in it the estimates of 0 units begin, (N, R)."""
        problem = self.problem
        if self._estimated is not None:
            begins = (plan[:, None] * self.dims.shape[1] + devices) * self._estimated.shape[2]
            begins += problem.slots.take(groups)[:, None]
            return self._estimated.reshape(-1), begins
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
        estimated: Floats
        if self._estimated is not None:
            estimated = self._estimated.reshape(-1).take(
                (plan * self.dims.shape[1] + devices) * self._estimated.shape[2] + slots
            )
            return estimated
        shards = problem.slot_shards.take(slots)
        problem.price(shards.ravel())
        vectors, slope = problem.vectors.take(shards, axis=0), self.slope[plan, devices]
        if devices.shape[1] == 1:
            estimated = np.matmul(vectors, slope.swapaxes(1, 2))[..., 0]
        else:
            estimated = np.einsum("jsk,jsk->js", vectors, slope)
        return estimated

    def put(self, plan: Ints, devices: Ints, sums: Floats, dims: Floats, compute: Floats) -> None:
        """Update N devices whose `widths` have changed already: (N,), (N,), (N, K), (N,), (N,)."""
        problem = self.problem
        self.sums[plan, devices], self.dims[plan, devices], self.compute[plan, devices] = sums, dims, compute
        slots = self.widths[plan, :, devices]
        slots += problem.slots
        self.free[plan, devices] = self.memory[plan, devices] - problem.slot_bytes.take(slots).sum(axis=1)
        slope = problem.model.compute_slope(sums)
        self.slope[plan, devices] = slope
        if self._estimated is not None:
            self._estimated[plan, devices] = self._estimate(slope)
        forward, backward = transfers_ms(problem.model, self.dims)
        ready = self.compute + backward
        each = zip(self.problems, self.shards, strict=True)
        self.launched_ms = np.array([one.launched_ms(shards) for one, shards in each])
        self.cost = ready.max(axis=1) + forward.max(axis=1) + self.launched_ms
