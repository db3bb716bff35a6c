"""Undo cuts of a plan: shards join other shards of their tables, and whole shards move on until that costs little.

Moves and swaps of whole shards cut nothing, and make up for what a join adds to its device. Without them few joins are cheap.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from neuroshard.search.improve.descent import descend
from neuroshard.search.improve.moves import Moves, price
from neuroshard.search.problem.column_shards import Widths
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.objective import Objective, SoftMaximum
from neuroshard.search.problem.plans import Plans
from neuroshard.search.problem.state import State
from neuroshard.search.watch import Watch

Join = tuple[int, int, int]  # table group, device that its shard leaves, device whose shard it joins


def fewer_cuts(
    state: State, most_ms: float, rng: np.random.Generator, watch: Watch, current: CurrentPlacement | None = None
) -> list[State]:
    """Plans of at most `most_ms` with fewer and fewer cuts, made from one plan; none moves more bytes than that one.

    The best 1, 2, 4, … joins are tried together, up to a number that costs too much; if none of these plans is cheap enough,
    other joins one by one.
    """
    problem, tuning = copy.copy(state.problem), state.problem.tuning
    problem.tuning = replace(tuning, partial_moves=False)
    objective = Objective.of(problem)
    limit = None if current is None else current.limited(current.moving_bytes(problem, state.widths))

    def descended(plans: Iterable[Widths]) -> list[State]:
        """Those of the plans, after a descent or before, that cost and move little enough; the fewest cuts first."""
        some = [widths for widths in plans if limit is None or limit.within_budget(problem, widths)]
        if not some:
            return []
        joined = State.each(problem, some)
        lower = Plans(joined)
        for _ in descend(lower, objective, rng, limit):
            if watch.expired:
                break
        ends = [*joined, *State.each(problem, list(lower.widths))]
        return sorted((one for one in ends if one.cost <= most_ms), key=lambda one: (one.cuts, one.cost))

    def joined(at: State, joins: Sequence[Join], most: int) -> tuple[list[State], int]:
        """Those of the plans with the most joins, at most so many, a few plans at a time; and how many to try from then on."""
        found, tried, plans = list[State](), 0, _joined(at, joins, most)
        while some := list(islice(plans, Plans.at_once(problem))):
            ends = descended(some)
            found, tried = ends or found, tried + len(some)
            if not ends or ends[0].cuts > (np.count_nonzero(some[-1], axis=1) - 1).clip(0).sum() + len(problem.spread):
                return found, max(2 ** (tried - 1) // 2, 1)  # so many were too many, and will be
        return found, most

    found, at, most = list[State](), State(problem, state.widths), len(problem.whole)
    while not watch.expired and (joins := _joins(at, objective)):
        others = [widths for join in joins[1 : tuning.joins_tried] for widths in _joined(at, [join], 1)]
        ends, most = joined(at, joins, most)
        ends = ends or descended(others)
        if not ends:
            break
        at = ends[0]
        found.append(State(state.problem, at.widths))
    return found


def simplest(plans: Sequence[State], simplicity: float, current: CurrentPlacement | None = None) -> State:
    """The plan with the fewest cuts, among those that cost at most the share `simplicity` more than the first one. Of equally few
    cuts: the one that moves least, then the cheapest."""

    def key(state: State) -> tuple[int, int, float]:
        moving = 0 if current is None else current.moving_bytes(state.problem, state.widths)
        return state.cuts, moving, state.cost

    return min((state for state in plans if state.cost <= plans[0].cost * (1 + simplicity)), key=key)


def _joins(state: State, objective: Objective) -> list[Join]:
    """The joins that have room, those that leave the plan most even first."""
    problem, most = state.problem, state.problem.tuning.joins_priced
    cut = np.flatnonzero(state.shards > 1)
    which, source = np.nonzero(state.widths[cut])
    pair, to = np.nonzero((state.widths[cut][which] > 0) & (np.arange(problem.devices) != source[:, None]))
    group, source = cut[which[pair]], source[pair]
    out, there = state.widths[group, source], state.widths[group, to]
    joined, first = np.minimum(there + out, problem.max_units[group]), problem.first[group]
    fits = (joined == there + out) & (problem.nbytes[first + joined] - problem.nbytes[first + there] <= state.free[to])
    some = np.flatnonzero(fits)
    some = some[np.argsort(problem.dims[first + out][some], kind="stable")[:most]]  # the narrowest shards
    if not len(some):
        return []
    group, source, to, out = group[some], source[some], to[some], out[some]
    zeros, plans = np.zeros(len(some), dtype=np.int64), Plans([state])
    moves = Moves(zeros, source, group, out, to, zeros - 1, zeros)
    change = price(plans, SoftMaximum(objective, plans.compute, plans.dims), moves).change
    order = np.argsort(change, kind="stable")
    return list(zip(group[order].tolist(), source[order].tolist(), to[order].tolist(), strict=True))


def _joined(state: State, joins: Sequence[Join], most: int) -> Iterator[Widths]:
    """Plans with the first 1, 2, 4, 8 … joins, at most so many, of each table one."""
    problem, widths, free, groups = state.problem, state.widths.copy(), state.free.copy(), set[int]()
    for group, source, to in joins:
        units = problem.first[group] + widths[group]
        joined = units[to] + widths[group, source]
        more = problem.nbytes[joined] - problem.nbytes[units[to]]
        if group in groups or more > free[to]:
            continue
        groups.add(group)
        free[to] -= more
        free[source] += problem.nbytes[units[source]]
        widths[group, to] += widths[group, source]
        widths[group, source] = 0
        if len(groups) & (len(groups) - 1) == 0:
            yield widths.copy()
        if len(groups) == most:
            return
