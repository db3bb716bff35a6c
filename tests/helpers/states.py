"""Plans of a search, by hand."""

from collections.abc import Sequence

import numpy as np

from neuroshard.search.problem.column_shards import Placement
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State


def whole(problem: Problem, devices: Sequence[int]) -> State:
    """Every table whole on its device."""
    return State(problem, problem.widths(Placement(problem.whole, np.array(devices))))
