"""A bound that distinguishes devices by how many rows they hold, for compute costs that grow with all rows of a device.

Such a cost has rates: beyond a threshold of rows all lookups of a device take longer. The tangent of `lower_bound.py` counts, for
each shard, only the rates that its own rows reach. This proof counts more of them:

1. A few thresholds split devices into levels. On a device of a level every shard pays the rates of the level's least rows.
2. A plan has so many devices of each level. For each way to distribute the devices over the levels it must be shown that no
   plan costs at most C.
3. Such a plan keeps three limits on each level: the time of its devices (C each), their rows (fewer than the next
   threshold), and their bytes (no more than so many largest memories). So it keeps every weighted sum of them with weights
   of at least 0, the multipliers. If the cheapest cuts, each shard on its cheapest level, take more than that sum of
   limits, there is no such plan (Lagrange).
4. Multipliers that show it are sought by Kelley's method: those that are best against all cuts met so far, which is a game.
"""

from itertools import combinations_with_replacement
from math import comb

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.compute_net import COUNTED_IN, OWN, ROWS, THRESHOLDS, steps
from neuroshard.costmodel.protocol import Bending, Floats, Ints
from neuroshard.search.bound.branches import Branch
from neuroshard.search.bound.cuts import cheapest_cuts
from neuroshard.search.bound.settings import BoundSettings
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.row_blocks import OVER_ALL

PIVOTS = 200  # of the simplex method, at most; any strategy it has by then is valid
SLACK = 1e-9  # share by which plans must cost more to be ruled out: sums of floats are no more exact


