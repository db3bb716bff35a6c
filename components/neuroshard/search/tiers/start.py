"""Plans to start from: one of other tiers, or the plan that trainers have, as far as shards may stay and fit."""

import numpy as np

from neuroshard.core.plan import Plan
from neuroshard.core.tiers import WAYS
from neuroshard.costmodel.protocol import Ints
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.current import plans_in_place
from neuroshard.search.tiers.options import DIVIDED, LEVELS, WHOLE, InTierPlan, TierProblems
from neuroshard.search.watch import Watch


def start_plan(problems: TierProblems, before: Plan, watch: Watch) -> InTierPlan | None:
    """The plan to start from, in its tiers, completed where it no longer fits; None where that would move too much, or has no
    room."""
    current = problems.current
    assert current is not None
    choice = _as_before(problems, before)
    plans = plans_in_place(problems.of(choice), current)
    some: list[State] = [plan for plan in plans if current.within_budget(plan.problem, plan.widths)]
    return problems.found(some[0], choice, watch, watch.quiet()) if some else None


def _as_before(problems: TierProblems, before: Plan) -> Ints:
    """The option of each table group (G,) in the plan to start from, of shares of cached rows the nearest below."""
    tables, rules = {table.name: table for table in before.task.tables}, before.task.constraints.beyond_hbm
    choice = np.full(len(problems.anywhere.tables), WHOLE)
    for group in np.flatnonzero(problems.chosen).tolist():
        owners = [problems.table_of(table.name) for table in problems.anywhere.tables[group]]
        ruled = [name for name in owners if name in rules and name in tables]
        if not ruled:
            continue
        choice[group] = DIVIDED
        if problems.in_level_only[group]:
            share = ((rules[ruled[0]].cached_rows or 0) + WAYS) / tables[ruled[0]].rows
            choice[group] += np.searchsorted(LEVELS, share, side="right")
    return choice
