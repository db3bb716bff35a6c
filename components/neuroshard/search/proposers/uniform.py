"""Plans that treat all tables alike: each in as many shards as there are devices, or half as many, …; or each row-wise.

Few tables on many devices often run best so, and no sequence of moves leads there that changes one table at a time: the first
of them only cost.
"""

import numpy as np

from neuroshard.search.problem.filling import Shares, fewest_and_most_shards
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.base import ProposalRequest
from neuroshard.search.proposers.greedy import by_load, cut_into, first_plans


def propose(problem: Problem, request: ProposalRequest) -> list[State]:
    """Those that fit; none of large tasks."""
    if problem.devices == 1 or problem.devices * len(problem.whole) > problem.tuning.uniform_most_cells:
        return []
    found = _column_wise(problem)
    if len(problem.row_blocks.groups) and (there := problem.with_row_wise(problem.row_blocks.groups)) is not None:
        found += [*first_plans(there, 1), *_column_wise(there)]
    return sorted(found, key=lambda state: state.cost)


def _column_wise(problem: Problem) -> list[State]:
    if not problem.whole.any():
        return []
    halvings = range(int(np.log2(problem.devices)) + 1)
    counts = sorted({problem.devices >> halving for halving in halvings} - {1})
    weight = Shares.of(problem).ms
    fewest, most = fewest_and_most_shards(problem)
    lists = [cut_into(problem, weight, np.minimum(np.maximum(count, fewest), most)) for count in counts]
    return [State(problem, widths) for widths in by_load(problem, weight, lists)]
