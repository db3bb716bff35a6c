"""Toggle one table of a plan: spread it, or, if it was, cut it column-wise or spread it elsewhere."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.column_shards import Widths
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.filling import complete
from neuroshard.search.problem.objective import Objective, SoftMaximum
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State


class _Linearized(NamedTuple):
    """A plan, its objective, and what a unit of each vector adds to each device by a linear estimate: `slope` (D, K)."""

    state: State
    soft: SoftMaximum
    slope: Floats

    def change(self, load: Floats, dims: Floats) -> Floats:
        """What the objective changes by if every device gets so many ms and columns more, two (C, D): (C,)."""
        amounts = np.stack([(self.soft.load[0] + load).T, (self.state.dims + dims).T])
        change: Floats = self.soft.added(amounts, np.zeros(1, dtype=np.int64))
        change -= self.soft.shares[0].sum()
        return change

    def pieces(self, groups: Ints, places: Ints) -> tuple[Floats, Floats]:
        """Ms and columns that the pieces of these groups, at their places, are on each device: two (C, D)."""
        options = self.state.problem.options
        load = options.ms(groups, places, self.slope)
        sent = options.of_fullest(options.dims, options.positions(groups), options.way_of[places])
        dims = np.where(np.isfinite(load), sent[:, None], 0.0)
        return np.nan_to_num(load, nan=0.0) + self.soft.objective.own_ms * dims, dims

    def shards(self, groups: Ints, widths: Widths) -> tuple[Floats, Floats]:
        """The same of column shards, so many units on each device (C, D)."""
        problem = self.state.problem
        shards = problem.shards_of(groups[:, None], widths)
        problem.price(shards.ravel())
        dims: Floats = problem.dims[shards]
        return np.einsum("cdk,dk->cd", problem.vectors[shards], self.slope) + self.soft.objective.own_ms * dims, dims

    def copying_ms(self, groups: Ints, places: Ints) -> Floats:
        """What copies take more with each of these groups, or without it where it is copied now; 0 at other places: (C,)."""
        options = self.state.problem.options
        found, copies = np.zeros(len(groups)), options.way_of[places] == options.copied
        if copies.any():
            found[copies] = self.state.problem.copying_ms(groups[copies])
        return found


def toggled(
    state: State, objective: Objective, rng: np.random.Generator, current: CurrentPlacement | None = None
) -> State | None:
    """The plan with one table more or one fewer spread, or one spread elsewhere, drawn from the best by a linear estimate.

    None if there is no such table, no room, or more bytes would move than the budget of the `current` placement.
    """
    problem, tuning = state.problem, state.problem.tuning
    soft = SoftMaximum(objective, state.compute[None], state.dims[None])
    estimate = _Linearized(state, soft, problem.model.compute_slope(state.sums))
    spread, to = _may_be_spread(state, soft, rng)
    join, most = problem.spread, tuning.toggle_candidates
    join = join if len(join) <= most else rng.choice(join, most, replace=False)
    moved, elsewhere = _at_each(problem, join)
    over, left = (problem.places[np.searchsorted(problem.spread, groups)] for groups in (join, moved))
    moved, elsewhere, left = (one[elsewhere != left] for one in (moved, elsewhere, left))
    join_change, cuts = _join_change(estimate, join, over)
    move_change = _move_change(estimate, moved, left, elsewhere)
    change = np.concatenate([_spread_change(estimate, spread, to), move_change, join_change])
    groups, places = np.concatenate([spread, moved, join]), np.concatenate([to, elsewhere, over])
    before = np.concatenate([to, left, over])  # a copy comes or goes where either place is one
    some = np.flatnonzero(np.isfinite(change) & _drawn_kind(problem, before, places, rng))
    if not len(some):
        return None
    rank = min(int(rng.exponential(tuning.toggle_luck)), len(some) - 1)
    chosen = int(some[np.argsort(change[some], kind="stable")[rank]])
    group, widths = int(groups[chosen]), state.widths.copy()
    others = problem.spread != group
    stay, where = problem.spread[others], problem.places[others]
    if chosen < len(groups) - len(join):
        stay, where = np.append(stay, group), np.append(where, places[chosen])
        widths[group] = 0
    else:
        widths[group] = cuts[group]
    there = problem.with_spread(stay, where)
    found = None if there is None else complete(there, widths)
    if found is None or (current is not None and not current.within_budget(found.problem, found.widths)):
        return None
    return found


def _may_be_spread(state: State, soft: SoftMaximum, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Groups of the slowest devices at each place where they may be spread, and copies of others: a copy relieves every device,
    wherever the table was. Groups and places, two (C,)."""
    problem, tuning, options = state.problem, state.problem.tuning, state.problem.options
    slowest, most = np.argsort(-soft.shares[0], kind="stable")[: tuning.toggle_sources], tuning.toggle_candidates
    groups, places = _at_each(problem, options.groups[state.widths[options.groups][:, slowest].any(axis=1)][:most])
    if options.copied < 0:
        return groups, places
    others = np.setdiff1d(options.groups[options.allowed[:, options.copied]], [*problem.spread, *groups])
    others = others if len(others) <= most else rng.choice(others, most, replace=False)
    of_copies = np.full(len(others), options.place_of(options.copied))
    return np.concatenate([groups, others]), np.concatenate([places, of_copies])


