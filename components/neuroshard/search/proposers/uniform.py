"""Plans that treat all tables alike: each in as many parts as there are devices, or in half as many, …; or each row-wise.

Where few tables lie on many devices such plans are among the best, and no step leads there that changes one table at a time:
the first parts of it only cost.
"""

import numpy as np

from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.start import Shares, first_plans, in_parts

LARGE = 2048  # tables x devices, above which there are enough tables to be dealt out evenly as they are


def alike(problem: Problem) -> list[State]:
    """Those that fit, in no order; none of large tasks."""
    if problem.devices == 1 or problem.devices * len(problem.whole) > LARGE:
        return []
    found = _by_columns(problem)
    if len(problem.row_blocks.items) and (there := problem.with_rows(problem.row_blocks.items)) is not None:
        found += [*first_plans(there, 1), *_by_columns(there)]
    return found


def _by_columns(problem: Problem) -> list[State]:
    if not problem.whole.any():
        return []
    halvings = range(int(np.log2(problem.devices)) + 1)
    parts = sorted({problem.devices >> halving for halving in halvings} - {1})
    return [State(problem, widths) for widths in in_parts(problem, Shares.of(problem), parts)]
