"""Cases of which tables are row-wise that together are all plans, and what each device holds beforehand in them: for the bound.

Tables that may be split row-wise are taken heaviest first, by what their narrowest part takes. In every plan so many of them are
row-wise, and the next one is not. Then every device holds their blocks, and every part of the others lies beside these:
the more tables are row-wise, the less there is room for beside them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.table import DIM_STEP
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.bound.cuts import Cuts
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import transfers

BEYOND_MEAN = 1.1  # columns of a device, up to which its all-to-alls are told


@dataclass(frozen=True)
class Case:
    """Plans in which some items are row-wise for `sure`, and one may be column-wise for sure.

    `alone` (S,) is what each shard takes at least beside the blocks of these items, compute and backward all-to-all in ms;
    `rows_alone` (P,) likewise a block of each item that may be row-wise. Infinite where there is no room, or it may not be.
    All devices hold so many `columns` of these blocks, and at least `beside` (K,) of each component. A device of 0, 4, 8 …
    columns in all takes at least `all_to_all_ms` for its own backward all-to-all and the forward one together; beyond the last of
    these no less. Without waiting the forward all-to-all takes `ahead`, all devices' backward all-to-alls `back` on average; each
    item more row-wise adds `all_to_all` (P,) to both, summed over all devices. `of_used` (D,) is what both take a device, on
    average over those that hold something, where these are one, two …, and none is row-wise. `blocks` (P, K) are the sums of
    each item's blocks.
    """

    problem: Problem
    sure: Ints  # places among the P
    alone: Floats
    rows_alone: Floats
    columns: int
    beside: Floats
    all_to_all_ms: Floats
    ahead: float
    back: float
    of_used: Floats
    blocks: Floats
    all_to_all: Floats

    @property
    def widest_part_ms(self) -> float:
        """Some device holds at least so wide a part of every item, or a block of it: what the worst of them cost."""
        problem = self.problem
        narrowest = -(-problem.all_units // problem.max_devices)
        wide = np.flatnonzero((problem.units >= narrowest[problem.group]) & np.isfinite(self.alone))
        least = np.full(len(problem.whole), np.inf)
        np.minimum.at(least, problem.group[wide], self.alone[wide])
        items = problem.row_blocks.groups
        least[items] = np.minimum(least[items], self.rows_alone)
        return float(least.max()) + self.ahead

    def possible(self, cost_ms: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | None:
        """The shards (S,), and of items that may be row-wise those (P,), that such a plan can have; None where there
        is none, since it could have nothing of some item."""
        enough = (cost_ms - self.ahead) * (1 + 1e-9)
        shards, row_wise = self.alone <= enough, self.rows_alone <= enough
        some = np.logical_or.reduceat(shards[1:], self.problem.first)
        some[self.problem.row_blocks.groups[row_wise]] = True
        return (shards, row_wise) if some.all() else None

    def cheaper_row_wise(self, cuts: Cuts, slope: Floats, row_wise: NDArray[np.bool_]) -> tuple[float, Floats]:
        """The total, and the sum of vectors, where each item is cut or split row-wise, whichever is cheaper."""
        problem, items = self.problem, self.problem.row_blocks.groups
        item, price = problem.group[cuts.shards], np.zeros(len(problem.whole))
        np.add.at(price, item, problem.vectors[cuts.shards] @ slope * cuts.times)
        price[cuts.none] = np.inf
        split = np.where(row_wise, self.blocks @ slope + self.all_to_all, np.inf)
        better = split < price[items]
        price[items[better]] = split[better]
        kept = np.where(np.isin(item, items[better]), 0.0, cuts.times)
        return float(price.sum()), kept @ problem.vectors[cuts.shards] + self.blocks[better].sum(axis=0)


class Cases:
    """The cases of a problem; `order` (P,) are the places of items that may be row-wise, heaviest first."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.may_be: NDArray[np.bool_] = (problem.units >= problem.min_units[problem.group]) & (problem.units > 0)
        blocks, devices = problem.row_blocks, problem.devices
        self.blocks: Floats = np.zeros((0, problem.vectors.shape[1]))
        if len(blocks.groups):
            self.blocks = blocks.vectors[:, 0] * (devices - 1) + blocks.vectors[:, 1]
        narrow = problem.shards_of(np.arange(len(problem.whole)), -(-problem.all_units // problem.max_devices))
        narrow_ms = np.where(problem.nbytes[narrow] <= problem.roomiest(), problem.alone_ms(narrow), np.inf)
        self.order: Ints = np.argsort(-narrow_ms[blocks.groups], kind="stable")
        used = np.arange(1, devices + 1)
        held = np.tri(devices)  # all that hold something alike: all-to-alls are convex
        both = np.add(*transfers(problem, held * (problem.mean_columns * devices / used)[:, None]))
        self.of_used: Floats = (both * held).sum(axis=1) / used

    def of(self, count: int, *, next_not: bool = False) -> Case:
        """Where at least the first `count` are row-wise; and, with `next_not`, the next one is not."""
        problem, rows, devices = self.problem, self.problem.row_blocks, self.problem.devices
        sure = self.order[:count]
        columns = int(rows.dims[sure].sum())
        mean = problem.mean_columns + columns * (1 - 1 / devices)
        forward, backward = transfers(problem, np.full(devices, mean))
        memory, beside, rows_alone = problem.memory, np.zeros(problem.vectors.shape[1]), np.zeros(0)
        if len(rows.groups):
            beside, _, nbytes = rows.load(rows.groups[np.sort(sure)])
            memory, beside = memory - nbytes, beside.min(axis=0)  # no device holds less of any component
            block_bytes = rows.nbytes * (~np.isin(np.arange(len(rows.groups)), sure))[:, None]
            more = rows.vectors * (block_bytes > 0)[..., None]
            rows_alone = problem.model.compute_ms(beside + more).max(axis=1)
            rows_alone = rows_alone + self._own_backward_ms(columns + rows.dims * (block_bytes[:, 0] > 0), mean)
            fits = (block_bytes[:, 0] <= memory[:-1].min()) & (block_bytes[:, 1] <= memory[-1])
            rows_alone[~fits] = np.inf
        room = np.where(problem.allowed, memory, -1).max(axis=1)[problem.group]
        alone = np.where(np.arange(len(problem.group)) > 0, problem.model.compute_ms(beside + problem.vectors), 0.0)
        alone = alone + self._own_backward_ms(columns + problem.dims, mean)
        alone[~self.may_be | (problem.nbytes > room) | np.isin(problem.group, rows.groups[sure])] = np.inf
        if next_not:
            rows_alone[self.order[count]] = np.inf
        all_to_all = ((devices - 1) * self._a_column_ms(mean)) * rows.dims.astype(np.float64)
        all_to_all[sure] = 0.0
        return Case(
            problem=problem,
            sure=sure,
            alone=alone,
            rows_alone=rows_alone,
            columns=columns,
            beside=beside,
            all_to_all_ms=self._all_to_all_ms(mean),
            ahead=float(forward.mean()),
            back=float(backward.mean()),
            of_used=self.of_used,
            blocks=self.blocks,
            all_to_all=all_to_all,
        )

    def _all_to_all_ms(self, mean: float) -> Floats:
        """Both all-to-alls at least of a device of 0, 4, 8 … columns, where all hold `mean` or more; none where these do not tell
        what more columns take.

        They take least where all others hold the same, and are convex: once they grow they do not fall again.
        """
        devices = self.problem.devices
        own = DIM_STEP * np.arange(int(BEYOND_MEAN * mean / DIM_STEP) + 3, dtype=np.float64)
        others = np.maximum(mean * devices - own, 0.0) / max(devices - 1, 1)
        forward, backward = transfers(
            self.problem, np.concatenate([own[:, None], np.repeat(others[:, None], devices - 1, axis=1)], axis=1)
        )
        both: Floats = forward.max(axis=1) + backward[:, 0]
        return both if both[-1] > both[-2] else both[:0]

    def _a_column_ms(self, mean: float) -> float:
        """What a column more on every device adds to both all-to-alls at least, where all hold so many: what the last of those
        added, since all-to-alls are convex."""
        even = np.full((2, self.problem.devices), mean)
        even[0] *= 0.99
        forward, backward = transfers(self.problem, even)
        both = (forward + backward).mean(axis=-1)
        return max(float(both[1] - both[0]) / (0.01 * mean) * (1 - 1e-6), 0.0)

    def _own_backward_ms(self, dims: Ints, mean: float) -> Floats:
        """The least backward all-to-all of a device that holds at least so many columns, (…) -> (…), where all hold `mean`.

        It takes least where all others hold the same; and is then convex in the device's own columns, so what it is at its least
        counts for all below that.
        """
        devices, model = self.problem.devices, self.problem.model
        if devices == 1:
            return np.zeros(dims.shape)
        total = mean * devices

        def own_ms(columns: Floats) -> Floats:
            others = np.maximum(total - columns, 0.0) / (devices - 1)
            layout = np.concatenate([columns[:, None], np.repeat(others[:, None], devices - 1, axis=1)], axis=1)
            backward: Floats = model.backward_collective_ms(layout)[:, 0]
            return backward

        low, high = 0.0, total
        for _ in range(4):  # each narrows where the least is to a sixteenth
            grid = np.linspace(low, high, 33)
            least = int(own_ms(grid).argmin())
            low, high = grid[max(least - 1, 0)], grid[min(least + 1, 32)]
        widths, place = np.unique(dims, return_inverse=True)
        found: Floats = own_ms(np.maximum(widths, low).astype(np.float64))[place] * (1 - 1e-4)
        return found
