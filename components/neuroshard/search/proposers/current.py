"""Plans that start from the current plan: what still fits stays, and the rest goes to the least loaded devices."""

import numpy as np

from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.filling import complete
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State


def plans_in_place(problem: Problem, current: CurrentPlacement) -> list[State]:
    """The current plan, completed if it no longer fits; with a move budget, also completed so that few bytes move."""
    may_stay = current.places < len(problem.options.places)  # copies are the last, where the problem has any
    there = problem.with_spread(current.spread[may_stay], current.places[may_stay]) or problem
    ways = (False,) if current.budget_bytes is None else (False, True)
    widths = current.widths()
    widths[np.count_nonzero(widths, axis=1) > problem.max_shards] = 0  # cut, where the problem has no plans with cuts
    found = (complete(there, widths.copy(), sparing=sparing) for sparing in ways)
    return [plan for plan in found if plan is not None]
