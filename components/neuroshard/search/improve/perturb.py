"""Shake a plan: some items leave a few of its devices and are put back one by one, cut anew."""

import numpy as np

from neuroshard.search.problem.plans import Yardstick
from neuroshard.search.problem.problem import Problem, Widths
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.start import squeeze


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
