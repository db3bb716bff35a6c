"""Toggle one table of a plan: spread it, or, if it was, cut it column-wise or spread it elsewhere."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.filling import complete
from neuroshard.search.problem.objective import Objective, SoftMaximum
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State

COLUMN_WISE = -1  # in place of a place


class _Linearized(NamedTuple):
    """A plan, its objective, and what a unit of each vector adds to each device by a linear estimate: `slope` (D, K)."""

    state: State
    soft: SoftMaximum
    slope: Floats

    def change(self, load: Floats, dims: Floats, copying_ms: Floats | float = 0.0) -> Floats:
        """What the objective changes by if every device gets so many ms and columns more, two (C, D), and copies take so much
        more (C,): (C,)."""
        amounts = np.stack([(self.soft.load[0] + load).T, (self.state.dims + dims).T])
        change: Floats = self.soft.added(amounts, np.zeros(1, dtype=np.int64))
        change -= self.soft.shares[0].sum()
        return change + copying_ms

    def pieces(self, groups: Ints, places: Ints) -> tuple[Floats, Floats]:
        """Ms and columns that the pieces of these groups, at their places, are on each device: two (C, D)."""
        options = self.state.problem.options
        load = options.ms(groups, places, self.slope)
        sent = options.dims[options.positions(groups), options.way_of[places], 0]
        dims = np.where(np.isfinite(load), sent[:, None], 0.0)
        return np.nan_to_num(load, nan=0.0) + self.soft.objective.own_ms * dims, dims

    def copying_ms(self, groups: Ints, places: Ints) -> Floats:
        """What copies take more with each of these groups, or without it where it is copied now; 0 at other places: (C,)."""
        problem, options = self.state.problem, self.state.problem.options
        found, copies = np.zeros(len(groups)), options.way_of[places] == options.copied
        if copies.any():
            found[copies] = problem.copying_ms(groups[copies])
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
    sources = np.argsort(-soft.shares[0], kind="stable")[: tuning.toggle_sources]
    permitted, most = problem.options.groups, tuning.toggle_candidates
    spread = permitted[state.widths[permitted][:, sources].any(axis=1)][:most]
    join = problem.spread if len(problem.spread) <= most else rng.choice(problem.spread, most, replace=False)
    over = problem.places[np.searchsorted(problem.spread, join)]
    spread, to = _at_each(problem, spread)
    spread, to = _with_copies(problem, spread, to, most, rng)
    moved, elsewhere = _at_each(problem, join)
    left = problem.places[np.searchsorted(problem.spread, moved)]
    moved, elsewhere, left = (one[elsewhere != left] for one in (moved, elsewhere, left))
    spread_change = _spread_change(estimate, spread, to)
    join_change, cuts = _join_change(estimate, join, over)
    move_change = _move_change(estimate, moved, left, elsewhere)
    groups = np.concatenate([spread, join, moved])
    places = np.concatenate([to, np.full(len(join), COLUMN_WISE), elsewhere])
    change = np.concatenate([spread_change, join_change, move_change])
    some = np.isfinite(change) & _drawn_kind(
        problem, places, np.concatenate([np.full(len(to), COLUMN_WISE), over, left]), rng
    )
    groups, places, change = groups[some], places[some], change[some]
    if not len(groups):
        return None
    rank = min(int(rng.exponential(tuning.toggle_luck)), len(groups) - 1)
    chosen = np.argsort(change, kind="stable")[rank]
    group, place = int(groups[chosen]), int(places[chosen])
    widths, others = state.widths.copy(), problem.spread != group
    stay, where = problem.spread[others], problem.places[others]
    if place == COLUMN_WISE:
        there = problem.with_spread(stay, where)
        widths[group] = cuts[group]
    else:
        there = problem.with_spread(np.append(stay, group), np.append(where, place))
        widths[group] = 0
    found = None if there is None else complete(there, widths)
    if found is None or (current is not None and not current.within_budget(found.problem, found.widths)):
        return None
    return found


def _at_each(problem: Problem, groups: Ints) -> tuple[Ints, Ints]:
    """Each group with each of the places that it may have: groups and places, two (C,)."""
    options = problem.options
    of, places = np.nonzero(options.allowed[options.positions(groups)][:, options.way_of])
    return groups[of], places


def _with_copies(
    problem: Problem, groups: Ints, places: Ints, most: int, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """These groups with their places, and copies of others: a copy relieves every device, wherever the table was."""
    options = problem.options
    if options.copied < 0:
        return groups, places
    others = np.setdiff1d(options.groups[options.allowed[:, options.copied]], [*problem.spread, *groups])
    others = others if len(others) <= most else rng.choice(others, most, replace=False)
    of_copies = np.full(len(others), options.place_of(options.copied))
    return np.concatenate([groups, others]), np.concatenate([places, of_copies])


def _drawn_kind(problem: Problem, places: Ints, left: Ints, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Of toggles from the places `left` to others (C,): all or, where tables may be copied, those of copies as often as the
    tuning says, and the others else. Estimates of the two cannot be compared well."""
    if problem.options.copied < 0:
        return np.ones(len(places), dtype=bool)
    copy = problem.options.place_of(problem.options.copied)
    of_copies: NDArray[np.bool_] = (places == copy) | (left == copy)
    return of_copies if rng.random() < problem.tuning.toggle_copies else ~of_copies


