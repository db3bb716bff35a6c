"""How close: a number of ms that no plan of the task can go below, by a cost model that only grows.

The device that is ready last is so no earlier than all are on average, and a convex compute cost of the mean sum of vectors is
at most the mean cost (Jensen). The sum depends on the cuts, so all of them are allowed for: a tangent of the cost at any point
is below it, and the sum that is cheapest along the tangent is found table by table. The best tangent is sought (Frank and Wolfe).

Where a compute cost is not convex, one stands for it that is, and is not above it on any device of a plan of that cost
(`reach.py` tells how far these can be into a dip).

Parts are left out that no device has memory for, and those that by themselves take longer than some cost: no plan of that cost
has any of them. If what is left cannot be had for that cost, there is no such plan. The highest such cost is the bound.

A table that may be split row-wise has one choice more: its blocks on all devices. Their columns, more than those of the table
whole, add to the all-to-alls what a tangent of these says, which is below them.
"""

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from neuroshard.costmodel.protocol import Bending, CostModel, Floats
from neuroshard.search.bound.branches import Case, Cases
from neuroshard.search.bound.cuts import cheapest_cuts
from neuroshard.search.bound.filled import Filled
from neuroshard.search.bound.reach import Reach
from neuroshard.search.bound.row_levels import row_levels
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State

TANGENTS = 60
VAIN = 8  # tangents without a better bound, after which no better one is sought
HALVINGS = 8
NARROWED = 2  # times that what devices can hold is told from a bound, and a bound from that
CASES_OF = 2**19  # shards, of all cases that are told apart
LEAST_GAIN = 1e-4  # share by which a bound must be better to count as better
ASSUMPTIONS = (
    "the cost model's compute cost {bends}, its all-to-alls are convex in the columns of all devices "
    "and the same however these are numbered, and waiting is added by rule",
    "columns are cut in steps of 4, rows are not cut; of memory, what a shard needs and what all devices have is looked at",
)
ASSUMPTIONS_BY_ROWS = (
    "the cost model's compute cost {bends}, its all-to-alls are convex in the columns of all "
    "devices, fall with none of them, are the same however the devices are numbered, and waiting is added by rule",
    "columns are cut in steps of 4, rows into a block a device and only of tables for which that is allowed; of memory, only "
    "what a single shard needs is looked at",
)
CONVEX = "is convex and grows with every vector"
CONVEX_INSTEAD = "grows with every vector, and where it is not convex one below it that is stands for it"
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
    problem.price(np.arange(1, len(problem.group)))
    why = ASSUMPTIONS_BY_ROWS if len(problem.row_blocks.groups) else ASSUMPTIONS
    bends = CONVEX_INSTEAD if _bends(problem.model) else CONVEX
    return Bound(_Proof(problem, plan).bound_ms(plan.cost), tuple(line.format(bends=bends) for line in why))


def _bends(model: CostModel) -> TypeGuard[Bending]:
    return isinstance(model, Bending) and not model.convex


