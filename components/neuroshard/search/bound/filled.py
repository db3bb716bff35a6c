"""What a plan costs at least in which some device holds a given part: for the bound.

A device that holds a heavy part would be done sooner with nothing beside it; but then the others hold more columns, and all wait
for the all-to-all. So of all numbers of columns that it may hold the least is taken of both together: what so many columns add to
what it computes, were they the cheapest there are, and what the all-to-alls then take.
"""

from dataclasses import replace

import numpy as np

from neuroshard.core.table import DIM_STEP
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.compute_net import OWN, MeanHead, steps
from neuroshard.costmodel.protocol import CostModel, Floats
from neuroshard.search.bound.branches import Case
from neuroshard.search.problem.problem import Problem

NEAR = 0.75  # share of a plan's cost that parts must take by themselves, to be looked at
MOST = 256  # parts that are, the heaviest of these, and
MOST_PRICED = 300_000  # shards that are priced beside all of them, in 0.15 s of CPU


class Filled:
    """Of plans of at most `cost_ms`, by tangents of a convex cost that is not above that of their devices."""

    def __init__(self, problem: Problem, below: CostModel, cost_ms: float) -> None:
        self.problem, self.below, self.cost_ms = problem, below, cost_ms
        self.head: MeanHead | None = None
        if isinstance(problem.model, TrainedCostModel) and problem.model.nets.compute.rates is not None:
            self.head = problem.model.nets.compute.mean
            self.rates = problem.vectors @ self.head.rates

    def of(self, case: Case) -> Case:
        """The case, where heavy parts take what they do with the columns beside them that are best for the all-to-all."""
        problem = self.problem
        whole = case.alone + case.ahead
        near = np.flatnonzero((whole > NEAR * self.cost_ms) & (whole <= self.cost_ms * (1 + 1e-9)))
        most = min(MOST, MOST_PRICED // len(problem.vectors))
        near = near[np.argsort(-whole[near], kind="stable")[:most]]
        if not len(near) or not len(case.all_to_all_ms):
            return case
        alone, there = case.alone.copy(), case.beside + problem.vectors[near]
        computes, starts = problem.model.compute_ms(there), self.below.compute_ms(there)
        slopes = np.maximum(self.below.compute_slope(there), 0.0)
        for place, shard in enumerate(near.tolist()):
            first = (case.columns + int(problem.dims[shard])) // DIM_STEP
            all_to_all = case.all_to_all_ms[first:]
            if not len(all_to_all):
                continue
            adds = self._cheapest(case, int(problem.group[shard]), slopes[place], there[place], len(all_to_all))
            least = float((np.maximum(computes[place], starts[place] + adds) + all_to_all[: len(adds)]).min())
            alone[shard] = max(alone[shard], least - case.ahead)
        return replace(case, alone=alone)

    def _cheapest(self, case: Case, item: int, slope: Floats, there: Floats, count: int) -> Floats:
        """What 0, 4, 8 … columns of other items add at least to a device on which `there` lies: at most so many numbers."""
        problem = self.problem
        a_column = np.where(np.isfinite(case.alone), self._adds(problem.vectors, slope, there), np.inf) / np.maximum(
            problem.dims, 1
        )
        cheapest = np.minimum.reduceat(a_column[1:], problem.first)
        blocks = problem.row_blocks
        if len(blocks.groups):
            block = np.min([blocks.vectors[:, last] @ slope for last in (0, 1)], axis=0)
            cheapest[blocks.groups] = np.minimum(cheapest[blocks.groups], block / blocks.dims)
            cheapest[blocks.groups[case.sure]] = np.inf
        cheapest[item] = np.inf
        order = np.argsort(cheapest, kind="stable")
        order = order[np.isfinite(cheapest[order])]
        columns = np.append(0, problem.dims[problem.whole[order]].cumsum())
        ms = np.append(0.0, (cheapest[order] * problem.dims[problem.whole[order]]).cumsum())
        more = DIM_STEP * np.arange(min(count, int(columns[-1]) // DIM_STEP + 1))
        added: Floats = np.interp(more, columns, ms)
        return added

    def _adds(self, vectors: Floats, slope: Floats, there: Floats) -> Floats:
        """What each of these adds at least: rates are at least those of what is there already."""
        if self.head is None:
            added: Floats = vectors @ slope
            return added
        beside = slope.copy()
        beside[OWN] = 0.0
        shares = steps(np.maximum(vectors, there), self.head.used)
        with_rates: Floats = vectors @ beside + slope[OWN] * (shares * self.rates).sum(axis=1)
        return with_rates
