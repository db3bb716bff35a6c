"""Perturb a plan: some table groups of a few of its devices leave all devices and are placed again one by one, cut anew."""

import numpy as np

from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.filling import complete, fewest_and_most_shards, put_back, whole_vectors
from neuroshard.search.problem.objective import Objective
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State


def perturbed(
    state: State, objective: Objective, rng: np.random.Generator, current: CurrentPlacement | None = None
) -> State:
    """The plan with some groups of a few devices, the slowest among them, placed again in random order.

    Where memory is tight, groups are drawn again if they find no room, a few times. The same plan if they never do, or would
    move more bytes than a `current` placement's budget allows.
    """
    for _ in range(state.problem.tuning.perturb_tries):
        found = _perturbed_once(state, objective, rng)
        if found is not None and (current is None or current.within_budget(state.problem, found.widths)):
            return found
    return state


def _perturbed_once(state: State, objective: Objective, rng: np.random.Generator) -> State | None:
    """The same by one draw of groups; None if they find no room, in random order nor largest first, or lie as before."""
    problem, tuning = state.problem, state.problem.tuning
    others = rng.integers(1, tuning.perturb_devices)
    devices = [int(state.ready.argmax()), *rng.integers(problem.devices, size=others).tolist()]
    groups = np.flatnonzero(state.widths[:, devices].any(axis=1))
    groups = groups[rng.random(len(groups)) < rng.uniform(*tuning.perturb_share)]
    if not len(groups):
        return None
    slope, widths, free = problem.model.compute_slope(state.sums), state.widths.copy(), state.free.copy()
    load, column_ms = objective.load(state.compute, state.dims), objective.own_ms + objective.all_ms
    where, at = np.nonzero(widths[groups])
    taken = problem.shards_of(groups[where], widths[groups[where], at])
    np.add.at(free, at, problem.nbytes[taken])
    removed = np.einsum("sk,sk->s", problem.vectors[taken], slope[at]) + column_ms * problem.dims[taken]
    load += objective.all_ms * state.dims
    np.subtract.at(load, at, removed)
    widths[groups] = 0

    weight = whole_vectors(problem)[groups] @ slope.mean(axis=0)
    fewest, most = fewest_and_most_shards(problem)
    lost: list[tuple[int, int]] = []
    for index in np.argsort(-weight * rng.uniform(*tuning.perturb_order, len(groups))).tolist():
        group = int(groups[index])
        heavy = weight[index] / max(float(state.ready.mean()), 1e-30)
        for units in _cut(problem, group, int(fewest[group]), int(most[group]), heavy, rng):
            shard = int(problem.first[group]) + units
            problem.price(np.array([shard]))
            ms = load + slope @ problem.vectors[shard] + column_ms * problem.dims[shard]
            room = (free >= problem.nbytes[shard]) & problem.allowed[group] & (widths[group] == 0)
            if not room.any():
                lost.append((group, units))
                continue
            device = int(np.where(room, ms, np.inf).argmin())
            widths[group, device], load[device] = units, ms[device]
            free[device] -= problem.nbytes[shard]
    if put_back(problem, widths, free, lost):
        found: State | None = State(problem, widths)
    else:
        without = state.widths.copy()
        without[groups] = 0
        found = complete(problem, without)
    return None if found is None or (found.widths == state.widths).all() else found


def _cut(problem: Problem, group: int, fewest: int, most: int, heavy: float, rng: np.random.Generator) -> list[int]:
    """Units of the `fewest` to `most` shards that a group is cut into: mostly as few as possible, more if it is heavy. Some cuts
    are as even as possible, the others at random places. `heavy` is the group's share of a mean device's ms."""
    tuning = problem.tuning
    units, least = int(problem.all_units[group]), int(problem.min_units[group])
    more = rng.random() < tuning.perturb_cuts_more + heavy
    count = fewest + (int(rng.integers(1, tuning.perturb_most_more + 1)) if more else 0)
    count = max(1, min(count, most))
    if count > 1 and rng.random() < tuning.perturb_uneven:
        places = least * np.sort(rng.choice(np.arange(1, units // least), size=count - 1, replace=False))
        shards = np.diff(places, prepend=0, append=units)
        if shards.max() <= problem.max_units[group]:
            return [*map(int, sorted(shards, reverse=True))]
    return [units // count + (shard < units % count) for shard in range(count)]