def row_levels(problem: Problem, slope: Floats, intercept: float, settings: BoundSettings) -> "RowLevels | None":
    """None if costs do not depend on all rows of a device, there are too many devices to tell apart, or tables may be row-wise
    over one domain, which leaves other devices empty.

    `slope` and `intercept` are of a tangent that is below every device's compute cost, with the rates of each shard's own rows.
    """
    model = problem.model
    if not settings.row_levels or problem.devices == 1 or problem.row_blocks.domains > 1:
        return None
    if not isinstance(model, Bending) or not len(model.head.used):
        return None
    # one multiplier for each way to distribute the devices
    most = max(min(settings.level_counts_most, settings.level_cells // len(problem.group)), 1)
    levels = max(n for n in range(settings.levels_most + 1) if comb(problem.devices + n, n) <= most)
    return RowLevels(problem, model, slope, intercept, levels, settings) if levels else None


class RowLevels:
    """L levels: a device of level l holds at least `low[l]` and fewer than `high[l]` rows.

    Of each shard and level (S, L), in ms: `load`, what the tangent and the rates count at least; `alone`, the compute cost of the
    shard alone on a device of the level; `more`, how much that is above its cost at its own rows. The last two are infinite
    if the level cannot hold it. Of row-wise blocks likewise `block_load` (P, 2, L). `rows`, `share`, `block_rows` and
    `block_share` are rows, and bytes as shares of the largest memory.
    """

    def __init__(
        self,
        problem: Problem,
        model: Bending,
        slope: Floats,
        intercept: float,
        levels: int,
        settings: BoundSettings,
    ) -> None:
        head, vectors = model.head, problem.vectors
        self.problem, self.intercept, self.settings = problem, intercept, settings
        whole = vectors[problem.whole]
        of_rows = COUNTED_IN[head.used] == ROWS
        thresholds = THRESHOLDS[head.used[of_rows]]
        uncounted = ((1 - steps(whole, head.used)) * (whole @ head.rates)).sum(axis=0)[of_rows]
        uncounted[thresholds > whole[:, ROWS].sum()] = 0.0  # no device has so many rows
        chosen = np.sort(np.argsort(-uncounted, kind="stable")[:levels])
        self.low: Floats = np.append(0.0, thresholds[chosen])
        self.high: Floats = np.append(thresholds[chosen], np.inf)
        kinds = len(self.low)  # fewer than asked for if the model has fewer rates of rows
        ways = combinations_with_replacement(range(kinds), problem.devices)
        self.counts = [tuple(np.bincount(way, minlength=kinds).tolist()) for way in ways]  # devices of each level
        linear = slope.copy()
        linear[OWN] = 0.0

        def at_levels(some: Floats) -> tuple[Floats, Floats]:
            """Vectors (…, K) with at least each level's rows, (…, L, K), and their load (…, L)."""
            raised = np.repeat(some[..., None, :], kinds, axis=-2)
            raised[..., ROWS] = np.maximum(raised[..., ROWS], self.low)
            rates = (steps(raised, head.used) * (some @ head.rates)[..., None, :]).sum(axis=-1)
            load: Floats = (some @ linear)[..., None] + slope[OWN] * rates
            return raised, load

        self.rows = vectors[:, ROWS]
        raised, self.load = at_levels(vectors)
        self.alone: Floats = np.where(self.rows[:, None] < self.high, model.compute_ms(raised), np.inf)
        self.more: Floats = self.alone - model.compute_ms(vectors)[:, None]
        row_blocks = problem.row_blocks
        blocks = row_blocks.vectors[:, OVER_ALL] if len(row_blocks.groups) else np.zeros((0, 2, vectors.shape[1]))
        self.block_rows, self.block_load = blocks[..., ROWS], at_levels(blocks)[1]
        memory = np.sort(problem.memory)[::-1].astype(np.float64)
        self.room = np.append(0.0, np.cumsum(memory)) / memory[0]  # of the 0, 1, 2, … largest devices together
        self.share, self.block_share = problem.nbytes / memory[0], row_blocks.nbytes[:, OVER_ALL] / memory[0]
        self.steps_left = settings.level_cells // len(problem.group)
        self.shown_by: dict[tuple[int, ...], Floats] = {}  # multipliers that were enough, by counts

    def none_of(self, branch: Branch, cost_ms: float) -> bool:
        """Whether it is shown that no plan of a branch costs at most `cost_ms`."""
        enough = (cost_ms - branch.ahead) * (1 + SLACK)
        alone = branch.alone[:, None]
        possible = (np.maximum(alone, self.alone) if len(branch.sure) else alone + self.more) <= enough
        least = np.where(possible.any(axis=1), self.load.min(axis=1), np.inf)
        total = cheapest_cuts(self.problem, least, self.settings.exact_cut_units).total
        fewer_used = self.intercept + total / np.arange(1, self.problem.devices) + branch.of_used[:-1]
        # with row-wise tables no device is empty
        may_be_empty = not len(branch.sure) and bool((fewer_used <= cost_ms * (1 + SLACK)).any())
        for place, counts in enumerate(self.counts):
            if not self._none_with(branch, counts, possible, cost_ms, may_be_empty):
                self.counts.insert(0, self.counts.pop(place))  # asked first the next time
                return False
        return True

    def _none_with(
        self, branch: Branch, counts: tuple[int, ...], possible: NDArray[np.bool_], cost_ms: float, may_be_empty: bool
    ) -> bool:
        """The same for plans with so many devices of each level."""
        used = np.flatnonzero(counts)
        relaxed = _Relaxed(self, branch, used, np.array(counts)[used], possible[:, used], cost_ms, may_be_empty)
        at, payoffs = self.shown_by.get(counts), list[Floats]()
        if at is None:
            at = np.append(relaxed.counts / relaxed.counts.sum(), np.zeros(2 * len(used)))
        for _ in range(min(self.settings.level_steps, self.steps_left)):
            self.steps_left -= 1
            shown, payoff = relaxed.excess(at)
            if shown:
                self.shown_by[counts] = at
                return True
            payoffs.append(payoff)
            at, most = game(np.array(payoffs))
            if most <= SLACK * cost_ms:
                break
        return False


class _Relaxed:
    """Plans of a branch and of at most `cost_ms`, with `counts` (L,) devices of the levels `used` (L,), under multipliers."""

    def __init__(
        self,
        levels: RowLevels,
        branch: Branch,
        used: Ints,
        counts: Ints,
        possible: NDArray[np.bool_],
        cost_ms: float,
        may_be_empty: bool,
    ) -> None:
        self.problem, self.counts, self.possible = levels.problem, counts, possible
        self.intercept, self.cost_ms, self.exact_units = levels.intercept, cost_ms, levels.settings.exact_cut_units
        self.limit_ms, self.back = cost_ms - branch.ahead, levels.problem.devices * branch.back
        high = levels.high[used]
        self.load, self.rows, self.share = levels.load[:, used], levels.rows[:, None] / high, levels.share
        self.row_wise = branch.block_alone[:, OVER_ALL] <= self.limit_ms * (1 + SLACK)
        self.row_wise &= (levels.block_rows.min(axis=1)[:, None] < high).all(axis=1)
        self.all_to_all, self.groups = branch.all_to_all[:, OVER_ALL], levels.problem.row_blocks.groups
        block_rows = levels.block_rows[..., None] / high
        block_share = np.broadcast_to(levels.block_share[..., None], block_rows.shape)
        self.of_blocks = np.stack([levels.block_load[..., used], block_rows, block_share])  # (3, P, 2, L)
        self.room = np.stack([np.where(np.isfinite(high), counts, 0), levels.room[counts]])  # rows and bytes (2, L)
        self.may_be_empty = may_be_empty and bool(used[0] == 0)

    def excess(self, at: Floats) -> tuple[bool, Floats]:
        """Whether the multipliers (3 L,) of time, rows and bytes show that there is no plan, and by how much the cuts that are
        cheapest under them exceed each limit: the payoff of any other multipliers against these cuts (3 L,)."""
        counts = self.counts
        weights, of_rows, of_bytes = at.reshape(3, -1)
        times = weights / counts
        price = times * self.load + self.cost_ms * (of_rows * self.rows + of_bytes * self.share[:, None])
        price[~self.possible] = np.inf
        level = price.argmin(axis=1)
        least_price, cheapest = price[np.arange(len(price)), level], int(times.argmin())
        cuts = cheapest_cuts(self.problem, least_price, self.exact_units)
        group = self.problem.group[cuts.shards]
        of_group = np.zeros(len(self.problem.whole))
        np.add.at(of_group, group, least_price[cuts.shards] * cuts.times)
        of_group[cuts.none] = np.inf
        blocks_price, of_blocks = self._blocks(np.stack([times, self.cost_ms * of_rows, self.cost_ms * of_bytes]))
        better = self.row_wise & (blocks_price + times[cheapest] * self.all_to_all < of_group[self.groups])
        of_group[self.groups[better]] = 0.0
        if not np.isfinite(of_group).all():
            return True, np.zeros_like(at)
        kept = ~np.isin(group, self.groups[better])
        shards, on, often = cuts.shards[kept], level[cuts.shards[kept]], cuts.times[kept]
        amounts = self.load[shards, on], self.rows[shards, on], self.share[shards]
        taken: Floats = of_blocks[:, better].sum(axis=1)  # time, rows and bytes of each level (3, L)
        taken += np.stack([np.bincount(on, often * amount, len(counts)) for amount in amounts])
        taken[0, cheapest] += float(self.all_to_all[better].sum())
        taken[0] /= counts
        taken[1:] = self.cost_ms * (taken[1:] - self.room)
        without_devices = float(at @ taken.ravel())
        taken[0] += self.intercept - self.limit_ms
        taken[0, cheapest] += self.back / counts[cheapest]
        return self._too_late(without_devices, weights, float(times[cheapest]) * self.back), taken.ravel()

    def _blocks(self, prices: Floats) -> tuple[Floats, Floats]:
        """What each row-wise group costs at least on all devices, (P,), by prices (3, L), and what it takes, (3, P, L).

        The last block, which may be smaller, is on the level where that saves most.
        """
        of_level = np.einsum("apbl,al->pbl", self.of_blocks, prices)
        saved = of_level[:, 0] - of_level[:, 1]
        last, place = saved.argmax(axis=1), np.arange(len(saved))
        taken: Floats = self.of_blocks[:, :, 0] * self.counts
        taken[:, place, last] -= self.of_blocks[:, place, 0, last] - self.of_blocks[:, place, 1, last]
        return of_level[:, 0] @ self.counts - saved[place, last], taken

    def _too_late(self, taken: float, weights: Floats, back: float) -> bool:
        """Whether the weighted time is exceeded, if shards take `taken` on top of what each used device begins with.

        Devices of the lowest level may be empty, and compute nothing then. So it must be exceeded for any number of them.
        """
        few = int(self.counts[0])
        used = np.arange(0 if len(weights) > 1 else 1, few + 1) if self.may_be_empty else np.array([few])
        of_used = float(weights.sum()) - float(weights[0]) * (1 - used / few)
        beyond = taken + self.intercept * of_used
        over_all = beyond + back - self.limit_ms * float(weights.sum())
        over_used = beyond - self.limit_ms * of_used
        return bool((np.maximum(over_all, over_used) > SLACK * self.cost_ms).all())


def game(payoffs: Floats) -> tuple[Floats, float]:
    """The mixed strategy (K,) that gains most against every choice of the opponent, by payoffs (N, K), and its gain.

    The simplex method on the opponent's side. Made positive, payoffs allow it to begin with no choice at all.
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
