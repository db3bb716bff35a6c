"""A lower bound: the ms that no plan of a task can cost less than, by a cost model that only grows.

What a plan costs. Device d holds shards whose vectors sum to s_d. It computes for f(s_d) ms, nothing if it is empty; its
backward all-to-all takes b_d ms and its forward one a_d ms. A device waits for the last one, so the plan costs
max(f(s_d) + b_d) + max(a_d). Operators and collectives beyond the first take a constant more; here it is part of a_d.

The proof, for all plans that cost at most C:

1. A maximum is at least the mean: the plan costs at least mean(f(s_d)) + mean(b_d) + mean(a_d).
2. All-to-alls are convex in the columns of all devices, and do not depend on how devices are numbered. So they take least if all
   devices hold the same number of columns, which the tables determine: `back` and `ahead`, constants.
3. f is convex, so it lies above its tangent at any point p with slope g: f(s) >= f(p) - g·p + g·s. The mean of this over the
   devices depends only on g times the sum of all shards' vectors: on how tables are cut, not on where shards lie.
4. For each table, take the cut that is cheapest at the price g·v of a shard with vector v (`cuts.py`). No plan has a lower sum.
   This is a bound for every p; the p with the highest bound is sought (Frank and Wolfe). Where the cheapest cuts need more bytes
   than all devices have, a byte has a price too: cuts are the cheapest with it, and what all bytes of the devices cost is taken
   off the sum again (`_BytePrice`).
5. f grows with every vector, so a device costs at least what any one of its shards costs alone. A plan of at most C has no shard
   that costs more than C alone, and none larger than a device's memory. Without these shards the cuts of step 4 cost more.
6. If steps 1 to 5 show for some C that plans of at most C cost more than C, there are no such plans: C is a bound. The
   highest such C is found by halving the range from the bound known to the cost of a plan that was found.

What changes the steps:

- A plan that cuts a pooled table takes some ms more to put outputs into order (`core/launches.py`). So the bound is the lesser of
  two: of plans with a cut, these ms included, and of plans without any. In the first, a table that is made row-wise takes its
  columns off those that are put into order.
- The tangent of step 3 does not hold for empty devices. The bound is the least over all numbers of used ones (`_over_devices`).
- f may have dips. A convex underestimate replaces it, made for the range of each dip in which devices of a plan of at most C can
  be (`reach`).
- f may have rates, by the rows and bytes of a device. A shard counts those that set in by its own, together with those that every
  device of a branch holds anyway.
- A table may be row-wise: one more choice for it in step 4. Then every device sends all of its columns, more than in step 2;
  what these add is at least what the tangent of the convex all-to-alls says. Over one domain is another choice, which sends more
  too, since its two collectives run one after the other; then devices elsewhere may be empty.
- Each sharding type that a plan uses launches operators and collectives of its own, and outputs of several types are copied
  once more. So the bound is the least over all sets of types.

Two refinements have switches in `settings.py`: `branches.py` distinguishes plans by which tables are row-wise, where no other
type spreads some; `heavy_shards.py` raises what a heavy shard costs alone in step 5.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.sharding import ROW_WISE, Sharding
from neuroshard.costmodel.protocol import CostModel, Dips, Floats, Ints, is_bending
from neuroshard.search.bound.branches import Branch, Branches
from neuroshard.search.bound.cuts import cheapest_cuts
from neuroshard.search.bound.heavy_shards import HeavyShards
from neuroshard.search.bound.settings import BOUND, BoundSettings
from neuroshard.search.copies import STAY
from neuroshard.search.problem.launches import NONE
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State

COLLECTIVES = (
    "all-to-all times are convex in the columns of the devices{and_grow} and do not depend on the devices' order"
)
AS_SEARCHED = (
    "no table has more column shards than there are devices, sequences have as many equal ones as were searched, and no shard of "
    "a cut table is wider than what the cost model measured: plans beyond that were not searched, and may cost less"
)
ASSUMPTIONS = (
    "the predicted compute cost {grows}; {collectives}; waiting is added by rule",
    "tables are cut into multiples of 4 columns and not by rows; memory is counted for each shard and for all devices together",
    AS_SEARCHED,
)
ASSUMPTIONS_ROW_WISE = (
    ASSUMPTIONS[0],
    "tables are cut into multiples of 4 columns or, if allowed, into a block of rows for each device, or for each of a domain; "
    "memory is counted for each shard",
    AS_SEARCHED,
)
HELD = (
    "no shard is wider than the {:,} columns that FBGEMM's operator holds, and a wider table that has equal shards is in as many "
    "of them as were searched: other numbers may cost less"
)
CONVEX = "never falls as a device gets more, and is convex"
UNDERESTIMATED = "never falls as a device gets more, and a convex underestimate replaces it where it is not convex"
NOT_BOUNDED = "no lower bound: by this cost model a device may cost less with more on it"


@dataclass(frozen=True)
class Bound:
    """No plan costs less than `ms`; None if nothing can be proven. `why` are the assumptions, in words."""

    ms: float | None
    why: tuple[str, ...]


def lower_bound(problem: Problem, plan: State, settings: BoundSettings = BOUND, *, known_ms: float = 0.0) -> Bound:
    """A lower bound on the cost of every plan that keeps the task's constraints on cuts; at most the cost of `plan`, which need
    not be a plan of this problem. `known_ms` is a bound already."""
    if not problem.model.bounded:
        return Bound(None, (NOT_BOUNDED,))
    problem.price(np.arange(1, len(problem.group)))
    row_wise = len(problem.options.groups) > 0
    collectives = COLLECTIVES.format(and_grow=", never fall as columns are added" * row_wise)
    grows = UNDERESTIMATED if is_bending(problem.model) else CONVEX
    why = ASSUMPTIONS_ROW_WISE if row_wise else ASSUMPTIONS
    ms = _Proof(problem, plan, settings, cuts=problem.orders_cut).bound_ms(plan.cost, known_ms)
    uncut = problem.uncut() if problem.orders_cut else None  # where cuts are free, the first bound is of all plans
    if uncut is not None:
        ms = min(ms, _Proof(uncut, plan, settings).bound_ms(plan.cost, known_ms))
    copied = (STAY,) if problem.copied else ()
    wide = (HELD.format(max(one.widest for one in problem.wide.values())),) if problem.wide else ()
    return Bound(ms, (*(line.format(grows=grows, collectives=collectives) for line in why), *wide, *copied))


def least_with_cuts_ms(problem: Problem, plan: State, settings: BoundSettings = BOUND) -> float:
    """What every plan that cuts a pooled table costs at least, where outputs then need to be put into order; at most the cost of
    `plan`, which need not be one of these. 0 if nothing can be proven, as where tables keep their cuts or may be copied."""
    if not problem.model.bounded or problem.may_copy or len(problem.launches.pieces):
        return 0.0
    problem.price(np.arange(1, len(problem.group)))
    return _Proof(problem, plan, settings, cuts=True).bound_ms(plan.cost)


class _BytePrice:
    """The price of a byte, in ms: a Lagrange multiplier of the memory of all devices together, `have` bytes. Every price is a
    bound; the best one is sought by halving while tangents are tried. None where the cheapest cuts fit anyway."""

    def __init__(self, have: float) -> None:
        self.have, self.ms = have, 0.0
        self.anew()

    def anew(self) -> None:
        """Begin again, from the last price."""
        self.low, self.high = 0.0, np.inf

    def met(self, need: float, usual: float) -> None:
        """Change the price where the cheapest cuts `need` so many bytes at it; `usual` is what a byte costs in the mean."""
        if need > self.have:
            self.low = self.ms
            self.ms = max(2 * self.ms, 0.05 * usual) if self.high == np.inf else (self.low + self.high) / 2
        elif self.ms:
            self.high = self.ms
            self.ms = (self.low + self.high) / 2


class _Proof:
    """Shows that plans of at most some cost do not exist, among all plans or, with `cuts`, those that cut a pooled table.

    `convex` is a convex cost model that is not above the problem's.
    """

    def __init__(self, problem: Problem, plan: State, settings: BoundSettings, *, cuts: bool = False) -> None:
        self.problem, self.settings, self.branches = problem, settings, Branches(problem, settings, cuts=cuts)
        self.start = plan.sums.mean(axis=0)
        self.as_planned = set(plan.problem.spread_as.values())
        self.convex = self._convex(self.branches.of(()), plan.cost)
        self.bytes = _BytePrice(float(problem.memory.sum()))
        self.heavy = HeavyShards(problem, self.convex, plan.cost, settings)

    def bound_ms(self, cost_ms: float, known_ms: float = 0.0) -> float:
        """The bound, given a plan of `cost_ms` and a bound: the least over all branches."""
        types, best = self.branches.types, cost_ms
        sets = [used for count in range(len(types) + 1) for used in combinations(types, count)]
        # the others are ruled out sooner once the plan's own set has a bound
        for used in sorted(sets, key=lambda used: set(used) != self.as_planned):
            best = self._least_of(used, known_ms, best)
        return best

    def _least_of(self, used: Collection[Sharding], known_ms: float, best: float) -> float:
        """The lesser of `best` and the bound of plans that spread tables in each of these types and no other."""
        all_of_these = self._branch(used)
        low = self._of(all_of_these, known_ms, best)
        if set(used) != {ROW_WISE} or not self.settings.branches:
            return low
        return self._least_of_branches(all_of_these, low, best)

    def _least_of_branches(self, row_wise: Branch, low: float, best: float) -> float:
        """The least over all branches of `row_wise`, plans whose spread tables are over all devices, between the bound `low` and
        the cost of the `best` plan."""
        order, left = self.branches.order, self.settings.branch_cells // len(self.problem.group)
        # groups that are row-wise, and that are not; then those to distinguish by, and of how many of these every set
        rest = [(order[:0], order[:0], order, self.branches.large)]
        while rest:
            if best <= low * (1 + self.settings.least_gain):
                return low
            sure, never, others, large = rest.pop()
            decided = len(sure) + len(never)
            branch = self._branch((ROW_WISE,), sure, never) if decided else row_wise
            if not len(others) or left < 0:
                best = self._of(branch, low, best)
            elif not decided or not self._none_of(branch, best):
                one, others, fewer = others[:1], others[1:], max(large - 1, 0)
                rest.append((np.append(sure, one), never, others, fewer))
                rest.append((sure, np.append(never, one), others if large else others[:0], fewer))
            left -= 1
        return best

    def _branch(self, used: Collection[Sharding], sure: Ints = NONE, never: Ints = NONE) -> Branch:
        return self.heavy.raised(self.branches.of(used, sure, never))

    def _of(self, branch: Branch, low: float, high: float) -> float:
        """The bound of a branch's plans, between `low` and `high`: the highest cost for which there are shown to be none."""
        low = min(max(low, branch.widest_shard_ms, self._mean_ms(branch, high, high)), high)
        middle = low * (1 + self.settings.least_gain)  # mostly no shard is ruled out that this cost allows
        for _ in range(self.settings.halvings):
            if high - low < self.settings.least_gain * high:
                break
            if self._none_of(branch, middle):
                low = middle
            else:
                high = middle
            middle = (low + high) / 2
        return low

    def _none_of(self, branch: Branch, cost_ms: float) -> bool:
        """Whether it is shown that no plan of a branch costs at most `cost_ms`."""
        return self._mean_ms(branch, cost_ms, cost_ms) > cost_ms

    def _mean_ms(self, branch: Branch, cost_ms: float, enough: float) -> float:
        """Steps 1 to 5: what a branch's plans of at most `cost_ms` cost at least; infinite if there are none.

        Tangents are tried until one shows more than `enough`.
        """
        problem, model, devices = self.problem, self.convex, self.problem.devices
        possible = branch.possible(cost_ms)
        if possible is None:
            return np.inf
        self.bytes.anew()
        shards, row_wise = possible
        held: Floats = problem.base.sum(axis=0)
        point, best, slope, byte_ms = self.start, 0.0, np.full_like(self.start, np.nan), self.bytes.ms
        for step in range(self.settings.tangents):
            before, slope = slope, np.maximum(model.compute_slope(point), 0.0)
            # piecewise linear costs often give the same tangent again
            if self.bytes.ms != byte_ms or not np.array_equal(slope, before):
                byte_ms = self.bytes.ms
                if best > enough:
                    break
                # where f is flat, at its floor, rates do not show either
                shard_ms = problem.vectors @ slope + branch.rates * slope.any()
                price = np.where(shards, shard_ms + byte_ms * problem.nbytes, np.inf)
                cuts = cheapest_cuts(problem, price, self.settings.exact_cut_units)
                sums: Floats = cuts.times @ problem.vectors[cuts.shards]
                cheapest, need = cuts.total, float(cuts.times @ problem.nbytes[cuts.shards])
                intercept = float(model.compute_ms(point)) - float(slope @ point)
                anyway = float(held @ slope) + branch.held_rates * slope.any() - byte_ms * self.bytes.have
                if row_wise.any():
                    cheapest, sums, need = branch.cheaper_row_wise(cuts, price, slope, row_wise, byte_ms)
                bound = _over_devices(intercept, cheapest + anyway, branch)
                if bound == np.inf:
                    return np.inf
                best = max(best, bound)
                self.bytes.met(need, cheapest / max(need, 1.0))
            point = point + ((sums + held) / devices - point) * (2 / (step + 3))  # Frank and Wolfe's step
        return best

    def _convex(self, branch: Branch, cost_ms: float) -> CostModel:
        """A model whose compute cost is convex, and not above the problem's on any device of a plan of at most `cost_ms`."""
        model, enough = self.problem.model, (cost_ms - branch.ahead) * (1 + 1e-9)
        if not is_bending(model):
            return model
        possible = branch.alone <= enough
        return model.convex_below(*reach(self.problem, possible, len(self.branches.order) > 0, model.dips))