class _Proof:
    """What plans of at most some cost can be shown to cost at least."""

    def __init__(self, problem: Problem, plan: State) -> None:
        self.problem, self.cases = problem, Cases(problem)
        self.start = plan.sums.mean(axis=0)
        self.all = self.cases.of(0)
        self.below = self._convex(plan.cost)
        self.filled = Filled(problem, self.below, plan.cost)
        self.all = self.filled.of(self.all)
        self.levels = row_levels(problem, *self._tangent(self.below))

    def bound_ms(self, cost_ms: float) -> float:
        """The bound, where there is a plan of `cost_ms`: the least of all cases of which tables are row-wise."""
        low, best = self._of(self.all, 0.0, cost_ms), cost_ms
        rows = len(self.cases.order)
        told_apart = min(rows, CASES_OF // len(self.problem.group))
        for count in range(told_apart):
            if best <= low * (1 + LEAST_GAIN):
                return low
            if count and self._none_of(self._case(count), best):  # no better one has as many row-wise
                return best
            best = self._of(self._case(count, next_not=True), low, best)
        return self._of(self._case(told_apart), low, best) if told_apart else low

    def _case(self, count: int, *, next_not: bool = False) -> Case:
        return self.filled.of(self.cases.of(count, next_not=next_not))

    def _of(self, case: Case, low: float, high: float) -> float:
        """The bound of the plans of a case, where that is between these.

        If plans of at most some cost can be shown to cost more, there are none: the highest such cost is sought by halving.
        """
        low = min(max(low, case.widest_part_ms, self._even(case, high, high)), high)
        for _ in range(HALVINGS):
            if high - low < LEAST_GAIN * high:
                break
            middle = (low + high) / 2
            if self._none_of(case, middle):
                low = middle
            else:
                high = middle
        return low

    def _none_of(self, case: Case, cost_ms: float) -> bool:
        """Whether no plan of a case costs at most so much."""
        if self._even(case, cost_ms, cost_ms) > cost_ms:
            return True
        return self.levels is not None and self.levels.none_of(case, cost_ms)

    def _even(self, case: Case, cost_ms: float, enough: float) -> float:
        """What plans of a case and of at most `cost_ms` cost at least, were all devices alike; infinite where there are none.
        Tangents are tried until one shows `enough`."""
        problem, model, devices = self.problem, self.below, self.problem.devices
        possible = case.possible(cost_ms)
        if possible is None:
            return np.inf
        shards, row_wise = possible
        point, best, slope, vain = self.start, 0.0, np.full_like(self.start, np.nan), 0
        for step in range(TANGENTS):
            before, slope = slope, np.maximum(model.compute_slope(point), 0.0)
            if not np.array_equal(slope, before):  # else it is the same tangent: heads are linear in pieces
                if vain == VAIN or best > enough:
                    break
                cuts, bound = cheapest_cuts(problem, np.where(shards, problem.vectors @ slope, np.inf)), np.inf
                sums: Floats = cuts.times @ problem.vectors[cuts.shards]
                intercept = float(model.compute_ms(point)) - float(slope @ point)
                if not len(case.sure):
                    bound = _over_devices(intercept, cuts.total, case)
                if len(row_wise):
                    cheapest, sums = case.cheaper_row_wise(cuts, slope, row_wise)
                    bound = min(bound, intercept + cheapest / devices + case.back + case.ahead)
                if bound == np.inf:
                    return np.inf
                vain = 0 if bound > best * (1 + LEAST_GAIN) else vain + 1
                best = max(best, bound)
            point = point + (sums / devices - point) * (2 / (step + 3))
        return best

    def _convex(self, cost_ms: float) -> CostModel:
        """A cost model whose compute cost is convex, and not above the problem's on any device of a plan of at most `cost_ms`."""
        model, enough = self.problem.model, (cost_ms - self.all.ahead) * (1 + 1e-9)
        if not _bends(model):
            return model
        reach = Reach(self.problem, self.all.alone <= enough, len(self.cases.order) > 0, model.dips)
        below = model.convex_below(*reach.anywhere())
        for _ in range(NARROWED):
            slope, intercept = self._tangent(below)
            below = model.convex_below(*reach.within(slope, enough - intercept))
        return below

    def _tangent(self, below: CostModel) -> tuple[Floats, float]:
        """Slope and intercept of the tangent at the mean device of the plan."""
        slope: Floats = np.maximum(below.compute_slope(self.start), 0.0)
        return slope, float(below.compute_ms(self.start)) - float(slope @ self.start)


def _over_devices(intercept: float, total: float, case: Case) -> float:
    """The least that a plan costs, where a device computes at least `intercept` plus its share of `total`.

    Devices may stay empty, and compute nothing then; so the least is taken over how many do not. The mean of all devices is a
    bound, and that of those that hold tables.
    """
    devices = len(case.of_used)
    used = np.arange(1, devices + 1)
    all_devices = used / devices * intercept + total / devices + case.back + case.ahead
    return float(np.maximum(all_devices, intercept + total / used + case.of_used).min())
