"""The algorithms that ask a cost model. The heuristics that ask none are in baselines.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.progress import progress
from neuroshard.search.all_plans import cheapest_of_all
from neuroshard.search.baselines import KEYS
from neuroshard.search.beam import PAPER, Width, beam_search
from neuroshard.search.by_rows import row_plans, turned
from neuroshard.search.feasibility import any_plan, misfit
from neuroshard.search.held import Held
from neuroshard.search.improve import improve
from neuroshard.search.problem import Placement, Problem
from neuroshard.search.start import first_plans, resumed
from neuroshard.search.state import State
from neuroshard.search.trust import REGRET_ROWS, trusted
from neuroshard.search.watch import Watch

ROUNDS = 40  # of shaking and descending again, where no time budget says otherwise
ROUNDS_AT_MOST = 10**6  # where one does
FIRST_ROUNDS = 2  # before the published search is asked as well
BEAM_AT_MOST = 6400  # tables x devices: 400 x 16, some 1.5 s
WORTH_MOVING = 1e-3  # of the cost: for a smaller gain 7.5 GiB once moved to end with the very same cost
STARTS = 3  # first plans that are descended from, in lockstep
COLUMNS_SHARE = 0.3  # of a time budget, for plans by columns alone, where tables may be split by rows


@dataclass(frozen=True)
class Effort:
    """How long to search, in rounds of improvement; and how wide the published search is."""

    rounds: int = ROUNDS
    width: Width = PAPER


Search = Callable[[Problem, Effort, np.random.Generator, Watch], Placement]  # raises Infeasible where it finds no plan


def neuroshard(problem: Problem, effort: Effort, rng: np.random.Generator, watch: Watch) -> Placement:
    """The best plan by columns, and where tables may be split by rows, the best with some of them so, if it is worth it."""
    if not len(problem.row_blocks.items):
        return _columns(problem, effort, rng, watch).best().placement
    with watch.sharing(COLUMNS_SHARE):
        by_columns = _columns(problem, effort, rng, watch)
    columns = by_columns.best()
    bound_to_stay = problem.held is not None and problem.held.budget_bytes is not None
    plans = [columns] if bound_to_stay else [*row_plans(problem), columns]
    total, unit = watch.amount(effort.rounds)
    with progress("search by rows", total=total, unit=unit) as bar:
        watch.bar = bar
        found = improve(plans, effort.rounds, rng, watch, turned)
    columns = by_columns.best([state for state in found if not len(state.problem.by_rows)])
    return trusted([*found, columns], columns, REGRET_ROWS).placement


@dataclass(frozen=True)
class _Found:
    """What a search by columns has found: `plans`, the one that it began with, and the published search's."""

    plans: list[State]
    begun: State
    published: State | None

    def best(self, more: Sequence[State] = ()) -> State:
        """The plan to take of these, and of more by columns that were found since."""
        held = self.begun.problem.held is not None
        # nothing moves for a plan that costs more than what lies there
        found = trusted([*self.plans, *more], self.published, at_most_ms=self.begun.cost if held else np.inf)
        # nor where next to nothing is gained
        return self.begun if held and found.cost > self.begun.cost * (1 - WORTH_MOVING) else found


def _columns(problem: Problem, effort: Effort, rng: np.random.Generator, watch: Watch) -> _Found:
    """Greedy placements in lockstep, or any packing that fits; the cheapest are improved by local search."""
    plans = starts(problem, watch)
    watch.note(min(plan.cost for plan in plans))
    total, unit = watch.amount(effort.rounds)
    with progress("search", total=total, unit=unit) as bar:
        watch.bar = bar
        found = improve([*plans, *cheapest_of_all(problem)], min(effort.rounds, FIRST_ROUNDS), rng, watch)
        if not effort.rounds:
            return _Found(found, plans[0], None)
        # the published search cuts otherwise; where it is quick, its plan is worth going on from, and a floor
        published = None
        if problem.held is None and problem.devices * len(problem.whole) <= BEAM_AT_MOST and not watch.expired:
            watch.bar = None
            placed = beam_search(problem, effort.width, watch).placement
            watch.bar = bar
            published = State(problem, problem.widths(placed)) if placed.fits else None
        begins = found[:1] if published is None else [found[0], published]
        found += improve(begins, max(effort.rounds - FIRST_ROUNDS, 0), rng, watch)
        return _Found(found, plans[0], published)


def at_least(
    problem: Problem, found: Placement, others: Sequence[Placement], rng: np.random.Generator, watch: Watch
) -> Placement:
    """What was found, or the best of the others, improved, where that is cheaper: so no heuristic is ever better."""
    costs = problem.worst_ms([found, *others])
    best = int(costs.argmin())
    if best == 0 and (not others or not len(problem.row_blocks.items)):
        return found
    # where rows may be split, also what a search by columns would have gone on from: so permission costs nothing
    other = int(costs[1:].argmin())
    improved = improve([State(problem, problem.widths(others[other]))], 0, rng, watch)[0]
    cheapest = (found, *others)[best]
    return improved.placement if improved.cost < costs[best] or (best and improved.cost == costs[best]) else cheapest


def starts(problem: Problem, watch: Watch) -> Sequence[State]:
    """Plans that fit, cheapest first, and before them what lies there already, where a plan is to be changed.

    Raises Infeasible with what is missing where there is none, or none is found, or more would have to move than may.
    """
    held = problem.held
    if held is None or held.budget_bytes is None:
        there = None if held is None else _where_it_lies(problem, held)
        return [*([there] if there else []), *first_plans(problem, STARTS, watch)] or [State(*any_plan(problem))]
    stays = (_where_it_lies(problem, held, sparing) for sparing in (False, True))
    found = [*(plan for plan in stays if plan), *first_plans(problem, STARTS)] or [State(*any_plan(problem))]
    needed = [_moving_bytes(plan) for plan in found]
    held.check(min(needed))
    return [plan for plan, nbytes in zip(found, needed, strict=True) if nbytes <= held.budget_bytes]


def _moving_bytes(plan: State) -> int:
    held = plan.problem.held
    return 0 if held is None else held.total(plan.widths)


def _where_it_lies(problem: Problem, held: Held, sparing: bool = False) -> State | None:
    """The plan to start from, as far as it is one still; None where there is no room."""
    return resumed(problem.with_rows(held.by_rows) or problem, held.widths(), sparing=sparing)


def paper(problem: Problem, effort: Effort, rng: np.random.Generator, watch: Watch) -> Placement:
    """The search as published, to compare with: it may miss plans where memory is tight."""
    with progress("search splits", total=effort.width.depth, unit="levels") as bar:
        watch.bar = bar
        found = beam_search(problem, effort.width, watch).placement
    if not found.fits:
        raise Infeasible(
            f"paper, which gives a device at most 1.5 x the mean columns, found no plan: {misfit(problem, found)}; "
            "neuroshard splits until tables fit: try it"
        )
    return found


SEARCHES: dict[str, Search] = {"neuroshard": neuroshard, "paper": paper}
ALGORITHMS = (*SEARCHES, *KEYS)
