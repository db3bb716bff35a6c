"""How close: a number of ms that no plan of the task can go below, by a cost model that only grows.

The device that is ready last is so no earlier than all are on average, and a convex compute cost of the mean sum of vectors is
at most the mean cost (Jensen). The sum depends on the cuts, so all of them are allowed for: a tangent of the cost at any point
is below it, and the sum that is cheapest along the tangent is found table by table. The best tangent is sought (Frank and Wolfe).

Where a compute cost is convex but for some dips, one stands for it that is convex, and not above it on any device of a plan of
that cost (`reach.py` tells how far these can be into a dip).

Parts are left out that no device has memory for, and those that by themselves take longer than some cost: no plan of that cost
has any of them. If what is left cannot be had for that cost, there is no such plan. The highest such cost is the bound.

A table that may be split by rows has one choice more: its blocks on all devices. Their columns, more than those of the table
whole, add to the exchanges what a tangent of these says, which is below them.
"""

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import CostModel, Dipping, Floats, Ints
from neuroshard.search.cuts import Cuts, cheapest_cuts
from neuroshard.search.problem import Problem
from neuroshard.search.reach import Reach
from neuroshard.search.state import State, transfers

TANGENTS = 60
VAIN = 8  # tangents without a better bound, after which no better one is sought
HALVINGS = 8
NARROWED = 2  # times that what devices can hold is told from a bound, and a bound from that
LEAST_GAIN = 1e-4  # share by which a bound must be better to count as better
ASSUMPTIONS = (
    "the cost model's compute cost {bends}, its exchanges are convex in the columns of all devices "
    "and the same however these are numbered, and waiting is added by rule",
    "columns are cut in steps of 4, rows are not cut; of memory, only what a single shard needs is looked at",
)
ASSUMPTIONS_BY_ROWS = (
    "the cost model's compute cost {bends}, its exchanges are convex in the columns of all "
    "devices, fall with none of them, are the same however the devices are numbered, and waiting is added by rule",
    "columns are cut in steps of 4, rows into a block a device and only of tables for which that is allowed; of memory, only "
    "what a single shard needs is looked at",
)
CONVEX = "is convex and grows with every vector"
CONVEX_BUT_FOR_DIPS = "grows with every vector and is convex, but for dips that are allowed for"
NOT_BOUNDED = "nothing is proven: the cost model is not known to grow with every vector"


@dataclass(frozen=True)
class Bound:
    """No plan costs less than `ms`; None where nothing can be proven. Why, in words."""

    ms: float | None
    why: tuple[str, ...]


def lower_bound(problem: Problem, plan: State) -> Bound:
    """A lower bound on the cost of every plan that honours the task's constraints on cuts, at most what `plan` costs."""
    if not problem.model.bounded:
        return Bound(None, (NOT_BOUNDED,))
    problem.price(np.arange(1, len(problem.item)))
    why = ASSUMPTIONS_BY_ROWS if len(problem.row_blocks.items) else ASSUMPTIONS
    bends = CONVEX_BUT_FOR_DIPS if _has_dips(problem.model) else CONVEX
    return Bound(_Proof(problem, plan).bound_ms(plan.cost), tuple(line.format(bends=bends) for line in why))


def _has_dips(model: CostModel) -> TypeGuard[Dipping]:
    return isinstance(model, Dipping) and len(model.dips.bias) > 0


