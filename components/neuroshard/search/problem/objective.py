"""What local search minimizes: a soft maximum in place of a plan's cost."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.filling import whole_vectors
from neuroshard.search.problem.problem import Problem

NO_LOAD = 1e-6  # share of an all-to-all that a load must reach to count: less is rounding of sums


@dataclass(frozen=True)
class Objective:
    """How even a plan is, as one number: every move towards an even plan lowers it.

    A plan costs max(compute + backward) + max(forward), which no single move lowers where several devices are equally slow. So
    the maxima are soft ones, (sum x^p)^(1/p) with p = 2^`sharpness`, and the all-to-all is linear in a device's own columns and
    in the most columns of any device. Moves that need more bytes pay for them (`byte_ms`), else cuts that hardly gain take all
    that is left of memory.
    """

    own_ms: float  # ms that a column adds to its device
    all_ms: float  # ms that a column on the widest device adds to the plan
    sharpness: int
    byte_ms: float = 0.0  # the price of a byte, 0 unless memory is nearly full: what is left pays for cuts

    @classmethod
    def of(cls, problem: Problem) -> "Objective":
        """Slopes of the all-to-all from what changes where one device has a tenth more columns than all others."""
        sharpness = problem.tuning.sharpness
        if problem.devices == 1:
            return cls(0.0, 0.0, sharpness)
        columns = problem.mean_columns
        dims = np.full((2, problem.devices), columns)
        dims[1, 0] *= 1.1
        forward, backward = transfers_ms(problem.model, dims)
        rise = (backward[1] - backward[0]) / (0.1 * columns)
        shared = max(float(rise[1:].mean()), 0.0)
        ahead = max(float(forward[1].max() - forward[0].max()) / (0.1 * columns), 0.0)
        return cls(max(float(rise[0]) - shared, 0.0), shared + ahead, sharpness, _byte_ms(problem))

    def load(self, compute: Floats, dims: Floats) -> Floats:
        """Ms of devices, without the part of the all-to-alls that depends on the widest device alone."""
        return compute + self.own_ms * dims

    def power(self, shares: Floats) -> Floats:
        """`shares` of a maximum to the power p, overwritten."""
        np.maximum(shares, 0.0, out=shares)
        with np.errstate(over="ignore"):  # 10^5 times the maximum counts as infinite
            for _ in range(self.sharpness):
                np.multiply(shares, shares, out=shares)
        return shares


def _byte_ms(problem: Problem) -> float:
    """The price of a byte by the tuning."""
    if not problem.is_full:
        return 0.0
    load = whole_vectors(problem)
    load[problem.spread] = 0.0
    mean = problem.model.compute_ms((load.sum(axis=0) / problem.devices + problem.base.mean(axis=0))[None])
    return problem.tuning.memory_price * float(mean[0]) / max(float(problem.memory.mean()), 1.0)


class SoftMaximum:
    """The objective of B plans as a sum over their devices: `shares` (B, D) are what each device adds to it, in ms.

    That is exact to first order: the p-th root of the sum of powers is replaced by its tangent.
    """

    def __init__(self, objective: Objective, compute: Floats, dims: Floats) -> None:
        self.objective = objective
        self.load = objective.load(compute, dims)  # (B, D)
        self.widest = np.maximum(dims.max(axis=1), 1.0)
        # if no device has a load to speak of, a gain in the last bits of a sum is none
        least = np.maximum(NO_LOAD * objective.all_ms * self.widest, 1e-30)
        self.slowest = np.maximum(self.load.max(axis=1), least)  # (B,)
        self.scales = np.stack([self.slowest, self.widest])  # what load and columns are shares of: (2, B)
        powers = np.stack([self.load, dims])
        powers /= self.scales[:, :, None]
        self.busy, self.wide = objective.power(powers)  # (B, D) each
        # the derivative of m = (sum x^p)^(1/p) by the sum is m^(1-p) / p; both terms in ms
        exponent = 1 / 2.0**objective.sharpness - 1
        self.weights = np.stack(
            [
                # the slowest counts 1, unless all tables cost nothing
                self.slowest * np.maximum(self.busy.sum(axis=1), 1.0) ** exponent,
                objective.all_ms * self.widest * self.wide.sum(axis=1) ** exponent,
            ]
        )  # (2, B)
        powers = powers * self.weights[:, :, None]
        self.shares: Floats = powers[0] + powers[1]

    def added(self, amounts: Floats, plan: Ints) -> Floats:
        """What some devices would add to the objective of their plan, with these loads and columns.

        `amounts` (2, M, N, …) are overwritten: loads and columns of M devices in N cases. All M are of the plan `plan` (N, …).
        Returns their sum over the M devices (N, …), in ms.
        """
        amounts /= self.scales[:, plan][:, None]
        with np.errstate(over="ignore"):  # as in `power`
            of_both: Floats = self.objective.power(amounts).sum(axis=1)
            of_both *= self.weights[:, plan]
            added: Floats = of_both[0] + of_both[1]
        return added

    @property
    def worst_devices(self) -> NDArray[np.bool_]:
        """The slowest device and the widest: (B, D)."""
        worst, plan = np.zeros(self.load.shape, dtype=bool), np.arange(len(self.load))
        worst[plan, self.load.argmax(axis=1)] = worst[plan, self.wide.argmax(axis=1)] = True
        return worst
