"""The algorithms that ask a cost model. The heuristics that ask none are in baselines.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.progress import progress
from neuroshard.search.choice import trusted
from neuroshard.search.improve.local_search import improve
from neuroshard.search.infeasible.feasibility import misfit
from neuroshard.search.problem.problem import Placement, Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.baselines import KEYS
from neuroshard.search.proposers.beam import PAPER, Width, beam_search
from neuroshard.search.proposers.columns import WORTH_MOVING, ByColumns
from neuroshard.search.proposers.side_by_side import with_rows
from neuroshard.search.proposers.uniform import alike
from neuroshard.search.watch import Watch

ROUNDS = 40  # of shaking and descending again, where no time budget says otherwise
ROUNDS_AT_MOST = 10**6  # where one does
NEAR = 0.05  # share by which a plan may cost more than what was found, and be worth improving
BEGIN_SHARE = 0.3  # of a time budget, until rows are tried too, where tables may be split row-wise


@dataclass(frozen=True)
class Effort:
    """How long to search, in rounds of improvement; and how wide the published search is."""

    rounds: int = ROUNDS
    width: Width = PAPER


Search = Callable[[Problem, Effort, np.random.Generator, Watch], Placement]  # raises Infeasible where it finds no plan


def neuroshard(problem: Problem, effort: Effort, rng: np.random.Generator, watch: Watch) -> Placement:
    """The best plan column-wise, and where tables may be split row-wise, the best with some of them so, if it is worth it."""
    rows = len(problem.row_blocks.items) > 0
    total, unit = watch.amount((1 + rows) * effort.rounds)
    with progress("search", total=total, unit=unit) as bar:
        watch.bar = bar
        with watch.sharing(BEGIN_SHARE if rows else 1.0):
            columns = ByColumns(problem, effort.rounds, effort.width, rng, watch)
        if rows:
            return with_rows(problem, columns, effort.rounds, rng.spawn(1)[0], watch).placement
        while columns.go_on():
            pass
        return columns.best().placement


def at_least(
    problem: Problem, found: Placement, others: Sequence[Placement], rng: np.random.Generator, watch: Watch
) -> Placement:
    """What was found, or the best of the others, improved, where that is cheaper: so no heuristic is ever better. Where something
    lies already, it must be worth moving."""
    costs = problem.worst_ms([found, *others])
    best = int(costs.argmin())
    if best == 0 and (not others or not len(problem.row_blocks.items)):
        return found
    # where rows may be split, also what a search column-wise would have gone on from: so permission costs nothing
    other = int(costs[1:].argmin())
    improved = improve([State(problem, problem.widths(others[other]))], 0, rng, watch)[0]
    cheapest, cost = (found, *others)[best], costs[best]
    if improved.cost < cost or (best and improved.cost == cost):
        cheapest, cost = improved.placement, improved.cost
    return found if problem.held is not None and cost > costs[0] * (1 - WORTH_MOVING) else cheapest


def or_alike(problem: Problem, found: Placement, rng: np.random.Generator, watch: Watch) -> Placement:
    """What was found, or the cheapest plan that treats all tables alike, improved, where that is cheaper and not expected to be
    slower; where something lies already, it must be worth moving."""
    state, others = State.of(problem, found), sorted(alike(problem), key=lambda other: other.cost)
    most = state.cost * (1 - WORTH_MOVING) if problem.held is not None else state.cost
    if not others or others[0].cost > most * (1 + NEAR):
        return found
    best = improve(others[:1], 0, rng, watch)[0]
    return trusted([best, state]).placement if best.cost < most else found


def paper(problem: Problem, effort: Effort, rng: np.random.Generator, watch: Watch) -> Placement:
    """The search as published, to compare with: it may miss plans where memory is tight."""
    with progress("search splits", total=effort.width.depth, unit="levels") as bar:
        watch.bar = bar
        found = beam_search(problem, effort.width, watch).placement
    if not found.fits:
        raise Infeasible(
            f"neuroshard-2023, which gives a device at most 1.5 x the mean columns, found no plan: {misfit(problem, found)}; "
            "local-search splits until tables fit: try it"
        )
    return found


SEARCHES: dict[str, Search] = {"local-search": neuroshard, "neuroshard-2023": paper}
ALGORITHMS = (*SEARCHES, *KEYS)
