"""Plans to start from: one of other tiers, or the plan that trainers have, as far as shards may stay and fit."""

import numpy as np

from neuroshard.core.plan import Plan
from neuroshard.core.tiers import WAYS
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.current import plans_in_place
from neuroshard.search.tiers.options import DIVIDED, LEVELS, WHOLE, InTierPlan, TierProblems
from neuroshard.search.watch import Watch


def start_plan(problems: TierProblems, before: Plan, worth: Floats, watch: Watch) -> InTierPlan | None:
    """The plan to start from, in its tiers, completed where it no longer fits; None where that would move too much. `worth` is
    what each option of each table group takes, in ms: (O, G)."""
    current = problems.current
    assert current is not None
    choice = _fitting(problems, _as_before(problems, before), worth)
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


def _fitting(problems: TierProblems, choice: Ints, worth: Floats) -> Ints:
    """The choice in which so many table groups leave HBM that their devices have room, those first that cost least a byte; then,
    if that is not enough, so many cache less."""
    held, memory, each = _held_bytes(problems), problems.anywhere.memory, np.arange(len(choice))
    least = 1 + np.where(np.isfinite(worth[1:]), problems.need_bytes[1:], np.inf).argmin(axis=0)
    for to in (1 + worth[1:].argmin(axis=0), least):
        over = held[choice, each].sum(axis=0) - memory
        for device in np.argsort(-over, kind="stable").tolist():
            freed = held[choice, each, device] - held[to, each, device]
            loss = np.maximum(worth[to, each] - np.minimum(worth[choice, each], worth[to, each]), 0.0)
            may = problems.chosen & (freed > 0) & ((choice == WHOLE) | (to == least))
            for group in np.argsort(np.where(may, loss / np.maximum(freed, 1), np.inf), kind="stable").tolist():
                if held[choice, each].sum(axis=0)[device] <= memory[device] or not may[group]:
                    break
                same = problems.owner == problems.owner[group]
                choice[same] = to[same]
    return choice


def _held_bytes(problems: TierProblems) -> Ints:
    """What each table group takes of each device that has some of it now, by option: (O, G, D)."""
    current = problems.current
    assert current is not None
    widths = current.widths()
    shards = np.where(widths > 0, problems.anywhere.first[:, None] + widths, 0)
    found = np.stack([problem.nbytes[shards] for problem in problems.options])
    for number, problem in enumerate(problems.options):
        for group, place in zip(current.spread.tolist(), current.places.tolist(), strict=True):
            found[number, group] = problem.options.load(np.array([group]), np.array([place])).nbytes
    return found
