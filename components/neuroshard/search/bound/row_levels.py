"""Devices told apart by how many rows they hold in all: for the bound, where lookups take longer the more rows there are.

What a device pays for the rows of all its tables together is not known of a part alone. So plans are taken by how many devices
hold so many rows that a rate is all there, how many fewer. A device of the former pays that rate on all that it holds; one of
the latter has no room for so many rows, and no device has room for more than its memory, nor time for more than a plan's cost.
Then tables of many rows, which take the memory, do not all go on few devices, nor all others on the rest.

For each such number of devices it is shown that no plan costs so little, by multipliers for time, rows and bytes of each kind
of devices: whatever these are, if the cheapest cuts where parts are priced by them take more than there is, there is no such plan
(Lagrange). They are sought as in a game: the best multipliers against all cuts met so far (Kelley).
"""

from itertools import combinations_with_replacement
from math import comb

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.compute_net import COUNTED_IN, OWN, ROWS, THRESHOLDS, steps
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.bound.branches import Case
from neuroshard.search.bound.cuts import cheapest_cuts
from neuroshard.search.problem.problem import Problem

MOST_LEVELS = 3  # thresholds that devices are told apart by
MOST_COUNTS = 50  # ways to deal devices to levels
STEPS = 30  # multipliers tried for one number of devices of each level
IN_ALL = 100_000  # shards priced by such, for all of them and all costs: some 0.3 s
PIVOTS = 200
SURE = 1e-9  # share by which plans must cost more to be ruled out: sums of floats are no nearer


