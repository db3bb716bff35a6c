"""Branches: sets of plans that differ in which tables are row-wise, and that together are all plans.

Tables that may be row-wise are ordered: heaviest first, by the cost of their narrowest shard. In every plan the first n of them
are row-wise, for some n, and the next one is not. In that branch every device holds the blocks of these n tables, and each shard
of another table shares its device with them. So the larger n is, the more a device with a given shard costs.

Where memory is nearly full, the largest tables come before these, and every set of them is distinguished: beside the blocks of
some, the others must be cut to the room that is left, but each shard repeats the optimizer state of its rows, and few sets leave
enough for that.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.table import DIM_STEP
from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.bound.cuts import Cuts
from neuroshard.search.bound.settings import BoundSettings
from neuroshard.search.problem.kinds import OVER_ALL
from neuroshard.search.problem.launches import NONE
from neuroshard.search.problem.problem import Problem


@dataclass(frozen=True)
class Branch:
    """Plans in which the table groups `sure` are row-wise over all devices, and perhaps some are not. S shards, P groups that may
    be row-wise, each in W kinds of spread options (`SpreadOptions`).

    In the letters of the proof (`lower_bound.py`), each the least over these plans, in ms; launches are part of a_d:

        alone (S,)          f(s_d) + b_d of a device with this shard and the blocks of `sure`     step 5
        block_alone (P, W)  the same with a block of this group                                   step 5
        back, ahead         mean(b_d) and mean(a_d)                                               step 2
        of_used (D,)        mean(b_d) + mean(a_d) of the used devices, if 1, 2, … are used and no table is row-wise
        blocks (P, W, K)    v, summed over all blocks of a group                                  step 4
        all_to_all (P, W)   what one more row-wise group adds to b_d + a_d, summed over the devices
        all_to_all_ms       b_d + a_d of a device with 0, 4, 8, … columns
        block_bytes (P, W)  bytes of all blocks of a group
        shard_bytes (G,)    bytes that a group needs more for each shard more

    `alone` and `block_alone` are infinite where the shard does not fit or is not allowed. All devices hold `columns` of the
    blocks of `sure`, and at least `beside` (K,) of each vector component.
    """

    problem: Problem
    sure: Ints  # places among the P
    alone: Floats
    block_alone: Floats
    columns: float
    beside: Floats
    all_to_all_ms: Floats
    ahead: float
    back: float
    of_used: Floats
    blocks: Floats
    all_to_all: Floats
    block_bytes: Floats
    shard_bytes: Ints

    @property
    def widest_shard_ms(self) -> float:
        """Each group has a shard at least as wide as in its finest cut, or is row-wise: the most that any of these costs."""
        problem = self.problem
        wide = np.flatnonzero(
            (problem.units >= problem.units[problem.narrowest][problem.group]) & np.isfinite(self.alone)
        )
        least = np.full(len(problem.whole), np.inf)
        np.minimum.at(least, problem.group[wide], self.alone[wide])
        groups = problem.options.groups
        least[groups] = np.minimum(least[groups], self.block_alone.min(axis=1))
        return float(least.max()) + self.ahead

    def possible(self, cost_ms: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | None:
        """Which shards (S,) and row-wise groups in each way (P, W) a plan of at most `cost_ms` can have; None if some group
        has no choice, or if all devices together have too few bytes for any."""
        enough = (cost_ms - self.ahead) * (1 + 1e-9)
        shards, row_wise = self.alone <= enough, self.block_alone <= enough
        fits = self._least_bytes(shards, row_wise) <= self.problem.memory.sum()
        return (shards, row_wise) if fits else None

    def _least_bytes(self, shards: NDArray[np.bool_], row_wise: NDArray[np.bool_]) -> float:
        """What all groups need at least: each row-wise, or in as few shards as the widest of these allows; infinite if some group
        has no choice."""
        problem, groups = self.problem, self.problem.options.groups
        widest = np.maximum.reduceat(np.where(shards, problem.units, 0)[1:], problem.first)
        fewest = -(-problem.all_units // np.maximum(widest, 1))
        nbytes = np.where(widest > 0, problem.nbytes[problem.whole] + (fewest - 1) * self.shard_bytes, np.inf)
        blocks = np.where(row_wise, self.block_bytes, np.inf).min(axis=1, initial=np.inf)
        nbytes[groups] = np.minimum(nbytes[groups], blocks)
        return float(nbytes.sum())

    def cheaper_row_wise(
        self, cuts: Cuts, slope: Floats, row_wise: NDArray[np.bool_], byte_ms: float
    ) -> tuple[float, Floats, float]:
        """The total price, the sum of vectors, and bytes, if each group is cut or made row-wise, whichever is cheaper."""
        problem, groups = self.problem, self.problem.options.groups
        group, price = problem.group[cuts.shards], np.zeros(len(problem.whole))
        shards_ms = problem.vectors[cuts.shards] @ slope + byte_ms * problem.nbytes[cuts.shards]
        np.add.at(price, group, shards_ms * cuts.times)
        price[cuts.none] = np.inf
        nbytes = self.block_bytes
        as_blocks = np.where(row_wise, self.blocks @ slope + byte_ms * nbytes + self.all_to_all, np.inf)
        way, place = as_blocks.argmin(axis=1), np.arange(len(groups))
        better = as_blocks[place, way] < price[groups]
        price[groups[better]] = as_blocks[place, way][better]
        kept = np.where(np.isin(group, groups[better]), 0.0, cuts.times)
        blocks: Floats = self.blocks[place, way][better].sum(axis=0)
        need = float(kept @ problem.nbytes[cuts.shards]) + float(nbytes[place, way][better].sum())
        return float(price.sum()), kept @ problem.vectors[cuts.shards] + blocks, need


class Branches:
    """The branches of a problem whose plans take `cut_ms` for their cuts.

    `order` (P,) are the places of groups that may be row-wise, first the `large` ones, where memory is nearly full, then the
    heaviest.
    """

    def __init__(self, problem: Problem, settings: BoundSettings, cut_ms: float = 0.0) -> None:
        self.problem, self.beyond_mean, self.cut_ms = problem, settings.beyond_mean, cut_ms
        self.may_be: NDArray[np.bool_] = (problem.units >= problem.min_units[problem.group]) & (problem.units > 0)
        self.may_be &= problem.units <= problem.operator_units[problem.group]
        options, devices = problem.options, problem.devices
        none = np.zeros((0, len(options.kinds), problem.vectors.shape[1]))
        self.blocks: Floats = options.all_pieces if len(options.groups) else none
        self.block_bytes = options.all_bytes if len(options.groups) else np.zeros((0, len(options.kinds)))
        first = problem.first + 1
        second = np.where(problem.all_units > 1, first + 1, 0)  # bytes are linear in the width of a shard
        self.shard_bytes: Ints = np.where(second > 0, 2 * problem.nbytes[first] - problem.nbytes[second], 0)
        heaviest = np.argsort(-problem.narrowest_ms()[options.groups], kind="stable")
        nbytes = problem.nbytes[problem.whole[options.groups]]
        is_large = (nbytes >= problem.tuning.large * problem.memory.max()) & problem.is_full
        large = np.argsort(-nbytes, kind="stable")[: np.count_nonzero(is_large)]
        self.order: Ints = np.concatenate([large, heaviest[~is_large[heaviest]]])
        self.large = len(large)
        used = np.arange(1, devices + 1)
        is_used = np.tri(devices)  # convex all-to-alls take least if all used devices hold the same
        both = np.add(*transfers_ms(problem.model, is_used * (problem.mean_columns * devices / used)[:, None]))
        self.of_used: Floats = (both * is_used).sum(axis=1) / used

    def of(self, sure: Ints = NONE, never: Ints = NONE) -> Branch:
        """The groups `sure` are row-wise, `never` are not, and any other may be."""
        problem, options = self.problem, self.problem.options
        columns = float(problem.base_dims.min()) + float(options.least[sure, OVER_ALL].sum())
        mean = problem.mean_columns + float(options.more[sure, OVER_ALL].sum())
        memory, beside = problem.memory, problem.base.min(axis=0)
        if len(options.groups):
            load = options.load(options.groups[np.sort(sure)], np.full(len(sure), options.place_of(OVER_ALL)))
            # no device holds less of any component
            memory, beside = memory - load.nbytes, (load.vectors + problem.base).min(axis=0)
        block_alone, may_be = self._block_alone(sure, memory, beside, columns, mean), options.groups
        block_alone[never] = np.inf
        may_be = np.delete(may_be, never)
        # over a domain no more leaves it than of the whole table
        over_all = np.arange(options.more.shape[1]) == OVER_ALL
        all_to_all = problem.devices * self._column_ms(mean) * options.more * over_all
        all_to_all[sure] = 0.0
        launched = problem.launches.least(options.groups[sure], may_be) + problem.copies_ms.total_ms + self.cut_ms
        forward, backward = transfers_ms(problem.model, np.full(problem.devices, mean))
        return Branch(
            problem=problem,
            sure=sure,
            alone=self._alone(sure, memory, beside, columns, mean),
            block_alone=block_alone,
            columns=columns,
            beside=beside,
            all_to_all_ms=self._all_to_all_ms(mean) + launched,
            ahead=float(forward.mean()) + launched,
            back=float(backward.mean()),
            of_used=self.of_used + launched,
            blocks=self.blocks,
            all_to_all=all_to_all,
            block_bytes=self.block_bytes,
            shard_bytes=self.shard_bytes,
        )

    def _alone(self, sure: Ints, memory: Ints, beside: Floats, columns: float, mean: float) -> Floats:
        """`alone` of a branch: f(beside + v) + b_d for each shard, (S,)."""
        problem = self.problem
        room = np.where(problem.allowed, memory, -1).max(axis=1)[problem.group]
        alone = np.where(np.arange(len(problem.group)) > 0, problem.model.compute_ms(beside + problem.vectors), 0.0)
        alone = alone + self._backward_ms(columns + problem.dims, mean)
        row_wise = np.isin(problem.group, problem.options.groups[sure])
        alone[~self.may_be | (problem.nbytes > room) | row_wise] = np.inf
        return alone

    def _block_alone(self, sure: Ints, memory: Ints, beside: Floats, columns: float, mean: float) -> Floats:
        """`block_alone` of a branch: f(beside + v) + b_d for the heavier of a group's blocks, (P, W)."""
        options = self.problem.options
        if not len(options.groups):
            return np.zeros(options.more.shape)
        others = (~np.isin(np.arange(len(options.groups)), sure))[:, None]
        nbytes = options.nbytes * others[..., None]
        vectors = options.vectors * (nbytes > 0)[..., None]
        back = self._backward_ms((columns + options.least * others).ravel(), mean).reshape(others.shape[0], -1)
        alone: Floats = self.problem.model.compute_ms(beside + vectors).max(axis=2) + back
        fits = nbytes.max(axis=2) <= memory.max()
        last = nbytes[:, OVER_ALL, -1] <= memory[-1]
        fits[:, OVER_ALL] = (nbytes[:, OVER_ALL, :-1].max(axis=1) <= memory[:-1].min()) & last
        alone[~(fits & options.allowed)] = np.inf
        return alone

    def _own_and_others(self, own: Floats, mean: float) -> Floats:
        """Columns of all devices (N, D): `own` (N,) on the first, the rest of `mean` a device spread evenly over the others.

        That is where convex all-to-alls of the first device take least.
        """
        devices = self.problem.devices
        others = np.maximum(mean * devices - own, 0.0) / max(devices - 1, 1)
        return np.concatenate([own[:, None], np.repeat(others[:, None], devices - 1, axis=1)], axis=1)

    def _all_to_all_ms(self, mean: float) -> Floats:
        """The least backward and forward all-to-all of a device with 0, 4, 8, … columns, if all hold `mean` or more on average.

        Beyond the last number of columns it is no less: convex costs that grow once do not fall again. Empty if they do not grow.
        """
        own = DIM_STEP * np.arange(int(self.beyond_mean * mean / DIM_STEP) + 3, dtype=np.float64)
        forward, backward = transfers_ms(self.problem.model, self._own_and_others(own, mean))
        both: Floats = forward.max(axis=1) + backward[:, 0]
        return both if both[-1] > both[-2] else both[:0]

    def _column_ms(self, mean: float) -> float:
        """What a column more on every device adds at least to both all-to-alls, if all hold `mean` columns.

        All-to-alls are convex, so it adds no less than the last of these columns did.
        """
        even = np.full((2, self.problem.devices), mean)
        even[0] *= 0.99
        forward, backward = transfers_ms(self.problem.model, even)
        both = (forward + backward).mean(axis=-1)
        return max(float(both[1] - both[0]) / (0.01 * mean) * (1 - 1e-6), 0.0)

    def _backward_ms(self, dims: Floats, mean: float) -> Floats:
        """The least backward all-to-all of a device with at least `dims` columns, (N,) -> (N,), if all hold `mean` on average.

        It is convex in the device's own columns, so its least value holds for all numbers of columns below where it is taken.
        """
        if self.problem.devices == 1:
            return np.zeros(dims.shape)

        def own_ms(columns: Floats) -> Floats:
            backward: Floats = self.problem.model.backward_collective_ms(self._own_and_others(columns, mean))[:, 0]
            return backward

        low, high = 0.0, mean * self.problem.devices
        for _ in range(4):  # each round narrows the range of the minimum to a sixteenth
            grid = np.linspace(low, high, 33)
            least = int(own_ms(grid).argmin())
            low, high = grid[max(least - 1, 0)], grid[min(least + 1, 32)]
        widths, place = np.unique(dims, return_inverse=True)
        found: Floats = own_ms(np.maximum(widths, low).astype(np.float64))[place] * (1 - 1e-4)
        return found
