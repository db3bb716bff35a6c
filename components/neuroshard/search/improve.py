"""Improve a plan: descend to a local optimum, shake it, descend again; the best so far is at hand at any moment."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.plans import Level, Plans, Yardstick, sources
from neuroshard.search.problem import Widths
from neuroshard.search.promising import promising
from neuroshard.search.shake import shake
from neuroshard.search.state import State
from neuroshard.search.steps import Priced, Steps, changes, price
from neuroshard.search.trust import near
from neuroshard.search.watch import Watch

if TYPE_CHECKING:
    from neuroshard.search.held import Held

MIN_GAIN = 1e-6  # share of the slowest device's ms, below which a step is none
SHARPNESS = 6  # of the yardstick of a descent: exponent 64
# Devices that steps are tried from, before a plan counts as a local optimum: those at these places by ms, and by columns. For
# where one table's narrowest part outweighs all else, no step eases the device that holds it, and columns are all there is.
SOURCES = (range(1), range(1, 3))
TOGETHER = 4  # rounds in lockstep
WORSE = 0.003  # share by which a local optimum may cost more than the one that it was shaken from, to go on from it
IDLE, SELDOM = 10, 8  # turns in a row that came to nothing, after which only every so many rounds is one
PATIENCE = 30  # rounds without a better plan, after which the search goes back to the best

Turn = Callable[[State, Yardstick, np.random.Generator], State | None]  # another plan, or none
Cells = tuple[Ints, Ints, Ints]  # items, devices, and the units that were there before


def descend(plans: Plans, stick: Yardstick) -> Iterator[dict[int, list[Cells]]]:
    """What is changed of which plan by each round of steps that make them more even by the yardstick, until no priced step does.

    Steps go from the devices that are slowest, and from those with the most columns. Not every step makes a plan cheaper.
    """
    moving = np.full(len(plans), plans.problem.devices > 1)
    while moving.any():
        level, trying = Level(stick, plans.compute, plans.dims), moving.copy()
        changed: dict[int, list[Cells]] = {}
        for places in SOURCES:
            plan, source = np.nonzero(sources(level, places) & trying[:, None])
            steps = promising(plans, level, plan, source)
            if not len(steps):
                continue
            priced = price(plans, level, steps)
            chosen = _chosen(plans, level, steps, priced.change)
            if chosen:
                changed |= _take(plans, steps, priced, np.array(chosen))
                trying[list(changed)] = False
            if not trying.any():
                break
        moving &= ~trying
        if changed:
            yield changed


def _chosen(plans: Plans, level: Level, steps: Steps, change: Floats) -> list[int]:
    """The steps of the least change, no two on one device or of one item, that gain enough and do not move more bytes
    than there is a budget for."""
    budgets = [p.held if p.held is not None and p.held.budget_bytes is not None else None for p in plans.problems]
    gains = np.flatnonzero(change < -MIN_GAIN * level.slowest[steps.plan])
    chosen: list[int] = []
    used: set[tuple[int, int]] = set()
    bound: set[int] = set()
    for index in gains[np.argsort(change[gains], kind="stable")].tolist():
        plan, devices = int(steps.plan[index]), (int(steps.source[index]), int(steps.to[index]))
        items = (-2 - int(steps.give[index]), -2 - int(steps.take[index]))
        touched = {(plan, one) for one in (*devices, *items) if one != -1}
        if used & touched:
            continue
        budget = budgets[plan]
        if budget and (plan in bound or not _affordable(budget, plans.widths[plan], steps, index)):
            continue
        if budget:
            bound.add(plan)  # a step at a time, since each is held against what was moved before
        chosen.append(index)
        used |= touched
    return chosen


def _affordable(held: "Held", widths: Widths, steps: Steps, index: int) -> bool:
    items, devices, units = changes(steps, index)
    rows = {item: widths[item].copy() for item in items.tolist()}
    for item, device, more in zip(items.tolist(), devices.tolist(), units.tolist(), strict=True):
        rows[item][device] += more
    return held.affords(widths, list(rows), np.array(list(rows.values())), held.total(widths))


def _take(plans: Plans, steps: Steps, priced: Priced, chosen: Ints) -> dict[int, list[Cells]]:
    """Change the plans by these steps."""
    changed: dict[int, list[Cells]] = {}
    for index in chosen.tolist():
        plan = int(steps.plan[index])
        items, devices, units = changes(steps, index)
        widths = plans.widths[plan]
        before = widths[items, devices]
        widths[items, devices] = before + units
        plans.shards[plan, items] = np.count_nonzero(widths[items], axis=1)
        changed.setdefault(plan, []).append((items, devices, before))
    twice, touched = np.tile(steps.plan[chosen], 2), np.concatenate([steps.source[chosen], steps.to[chosen]])
    after = (a[:, chosen].reshape(2 * len(chosen), *a.shape[2:]) for a in (priced.sums, priced.dims, priced.compute))
    plans.put(twice, touched, *after)
    return changed


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
        self.found = [end for ends in _descended(starts, self.stick, watch) for end in ends]
        self.best = self.at = min(self.found, key=_cost)
        self.vain, self.tried, self.in_vain = 0, 0, 0

    @property
    def idle(self) -> bool:
        """Whether turns have come to nothing for long."""
        return self.in_vain >= IDLE

    def climb(self, most: int) -> int:
        """At most so many rounds, in lockstep; how many it were."""
        trials, turns = [], []
        for _ in range(min(most, TOGETHER)):
            every = 1 if not len(self.at.problem.by_rows) else SELDOM if self.idle else 2
            turned = self.turn(self.at, self.stick, self.rng) if self.turn and self.tried % every == 0 else None
            self.tried += 1
            trials.append(turned or self.at.copy())
            turns.append(turned is not None)
            if turned is None:
                shake(trials[-1], self.stick, self.rng)
        for ends, is_turn in zip(_descended(trials, self.stick, self.watch), turns, strict=True):
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


def _descended(states: Sequence[State], stick: Yardstick, watch: Watch) -> list[tuple[State, State]]:
    """Of each plan the cheapest on the way down, and the one at the end, the most even; cut short where time is up."""
    watch.note(min(state.cost for state in states))
    plans = Plans(states)
    best, since = plans.cost.copy(), [list[Cells]() for _ in states]  # what was changed since the cheapest
    for changed in descend(plans, stick):
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
