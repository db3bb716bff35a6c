"""Plans column-wise and plans with tables row-wise, sought side by side: time goes to what gains by it.

Both searches go on from where they are, a few rounds at a time. The one column-wise goes as it would alone, step by step, so
where rows do nothing its plan is that of a search column-wise that had a little less time.
"""

import numpy as np

from neuroshard.search.choice import REGRET_ROWS, trusted
from neuroshard.search.improve.local_search import Climb
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.columns import ByColumns, moving_bytes
from neuroshard.search.proposers.row_wise import row_plans, turned
from neuroshard.search.watch import Watch

FAR = 0.03  # share by which a plan with rows must be cheaper, for the search column-wise not to be gone on with
SELDOM = 8  # of so many turns of the two searches one is of that with rows, where tables were turned in vain for long


def with_rows(problem: Problem, columns: ByColumns, rounds: int, rng: np.random.Generator, watch: Watch) -> State:
    """The best plan with some tables row-wise, where it is worth it, or the best column-wise; of so many rounds of each."""
    best = columns.best()
    begun = row_plans(problem)
    if problem.held is not None and (budget := problem.held.budget_bytes) is not None:
        begun = [plan for plan in begun if moving_bytes(plan) <= budget]
    rows = Climb([*begun, best], rng, watch, turned)
    turns = 0
    while not watch.expired:
        turns += 1
        if rounds and (not columns.left or _rows_next(columns, rows, turns)):
            rounds -= rows.climb(rounds)
        elif not columns.go_on():
            break
    best = columns.best([state for state in rows.found if not len(state.problem.row_wise)])
    return trusted([*rows.found, best], best, REGRET_ROWS)


def _rows_next(columns: ByColumns, rows: Climb, turns: int) -> bool:
    """Whether it is the turn of plans with rows; which go on from those column-wise where these are cheaper."""
    rows.adopt(columns.cheapest)
    split = len(rows.best.problem.row_wise) > 0
    if split and rows.best.cost < columns.cheapest.cost * (1 - FAR):
        return True
    gains = (split and rows.best.cost < columns.cheapest.cost) or not rows.idle
    return turns % (2 if gains else SELDOM) == 0
