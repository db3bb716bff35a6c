"""Step by step from a plan to one that is more even, until no step is left that makes it so.

On few devices steps go from the slowest one, one at a time. On many a round goes from a quarter of the devices at once, those
that count most, each towards some others drawn by chance; where few of them find a step, from half as many towards twice as
many. So a round changes many devices in the time of one step, and in the end each of the worst has met all others.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.moves import promising, towards
from neuroshard.search.improve.steps import Priced, Steps, cells, changes, price
from neuroshard.search.problem.plans import Level, Plans, Yardstick, sources
from neuroshard.search.problem.problem import Widths

if TYPE_CHECKING:
    from neuroshard.search.problem.current import Held

MIN_GAIN = 1e-6  # share of the slowest device's ms, below which a step is none
# Devices that steps are tried from, before a plan counts as a local optimum: those at these places by ms, and column-wise. For
# where one table's narrowest part outweighs all else, no step eases the device that holds it, and columns are all there is.
SOURCES = (range(1), range(1, 3))
MANY = 16  # devices from which on steps are sought from several at once
PART = 4  # of the devices one in so many at first; of these one in so many must find a step, or the round was in vain
IN_VAIN = 2  # rounds, before there are half as many

Cells = tuple[Ints, Ints, Ints]  # items, devices, and the units that were there before
Changed = dict[int, list[Cells]]  # of which plan


def descend(plans: Plans, stick: Yardstick, rng: np.random.Generator) -> Iterator[Changed]:
    """What is changed of which plan by each round of steps that make them more even by the yardstick, until no priced step does.

    Not every step makes a plan cheaper.
    """
    if plans.problem.devices >= MANY:
        yield from _from_many(plans, stick, rng)
    yield from _from_slowest(plans, stick, rng)


def _from_many(plans: Plans, stick: Yardstick, rng: np.random.Generator) -> Iterator[Changed]:
    """Rounds of steps from several devices of each plan at once."""
    devices = plans.problem.devices
    jobs = devices // PART
    while jobs > 1:
        vain = np.zeros(len(plans), dtype=np.int64)
        while len(active := np.flatnonzero(vain < IN_VAIN)):
            level = Level(stick, plans.compute, plans.dims)
            order = np.argsort(-level.counts[active], axis=1, kind="stable")
            others = rng.permuted(np.repeat(order[:, jobs:], jobs, axis=0), axis=1)
            some = order[:, :jobs].ravel(), others[:, : devices // jobs]
            steps = towards(plans, level, np.repeat(active, jobs), *some, rng)
            changed = _taken(plans, level, steps)
            few = np.array([len(changed.get(int(plan), ())) * PART < jobs for plan in active])
            vain[active] = np.where(few, vain[active] + 1, 0)
            if changed:
                yield changed
        jobs //= 2


def _from_slowest(plans: Plans, stick: Yardstick, rng: np.random.Generator) -> Iterator[Changed]:
    """Steps from the devices that are slowest, then from those with the most columns, until there is none."""
    moving = np.full(len(plans), plans.problem.devices > 1)
    while moving.any():
        level, trying = Level(stick, plans.compute, plans.dims), moving.copy()
        changed: Changed = {}
        for places in SOURCES:
            plan, source = np.nonzero(sources(level, places) & trying[:, None])
            changed |= _taken(plans, level, promising(plans, level, plan, source, rng))
            trying[list(changed)] = False
            if not trying.any():
                break
        moving &= ~trying
        if changed:
            yield changed


def _taken(plans: Plans, level: Level, steps: Steps) -> Changed:
    """Take those of the steps that gain enough by the cost model, the best first."""
    if not len(steps):
        return {}
    priced = price(plans, level, steps)
    chosen = _chosen(plans, level, steps, priced.change)
    return _take(plans, steps, priced, np.array(chosen)) if chosen else {}


def _chosen(plans: Plans, level: Level, steps: Steps, change: Floats) -> list[int]:
    """The steps of the least change, no two on one device or of one item, that gain enough and do not move more bytes
    than there is a budget for."""
    budgets = [p.held if p.held is not None and p.held.budget_bytes is not None else None for p in plans.problems]
    gains = np.flatnonzero(change < -MIN_GAIN * level.slowest[steps.plan])
    gains = gains[np.argsort(change[gains], kind="stable")]
    # devices and items of all plans, a number each; of an item that is none that of the device that gives
    plan, source, to, give, take = (of[gains] for of in (steps.plan, steps.source, steps.to, steps.give, steps.take))
    count, items = plans.dims.size, len(plans.problem.first)
    source, to, give = source * len(plans) + plan, to * len(plans) + plan, count + plan * items + give
    touched = np.array([source, to, give, np.where(take < 0, source, count + plan * items + take)]).T.tolist()
    chosen: list[int] = []
    used: set[int] = set()
    bound: set[int] = set()
    for index, of_plan, touches in zip(gains.tolist(), plan.tolist(), touched, strict=True):
        if not used.isdisjoint(touches):
            continue
        budget = budgets[of_plan]
        if budget and (of_plan in bound or not _affordable(budget, plans.widths[of_plan], steps, index)):
            continue
        if budget:
            bound.add(of_plan)  # a step at a time, since each is held against what was moved before
        chosen.append(index)
        used.update(touches)
    return chosen


def _affordable(held: "Held", widths: Widths, steps: Steps, index: int) -> bool:
    items, devices, units = changes(steps, index)
    rows = {item: widths[item].copy() for item in items.tolist()}
    for item, device, more in zip(items.tolist(), devices.tolist(), units.tolist(), strict=True):
        rows[item][device] += more
    return held.affords(widths, list(rows), np.array(list(rows.values())), held.total(widths))


def _take(plans: Plans, steps: Steps, priced: Priced, chosen: Ints) -> Changed:
    """Change the plans by these steps."""
    taken, changed = steps[chosen], Changed()
    plan, (items, devices, units) = taken.plan, cells(taken)
    before = plans.widths[plan, items, devices]
    # where a cell stands twice, as that of an item taken that is none, the last value counts
    plans.widths[plan, items, devices] = before + units
    plans.shards[plan, items] = np.count_nonzero(plans.widths[plan, items], axis=-1)
    for place, one in enumerate(plan.tolist()):
        changed.setdefault(one, []).append((items[:, place], devices[:, place], before[:, place]))
    after = (a[:, chosen].reshape(2 * len(chosen), *a.shape[2:]) for a in (priced.sums, priced.dims, priced.compute))
    plans.put(np.concatenate([plan, plan]), devices[2:].ravel(), *after)
    return changed
