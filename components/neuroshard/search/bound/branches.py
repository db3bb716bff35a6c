"""Branches: sets of plans that differ in how tables are spread, and that together are all plans.

They differ first in which sharding types they use for some table: each launches collectives of its own, and copies outputs.

Plans that spread tables over all devices alone differ further. Tables that may be row-wise are ordered: heaviest first, by the
cost of their narrowest shard. In every plan the first n of them are row-wise, for some n, and the next one is not. In that branch
every device holds the blocks of these n tables, and each shard of another table shares its device with them. So the larger n is,
the more a device with a given shard costs.

Where memory is nearly full, the largest tables come before these, and every set of them is distinguished: beside the blocks of
some, the others must be cut to the room that is left, but each shard repeats the optimizer state of its rows, and few sets leave
enough for that.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.sharding import ROW_WISE, SHARDINGS, Sharding
from neuroshard.core.table import DIM_STEP
from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints, is_bending
from neuroshard.search.bound.cuts import Cuts
from neuroshard.search.bound.settings import BoundSettings
from neuroshard.search.problem.kinds import OVER_ALL
from neuroshard.search.problem.launches import NONE
from neuroshard.search.problem.problem import Problem


@dataclass(frozen=True)
class Branch:
    """Plans that spread some table in each of some sharding types, and none in others; in which the table groups `sure` are
    row-wise over all devices, and perhaps some are not. S shards, P groups that may be spread, each in W kinds of spread options
    (`SpreadOptions`). `least_used` devices or more hold something.

    In the letters of the proof (`lower_bound.py`), each the least over these plans, in ms; launches are part of a_d:

        alone (S,)          f(s_d) + b_d of a device with this shard and the blocks of `sure`, and
                            by how much more than `ahead` max(a_d) then is                        step 5
        block_alone (P, W)  the same with a block of this group                                   step 5
        back, ahead         mean(b_d) and mean(a_d)                                               step 2
        of_used (D,)        mean(b_d) + mean(a_d) of the used devices, if 1, 2, … are used and no table is spread
        blocks (P, W, K)    v, summed over all blocks of a group                                  step 4
        all_to_all (P, W)   what one more spread group adds to b_d + a_d, summed over the devices
        in_order            how much more a_d takes, if no other group is spread. `all_to_all` has taken it off again
        all_to_all_ms       b_d + a_d of a device with 0, 4, 8, … columns
        block_bytes (P, W)  bytes of all blocks of a group
        rates (S,)          rates that set in for a shard because its device holds `beside` too, beyond those of f
        block_rates (P, W)  the same, summed over all blocks of a group
        held_rates          the same of what devices hold anyway

    `alone` and `block_alone` are infinite where the shard does not fit or is not allowed. All devices hold `columns` of the
    blocks of `sure`, at least `beside` (K,) of each vector component, and `mean` columns or more on average.
    """

    problem: Problem
    sure: Ints  # places among the P
    least_used: int
    alone: Floats
    block_alone: Floats
    columns: float
    mean: float
    beside: Floats
    all_to_all_ms: Floats
    ahead: float
    back: float
    of_used: Floats
    blocks: Floats
    all_to_all: Floats
    in_order: float
    block_bytes: Floats
    rates: Floats
    block_rates: Floats
    held_rates: float

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
        """What all groups need at least: each row-wise, or in as few shards as the widest of these allows; infinite if one has
        no choice."""
        problem, groups = self.problem, self.problem.options.groups
        widest = np.maximum.reduceat(np.where(shards, problem.units, 0)[1:], problem.first)
        fewest = -(-problem.all_units // np.maximum(widest, 1))
        nbytes = np.where(widest > 0, problem.nbytes[problem.whole] + (fewest - 1) * problem.shard_bytes, np.inf)
        blocks = np.where(row_wise, self.block_bytes, np.inf).min(axis=1, initial=np.inf)
        nbytes[groups] = np.minimum(nbytes[groups], blocks)
        return float(nbytes.sum())

    def cheaper_row_wise(
        self, cuts: Cuts, price: Floats, slope: Floats, row_wise: NDArray[np.bool_], byte_ms: float
    ) -> tuple[float, Floats, float]:
        """The total price, the sum of vectors, and bytes, if each group is cut, at the `price` of shards (S,), or made row-wise,
        whichever is cheaper."""
        problem, groups = self.problem, self.problem.options.groups
        group, as_cut = problem.group[cuts.shards], np.zeros(len(problem.whole))
        np.add.at(as_cut, group, price[cuts.shards] * cuts.times)
        as_cut[cuts.none] = np.inf
        nbytes = self.block_bytes
        block_ms = self.blocks @ slope + self.block_rates * slope.any() + self.all_to_all
        as_blocks = np.where(row_wise, block_ms + byte_ms * nbytes, np.inf)
        way, place = as_blocks.argmin(axis=1), np.arange(len(groups))
        better = as_blocks[place, way] < as_cut[groups]
        as_cut[groups[better]] = as_blocks[place, way][better]
        kept = np.where(np.isin(group, groups[better]), 0.0, cuts.times)
        blocks: Floats = self.blocks[place, way][better].sum(axis=0)
        need = float(kept @ problem.nbytes[cuts.shards]) + float(nbytes[place, way][better].sum())
        return float(as_cut.sum()), kept @ problem.vectors[cuts.shards] + blocks, need


class Branches:
    """The branches of a problem all of whose plans cut a pooled table, if it `cuts`.

    `order` (P,) are the places of groups that may be row-wise, first the `large` ones, where memory is nearly full, then the
    heaviest.
    """

    def __init__(self, problem: Problem, settings: BoundSettings, *, cuts: bool = False) -> None:
        self.problem, self.beyond_mean, self.cuts = problem, settings.beyond_mean, cuts
        self.most_cells = settings.all_to_all_cells
        self.may_be: NDArray[np.bool_] = (problem.units >= problem.min_units[problem.group]) & (problem.units > 0)
        self.may_be &= problem.units <= problem.operator_units[problem.group]
        options, devices = problem.options, problem.devices
        none = np.zeros((0, len(options.kinds), problem.vectors.shape[1]))
        self.blocks, self.block_bytes = options.all_pieces if len(options.groups) else none, options.all_bytes
        heaviest = np.argsort(-problem.narrowest_ms()[options.groups], kind="stable")
        nbytes = problem.nbytes[problem.whole[options.groups]]
        is_large = (nbytes >= problem.tuning.large * problem.memory.max()) & problem.is_full
        large = np.argsort(-nbytes, kind="stable")[: np.count_nonzero(is_large)]
        self.order: Ints = np.concatenate([large, heaviest[~is_large[heaviest]]])
        self.large = len(large)
        # what sequences send is rounded, of each block by itself: together they may send a little less than the table
        fewer = np.minimum(options.more[:, OVER_ALL], 0.0)
        self.mean_columns = problem.mean_columns + float(fewer.sum())
        self.of_used = self._of_used_ms(self.mean_columns, 1)
        self._last: Branch | None = None
        # of a kind: the least columns more than the whole table's, in the mean of all devices. Over a domain it sends at least
        # these both near and far
        spare = [kind.devices / devices * kind.sharding.over_domains for kind in options.kinds]
        self.more: Floats = options.more - fewer[:, None] - (options.dims[..., -1] - options.least) * spare

    @property
    def types(self) -> list[Sharding]:
        """The sharding types in which some group may be spread, and not copied."""
        kinds, allowed = self.problem.options.kinds, self.problem.options.allowed
        found = [kind.sharding for way, kind in enumerate(kinds) if allowed[:, way].any()]
        return list(dict.fromkeys(one for one in found if not one.copied))

    def of(self, used: Collection[Sharding], sure: Ints = NONE, never: Ints = NONE) -> Branch:
        """Some table is spread in each of the types `used`, and none in another. The groups `sure` are row-wise over all devices,
        `never` are not, and any other may be."""
        problem, options, here = self.problem, self.problem.options, self._beside(sure)
        kinds = [kind.sharding in used or kind.sharding.copied for kind in options.kinds]
        may = options.allowed & np.array(kinds)
        may[never, OVER_ALL] = False
        least_used = min((k.devices for k in options.kinds if k.sharding in used), default=1)
        if ROW_WISE in used:
            least_used = problem.devices
        spread = options.groups[may.any(axis=1)]
        all_to_all = problem.devices * self._column_ms(here.mean, least_used) * self.more
        in_order, of_groups = problem.launches.permuted_ms(options.groups[sure], spread) if self.cuts else (0.0, None)
        if of_groups is not None:
            all_to_all = all_to_all - problem.devices * of_groups[options.groups][:, None]
        all_to_all[sure] = 0.0
        of_types = {
            SHARDINGS.index(one): options.groups[may[:, [k.sharding is one for k in options.kinds]].any(axis=1)]
            for one in used
            if not (len(sure) and one is ROW_WISE)
        }
        launched = problem.launches.least(options.groups[sure], spread, of_types, cuts=self.cuts)
        launched += problem.copies_ms.total_ms
        return replace(
            here,
            least_used=least_used,
            block_alone=np.where(may, here.block_alone, np.inf),
            all_to_all_ms=here.all_to_all_ms + launched,
            ahead=here.ahead + launched,
            of_used=self.of_used + launched,
            all_to_all=all_to_all,
            in_order=in_order,
        )

    def _beside(self, sure: Ints) -> Branch:
        """Without launches: the same of all branches in which these groups are row-wise, which mostly follow each other."""
        if self._last is not None and np.array_equal(self._last.sure, sure):
            return self._last
        problem, options = self.problem, self.problem.options
        columns = float(problem.base_dims.min()) + float(options.least[sure, OVER_ALL].sum())
        mean = self.mean_columns + float(self.more[sure, OVER_ALL].sum())
        memory, vectors = problem.memory, problem.base.min(axis=0)
        if len(sure):
            load = options.load(options.groups[np.sort(sure)], np.full(len(sure), options.place_of(OVER_ALL)))
            # no device holds less of any component
            memory, vectors = memory - load.nbytes, (load.vectors + problem.base).min(axis=0)
        others = ~np.isin(np.arange(len(options.groups)), sure)
        own = [columns + problem.dims, (columns + options.least * others[:, None]).ravel()]
        back = self._beyond_ahead_ms(np.concatenate(own), mean)
        rates, block_rates, held_rates = self._rates(others, vectors)
        forward, backward = transfers_ms(problem.model, np.full(problem.devices, mean))
        self._last = Branch(
            problem=problem,
            sure=sure,
            least_used=0,
            alone=self._alone(sure, memory, vectors, back[: len(own[0])]),
            block_alone=self._block_alone(others, memory, vectors, back[len(own[0]) :]),
            columns=columns,
            mean=mean,
            beside=vectors,
            all_to_all_ms=self._all_to_all_ms(mean),
            ahead=float(forward.mean()),
            back=float(backward.mean()),
            of_used=self.of_used,
            blocks=self.blocks,
            all_to_all=self.more,
            in_order=0.0,
            block_bytes=self.block_bytes,
            rates=rates,
            block_rates=block_rates,
            held_rates=held_rates,
        )
        return self._last

    def _rates(self, others: NDArray[np.bool_], beside: Floats) -> tuple[Floats, Floats, float]:
        """`rates`, `block_rates` and `held_rates` of a branch."""
        problem, options, model = self.problem, self.problem.options, self.problem.model
        if not is_bending(model) or not beside.any():
            return np.zeros(len(problem.vectors)), np.zeros(options.more.shape), 0.0
        of_shards = model.beyond_own_ms(problem.vectors, beside + problem.vectors)
        of_held = float(model.beyond_own_ms(problem.base, beside).sum())
        if not len(options.groups):
            return of_shards, np.zeros(options.more.shape), of_held
        of_pieces = model.beyond_own_ms(options.vectors, beside + options.vectors * others[:, None, None, None])
        return of_shards, options.of_all_pieces(of_pieces[..., None])[..., 0], of_held

    def _alone(self, sure: Ints, memory: Ints, beside: Floats, back: Floats) -> Floats:
        """`alone` of a branch for each shard, (S,), whose all-to-alls take `back` beyond `ahead`."""
        problem = self.problem
        room = np.where(problem.allowed, memory, -1).max(axis=1)[problem.group]
        alone = np.where(np.arange(len(problem.group)) > 0, problem.model.compute_ms(beside + problem.vectors), 0.0)
        alone = alone + back
        row_wise = np.isin(problem.group, problem.options.groups[sure])
        alone[~self.may_be | (problem.nbytes > room) | row_wise] = np.inf
        return alone

    def _block_alone(self, others: NDArray[np.bool_], memory: Ints, beside: Floats, back: Floats) -> Floats:
        """`block_alone` of a branch, for the heavier of a group's blocks, (P, W)."""
        options = self.problem.options
        if not len(options.groups):
            return np.zeros(options.more.shape)
        nbytes = options.nbytes * others[:, None, None]
        vectors = options.vectors * (nbytes > 0)[..., None]
        alone: Floats = self.problem.model.compute_ms(beside + vectors).max(axis=2) + back.reshape(options.least.shape)
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

        Beyond the last it is no less: convex costs that grow once do not fall again. Empty if they do not grow, or are too many.
        """
        own = DIM_STEP * np.arange(int(self.beyond_mean * mean / DIM_STEP) + 3, dtype=np.float64)
        if own.size * self.problem.devices > self.most_cells:
            return own[:0]
        forward, backward = transfers_ms(self.problem.model, self._own_and_others(own, mean))
        both: Floats = forward.max(axis=1) + backward[:, 0]
        return both if both[-1] > both[-2] else both[:0]

    def _of_used_ms(self, mean: float, least_used: int) -> Floats:
        """`of_used` of so many used devices or more, without launches, if all devices hold `mean` columns on average."""
        devices = self.problem.devices
        # convex all-to-alls take least if all used devices hold the same
        is_used = np.tri(devices)[least_used - 1 :]
        used = is_used.sum(axis=1)
        both = np.add(*transfers_ms(self.problem.model, is_used * (mean * devices / used)[:, None]))
        found: Floats = (both * is_used).sum(axis=1) / used
        return found

    def _column_ms(self, mean: float, least_used: int) -> float:
        """What a column more on every device, or as many in all on the used ones, adds at least to both all-to-alls, if all hold
        `mean` columns and `least_used` or more are used.

        All-to-alls are convex, so it adds no less than the last of these columns did.
        """
        more = self._of_used_ms(mean, least_used) - self._of_used_ms(0.99 * mean, least_used)
        columns = 0.01 * mean * self.problem.devices / np.arange(least_used, self.problem.devices + 1)
        return max(float((more / columns).min()) * (1 - 1e-6), 0.0)

    def _beyond_ahead_ms(self, dims: Floats, mean: float) -> Floats:
        """The least that the backward all-to-all of a device with at least `dims` columns, and the forward one of all, take
        beyond the forward one of even columns, (N,) -> (N,), if all hold `mean` on average.

        Both are convex in the device's own columns, so their least value holds for all numbers of columns below where it is
        taken.
        """
        if self.problem.devices == 1:
            return np.zeros(dims.shape)

        def own_ms(columns: Floats) -> Floats:
            forward, backward = transfers_ms(self.problem.model, self._own_and_others(columns, mean))
            both: Floats = forward.max(axis=1) + backward[:, 0]
            return both

        low, high = 0.0, mean * self.problem.devices
        for _ in range(4):  # each round narrows the range of the minimum to a sixteenth
            grid = np.linspace(low, high, 33)
            least = int(own_ms(grid).argmin())
            low, high = grid[max(least - 1, 0)], grid[min(least + 1, 32)]
        widths, place = np.unique(dims, return_inverse=True)
        even = transfers_ms(self.problem.model, np.full(self.problem.devices, mean))[0].mean()
        found: Floats = own_ms(np.maximum(widths, low).astype(np.float64))[place] * (1 - 1e-4) - float(even)
        return found
