"""A priced plan: units of every table group on every device, and what that costs each device."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import MOST_PREDICTED_MS
from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.column_shards import Placement, Widths
from neuroshard.search.problem.problem import Problem


class State:
    """One plan that fits, never changed once it is made. `widths` (G, D) are units of each table group on each device.

    Per device: `sums` of vectors (D, K), `dims` (columns), `free` bytes, ms of `compute`, `forward` and `backward` all-to-all,
    and `ready`, compute + backward. Per group: the number of its `shards` (G,). A device waits for the last one, by rule, so
    all end at `cost` = max(ready) + max(forward) + what launches take, in ms. Raises InvalidInput where that is not valid.
    """

    def __init__(self, problem: Problem, widths: Widths, priced: Sequence[Any] | None = None) -> None:
        """`priced` is the plan's part of what `_priced` returns, if it was called for several plans at once."""
        sums, dims, nbytes, compute, forward, backward = priced or [of[0] for of in _priced(problem, widths[None])]
        self.problem, self.widths, self.sums, self.dims = problem, widths, sums, dims
        self.free: Ints = problem.memory - nbytes
        self.shards = np.count_nonzero(widths, axis=1)
        self.compute, self.forward, self.backward = compute, forward, backward
        self.ready = compute + backward
        self.launched_ms = problem.launched_ms(self.shards)
        self.cost = float(self.ready.max() + forward.max()) + self.launched_ms
        if not 0 <= self.cost <= MOST_PREDICTED_MS:
            raise InvalidInput(f"cost model {problem.model.name} predicts {self.cost} ms for a plan; train it again")

    @classmethod
    def each(cls, problem: Problem, plans: Sequence[Widths]) -> list["State"]:
        """The states of several plans, priced in one batch."""
        each = zip(plans, *_priced(problem, np.stack(plans)), strict=True)
        return [cls(problem, widths, priced) for widths, *priced in each]

    @classmethod
    def of(cls, problem: Problem, placement: Placement) -> "State":
        """The state of a placement that fits; shards of one group on one device become one."""
        return cls(problem, problem.widths(placement))

    @property
    def cuts(self) -> int:
        """Shards beyond one of each table group; a spread table counts as one cut."""
        return int((self.shards - 1).clip(0).sum()) + len(self.problem.spread)


def _priced(problem: Problem, plans: Widths) -> tuple[Floats, Floats, Ints, Floats, Floats, Floats]:
    """What the devices of B plans (B, G, D) hold and take: sums of vectors (B, D, K), then (B, D) each: columns, bytes of what
    is not spread, ms of compute, of the forward and of the backward all-to-all."""
    count, groups, devices = plans.shape
    widths = plans.swapaxes(1, 2).reshape(-1, groups)  # a row for each device of each plan
    on, group = np.nonzero(widths)
    shards = problem.first[group] + widths[on, group]
    problem.price(shards)
    held = np.bincount(on, minlength=len(widths))
    busy = np.flatnonzero(held)
    flat, nbytes = np.zeros((len(widths), problem.vectors.shape[1])), np.zeros(len(widths), dtype=np.int64)
    if len(busy):
        begins = (np.cumsum(held) - held)[busy]
        flat[busy] = np.add.reduceat(problem.vectors[shards], begins)
        nbytes[busy] = np.add.reduceat(problem.nbytes[shards], begins)
    # bincount of nothing is of integers
    columns = np.bincount(on, problem.dims[shards], len(widths)).astype(np.float64)
    sums: Floats = flat.reshape(count, devices, -1)
    dims: Floats = columns.reshape(count, -1)
    if problem.has_base:
        sums, dims = sums + problem.base, dims + problem.base_dims
    compute = np.where(dims > 0, problem.model.compute_ms(sums), 0.0)
    return sums, dims, nbytes.reshape(count, -1), compute, *transfers_ms(problem.model, dims)


def column_ms(problem: Problem, columns: float) -> float:
    """Ms that one column more on every device adds to both all-to-alls, where each holds `columns`."""
    even = np.full((2, problem.devices), columns)
    even[1] *= 1.01
    forward, backward = transfers_ms(problem.model, even)
    more = (forward + backward).max(axis=-1)
    return max(float(more[1] - more[0]) / (0.01 * columns), 0.0)
