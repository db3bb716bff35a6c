"""A plan in the making: units of every item on every device, with the sums and costs of each device."""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import MOST_PREDICTED_MS
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Placement, Problem, Widths


class State:
    """Units of each item on each device (I, D), and per device: sum of vectors, columns, free bytes, compute and all-to-all ms.

    Waiting is added by rule, so every device ends when the last is ready and its own transfer is done: the plan costs
    max(compute + backward all-to-all) + max(forward transfer).
    """

    def __init__(self, problem: Problem, widths: Widths) -> None:
        self._fill(problem, widths, *(of[0] for of in _counted(problem, widths[None])))

    @classmethod
    def each(cls, problem: Problem, plans: Sequence[Widths]) -> list["State"]:
        """Of several plans: the cost model is asked about all at once."""
        states = []
        for widths, *counted in zip(plans, *_counted(problem, np.stack(plans)), strict=True):
            states.append(object.__new__(cls))
            states[-1]._fill(problem, widths, *counted)
        return states

    def _fill(
        self,
        problem: Problem,
        widths: Widths,
        sums: Floats,
        dims: Floats,
        nbytes: Ints,
        compute: Floats,
        forward: Floats,
        backward: Floats,
    ) -> None:
        self.problem, self.widths, self.sums, self.dims, self.base = problem, widths, sums, dims, problem.base
        self.free: Ints = problem.memory - nbytes
        self.shards = np.count_nonzero(widths, axis=1)
        self.compute, self.forward, self.backward = compute, forward, backward
        self._settle()
        if not 0 <= self.cost <= MOST_PREDICTED_MS:
            raise InvalidInput(f"cost model {problem.model.name} predicts {self.cost} ms for a plan; train it again")

    @classmethod
    def of(cls, problem: Problem, placement: Placement) -> "State":
        """The state of a placement that fits; shards of one item on one device become one."""
        there = problem.with_rows(placement.row_wise)
        assert there is not None
        return cls(there, problem.widths(placement))

    def _settle(self) -> None:
        self.ready = self.compute + self.backward
        self.cost = float(self.ready.max() + self.forward.max())

    def copy(self) -> "State":
        """An independent one."""
        new = object.__new__(State)
        new.__dict__.update(self.__dict__)
        for name in ("widths", "sums", "dims", "free", "shards", "compute"):  # the others are replaced, never changed
            setattr(new, name, getattr(self, name).copy())
        return new

    @property
    def placement(self) -> Placement:
        """The plan's shards and their devices."""
        return self.problem.placement(self.widths)

    def change(self, items: Ints, devices: Ints, units: Ints) -> None:
        """Set the units of these items on these devices, and count what lies on the devices anew: sums do not drift."""
        problem = self.problem
        self.widths[items, devices] = units
        for item in set(items.tolist()):
            self.shards[item] = np.count_nonzero(self.widths[item])
        changed = sorted(set(devices.tolist()))
        for device in changed:
            held = np.flatnonzero(self.widths[:, device])
            shards = problem.first[held] + self.widths[held, device]
            self.sums[device] = problem.vectors[shards].sum(axis=0) + self.base[device]
            self.dims[device] = problem.dims[shards].sum() + problem.base_dims
            self.free[device] = problem.memory[device] - problem.nbytes[shards].sum()
        compute = problem.model.compute_ms(self.sums[changed])
        self.compute[changed] = np.where(self.dims[changed] > 0, compute, 0.0)
        self.forward, self.backward = transfers(problem, self.dims)
        self._settle()


def _counted(problem: Problem, plans: Widths) -> tuple[Floats, Floats, Ints, Floats, Floats, Floats]:
    """What lies on each device of B plans (B, I, D): sum of vectors (B, D, K), columns, bytes of what is not row-wise; and ms of
    compute, forward and backward all-to-all (B, D)."""
    count, items, devices = plans.shape
    widths = plans.swapaxes(1, 2).reshape(-1, items)  # of one device after another
    on, item = np.nonzero(widths)
    shards = problem.first[item] + widths[on, item]
    problem.price(shards)
    held = np.bincount(on, minlength=len(widths))
    some = np.flatnonzero(held)
    flat, nbytes = np.zeros((len(widths), problem.vectors.shape[1])), np.zeros(len(widths), dtype=np.int64)
    if len(some):
        begins = (np.cumsum(held) - held)[some]
        flat[some] = np.add.reduceat(problem.vectors[shards], begins)
        nbytes[some] = np.add.reduceat(problem.nbytes[shards], begins)
    columns = np.bincount(on, problem.dims[shards], len(widths)).astype(np.float64)  # of nothing it counts in integers
    sums: Floats = flat.reshape(count, devices, -1)
    dims: Floats = columns.reshape(count, -1)
    if len(problem.row_wise):
        sums, dims = sums + problem.base, dims + problem.base_dims
    compute = np.where(dims > 0, problem.model.compute_ms(sums), 0.0)
    return sums, dims, nbytes.reshape(count, -1), compute, *transfers(problem, dims)


def transfers(problem: Problem, device_dims: Floats) -> tuple[Floats, Floats]:
    """Forward and backward all-to-all ms of every device without waiting: (…, D) -> two (…, D)."""
    if problem.devices == 1:
        return np.zeros_like(device_dims), np.zeros_like(device_dims)
    if isinstance(problem.model, TrainedCostModel):
        return problem.model.transfers_ms(device_dims)
    together = np.zeros_like(device_dims)
    return problem.model.forward_collective_ms(device_dims, together), problem.model.backward_collective_ms(device_dims)
