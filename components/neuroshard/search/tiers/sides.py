"""A lower bound by which tables are in HBM and which are not.

The relaxation in which every part of a table may be in any tier lets half of a large table be in HBM. So plans are
distinguished by the side of single tables: all plans in which a table is in HBM, and all in which it is not. Either kind has a
bound of its own, and the least of both is one for all plans. Tables are distinguished one after another, always in the kind of
plans with the least bound.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.bound.settings import QUICK
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided


@dataclass(frozen=True)
class Sides:
    """Plans in which the table groups `inside` (G,) are in HBM and those `beyond` (G,) are not, and their least ms."""

    inside: NDArray[np.bool_]
    beyond: NDArray[np.bool_]
    ms: float


@dataclass(frozen=True)
class ThreeProblems:
    """A task in which each part of a table is in any tier (`anywhere`), in HBM (`whole`), or beyond it (`outside`). All are
    priced."""

    anywhere: Problem
    whole: Problem
    outside: Problem

    def of(self, inside: NDArray[np.bool_], beyond: NDArray[np.bool_]) -> Problem:
        """The problem in which some table groups are on one side."""
        problem = self.anywhere
        if inside.any():
            problem = problem.with_options_of(self.whole, inside)
        return problem.with_options_of(self.outside, beyond) if beyond.any() else problem

    def most_torn(self, sides: Sides) -> int | None:
        """The table group that may be on either side and for which the relaxation gains most, by a bound without devices; None
        where each has its side."""
        model = cast(Divided, self.anywhere.model)
        # of each group, the least of ms and bytes x price, by price: (G, M)
        anywhere, whole, outside = (
            problem.vectors[problem.whole, -model.terms :] for problem in (self.anywhere, self.whole, self.outside)
        )
        of_sides = np.where(sides.inside[:, None], whole, np.where(sides.beyond[:, None], outside, anywhere))
        at = int((of_sides.sum(axis=0) / self.anywhere.devices - model.prices * model.hbm).argmax())
        torn = outside[:, 0] - np.abs(whole[:, at] - outside[:, at])
        torn[sides.inside | sides.beyond] = -np.inf
        best = int(torn.argmax())
        return best if torn[best] > 0 else None


def bound_by_sides(problems: ThreeProblems, first: Bound, plan: State, most: int, expired: Callable[[], bool]) -> Bound:
    """The bound after up to `most` tables were distinguished. `first` is the bound of all plans, `plan` a plan in which each
    table has one tier."""
    none = np.zeros(len(problems.anywhere.tables), dtype=bool)
    if first.ms is None:
        return first
    open_sides = [(first.ms, 0, Sides(none, none, first.ms))]
    count = 0
    while count < most and not expired():
        ms, _, sides = open_sides[0]
        group = problems.most_torn(sides)
        if group is None or ms >= plan.cost:
            break
        heapq.heappop(open_sides)
        count += 1
        one = none.copy()
        one[group] = True
        for number, child in enumerate(
            (replace(sides, inside=sides.inside | one), replace(sides, beyond=sides.beyond | one))
        ):
            found = lower_bound(problems.of(child.inside, child.beyond), plan, QUICK, known_ms=ms)
            assert found.ms is not None
            at_least = max(found.ms, ms)
            heapq.heappush(open_sides, (at_least, 2 * count + number, replace(child, ms=at_least)))
    return replace(first, ms=min(open_sides[0][0], plan.cost))
