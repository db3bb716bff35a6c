"""The tiers of tables that a search tries first."""

from itertools import pairwise
from typing import cast

import numpy as np

from neuroshard.costmodel.cache import convex_hull
from neuroshard.costmodel.protocol import Ints
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.options import DIVIDED, WHOLE, TierProblems, linear_ms
from neuroshard.search.tiers.sides import Sides


def first_choice(problems: TierProblems, relaxed: State, share: float, sides: Sides | None) -> Ints:
    """An option of each table group (G,), so that they fill this share of all HBM and take few ms, both estimated by the shards
    and the prices of the relaxed plan.

    All begin with the option that needs least HBM. Then bytes are given along the convex hull of each group's options, first
    where they save most: the greedy way for a knapsack of several choices. Groups with a side are on it, if they fit.
    """
    model = cast(Divided, relaxed.problem.model)
    ms, nbytes = (linear_ms(problems, relaxed, slope) for slope in model.parts_of_slope(relaxed.sums))
    ms[DIVIDED, problems.large] = np.inf
    if len(problems.options) > 2:
        ms[2:, ~problems.large] = np.inf
    if sides is not None:
        ms[1:, sides.inside] += ms[np.isfinite(ms)].sum()  # first of all, if they fit
        ms[WHOLE, sides.beyond] = np.inf
    choice, steps = np.zeros(ms.shape[1], dtype=np.int64), []
    room = share * sum(problems.task.placeable_bytes)
    for group in range(len(choice)):
        possible = np.flatnonzero(np.isfinite(ms[:, group]))
        order = possible[np.lexsort((ms[possible, group], nbytes[possible, group]))]
        size, best = nbytes[order, group], np.minimum.accumulate(ms[order, group])
        choice[group] = order[0]
        room -= size[0]
        for first, last in pairwise(convex_hull(size, best)):
            saved = (best[first] - best[last]) / max(size[last] - size[first], 1.0)
            if saved > 0:
                steps.append((-saved, group, int(order[last]), float(size[last] - size[first])))
    full = np.zeros(len(choice), dtype=bool)
    for _, group, option, more in sorted(steps):
        full[group] |= more > room
        if not full[group]:
            choice[group] = option
            room -= more
    return choice