def row_levels(problem: Problem, slope: Floats, intercept: float) -> "RowLevels | None":
    """None where not all costs can be had for rows, or devices are too many to be told apart.

    `slope` and `intercept` are of a tangent that is below what a device computes, with what its parts ask for by their own rows.
    """
    model = problem.model
    if problem.devices == 1 or not isinstance(model, TrainedCostModel) or model.nets.compute.rates is None:
        return None
    most = max(min(MOST_COUNTS, IN_ALL // len(problem.group)), 1)  # each needs a multiplier at least
    levels = max(n for n in range(MOST_LEVELS + 1) if comb(problem.devices + n, n) <= most)
    return RowLevels(problem, model, slope, intercept, levels) if levels else None


def _dealt(devices: int, kinds: int) -> Ints:
    """Every way to make so many kinds of so many devices: how many of each (N, kinds)."""
    dealt = [np.bincount(one, minlength=kinds) for one in combinations_with_replacement(range(kinds), devices)]
    return np.array(dealt, dtype=np.int64)


class RowLevels:
    """L levels: a device of level l holds at least `low[l]` rows and fewer than `high[l]`.

    By level, of each shard: `load` (S, L), what the tangent and the rates say it takes at least, in ms; and `more` (S, L),
    what a device of the level takes more than by the rows of the shard alone, infinite where none of the level can hold it;
    `alone` (S, L), what it takes with nothing beside it. Of blocks of rows likewise `block_load` (P, 2, L). Rows and bytes, as
    shares of what the largest memory holds, are `rows`, `share`, `block_rows` and `block_share`.
    """

    def __init__(self, problem: Problem, model: TrainedCostModel, slope: Floats, intercept: float, levels: int) -> None:
        head = model.nets.compute.mean
        self.problem, self.intercept = problem, intercept
        whole = problem.vectors[problem.whole]
        row_wise = COUNTED_IN[head.used] == ROWS
        thresholds = THRESHOLDS[head.used[row_wise]]
        unsure = ((1 - steps(whole, head.used)) * (whole @ head.rates)).sum(axis=0)[row_wise]
        unsure[thresholds > whole[:, ROWS].sum()] = 0.0  # no device has so many rows
        chosen = np.sort(np.argsort(-unsure, kind="stable")[:levels])
        self.low: Floats = np.append(0.0, thresholds[chosen])
        self.high: Floats = np.append(thresholds[chosen], np.inf)
        self.counts = [tuple(one) for one in _dealt(problem.devices, len(self.low)).tolist()]
        vectors, beside = problem.vectors, slope.copy()
        beside[OWN] = 0.0

        def by_level(some: Floats) -> tuple[Floats, Floats]:
            there = np.repeat(some[..., None, :], len(self.low), axis=-2)
            there[..., ROWS] = np.maximum(there[..., ROWS], self.low)
            rates = (steps(there, head.used) * (some @ head.rates)[..., None, :]).sum(axis=-1)
            load: Floats = (some @ beside)[..., None] + slope[OWN] * rates
            return there, load

        self.rows = vectors[:, ROWS]
        there, self.load = by_level(vectors)
        self.least = self.load.min(axis=1)
        self.alone: Floats = np.where(self.rows[:, None] < self.high, model.compute_ms(there), np.inf)
        self.more: Floats = self.alone - model.compute_ms(vectors)[:, None]
        blocks = problem.row_blocks.vectors if len(problem.row_blocks.groups) else np.zeros((0, 2, vectors.shape[1]))
        self.block_rows, self.block_load = blocks[..., ROWS], by_level(blocks)[1]
        most = np.sort(problem.memory)[::-1].astype(np.float64)
        self.room = np.append(0.0, np.cumsum(most)) / most[0]  # of so many devices, in shares of the largest
        self.share, self.block_share = problem.nbytes / most[0], problem.row_blocks.nbytes / most[0]
        self.left = IN_ALL // len(problem.group)
        self.found: dict[tuple[int, ...], Floats] = {}  # multipliers that showed it

    def none_of(self, case: Case, cost_ms: float) -> bool:
        """Whether it is shown that no plan of a case costs at most so much."""
        enough = (cost_ms - case.ahead) * (1 + SURE)
        beside_none = case.alone[:, None] + self.more
        possible = (np.maximum(case.alone[:, None], self.alone) if len(case.sure) else beside_none) <= enough
        least = cheapest_cuts(self.problem, np.where(possible.any(axis=1), self.least, np.inf))
        fewer = self.intercept + least.total / np.arange(1, self.problem.devices) + case.of_used[:-1]
        may_be_empty = not len(case.sure) and bool(
            (fewer <= cost_ms * (1 + SURE)).any()
        )  # none is where some are row-wise
        for place, counts in enumerate(self.counts):
            if not self._none_of(case, np.array(counts), possible, cost_ms, may_be_empty):
                self.counts.insert(0, self.counts.pop(place))  # next time it is asked first
                return False
        return True

    def _none_of(
        self, case: Case, counts: Ints, possible: NDArray[np.bool_], cost_ms: float, may_be_empty: bool
    ) -> bool:
        used, key = np.flatnonzero(counts), tuple(counts.tolist())
        relaxed = _Relaxed(self, case, used, counts[used], possible[:, used], cost_ms, may_be_empty)
        at, planes = self.found.get(key), list[Floats]()
        if at is None:
            at = np.append(counts[used] / counts.sum(), np.zeros(2 * len(used)))
        for _ in range(min(STEPS, self.left)):
            self.left -= 1
            shown, plane = relaxed.more_than_it_may(at)
            if shown:
                self.found[key] = at
                return True
            planes.append(plane)
            at, most = game(np.array(planes))
            if most <= SURE * cost_ms:
                break
        return False


class _Relaxed:
    """Plans of a case and of at most some cost, with so many devices of each level."""

    def __init__(
        self,
        levels: RowLevels,
        case: Case,
        used: Ints,
        counts: Ints,
        possible: NDArray[np.bool_],
        cost_ms: float,
        may_be_empty: bool,
    ) -> None:
        self.problem, self.counts, self.possible = levels.problem, counts, possible
        self.intercept, self.cost_ms = levels.intercept, cost_ms
        self.may_take, self.back = cost_ms - case.ahead, levels.problem.devices * case.back
        self.load, self.rows, self.share = levels.load[:, used], levels.rows[:, None] / levels.high[used], levels.share
        self.row_wise = case.rows_alone <= self.may_take * (1 + SURE)
        self.row_wise &= (levels.block_rows.min(axis=1)[:, None] < levels.high[used]).all(axis=1)
        self.all_to_all, self.blocks = case.all_to_all, levels.problem.row_blocks.groups
        block_rows = levels.block_rows[..., None] / levels.high[used]
        block_share = np.broadcast_to(levels.block_share[..., None], block_rows.shape)
        self.of_blocks = np.stack([levels.block_load[..., used], block_rows, block_share])  # (3, P, 2, L)
        self.room = np.stack([np.where(np.isfinite(levels.high[used]), counts, 0), levels.room[counts]])
        self.may_be_empty = may_be_empty and bool(used[0] == 0)

    def more_than_it_may(self, at: Floats) -> tuple[bool, Floats]:
        """Whether multipliers (3 L,) of time, of rows and of bytes show that there is none; and what, for any such multipliers,
        the cheapest cuts by these take more than there is."""
        counts = self.counts
        weights, of_rows, of_bytes = at.reshape(3, -1)
        times = weights / counts
        price = times * self.load + self.cost_ms * (of_rows * self.rows + of_bytes * self.share[:, None])
        price[~self.possible] = np.inf
        level = price.argmin(axis=1)
        least_price, least = price[np.arange(len(price)), level], int(times.argmin())
        cuts = cheapest_cuts(self.problem, least_price)
        item = self.problem.group[cuts.shards]
        of_item = np.zeros(len(self.problem.whole))
        np.add.at(of_item, item, least_price[cuts.shards] * cuts.times)
        of_item[cuts.none] = np.inf
        split, of_split = self._row_wise(np.stack([times, self.cost_ms * of_rows, self.cost_ms * of_bytes]))
        better = self.row_wise & (split + times[least] * self.all_to_all < of_item[self.blocks])
        of_item[self.blocks[better]] = 0.0
        if not np.isfinite(of_item).all():
            return True, np.zeros_like(at)
        kept = ~np.isin(item, self.blocks[better])
        parts, on, often = cuts.shards[kept], level[cuts.shards[kept]], cuts.times[kept]
        amounts = self.load[parts, on], self.rows[parts, on], self.share[parts]
        held: Floats = of_split[:, better].sum(axis=1)
        held += np.stack([np.bincount(on, often * amount, len(counts)) for amount in amounts])
        held[0, least] += float(self.all_to_all[better].sum())
        held[0] /= counts
        held[1:] = self.cost_ms * (held[1:] - self.room)
        apart = float(at @ held.ravel())
        held[0] += self.intercept - self.may_take
        held[0, least] += self.back / counts[least]
        return self._too_late(apart, weights, float(times[least]) * self.back), held.ravel()

    def _row_wise(self, prices: Floats) -> tuple[Floats, Floats]:
        """What each item row-wise costs at least, (P,), by prices (3, L), on all devices together; and what it takes: (3, P, L).
        The last block, which may be smaller, lies on the level where that saves most."""
        of_level = np.einsum("apbl,al->pbl", self.of_blocks, prices)
        saved = of_level[:, 0] - of_level[:, 1]
        last, place = saved.argmax(axis=1), np.arange(len(saved))
        taken: Floats = self.of_blocks[:, :, 0] * self.counts
        taken[:, place, last] -= self.of_blocks[:, place, 0, last] - self.of_blocks[:, place, 1, last]
        return of_level[:, 0] @ self.counts - saved[place, last], taken

    def _too_late(self, apart: float, weights: Floats, back: float) -> bool:
        """Whether the last device is ready too late, where what is dealt out takes so much beside what devices begin with.

        Devices of few rows may hold nothing, and compute nothing then; so that must be so however many do not.
        """
        few = int(self.counts[0])
        used = np.arange(0 if len(weights) > 1 else 1, few + 1) if self.may_be_empty else np.array([few])
        of_used = float(weights.sum()) - float(weights[0]) * (1 - used / few)
        beyond = apart + self.intercept * of_used
        all_devices = beyond + back - self.may_take * float(weights.sum())
        used_alone = beyond - self.may_take * of_used
        return bool((np.maximum(all_devices, used_alone) > SURE * self.cost_ms).all())


def game(payoffs: Floats) -> tuple[Floats, float]:
    """The mixed strategy (K,) that gains most whatever the opponent does, of (N, K) payoffs, and how much that is.

    By the simplex method on the opponent's side, which can begin from nothing since all payoffs are made positive.
    """
    choices, own = payoffs.shape
    shift = 1.0 - float(payoffs.min())
    table = np.zeros((own + 1, choices + own + 1))
    table[:own, :choices], table[:own, choices:-1], table[:own, -1] = payoffs.T + shift, np.eye(own), 1.0
    table[-1, :choices] = -1.0
    for _ in range(PIVOTS):
        enters = int(table[-1, :-1].argmin())
        if table[-1, enters] >= -1e-12:
            break
        column = table[:own, enters]
        ratio = np.divide(table[:own, -1], column, out=np.full(own, np.inf), where=column > 1e-12)
        leaves = int(ratio.argmin())
        table[leaves] /= table[leaves, enters]
        others = np.arange(own + 1) != leaves
        table[others] -= table[others, enters, None] * table[leaves]
    strategy = np.maximum(table[-1, choices:-1], 0.0)
    strategy /= strategy.sum()
    return strategy, float((payoffs @ strategy).min())
