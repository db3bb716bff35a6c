"""Toggle one table of a plan: split it row-wise, or, if it was, cut it column-wise or split it over other devices."""

from typing import NamedTuple

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.filling import complete
from neuroshard.search.problem.objective import Objective, SoftMaximum
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State

COLUMN_WISE = np.iinfo(np.int64).min  # in place of a domain


class _Linearized(NamedTuple):
    """A plan, its objective, and what a unit of each vector adds to each device by a linear estimate: `slope` (D, K)."""

    state: State
    soft: SoftMaximum
    slope: Floats

    def change(self, load: Floats, dims: Floats) -> Floats:
        """What the objective changes by if every device gets so many ms and columns more: two (C, D) -> (C,)."""
        amounts = np.stack([(self.soft.load[0] + load).T, (self.state.dims + dims).T])
        change: Floats = self.soft.added(amounts, np.zeros(1, dtype=np.int64))
        change -= self.soft.shares[0].sum()
        return change

    def blocks(self, groups: Ints, domains: Ints) -> tuple[Floats, Floats]:
        """Ms and columns that these groups' row blocks, over the devices of their domains, are on each device: two (C, D)."""
        blocks, devices = self.state.problem.row_blocks, np.arange(self.state.problem.devices)
        load = blocks.ms(groups, domains, devices, self.slope)
        sent = blocks.dims[blocks.positions(groups), blocks.way_of(domains), 0]
        dims = np.where(np.isfinite(load), sent[:, None], 0.0)
        return np.nan_to_num(load, nan=0.0) + self.soft.objective.own_ms * dims, dims


def toggled(
    state: State, objective: Objective, rng: np.random.Generator, current: CurrentPlacement | None = None
) -> State | None:
    """The plan with one table more or one fewer row-wise, or one over other devices, drawn from the best by a linear estimate.

    None if there is no such table, no room, or more bytes would move than the budget of the `current` placement.
    """
    problem, tuning = state.problem, state.problem.tuning
    soft = SoftMaximum(objective, state.compute[None], state.dims[None])
    estimate = _Linearized(state, soft, problem.model.compute_slope(state.sums))
    sources = np.argsort(-soft.shares[0], kind="stable")[: tuning.toggle_sources]
    permitted, most = problem.row_blocks.groups, tuning.toggle_candidates
    split = permitted[state.widths[permitted][:, sources].any(axis=1)][:most]
    join = problem.row_wise if len(problem.row_wise) <= most else rng.choice(problem.row_wise, most, replace=False)
    over = problem.domains[np.searchsorted(problem.row_wise, join)]
    split, to = _over_each(problem, split)
    moved, elsewhere = _over_each(problem, join)
    left = problem.domains[np.searchsorted(problem.row_wise, moved)]
    moved, elsewhere, left = (one[elsewhere != left] for one in (moved, elsewhere, left))
    split_change = _split_change(estimate, split, to)
    join_change, cuts = _join_change(estimate, join, over)
    move_change = _move_change(estimate, moved, left, elsewhere)
    groups = np.concatenate([split, join, moved])
    domains = np.concatenate([to, np.full(len(join), COLUMN_WISE), elsewhere])
    change = np.concatenate([split_change, join_change, move_change])
    finite = np.isfinite(change)
    groups, domains, change = groups[finite], domains[finite], change[finite]
    if not len(groups):
        return None
    place = min(int(rng.exponential(tuning.toggle_luck)), len(groups) - 1)
    chosen = np.argsort(change, kind="stable")[place]
    group, domain = int(groups[chosen]), int(domains[chosen])
    widths, others = state.widths.copy(), problem.row_wise != group
    row_wise, where = problem.row_wise[others], problem.domains[others]
    if domain == COLUMN_WISE:
        there = problem.with_row_wise(row_wise, where)
        widths[group] = cuts[group]
    else:
        there = problem.with_row_wise(np.append(row_wise, group), np.append(where, domain))
        widths[group] = 0
    found = None if there is None else complete(there, widths)
    if found is None or (current is not None and not current.within_budget(found.problem, found.widths)):
        return None
    return found


def _over_each(problem: Problem, groups: Ints) -> tuple[Ints, Ints]:
    """Each group with each of the places that its blocks may have: groups and domains, two (C,)."""
    blocks, places = problem.row_blocks, problem.row_blocks.places()
    may = blocks.allowed[blocks.positions(groups)][:, blocks.way_of(places)]
    of, where = np.nonzero(may)
    return groups[of], places[where]


def _split_change(estimate: _Linearized, groups: Ints, domains: Ints) -> Floats:
    """What the objective changes by if each of these groups is split row-wise over the devices of its domain: (C,)."""
    load, dims = estimate.blocks(groups, domains)
    problem, widths = estimate.state.problem, estimate.state.widths[groups]
    shards = problem.shards_of(groups[:, None], widths)
    problem.price(shards.ravel())
    leaves = np.einsum("cdk,dk->cd", problem.vectors[shards], estimate.slope)
    columns = problem.dims[shards]
    return estimate.change(load - leaves - estimate.soft.objective.own_ms * columns, dims - columns)


def _move_change(estimate: _Linearized, groups: Ints, left: Ints, domains: Ints) -> Floats:
    """The same if each is split over the devices of another domain than the one `left`: (C,)."""
    (load, dims), (less, fewer) = estimate.blocks(groups, domains), estimate.blocks(groups, left)
    return estimate.change(load - less, dims - fewer)


def _join_change(estimate: _Linearized, groups: Ints, domains: Ints) -> tuple[Floats, dict[int, Ints]]:
    """The same if each of these is cut column-wise instead, evenly over the least loaded devices, into the best of some numbers
    of shards: (C,); and its units on every device (D,), by group."""
    problem = estimate.state.problem
    load, dims = estimate.blocks(groups, domains)
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
            if change < best[index]:
                best[index], cuts[group] = change, units
            count *= 2
    return best, cuts
