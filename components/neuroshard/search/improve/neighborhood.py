"""What the devices hold that moves start from, and an estimate of what it would add elsewhere.

Each array operation is about all jobs. A job is a device of a plan that moves start from, with the devices they may go to.
"""

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.moves import Moves
from neuroshard.search.problem.objective import SoftMaximum
from neuroshard.search.problem.plans import Plans


class Neighborhood:
    """N shards on the sources of J jobs, and ms that each width of them adds to the R receivers of their job and to the source.

    Shards are (N,), by `job`; receivers (J, R). Estimates are linear.
    """

    def __init__(
        self, plans: Plans, soft: SoftMaximum, plan: Ints, source: Ints, receivers: Ints, rng: np.random.Generator
    ) -> None:
        self.plans, self.soft, self.plan, self.source, self.receivers = plans, soft, plan, source, receivers
        self.rng, self.problem = rng, plans.problem
        problem = plans.problem
        held = plans.widths[plan, :, source]
        self.wide = plans.widths[plan[:, None], :, receivers]  # (J, R, G)
        job, group = self.job, self.group = self.some(*np.nonzero(held), most=problem.tuning.shards_seen)
        self.mine, self.there = held[job, group], self.wide[job, :, group]  # units: (N,), (N, R)
        self.slot, self.least, self.cap = (
            of.take(group) for of in (problem.slots, problem.min_units, problem.max_units)
        )
        self.may_split = plans.shards[plan[job], group] < problem.max_shards.take(group)
        shards = problem.slot_shards.take(self.slot + self.mine)
        self.nbytes, self.columns = problem.nbytes.take(shards), problem.dims.take(shards)
        self.unit = self.columns / self.mine  # columns

        devices = np.concatenate([receivers, source[:, None]], axis=1)
        known = np.maximum(self.cap, np.maximum(self.mine, self.there.max(axis=1)))
        # ms of every width on every receiver and on the source, flat, and where they begin: (N, R + 1)
        self.flat, self.begin = plans.added(plan[job], devices[job], group, known)
        self.whole = self.flat.take(self.begin + self.mine[:, None])  # (N, R + 1)
        self.leaves = self.whole[:, -1]
        of_job = plan[:, None]
        self.now = soft.shares[plan, source][:, None] + soft.shares[of_job, receivers]
        self.load, self.load_there = soft.load[plan, source], soft.load[of_job, receivers]
        self.dims, self.dims_there = plans.dims[plan, source], plans.dims[of_job, receivers]
        self.free, self.free_there = plans.free[plan, source], plans.free[of_job, receivers]

    def fit(self, kept: Ints, joined: Ints, there: Ints) -> NDArray[np.bool_]:
        """Whether what is kept and what is joined (N, P, R) are as wide as shards must and may be, and not too many."""
        least, cap, more = self.least[:, None, None], self.cap[:, None, None], self.may_split[:, None, None]
        fits: NDArray[np.bool_] = (kept == 0) | ((kept >= least) & ((there > 0) | more))
        fits &= joined <= cap
        fits &= joined >= least
        return fits

    def bytes(self, slots: Ints) -> Ints:
        nbytes: Ints = self.problem.slot_bytes.take(slots)
        return nbytes

    def joining(self, begin: Ints, there: Ints, joined: Ints) -> Floats:
        """Ms that a device needs more with `joined` units, at most `cap`, than with `there`."""
        more: Floats = self.flat.take(begin + joined)
        more -= self.flat.take(begin + there)
        return more

    def change(self, amounts: Floats, column: Ints) -> Floats:
        """By how much the objective changes where source and receiver then have these ms and columns (2, 2, N, P, R), which are
        overwritten: (N, P, R). Less is better."""
        change = self.soft.added(amounts, self.plan[self.job][:, None, None])
        change -= self.now[self.job[:, None, None], column]
        return change

    def best(self, change: Floats) -> tuple[Ints, Ints]:
        """The best move of each shard: which shards have one that fits, and its place among P x R."""
        flat = change.reshape(len(change), change.shape[1] * change.shape[2])
        if not flat.size:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing
        best = flat.argmin(axis=1)
        rows = np.flatnonzero(np.isfinite(flat[np.arange(len(flat)), best]))
        return rows, best[rows]

    def moves(self, rows: Ints, out: Ints, column: Ints, take: Ints, into: Ints) -> Moves:
        job = self.job[rows]
        return Moves(self.plan[job], self.source[job], self.group[rows], out, self.receivers[job, column], take, into)

    def some(self, *of: Ints, most: int) -> tuple[Ints, ...]:
        """About `most` entries of each job, drawn at random; the first array has the jobs. Of more shards on a device many are
        alike."""
        job = of[0]
        if len(job) <= most or (count := np.bincount(job)).max() <= most:
            return of
        kept = self.rng.random(len(job)) * count[job] < most
        return tuple(one[kept] for one in of)
