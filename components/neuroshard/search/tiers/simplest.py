"""Tables that gain nothing beyond HBM are in it: of plans that cost about as much, the one with fewest tables beyond is taken."""

import numpy as np

from neuroshard.search.problem.state import State
from neuroshard.search.tiers.options import WHOLE, InTierPlan, TierProblems
from neuroshard.search.watch import Watch

TRIED = 24  # plans, at most: a guess. Where HBM has room for all tables that gain nothing, one


def fewest_beyond(problems: TierProblems, plan: InTierPlan, simplicity: float, watch: Watch) -> InTierPlan:
    """The plan with more tables in HBM, the smallest first, where that costs at most the share `simplicity` more. Its shards stay
    where they are. Tables are tried together, and in halves where some of them have no room or cost too much."""
    most_ms, need = plan.cost * (1 + simplicity), problems.of_owner(problems.need_bytes)[WHOLE]
    groups = np.flatnonzero(problems.chosen & (plan.choice != WHOLE))
    together, tried = [groups[np.argsort(need[groups], kind="stable")]], 0
    while together and tried < TRIED and not watch.expired:
        some, tried = together.pop(), tried + 1
        choice = plan.choice.copy()
        choice[np.isin(problems.owner, problems.owner[some])] = WHOLE
        there = problems.of(choice).with_spread(plan.state.problem.spread, plan.state.problem.places)
        state = None if there is None else State(there, plan.state.widths)
        other = None if state is None or (state.free < 0).any() else problems.in_tiers(state, choice)
        if other is not None and other.over <= plan.over and other.cost <= most_ms:
            plan = other
        elif len(some) > 1:
            together += [some[len(some) // 2 :], some[: len(some) // 2]]
    return plan
