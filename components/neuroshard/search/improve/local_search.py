"""Improve a plan: descend to a local optimum, shake it, descend again; the best so far is at hand at any moment."""

from collections.abc import Callable, Sequence

import numpy as np

from neuroshard.search.choice import near
from neuroshard.search.improve.descent import MIN_GAIN, Cells, descend
from neuroshard.search.improve.perturb import shake
from neuroshard.search.problem.plans import Plans, Yardstick
from neuroshard.search.problem.state import State
from neuroshard.search.watch import Watch

SHARPNESS = 6  # of the yardstick of a descent: exponent 64
TOGETHER = 4  # plans in lockstep, at most
CELLS = 200_000  # devices x tables of them: where arrays are large, several take as long as one after another
WORSE = 0.003  # share by which a local optimum may cost more than the one that it was shaken from, to go on from it
IDLE, SELDOM = 10, 8  # turns in a row that came to nothing, after which only every so many rounds is one
PATIENCE = 30  # rounds without a better plan, after which the search goes back to the best

Turn = Callable[[State, Yardstick, np.random.Generator], State | None]  # another plan, or none


class Climb:
    """A search from plans that fit, a few rounds at a time: `best` is the cheapest so far, `found` those about as cheap.

    A round shakes the plan at hand by a few random steps and descends again; every other round goes by `turn` instead, where
    there is one, and fewer once turns come to nothing. Some rounds go in lockstep. It goes on from what it finds if that costs
    hardly more, and from the best after many rounds in vain.
    """

    def __init__(
        self, starts: Sequence[State], rng: np.random.Generator, watch: Watch, turn: Turn | None = None
    ) -> None:
        self.stick, self.rng, self.watch, self.turn = Yardstick.of(starts[0].problem, SHARPNESS), rng, watch, turn
        cells = starts[0].problem.devices * len(starts[0].problem.whole)
        self.together = min(max(CELLS // cells, 1), TOGETHER)
        self.found: list[State] = []
        for begin in range(0, len(starts), self.together):
            if begin and watch.expired:
                break
            some = starts[begin : begin + self.together]
            self.found += [end for ends in _descended(some, self.stick, rng, watch) for end in ends]
        self.best = self.at = min(self.found, key=_cost)
        self.vain, self.tried, self.in_vain = 0, 0, 0

    @property
    def idle(self) -> bool:
        """Whether turns have come to nothing for long."""
        return self.in_vain >= IDLE

    def climb(self, most: int) -> int:
        """At most so many rounds, in lockstep; how many it were."""
        trials, turns = [], []
        for _ in range(min(most, self.together)):
            every = 1 if not len(self.at.problem.row_wise) else SELDOM if self.idle else 2
            turned = self.turn(self.at, self.stick, self.rng) if self.turn and self.tried % every == 0 else None
            self.tried += 1
            trials.append(turned or self.at.copy())
            turns.append(turned is not None)
            if turned is None:
                shake(trials[-1], self.stick, self.rng)
        for ends, is_turn in zip(_descended(trials, self.stick, self.rng, self.watch), turns, strict=True):
            if is_turn:
                self.in_vain = 0 if ends[0].cost <= self.at.cost * (1 + WORSE) else self.in_vain + 1
            self._met(ends)
            self.watch.advance()
        return len(trials)

    def adopt(self, state: State) -> None:
        """Go on from a plan that was found elsewhere, where it is cheaper."""
        if state.cost < self.best.cost * (1 - WORSE):
            self.best = self.at = state
            self.found, self.vain = near([*self.found, state]), 0

    def _met(self, ends: Sequence[State]) -> None:
        """Where a round has ended: the cheapest on its way, and others."""
        self.found = near([*self.found, *ends])
        self.vain += 1
        if ends[0].cost < self.best.cost * (1 - MIN_GAIN):
            self.best, self.vain = ends[0], 0
        if ends[0].cost <= self.at.cost * (1 + WORSE):
            self.at = ends[0]
        if self.vain >= PATIENCE:
            self.at, self.vain = self.best, 0


def improve(starts: Sequence[State], rounds: int, rng: np.random.Generator, watch: Watch) -> list[State]:
    """The plans that local search ends in after so many rounds, the cheapest first, of those about as cheap."""
    search = Climb(starts, rng, watch)
    while rounds > 0 and not watch.expired:
        rounds -= search.climb(rounds)
    return near(search.found)


def _cost(state: State) -> float:
    return state.cost


def _descended(
    states: Sequence[State], stick: Yardstick, rng: np.random.Generator, watch: Watch
) -> list[tuple[State, State]]:
    """Of each plan the cheapest on the way down, and the one at the end, the most even; cut short where time is up."""
    watch.note(min(state.cost for state in states))
    plans = Plans(states)
    best, since = plans.cost.copy(), [list[Cells]() for _ in states]  # what was changed since the cheapest
    for changed in descend(plans, stick, rng):
        for plan, cells in changed.items():
            since[plan] += cells
            if plans.cost[plan] < best[plan]:
                best[plan] = plans.cost[plan]
                since[plan].clear()
        watch.note(float(best.min()), steps=1)
        if watch.expired:
            break
    ends = []
    for problem, widths, cells in zip(plans.problems, plans.widths, since, strict=True):
        end = cheapest = State(problem, widths.copy())
        for items, devices, before in reversed(cells):
            widths[items, devices] = before
        if cells:
            cheapest = State(problem, widths.copy())
        ends.append((cheapest, end))
    return ends
