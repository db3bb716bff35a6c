"""Descend to a local optimum, perturb it, descend again. The search can be stopped at any time with the best plan so far."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

import numpy as np

from neuroshard.search.improve.descent import Cells, step
from neuroshard.search.improve.perturb import perturbed
from neuroshard.search.improve.toggle import toggled
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.objective import Objective
from neuroshard.search.problem.plans import Plans
from neuroshard.search.problem.state import State
from neuroshard.search.watch import Watch


class LocalSearch:
    """A search from plans that fit: `best` is the cheapest plan so far, `descended` the cheapest of each descent from these. Of
    some plans these are known (`ends`). The search ends with a plan that costs at most `enough_ms`.

    A round perturbs the plan that the search is at, and descends again. With `toggle` every other round toggles one table
    instead. With many devices it first descends by moves to the least loaded ones, and goes on with moves to all if the plan then
    is hardly dearer than the best. The search goes on from what a round finds, unless that costs clearly more. A few rounds run
    in lockstep: when one ends, the next begins.
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
        enough_ms: float = 0.0,
    ) -> None:
        problem = starts[0].problem
        self.tuning, self.rng, self.watch, self.current = problem.tuning, rng, watch, current
        self.objective, self.toggle, self.enough_ms = Objective.of(problem), toggle, enough_ms
        self.lockstep = Plans.at_once(problem)
        # where memory is nearly full, few devices have room, be they loaded or not
        self.few_devices = problem.devices - 1 <= self.tuning.receivers
        self.all_at_once = self.few_devices or problem.is_full or self.tuning.finish_within == np.inf
        self.descended = [ends[one] for one in starts if one in ends]
        for found in self._descents((one for one in starts if one not in ends), to_all=True):
            self.descended.append(found)
            if found.cost <= enough_ms:
                break
        self.best = self.at = min(self.descended, key=lambda state: state.cost)
        self.tried = 0

    def run(self, rounds: int) -> State:
        """Run `rounds` rounds, or as many as there is time for, and return the cheapest plan. On many devices some in a row that
        gain next to nothing are the last; and none follows a plan that costs little enough."""
        if self.best.cost <= self.enough_ms:
            return self.best
        idle, before, patience = 0, self.best.cost, max(self.tuning.patience, rounds // 4)
        for found in self._descents((self._trial() for _ in range(rounds)), to_all=self.all_at_once):
            self._met(found)
            self.watch.advance()
            idle += 1
            if self.best.cost < before * (1 - self.tuning.least_gain):
                idle, before = 0, self.best.cost
            if self.best.cost <= self.enough_ms or (idle >= patience and not self.few_devices):
                break
        return self.best

    def _trial(self) -> State:
        """Another plan to descend from."""
        trial = self._toggled() or self._perturbed()
        self.tried += 1
        return trial

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

    def _descents(self, starts: Iterator[State], *, to_all: bool) -> Iterator[State]:
        """The cheapest state of each descent, as it ends; the last state of a descent is the most even, and may cost more.

        When a descent ends, the next one of the `starts` is taken, so the same number of plans is in lockstep until the last few.
        Once time is up, no more are taken, and descents are cut short; but there is one at least.
        """
        states = [] if self.descended and self.watch.expired else list(islice(starts, self.lockstep))
        if not states:
            return
        plans = Plans(states)
        moving, all_devices = np.full(len(plans), True), np.full(len(plans), to_all)
        best, since = plans.cost.copy(), [list[Cells]() for _ in states]  # what changed since the cheapest
        self.watch.note(float(best.min()))
        while moving.any():
            changed = step(plans, self.objective, self.rng, moving, self.current, all_devices)
            for plan, cells in changed.items():
                since[plan] += cells
                if plans.cost[plan] < best[plan]:
                    best[plan] = plans.cost[plan]
                    since[plan].clear()
            self.watch.note(float(best.min()), steps=1 if changed else 0)
            expired = self.watch.expired
            for plan in np.flatnonzero(moving).tolist():
                if plan in changed and not expired:
                    continue
                if not (all_devices[plan] or expired) and best[plan] < self.best.cost * (1 + self.tuning.finish_within):
                    all_devices[plan] = True
                    continue
                widths = plans.widths[plan].copy()
                for groups, devices, before in reversed(since[plan]):
                    widths[groups, devices] = before
                yield State(plans.problems[plan], widths)
                following = None if expired else next(starts, None)
                moving[plan] = following is not None
                if following is not None:
                    plans.replace(plan, following)
                    best[plan], all_devices[plan] = following.cost, to_all
                    since[plan].clear()
