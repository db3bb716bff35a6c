"""Table groups change sides, one or two at a time: into HBM, beyond it, or to another share of cached rows. In the end those that
gain nothing beyond HBM are in it."""

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.progress import progress
from neuroshard.search.asked import Asked
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.problem.filling import started
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.options import DIVIDED, WHOLE, InTierPlan, TierProblems, linear_ms
from neuroshard.search.watch import Watch

# How often tables change sides: as often as so many cells, table groups x devices, allow, and at most and at least so often. 120
# for 60 tables on 8 devices took half of a search's time
TOGGLE_CELLS, MOST_TOGGLES, LEAST_TOGGLES = 57_600, 120, 24
ROUNDS_A_TOGGLE = 2  # of local search after each: a guess
TOGGLE_CANDIDATES = 24  # the best by the estimate, of which one is drawn: a guess
TWO_AT_A_TIME = 0.35  # share of the times that two change sides: a guess
# Mean rank of the one that is drawn. 2.5 left one of three tasks of 10 tables on 3 devices 1 % above its optimum, 5 did not
TOGGLE_LUCK = 5.0
TRIED = 24  # plans with more tables in HBM, at most: a guess. Where HBM has room for all tables that gain nothing, one


def toggled(problems: TierProblems, best: InTierPlan, asked: Asked, rng: np.random.Generator) -> InTierPlan:
    """The cheapest plan found by giving one or two table groups another option at a time, each once from each plan."""
    toggles = min(max(TOGGLE_CELLS // best.state.widths.size, LEAST_TOGGLES), MOST_TOGGLES)
    change, tried = _change(problems, best), set[bytes]()
    with progress("search tiers", total=toggles, unit="tables") as bar:
        for _ in range(toggles):
            if asked.watch.expired:
                break
            candidates = np.argsort(change, axis=None, kind="stable")[
                : min(TOGGLE_CANDIDATES, np.isfinite(change).sum())
            ]
            if not len(candidates):
                break
            bar.advance(1, f"best {best.cost:.3f} ms")
            choice = best.choice.copy()
            for _ in range(1 + (rng.random() < TWO_AT_A_TIME)):
                number, group = np.unravel_index(
                    candidates[min(int(rng.exponential(TOGGLE_LUCK)), len(candidates) - 1)], change.shape
                )
                choice[problems.owner == problems.owner[group]] = number
            choice = _with_room(problems, choice, best.choice, change)
            if choice.tobytes() in tried:
                continue
            tried.add(choice.tobytes())
            there, current = problems.of(choice), problems.current
            # table groups of another option find new places only if they have no room
            start = started(there, best.state) or started(there, best.state, anew=choice != best.choice)
            if start is None or (current is not None and not current.within_budget(start.problem, start.widths)):
                continue
            quiet = asked.watch.quiet()
            last = LocalSearch([start], rng, quiet, current).run(ROUNDS_A_TOGGLE)
            found = problems.found(last, choice, asked.watch, quiet)
            if found.rank < best.rank:
                best, tried = found, set()
                change = _change(problems, best)
    return best


def _with_room(problems: TierProblems, choice: Ints, before: Ints, change: Floats) -> Ints:
    """The choice in which so many other table groups leave HBM that the rest has room, those first that cost least a byte."""
    need, each, choice = problems.need_bytes, np.arange(len(choice)), choice.copy()
    room = sum(problems.task.placeable_bytes) - float(need[choice, each].sum())
    if room >= 0:
        return choice
    out = 1 + change[1:].argmin(axis=0)
    need = problems.of_owner(need)
    freed = need[WHOLE] - need[out, each]
    may = (choice == WHOLE) & (before == WHOLE) & (freed > 0) & np.isfinite(change[out, each])
    for group in np.argsort(np.where(may, change[out, each] / np.maximum(freed, 1.0), np.inf), kind="stable").tolist():
        if room >= 0 or not may[group]:
            break
        if choice[group] == WHOLE:
            choice[problems.owner == problems.owner[group]] = out[group]
            room += freed[group]
    return choice


def _change(problems: TierProblems, plan: InTierPlan) -> Floats:
    """By a linear estimate, what each table group changes on the busy devices if it has another option: (O, G). Infinite where it
    has it already, or may not."""
    state = plan.state
    slope = state.problem.model.compute_slope(state.sums)
    busy = (state.ready / state.ready.max()) ** 8
    worth = linear_ms(problems, state, slope * busy[:, None])
    change: Floats = worth - worth[plan.choice, np.arange(len(plan.choice))]
    change[plan.choice, np.arange(len(plan.choice))] = np.inf
    change[DIVIDED, problems.wide] = np.inf
    change[2:, ~problems.large] = np.inf
    change[:, ~problems.chosen] = np.inf
    return change


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
