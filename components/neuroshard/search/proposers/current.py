"""Plans that start from the current plan: what still fits stays, and the rest goes to the least loaded devices."""

from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.filling import complete
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State


def plans_in_place(problem: Problem, current: CurrentPlacement) -> list[State]:
    """The current plan, completed if it no longer fits; with a move budget, also completed so that few bytes move."""
    there = problem.with_row_wise(current.row_wise, current.domains) or problem
    ways = (False,) if current.budget_bytes is None else (False, True)
    found = (complete(there, current.widths(), sparing=sparing) for sparing in ways)
    return [plan for plan in found if plan is not None]