def reach(problem: Problem, possible: NDArray[np.bool_], with_blocks: bool, dips: Dips) -> tuple[Floats, Floats]:
    """The least and the most value of each dip, two (J,), over all devices that hold at most one of the `possible` shards (S,),
    or one row block if `with_blocks`, of each table group."""
    group, vectors = problem.group[possible], problem.vectors[possible]
    if with_blocks:
        options = problem.options
        group = np.concatenate([group, np.repeat(options.groups, options.rows[0].size)])
        vectors = np.concatenate([vectors, options.vectors.reshape(-1, vectors.shape[1])])
        order = np.argsort(group, kind="stable")
        group, vectors = group[order], vectors[order]
    if not len(group):
        return dips.bias, dips.bias
    held = problem.base @ dips.weight
    along, begins = vectors @ dips.weight, np.flatnonzero(np.diff(group, prepend=-1))
    down = np.minimum(np.minimum.reduceat(along, begins), 0.0).sum(axis=0)
    up = np.maximum(np.maximum.reduceat(along, begins), 0.0).sum(axis=0)
    slack = 1e-9 * (up - down + np.abs(dips.bias))
    return dips.bias + down + held.min(axis=0) - slack, dips.bias + up + held.max(axis=0) + slack


def _over_devices(intercept: float, total: float, branch: Branch) -> float:
    """The least cost of a plan whose used devices compute at least `intercept` each and `total` together.

    For every number of used devices both means are a bound: that over all devices and that over the used ones.
    """
    devices = len(branch.of_used)
    used = np.arange(1, devices + 1)
    over_all = used / devices * intercept + total / devices + branch.back + branch.ahead
    both: Floats = np.maximum(over_all, intercept + total / used + branch.of_used)
    return float(both[branch.least_used - 1 :].min()) + branch.in_order
