"""The search column-wise: greedy placements in lockstep, the published search, and local search from the cheapest of these."""

from collections.abc import Sequence

import numpy as np

from neuroshard.search.choice import trusted
from neuroshard.search.improve.local_search import Climb, improve
from neuroshard.search.infeasible.feasibility import any_plan
from neuroshard.search.infeasible.packing import cheapest_plan
from neuroshard.search.problem.current import Held
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.beam import Width, beam_search
from neuroshard.search.proposers.company import accompanied
from neuroshard.search.proposers.start import first_plans, resumed
from neuroshard.search.watch import Watch

FIRST_ROUNDS = 2  # before the published search is asked as well
BEAM_AT_MOST = 6400  # tables x devices: 400 x 16, some 1.5 s
WORTH_MOVING = 1e-3  # of the cost: for a smaller gain 7.5 GiB once moved to end with the very same cost
STARTS = 3  # first plans that are descended from, in lockstep


class ByColumns:
    """What a search column-wise has found, and how it goes on; the plan that it began with, and the published search's."""

    def __init__(self, problem: Problem, rounds: int, width: Width, rng: np.random.Generator, watch: Watch) -> None:
        self.watch, self.left = watch, max(rounds - FIRST_ROUNDS, 0)
        plans = starts(problem, watch)
        watch.note(min(plan.cost for plan in plans))
        self.begun, self.published = plans[0], None
        self.plans = improve([*plans, *cheapest_plan(problem)], min(rounds, FIRST_ROUNDS), rng, watch)
        begins = self.plans[:1]
        # the published search cuts otherwise; where it is quick, its plan is worth going on from, and a floor
        small = problem.devices * len(problem.whole) <= BEAM_AT_MOST
        if rounds and problem.held is None and small and not watch.expired:
            with watch.without_bar():
                placed = beam_search(problem, width, watch).placement
            if placed.fits:
                self.published = State(problem, problem.widths(placed))
                begins = [*begins, self.published]
        self.climb = Climb(begins, rng, watch) if rounds else None

    @property
    def cheapest(self) -> State:
        """The cheapest plan so far."""
        return min([*self.plans, *([self.climb.best] if self.climb else [])], key=lambda plan: plan.cost)

    def go_on(self) -> bool:
        """A few rounds more; False where there were enough, or the time is up."""
        if self.climb is None or not self.left or self.watch.expired:
            return False
        self.left -= self.climb.climb(self.left)
        return True

    def best(self, more: Sequence[State] = ()) -> State:
        """The plan to take of these, and of more column-wise that were found since."""
        found = [*self.plans, *(self.climb.found if self.climb else ()), *more]
        held = self.begun.problem.held is not None
        if not held:
            found += accompanied(min(found, key=lambda plan: plan.cost))
        # nothing moves for a plan that costs more than what lies there
        best = trusted(found, self.published, at_most_ms=self.begun.cost if held else np.inf)
        # nor where next to nothing is gained
        return self.begun if held and best.cost > self.begun.cost * (1 - WORTH_MOVING) else best


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
    needed = [moving_bytes(plan) for plan in found]
    held.check(min(needed))
    return [plan for plan, nbytes in zip(found, needed, strict=True) if nbytes <= held.budget_bytes]


def moving_bytes(plan: State) -> int:
    """What has to move for a plan, where something lies already."""
    held = plan.problem.held
    return 0 if held is None else held.total(plan.widths)


def _where_it_lies(problem: Problem, held: Held, sparing: bool = False) -> State | None:
    """The plan to start from, as far as it is one still; None where there is no room."""
    return resumed(problem.with_rows(held.row_wise) or problem, held.widths(), sparing=sparing)