class _Proof:
    """What plans of at most some cost can be shown to cost at least."""

    def __init__(self, problem: Problem, plan: State) -> None:
        self.problem = problem
        forward, backward = transfers(problem, np.full(problem.devices, problem.mean_columns))
        self.ahead, self.back = float(forward.mean()), float(backward.mean())
        alone = np.where(np.arange(len(problem.item)) > 0, problem.model.compute_ms(problem.vectors), 0.0)
        self.alone: Floats = alone + _own_backward_ms(problem, problem.dims)
        largest = problem.roomiest()[problem.item]
        self.fits = (problem.nbytes <= largest) & (problem.units >= problem.least[problem.item]) & (problem.units > 0)
        self.start = plan.sums.mean(axis=0)
        self.rows = _Rows(problem) if len(problem.row_blocks.items) else None
        self.below = self._convex(plan.cost)

    def bound_ms(self, cost_ms: float) -> float:
        """The bound, where there is a plan of `cost_ms`.

        If plans of at most some cost can be shown to cost more, there are none: the highest such cost is sought by halving.
        """
        low, high = min(self._widest_part(), cost_ms), cost_ms
        low = max(low, min(self._even(high, np.inf), high))
        for _ in range(HALVINGS):
            if high - low < LEAST_GAIN * cost_ms:
                break
            middle = (low + high) / 2
            if self._even(middle, middle) > middle:
                low = middle
            else:
                high = middle
        return low

    def _widest_part(self) -> float:
        """Some device holds at least so wide a part of every item: what the worst of them cost on devices of their own."""
        problem = self.problem
        narrowest = -(-problem.widest // problem.places)
        wide = np.flatnonzero((problem.units >= narrowest[problem.item]) & self.fits)
        least = np.full(len(problem.whole), np.inf)
        np.minimum.at(least, problem.item[wide], self.alone[wide])
        if self.rows is not None:
            least[self.rows.items] = np.minimum(least[self.rows.items], self.rows.alone)
        return float(least.max()) + self.ahead

    def _even(self, cost_ms: float, enough: float) -> float:
        """What plans of at most `cost_ms` cost at least, were all devices alike. Tangents are tried until one shows `enough`."""
        problem, model, devices = self.problem, self.below, self.problem.devices
        possible = self.fits & (self.alone <= (cost_ms - self.ahead) * (1 + 1e-9))
        some_part = np.logical_or.reduceat(possible[1:], problem.first)
        by_rows = None
        if self.rows is not None:
            by_rows = self.rows.alone <= (cost_ms - self.ahead) * (1 + 1e-9)
            some_part[self.rows.items[by_rows]] = True
        if not some_part.all():
            return np.inf
        point, best, slope, vain = self.start, 0.0, np.full_like(self.start, np.nan), 0
        for step in range(TANGENTS):
            before, slope = slope, np.maximum(model.compute_slope(point), 0.0)
            if not np.array_equal(slope, before):  # else it is the same tangent: heads are linear in pieces
                if vain == VAIN or best > enough:
                    break
                cuts = cheapest_cuts(problem, slope, possible)
                sums = cuts.sums
                intercept = float(model.compute_ms(point)) - float(slope @ point)
                bound = _over_devices(intercept, cuts.total, devices, self.back) + self.ahead
                if by_rows is not None and self.rows is not None:
                    cheapest, sums = self.rows.instead(problem, cuts, slope, by_rows)
                    bound = min(bound, intercept + cheapest / devices + self.back + self.ahead)
                if bound == np.inf:
                    return np.inf
                vain = 0 if bound > best * (1 + LEAST_GAIN) else vain + 1
                best = max(best, bound)
            point = point + (sums / devices - point) * (2 / (step + 3))
        return best

    def _convex(self, cost_ms: float) -> CostModel:
        """A cost model whose compute cost is convex, and not above the problem's on any device of a plan of at most `cost_ms`."""
        model, enough = self.problem.model, (cost_ms - self.ahead) * (1 + 1e-9)
        if not _has_dips(model):
            return model
        reach = Reach(self.problem, self.fits & (self.alone <= enough), self.rows is not None, model.dips)
        below = model.convex_below(*reach.anywhere())
        for _ in range(NARROWED):
            slope = np.maximum(below.compute_slope(self.start), 0.0)
            intercept = float(below.compute_ms(self.start)) - float(slope @ self.start)
            below = model.convex_below(*reach.within(slope, enough - intercept))
        return below


class _Rows:
    """Splitting by rows as a choice for each item that may be so: all its blocks on all devices at once.

    Of each: `alone` (P,), ms of the larger block and its columns on a device of its own, infinite where there is no room;
    `vectors` (P, K), summed over its blocks; and `exchange` (P,), ms that its columns add, summed over all devices.
    """

    def __init__(self, problem: Problem) -> None:
        blocks, devices = problem.row_blocks, problem.devices
        self.items = blocks.items
        alone: Floats = problem.model.compute_ms(blocks.vectors).max(axis=1) + _own_backward_ms(problem, blocks.dims)
        fits = (blocks.nbytes[:, 0] <= problem.memory[:-1].min()) & (blocks.nbytes[:, 1] <= problem.memory[-1])
        self.alone: Floats = np.where(fits, alone, np.inf)
        self.vectors: Floats = blocks.vectors[:, 0] * (devices - 1) + blocks.vectors[:, 1]
        self.exchange: Floats = ((devices - 1) * _a_column_ms(problem)) * blocks.dims.astype(np.float64)

    def instead(self, problem: Problem, cuts: Cuts, slope: Floats, possible: NDArray[np.bool_]) -> tuple[float, Floats]:
        """The total, and the sum of vectors, where each item is cut or split by rows, whichever is cheaper."""
        item, price = problem.item[cuts.shards], np.zeros(len(problem.whole))
        np.add.at(price, item, problem.vectors[cuts.shards] @ slope * cuts.times)
        price[cuts.none] = np.inf
        by_rows = np.where(possible, self.vectors @ slope + self.exchange, np.inf)
        better = by_rows < price[self.items]
        price[self.items[better]] = by_rows[better]
        kept = np.where(np.isin(item, self.items[better]), 0.0, cuts.times)
        return float(price.sum()), kept @ problem.vectors[cuts.shards] + self.vectors[better].sum(axis=0)


def _a_column_ms(problem: Problem) -> float:
    """What a column more on every device adds to both exchanges at least, where all hold as many: what the last of those that
    they hold added, since exchanges are convex."""
    even = np.full((2, problem.devices), problem.mean_columns)
    even[0] *= 0.99
    forward, backward = transfers(problem, even)
    both = (forward + backward).mean(axis=-1)
    return max(float(both[1] - both[0]) / (0.01 * problem.mean_columns) * (1 - 1e-6), 0.0)


def _own_backward_ms(problem: Problem, dims: Ints) -> Floats:
    """The least backward exchange of a device that holds at least so many columns, (…) -> (…).

    It takes least where all others hold the same; and is then convex in the device's own columns, so what it is at its least
    counts for all below that.
    """
    if problem.devices == 1:
        return np.zeros(dims.shape)
    total = float(problem.dims[problem.whole].sum())

    def own_ms(columns: Floats) -> Floats:
        others = (total - columns) / (problem.devices - 1)
        layout = np.concatenate([columns[:, None], np.repeat(others[:, None], problem.devices - 1, axis=1)], axis=1)
        backward: Floats = problem.model.backward_comm_ms(layout)[:, 0]
        return backward

    low, high = 0.0, total
    for _ in range(4):  # each narrows where the least is to a sixteenth
        grid = np.linspace(low, high, 33)
        least = int(own_ms(grid).argmin())
        low, high = grid[max(least - 1, 0)], grid[min(least + 1, 32)]
    widths, place = np.unique(dims, return_inverse=True)
    found: Floats = own_ms(np.maximum(widths, low).astype(np.float64))[place] * (1 - 1e-4)
    return found


def _over_devices(intercept: float, total: float, devices: int, back: float) -> float:
    """The least that the last device is ready, where compute is at least `intercept` plus its share of `total`.

    Devices may stay empty, and compute nothing then; so the least is taken over how many do not. All devices' backward
    exchanges take `back` on average. Of devices that hold tables, the mean of compute alone is a bound as well.
    """
    used = np.arange(1, devices + 1)
    all_devices = used / devices * intercept + total / devices + back
    used_alone = intercept + total / used
    return float(np.maximum(all_devices, used_alone).min())
