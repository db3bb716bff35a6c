"""A lower bound by which tables are in HBM and which are not.

The relaxation in which every part of a table may be in any tier lets half of a large table be in HBM. So plans are
distinguished by the side of single tables: all plans in which a table is in HBM, and all in which it is not. Either kind has a
bound of its own, and the least of both is one for all plans. Tables are distinguished one after another, always in the kind of
plans with the least bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import cast

import numpy as np

from neuroshard.costmodel.protocol import Ints
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.bound.settings import QUICK
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided

# Tables in a row that raise the bound by less than the least gain in all, after which no more are distinguished. Of 19 bounds one
# was 0.04 % lower than without, the others equal, in 0.3 of the time
PATIENCE, LEAST_GAIN = 6, 2e-3


def bound_by_sides(
    problems: Sequence[Problem], first: Bound, plan: State, most: int, expired: Callable[[], bool]
) -> Bound:
    """The bound after up to `most` tables were distinguished. The `problems` are those in which each part of a table is in any
    tier, in HBM, and beyond it, all priced; `first` is the bound of all plans, `plan` one in which each table has one tier."""
    if first.ms is None:
        return first
    # of plans: their bound, a number, and the side of each group (G,), 0 where it may be on either
    kinds = [(first.ms, 0, np.zeros(len(problems[0].tables), dtype=np.int64))]
    bounds = list[float]()
    for count in range(most):
        ms, _, sides = kinds[0]
        bounds.append(ms)
        group, idle = _most_torn(problems, sides), count >= PATIENCE and ms <= bounds[-PATIENCE - 1] * (1 + LEAST_GAIN)
        if group is None or idle or ms >= plan.cost or expired():
            break
        heappop(kinds)
        for side in (1, 2):
            child, problem = np.where(np.arange(len(sides)) == group, side, sides), problems[0]
            for one in {1, 2}.intersection(child.tolist()):
                problem = problem.with_options_of(problems[one], child == one)
            found = lower_bound(problem, plan, QUICK, known_ms=ms)
            assert found.ms is not None
            heappush(kinds, (max(found.ms, ms), 2 * count + side, child))
    return replace(first, ms=min(kinds[0][0], plan.cost))


def _most_torn(problems: Sequence[Problem], sides: Ints) -> int | None:
    """The table group that may be on either side and for which the relaxation gains most, by a bound without devices; None where
    each has its side."""
    model = cast(Divided, problems[0].model)
    # of each group, the least of ms and bytes x price, by price: (3, G, M)
    least = np.stack([problem.vectors[problem.whole, -model.terms :] for problem in problems])
    total = least[sides, np.arange(len(sides))].sum(axis=0) / problems[0].devices
    at = int((total - model.prices * model.hbm).argmax())
    torn = np.where(sides == 0, least[2, :, 0] - np.abs(least[1, :, at] - least[2, :, at]), -np.inf)
    best = int(torn.argmax())
    return best if torn[best] > 0 else None
