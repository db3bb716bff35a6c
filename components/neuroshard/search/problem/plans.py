"""Several plans of one task, changed in lockstep: an array operation about few numbers costs what one about many does."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State, transfers

NO_LOAD = 1e-6  # of the all-to-all
GUESSED_BYTES = 16 * 2**20  # of what every shard is guessed to add to every device, if all are kept


@dataclass(frozen=True)
class Yardstick:
    """How even a plan is, as one number that falls with every step towards an even one, and that two devices change.

    It stands for the plan's cost, max(compute + backward) + max(forward): the all-to-all as a linear function of a device's own
    columns and of the most columns on any device, and soft maxima in place of the maxima, since where several devices
    are equally slow no single step makes the plan cheaper. `sharpness` doublings of the exponent make them hard.
    """

    own_ms: float  # a column on a device adds to the device
    all_ms: float  # a column on the device with the most adds to the plan
    sharpness: int

    @classmethod
    def of(cls, problem: Problem, sharpness: int) -> "Yardstick":
        """The all-to-all told by what one device with a tenth more columns than all others changes."""
        if problem.devices == 1:
            return cls(0.0, 0.0, sharpness)
        columns = problem.mean_columns
        dims = np.full((2, problem.devices), columns)
        dims[1, 0] *= 1.1
        forward, backward = transfers(problem, dims)
        rise = (backward[1] - backward[0]) / (0.1 * columns)
        shared = max(float(rise[1:].mean()), 0.0)
        ahead = max(float(forward[1].max() - forward[0].max()) / (0.1 * columns), 0.0)
        return cls(max(float(rise[0]) - shared, 0.0), shared + ahead, sharpness)

    def load(self, compute: Floats, dims: Floats) -> Floats:
        """Ms of devices without what they all share."""
        return compute + self.own_ms * dims

    def soft(self, level: Floats) -> Floats:
        """Shares of a maximum, as they count in the soft one; overwritten."""
        np.maximum(level, 0.0, out=level)
        with np.errstate(over="ignore"):  # what is guessed to be 10^5 times the maximum counts as infinite
            for _ in range(self.sharpness):
                np.multiply(level, level, out=level)
        return level


class Plans:
    """The arrays of a `State`, of B plans: see there. And `slope`, what a unit of each vector adds to each device (B, D, K).

    The plans' `problems` may differ in what is split row-wise; what else a problem tells is `problem`'s.
    """

    def __init__(self, states: Sequence[State]) -> None:
        self.problems = [state.problem for state in states]
        problem = self.problem = self.problems[0]
        self.memory = np.stack([one.memory for one in self.problems])
        self.widths, self.shards = np.stack([s.widths for s in states]), np.stack([s.shards for s in states])
        self.sums, self.dims = np.stack([s.sums for s in states]), np.stack([s.dims for s in states])
        self.free, self.compute = np.stack([s.free for s in states]), np.stack([s.compute for s in states])
        self.slope = problem.model.compute_slope(self.sums)
        self._guessed: Floats | None = None
        problem.price_rest()
        if problem.all_priced and 8 * self.dims.size * len(problem.item) <= GUESSED_BYTES:
            self._guessed = self._guess(self.slope)
        self.cost: Floats = np.array([s.cost for s in states])

    def __len__(self) -> int:
        return len(self.widths)

    def _settle(self) -> None:
        forward, backward = transfers(self.problem, self.dims)
        ready = self.compute + backward
        self.cost = ready.max(axis=1) + forward.max(axis=1)

    def _guess(self, slope: Floats) -> Floats:
        """Ms that the units of each slot are guessed to add to devices of these slopes: (…, K) -> (…, slots)."""
        guessed: Floats = np.take(slope @ self.problem.vectors.T, self.problem.slot_shards, axis=-1)
        return guessed

    def added(self, plan: Ints, devices: Ints, items: Ints, most: Ints) -> tuple[Floats, Ints]:
        """Ms that 0 to `most` units (G,) of items are guessed to add to each of some devices (G, R) of a plan (G,), one after
        another somewhere in one array, and where they begin (G, R)."""
        problem = self.problem
        if self._guessed is not None:
            begins = (plan[:, None] * self.dims.shape[1] + devices) * self._guessed.shape[2]
            begins += problem.slots.take(items)[:, None]
            return self._guessed.reshape(-1), begins
        width = np.arange(int(most.max(initial=0)) + 1)
        shards = np.where((width > 0) & (width <= most[:, None]), problem.first.take(items)[:, None] + width, 0)
        problem.price(shards.ravel())
        slope = self.slope[plan[:, None], devices].astype(np.float32)
        guessed = np.matmul(slope, problem.roughly(shards).swapaxes(1, 2)).astype(np.float64)
        return guessed.reshape(-1), len(width) * np.arange(devices.size).reshape(devices.shape)

    def added_each(self, plan: Ints, devices: Ints, items: Ints, units: Ints) -> Floats:
        """Ms that so many units are guessed to add to a device of a plan each: (J, 1), and three (J, S) or of a shape like it ->
        (J, S)."""
        problem = self.problem
        slots = problem.slots.take(items) + units
        guessed: Floats
        if self._guessed is not None:
            guessed = self._guessed.reshape(-1).take(
                (plan * self.dims.shape[1] + devices) * self._guessed.shape[2] + slots
            )
            return guessed
        shards = problem.slot_shards.take(slots)
        problem.price(shards.ravel())
        vectors, slope = problem.vectors.take(shards, axis=0), self.slope[plan, devices]
        if devices.shape[1] == 1:
            guessed = np.matmul(vectors, slope.swapaxes(1, 2))[..., 0]
        else:
            guessed = np.einsum("jsk,jsk->js", vectors, slope)
        return guessed

    def put(self, plan: Ints, devices: Ints, sums: Floats, dims: Floats, compute: Floats) -> None:
        """What now lies on some devices, which `widths` tell already: (N,), (N,), (N, K), (N,), (N,)."""
        problem = self.problem
        self.sums[plan, devices], self.dims[plan, devices], self.compute[plan, devices] = sums, dims, compute
        held = self.widths[plan, :, devices]
        held += problem.slots
        self.free[plan, devices] = self.memory[plan, devices] - problem.slot_bytes.take(held).sum(axis=1)
        slope = problem.model.compute_slope(sums)
        self.slope[plan, devices] = slope
        if self._guessed is not None:
            self._guessed[plan, devices] = self._guess(slope)
        self._settle()


class Level:
    """How even each of the plans is, for steps to be held against."""

    def __init__(self, stick: Yardstick, compute: Floats, dims: Floats) -> None:
        self.stick = stick
        self.load = stick.load(compute, dims)  # (B, D)
        self.widest = np.maximum(dims.max(axis=1), 1.0)
        # where no device has a load to speak of, of what is exchanged so much that the last bits of sums are no gain
        self.slowest = np.maximum(
            self.load.max(axis=1), np.maximum(NO_LOAD * stick.all_ms * self.widest, 1e-30)
        )  # (B,)
        self.scales = np.stack([self.slowest, self.widest])  # what load and columns are shares of: (2, B)
        soft = np.stack([self.load, dims])
        soft /= self.scales[:, :, None]
        self.busy, self.wide = stick.soft(soft)  # (B, D) each
        # of a soft maximum m = (sum x^p)^(1/p) the derivative by the sum is m^(1-p) / p; both terms in ms
        exponent = 1 / 2.0**stick.sharpness - 1
        # the slowest counts 1, unless all tables cost nothing
        self.weights = np.stack(
            [
                self.slowest * np.maximum(self.busy.sum(axis=1), 1.0) ** exponent,
                stick.all_ms * self.widest * self.wide.sum(axis=1) ** exponent,
            ]
        )  # (2, B)
        soft = soft * self.weights[:, :, None]
        self.counts: Floats = soft[0] + soft[1]  # what devices add to it now: (B, D)

    def soft(self, amounts: Floats, plan: Ints) -> Floats:
        """What N devices that come to so much load, and to so many columns, add to the yardstick of their plan, which says what
        these are shares of: (2, N, …), overwritten -> (…)."""
        amounts /= self.scales[:, plan][:, None]
        of_both: Floats = self.stick.soft(amounts).sum(axis=1)
        of_both *= self.weights[:, plan]
        added: Floats = of_both[0] + of_both[1]
        return added

    def order(self) -> tuple[Ints, Ints]:
        """Devices of every plan (B, D), the slowest first; and those with the most columns first."""
        return np.argsort(-self.load, axis=1, kind="stable"), np.argsort(-self.wide, axis=1, kind="stable")


def sources(level: Level, places: range) -> NDArray[np.bool_]:
    """The devices at these places by load, and column-wise: (B, D)."""
    wanted, plan = np.zeros(level.load.shape, dtype=bool), np.arange(len(level.load))[:, None]
    for order in level.order():
        wanted[plan, order[:, places.start : places.stop]] = True
    return wanted
