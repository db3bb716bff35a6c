"""Descend to a local optimum, perturb it, descend again. The search can be stopped at any time with the best plan so far."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from neuroshard.search.improve.descent import Cells, descend
from neuroshard.search.improve.perturb import perturbed
from neuroshard.search.improve.toggle import toggled
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.objective import Objective
from neuroshard.search.problem.plans import Plans
from neuroshard.search.problem.state import State
from neuroshard.search.watch import Watch


class LocalSearch:
    """A search from plans that fit: `best` is the cheapest plan so far, `descended` the cheapest of each descent from these. Of
    some plans these are known (`ends`).

    A round perturbs the plan that the search is at, and descends again. With `toggle` every other round toggles one table
    instead. With many devices it first descends by moves to the least loaded ones, and goes on with moves to all if the plan then
    is hardly dearer than the best. The search goes on from what a round finds, unless that costs clearly more. Rounds run in
    lockstep, a few at a time.
    """

    def __init__(
        self,
        starts: Sequence[State],
        rng: np.random.Generator,
        watch: Watch,
        current: CurrentPlacement | None = None,
        *,
        toggle: bool = False,
        ends: Mapping[State, State] = MappingProxyType({}),
    ) -> None:
        problem = starts[0].problem
        self.tuning, self.rng, self.watch, self.current = problem.tuning, rng, watch, current
        self.objective, self.toggle = Objective.of(problem), toggle
        self.lockstep = Plans.at_once(problem)
        # where memory is nearly full, few devices have room, be they loaded or not
        few = problem.devices - 1 <= self.tuning.receivers
        self.all_at_once = few or problem.is_full or self.tuning.finish_within == np.inf
        found = self.descended = [ends[one] for one in starts if one in ends]
        left = [one for one in starts if one not in ends]
        for begin in range(0, len(left), self.lockstep):
            if found and watch.expired:
                break
            found += self._descended(left[begin : begin + self.lockstep])
        self.best = self.at = min(found, key=lambda state: state.cost)
        self.tried = 0

    def run(self, rounds: int) -> State:
        """Run `rounds` rounds, or as many as there is time for, and return the cheapest plan."""
        while rounds > 0 and not self.watch.expired:
            rounds -= self._rounds(min(rounds, self.lockstep))
        return self.best

    def _rounds(self, count: int) -> int:
        """Run `count` rounds from the same plan in lockstep, and return their number."""
        trials = []
        for _ in range(count):
            trials.append(self._toggled() or self._perturbed())
            self.tried += 1
        ends = self._descended(trials, to_all=self.all_at_once)
        for found in ends if self.all_at_once else self._finished(ends):
            self._met(found)
            self.watch.advance()
        return count

    def _finished(self, found: list[State]) -> list[State]:
        """These plans, and those that are hardly dearer than the best one after moves to all devices."""
        most_ms = self.best.cost * (1 + self.tuning.finish_within)
        near = [plan for plan in found if plan.cost < most_ms]
        if not near or self.watch.expired:
            return found
        return [*(plan for plan in found if plan.cost >= most_ms), *self._descended(near)]

    def _toggled(self) -> State | None:
        wanted = self.toggle and self.tried % 2 == 0
        return toggled(self.at, self.objective, self.rng, self.current) if wanted else None

    def _perturbed(self) -> State:
        return perturbed(self.at, self.objective, self.rng, self.current) if self.tuning.perturb else self.at

    def _met(self, found: State) -> None:
        """Record the cheapest plan of a round, and choose where to go on."""
        self.best = min(self.best, found, key=lambda state: state.cost)
        if found.cost <= self.at.cost * (1 + self.tuning.worse):
            self.at = found

    def _descended(self, states: Sequence[State], *, to_all: bool = True) -> list[State]:
        """The cheapest state of each plan during its descent; the last one is the most even, and may cost more. Cut short if time
        is up."""
        self.watch.note(min(state.cost for state in states))
        plans = Plans(states)
        best, since = plans.cost.copy(), [list[Cells]() for _ in states]  # what changed since the cheapest
        for changed in descend(plans, self.objective, self.rng, self.current, to_all=to_all):
            for plan, cells in changed.items():
                since[plan] += cells
                if plans.cost[plan] < best[plan]:
                    best[plan] = plans.cost[plan]
                    since[plan].clear()
            self.watch.note(float(best.min()), steps=1)
            if self.watch.expired:
                break
        cheapest = []
        for problem, widths, cells in zip(plans.problems, plans.widths, since, strict=True):
            for groups, devices, before in reversed(cells):
                widths[groups, devices] = before
            cheapest.append(State(problem, widths.copy()))
        return cheapest