def _at_each(problem: Problem, groups: Ints) -> tuple[Ints, Ints]:
    """Each group with each of the places that it may have: groups and places, two (C,)."""
    options = problem.options
    of, places = np.nonzero(options.allowed[options.positions(groups)][:, options.way_of])
    return groups[of], places


def _drawn_kind(problem: Problem, before: Ints, after: Ints, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Of toggles between these places (C,): all or, where tables may be copied, those of copies as often as the tuning says, and
    the others else. Estimates of the two cannot be compared well."""
    if problem.options.copied < 0:
        return np.ones(len(after), dtype=bool)
    copy = problem.options.place_of(problem.options.copied)
    of_copies: NDArray[np.bool_] = (before == copy) | (after == copy)
    return of_copies if rng.random() < problem.tuning.toggle_copies else ~of_copies


def _spread_change(estimate: _Linearized, groups: Ints, places: Ints) -> Floats:
    """What the objective changes by if each of these groups is spread at its place: (C,)."""
    arrive, leave = estimate.pieces(groups, places), estimate.shards(groups, estimate.state.widths[groups])
    return estimate.change(arrive[0] - leave[0], arrive[1] - leave[1]) + estimate.copying_ms(groups, places)


def _move_change(estimate: _Linearized, groups: Ints, left: Ints, places: Ints) -> Floats:
    """The same if each is spread at another place than the one `left`: (C,)."""
    arrive, leave = estimate.pieces(groups, places), estimate.pieces(groups, left)
    copying_ms = estimate.copying_ms(groups, places) + estimate.copying_ms(groups, left)
    return estimate.change(arrive[0] - leave[0], arrive[1] - leave[1]) + copying_ms


def _join_change(estimate: _Linearized, groups: Ints, places: Ints) -> tuple[Floats, dict[int, Ints]]:
    """The same if each, spread at its place, is cut column-wise instead, into the best of some numbers of shards: (C,); and its
    units on every device (D,), by group."""
    problem, (load, dims) = estimate.state.problem, estimate.pieces(groups, places)
    least_loaded = np.argsort(estimate.soft.load[0], kind="stable")
    best, cuts = np.full(len(groups), np.inf), {}
    for index, group in enumerate(groups.tolist()):
        widths = _even_cuts(problem, group, least_loaded)
        arrive = estimate.shards(np.full(len(widths), group), widths)
        change = estimate.change(arrive[0] - load[index], arrive[1] - dims[index])
        if len(change):
            best[index], cuts[group] = change.min(), widths[change.argmin()]
    return best + estimate.copying_ms(groups, places), cuts


def _even_cuts(problem: Problem, group: int, devices: Ints) -> Widths:
    """Units of a group on every device (N, D), cut evenly over the first of the `devices`: over as few as may be, then twice as
    many."""
    units, cuts = int(problem.all_units[group]), list[Ints]()
    count = -(-units // int(problem.max_units[group]))
    while count <= min(int(problem.max_shards[group]), units // int(problem.min_units[group]), problem.devices):
        cut = np.zeros(problem.devices, dtype=np.int64)
        cut[devices[:count]] = units // count
        cut[devices[: units % count]] += 1
        cuts.append(cut)
        count *= 2
    return np.array(cuts, dtype=np.int64).reshape(-1, problem.devices)
