"""What a plan costs at least if some device holds a given heavy shard.

A device with a heavy shard computes least with nothing else on it. But then the other devices hold more columns, and all devices
wait for their all-to-alls. So two costs are added up, for each number of columns that the device may hold besides the shard: the
least that so many columns add to its compute cost (as if they were the cheapest of all tables), and the all-to-alls in that case.
The smallest sum is the bound.
"""

from dataclasses import replace

import numpy as np

from neuroshard.core.table import DIM_STEP
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.search.bound.branches import Branch
from neuroshard.search.bound.settings import BoundSettings
from neuroshard.search.problem.problem import Problem


class HeavyShards:
    """Raises the cost of shards that are heavy in plans of at most `cost_ms`. The compute cost of `convex` is convex, and for
    every device of such a plan at most what the cost model says."""

    def __init__(self, problem: Problem, convex: CostModel, cost_ms: float, settings: BoundSettings) -> None:
        self.problem, self.convex, self.cost_ms, self.share = problem, convex, cost_ms, settings.heavy_share
        # the number of columns besides a shard is tried in steps of this size
        wanted = settings.heavy_shards and not (problem.dims % DIM_STEP).any()
        self._last = problem.vectors, problem.vectors  # what shards of a branch cost alone, and raised
        self.most = min(settings.heavy_most, settings.heavy_cells // len(problem.vectors)) if wanted else 0

    def raised(self, branch: Branch) -> Branch:
        """The branch with what its heavy shards cost alone raised by the columns beside them."""
        if self._last[0] is not branch.alone:  # branches with the same tables in blocks share it
            self._last = branch.alone, self._raised(branch)
        return replace(branch, alone=self._last[1])

    def _raised(self, branch: Branch) -> Floats:
        problem, shard_ms = self.problem, branch.alone + branch.ahead
        heavy = np.flatnonzero((shard_ms > self.share * self.cost_ms) & (shard_ms <= self.cost_ms * (1 + 1e-9)))
        heavy = heavy[np.argsort(-shard_ms[heavy], kind="stable")[: self.most]]
        if not len(heavy) or not len(branch.all_to_all_ms):
            return branch.alone
        alone, sums = branch.alone.copy(), branch.beside + problem.vectors[heavy]
        compute, convex = problem.model.compute_ms(sums), self.convex.compute_ms(sums)
        slopes, of = np.unique(np.maximum(self.convex.compute_slope(sums), 0.0), axis=0, return_inverse=True)
        others = [self._others(branch, slope) for slope in slopes]  # datasheets have few different slopes
        for place, shard in enumerate(heavy.tolist()):
            all_to_all = branch.all_to_all_ms[int(branch.columns + problem.dims[shard]) // DIM_STEP :]
            if len(all_to_all):
                adds = _added_ms(others[of[place]], int(problem.group[shard]), len(all_to_all))
                least = (np.maximum(compute[place], convex[place] + adds) + all_to_all[: len(adds)]).min()
                alone[shard] = max(alone[shard], float(least) - branch.ahead)
        return alone

    def _others(self, branch: Branch, slope: Floats) -> tuple[Ints, Floats, Floats]:
        """Groups, the cheapest first, what a column of each adds at least by the tangent of this slope, and how many it has."""
        problem, options = self.problem, self.problem.options
        price = np.where(np.isfinite(branch.alone), problem.vectors @ slope, np.inf)
        per_column = np.minimum.reduceat((price / np.maximum(problem.dims, 1))[1:], problem.first)  # of each group
        if len(options.groups):
            ms, sends = (options.vectors @ slope).min(axis=2), options.least > 0  # copies send no columns
            piece = np.divide(ms, options.least, out=np.full_like(ms, np.inf), where=sends).min(axis=1)
            per_column[options.groups] = np.minimum(per_column[options.groups], piece)
            per_column[options.groups[branch.sure]] = np.inf
        most = problem.dims[problem.whole].astype(np.float64)  # columns of a group on one device
        most[options.groups] = np.maximum(most[options.groups], options.least.max(axis=1, initial=0.0))
        order = np.argsort(per_column, kind="stable")
        order = order[np.isfinite(per_column[order])]
        return order, per_column[order], most[order]


def _added_ms(others: tuple[Ints, Floats, Floats], group: int, count: int) -> Floats:
    """What 0, 4, 8, … columns of other groups than this add at least: at most `count` numbers."""
    order, per_column, most = others
    dims = np.where(order == group, 0.0, most)
    columns, ms = np.append(0, dims.cumsum()), np.append(0.0, (per_column * dims).cumsum())
    more = DIM_STEP * np.arange(min(count, int(columns[-1]) // DIM_STEP + 1))
    added: Floats = np.interp(more, columns, ms)
    return added
