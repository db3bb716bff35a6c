"""Improve a plan: descend to a local optimum, shake it, descend again; the best so far is at hand at any moment."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.plans import Level, Plans, Yardstick, sources
from neuroshard.search.problem import Problem, Widths
from neuroshard.search.promising import promising
from neuroshard.search.start import squeeze
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


def improve(
    starts: Sequence[State], rounds: int, rng: np.random.Generator, watch: Watch, turn: Turn | None = None
) -> list[State]:
    """The plans that local search ends in from plans that fit, the cheapest first, of those about as cheap.

    A round shakes the plan at hand by a few random steps and descends again; every other round goes by `turn` instead, where
    there is one, and fewer once turns come to nothing. Some rounds go in lockstep. It goes on from what it finds if that costs
    hardly more, and from the best after many rounds in vain.
    """
    stick = Yardstick.of(starts[0].problem, SHARPNESS)
    found = [end for ends in _descended(starts, stick, watch) for end in ends]
    best = at = min(found, key=_cost)
    vain, idle, tried = 0, 0, 0
    while rounds > 0 and not watch.expired:
        trials, turns = [], []
        for _ in range(min(rounds, TOGETHER)):
            every = 2 if idle < IDLE else SELDOM
            turned = turn(at, stick, rng) if turn is not None and tried % every == 0 else None
            tried += 1
            trials.append(turned or at.copy())
            turns.append(turned is not None)
            if turned is None:
                shake(trials[-1], stick, rng)
        rounds -= len(trials)
        for ends, is_turn in zip(_descended(trials, stick, watch), turns, strict=True):
            found = near([*found, *ends])
            vain += 1
            if is_turn:
                idle = 0 if ends[0].cost <= at.cost * (1 + WORSE) else idle + 1
            if ends[0].cost < best.cost * (1 - MIN_GAIN):
                best, vain = ends[0], 0
            if ends[0].cost <= at.cost * (1 + WORSE):
                at = ends[0]
            if vain >= PATIENCE:
                at, vain = best, 0
            watch.advance()
    return near(found)


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


def shake(state: State, stick: Yardstick, rng: np.random.Generator) -> None:
    """Take some items off a few devices, one of them the one that is ready last, and put them back one by one, cut anew.

    Nothing changes where they find no room.
    """
    problem = state.problem
    devices = [int(state.ready.argmax()), *rng.integers(problem.devices, size=rng.integers(1, 4)).tolist()]
    items = np.flatnonzero(state.widths[:, devices].any(axis=1))
    items = items[rng.random(len(items)) < rng.uniform(0.1, 0.6)]
    if not len(items):
        return
    slope, widths, free = problem.model.compute_slope(state.sums), state.widths.copy(), state.free.copy()
    load, column_ms = stick.load(state.compute, state.dims), stick.own_ms + stick.all_ms
    where, at = np.nonzero(widths[items])
    taken = problem.numbers(items[where], widths[items[where], at])
    np.add.at(free, at, problem.nbytes[taken])
    removed = np.einsum("sk,sk->s", problem.vectors[taken], slope[at]) + column_ms * problem.dims[taken]
    load += stick.all_ms * state.dims
    np.subtract.at(load, at, removed)
    widths[items] = 0

    whole = problem.first[items] + problem.cap[items]
    problem.price(whole)
    weight = (problem.vectors[whole] @ slope.mean(axis=0)) * problem.widest[items] / problem.cap[items]
    lost: list[tuple[int, int]] = []
    for index in np.argsort(-weight * rng.uniform(0.7, 1.4, len(items))).tolist():
        item = int(items[index])
        heavy = weight[index] / max(float(state.ready.mean()), 1e-30)
        for units in _parts(problem, item, heavy, rng):
            shard = int(problem.first[item]) + units
            problem.price(np.array([shard]))
            ms = load + slope @ problem.vectors[shard] + column_ms * problem.dims[shard]
            room = (free >= problem.nbytes[shard]) & problem.allowed[item] & (widths[item] == 0)
            if not room.any():
                lost.append((item, units))
                continue
            device = int(np.where(room, ms, np.inf).argmin())
            widths[item, device], load[device] = units, ms[device]
            free[device] -= problem.nbytes[shard]
    if squeeze(problem, widths, free, lost) and within_budget(problem, widths):
        where, at = np.nonzero(widths != state.widths)
        if len(where):
            state.change(where, at, widths[where, at])


def within_budget(problem: Problem, widths: Widths) -> bool:
    held = problem.held
    return held is None or held.budget_bytes is None or held.total(widths) <= held.budget_bytes


def _parts(problem: Problem, item: int, heavy: float, rng: np.random.Generator) -> list[int]:
    """Units of the parts that an item is cut into: seldom more than it must be, more often where it is heavy; half of the
    cuts as even as can be, half anywhere."""
    widest, most = int(problem.widest[item]), int(problem.places[item])
    size, largest = int(problem.nbytes[problem.whole[item]]), int(problem.memory[problem.allowed[item]].max())
    fewest = max(-(-widest // int(problem.cap[item])), -(-size // max(largest, 1)))
    count = fewest + (int(rng.integers(1, 4)) if rng.random() < 0.1 + heavy else 0)
    least = int(problem.least[item])
    count = max(1, min(count, most, widest // least))
    if count > 1 and rng.random() < 0.5:
        places = least * np.sort(rng.choice(np.arange(1, widest // least), size=count - 1, replace=False))
        parts = np.diff(places, prepend=0, append=widest)
        if parts.max() <= problem.cap[item]:
            return [*map(int, sorted(parts, reverse=True))]
    return [widest // count + (part < widest % count) for part in range(count)]