def _spread_change(estimate: _Linearized, groups: Ints, places: Ints) -> Floats:
    """What the objective changes by if each of these groups is spread at its place: (C,)."""
    load, dims = estimate.pieces(groups, places)
    problem, widths = estimate.state.problem, estimate.state.widths[groups]
    shards = problem.shards_of(groups[:, None], widths)
    problem.price(shards.ravel())
    leaves = np.einsum("cdk,dk->cd", problem.vectors[shards], estimate.slope)
    columns = problem.dims[shards]
    copying = estimate.copying_ms(groups, places)
    return estimate.change(load - leaves - estimate.soft.objective.own_ms * columns, dims - columns, copying)


def _move_change(estimate: _Linearized, groups: Ints, left: Ints, places: Ints) -> Floats:
    """The same if each is spread at another place than the one `left`: (C,)."""
    (load, dims), (less, fewer) = estimate.pieces(groups, places), estimate.pieces(groups, left)
    copying = estimate.copying_ms(groups, places) + estimate.copying_ms(groups, left)
    return estimate.change(load - less, dims - fewer, copying)


def _join_change(estimate: _Linearized, groups: Ints, places: Ints) -> tuple[Floats, dict[int, Ints]]:
    """The same if each of these is cut column-wise instead, evenly over the least loaded devices, into the best of some numbers
    of shards: (C,); and its units on every device (D,), by group."""
    problem = estimate.state.problem
    load, dims = estimate.pieces(groups, places)
    copying = estimate.copying_ms(groups, places)
    least_loaded = np.argsort(estimate.soft.load[0], kind="stable")
    best, cuts = np.full(len(groups), np.inf), {}
    for index, group in enumerate(groups.tolist()):
        all_units = int(problem.all_units[group])
        count = -(-all_units // int(problem.max_units[group]))
        most = min(int(problem.max_shards[group]), int(all_units // problem.min_units[group]), problem.devices)
        while count <= most:
            units = np.zeros(problem.devices, dtype=np.int64)
            units[least_loaded[:count]] = all_units // count
            units[least_loaded[: all_units % count]] += 1
            shards = problem.shards_of(np.full(problem.devices, group), units)
            problem.price(shards)
            columns = problem.dims[shards]
            arrives = np.einsum("dk,dk->d", problem.vectors[shards], estimate.slope)
            arrives += estimate.soft.objective.own_ms * columns
            change = float(estimate.change((arrives - load[index])[None], (columns - dims[index])[None])[0])
            change += float(copying[index])
            if change < best[index]:
                best[index], cuts[group] = change, units
            count *= 2
    return best, cuts
