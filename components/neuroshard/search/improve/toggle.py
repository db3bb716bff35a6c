"""Toggle one table of a plan: split it row-wise, or cut it column-wise if it was row-wise."""

from typing import NamedTuple

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.filling import complete
from neuroshard.search.problem.objective import Objective, SoftMaximum
from neuroshard.search.problem.state import State


class _Linearized(NamedTuple):
    """A plan, its objective, and what a unit of each vector adds to each device by a linear estimate: `slope` (D, K)."""

    state: State
    soft: SoftMaximum
    slope: Floats

    def change(self, load: Floats, dims: Floats) -> Floats:
        """What the objective changes by if every device gets so many ms and columns more: two (C, D) -> (C,)."""
        amounts = np.stack([(self.soft.load[0] + load).T, (self.state.dims + dims).T])
        change: Floats = self.soft.added(amounts, np.zeros(1, dtype=np.int64))
        change -= self.soft.counts[0].sum()
        return change

    def blocks(self, groups: Ints) -> tuple[Floats, Floats]:
        """Ms (C, D) and columns (C, 1) that the row blocks of these groups are on each device."""
        blocks = self.state.problem.row_blocks
        positions = blocks.positions(groups)
        load = blocks.vectors[positions, 0] @ self.slope.T
        load[:, -1] = blocks.vectors[positions, 1] @ self.slope[-1]
        dims = blocks.dims[positions][:, None]
        return load + self.soft.objective.own_ms * dims, dims


def toggled(
    state: State, objective: Objective, rng: np.random.Generator, current: CurrentPlacement | None = None
) -> State | None:
    """The plan with one table more or one fewer row-wise, drawn from the best by a linear estimate.

    None if there is no such table, no room, or more bytes would move than the budget of the `current` placement.
    """
    problem, tuning = state.problem, state.problem.tuning
    soft = SoftMaximum(objective, state.compute[None], state.dims[None])
    estimate = _Linearized(state, soft, problem.model.compute_slope(state.sums))
    sources = np.argsort(-soft.counts[0], kind="stable")[: tuning.toggle_sources]
    permitted, most = problem.row_blocks.groups, tuning.toggle_candidates
    split = permitted[state.widths[permitted][:, sources].any(axis=1)][:most]
    join = problem.row_wise if len(problem.row_wise) <= most else rng.choice(problem.row_wise, most, replace=False)
    split_change = _split_change(estimate, split)
    join_change, cuts = _join_change(estimate, join)
    groups, change = np.concatenate([split, join]), np.concatenate([split_change, join_change])
    groups, change = groups[np.isfinite(change)], change[np.isfinite(change)]
    if not len(groups):
        return None
    place = min(int(rng.exponential(tuning.toggle_luck)), len(groups) - 1)
    group = int(groups[np.argsort(change, kind="stable")[place]])
    widths = state.widths.copy()
    if group in split:
        there = problem.with_row_wise(np.append(problem.row_wise, group))
        widths[group] = 0
    else:
        there = problem.with_row_wise(problem.row_wise[problem.row_wise != group])
        widths[group] = cuts[group]
    found = None if there is None else complete(there, widths)
    if found is None or (current is not None and not current.within_budget(found.problem, found.widths)):
        return None
    return found


def _split_change(estimate: _Linearized, groups: Ints) -> Floats:
    """What the objective changes by if each of these groups is split row-wise: (C,)."""
    load, dims = estimate.blocks(groups)
    problem, widths = estimate.state.problem, estimate.state.widths[groups]
    shards = problem.shards_of(groups[:, None], widths)
    problem.price(shards.ravel())
    leaves = np.einsum("cdk,dk->cd", problem.vectors[shards], estimate.slope)
    columns = problem.dims[shards]
    return estimate.change(load - leaves - estimate.soft.objective.own_ms * columns, dims - columns)


def _join_change(estimate: _Linearized, groups: Ints) -> tuple[Floats, dict[int, Ints]]:
    """The same if each of these is cut column-wise instead, evenly over the least loaded devices, into the best of some numbers
    of shards: (C,); and its units on every device (D,), by group."""
    problem = estimate.state.problem
    load, dims = estimate.blocks(groups)
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
