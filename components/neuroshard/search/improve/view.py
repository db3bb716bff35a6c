"""What lies on the devices that steps are sought from, and what it would add elsewhere, by a linear guess.

Each array operation is about all jobs: a job is a plan, and a device of it that steps are sought from.
"""

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.steps import Steps
from neuroshard.search.problem.plans import Level, Plans

# Of each device that steps are sought for, about: 1,900 tables on 16 devices get as far in a third of the time
PIECES = 64


class View:
    """What the sources hold (G pieces of J jobs), and what every width of it is guessed to add to every receiver (R of
    each job), and to the source."""

    def __init__(
        self, plans: Plans, level: Level, plan: Ints, source: Ints, receivers: Ints, rng: np.random.Generator
    ) -> None:
        self.plans, self.level, self.plan, self.source, self.receivers = plans, level, plan, source, receivers
        self.rng, self.problem = rng, plans.problem
        problem = plans.problem
        held = plans.widths[plan, :, source]
        self.wide = plans.widths[plan[:, None], :, receivers]  # (J, R, I)
        job, item = self.job, self.item = self.some(*np.nonzero(held), most=PIECES)
        self.mine, self.there = held[job, item], self.wide[job, :, item]  # (G,), (G, R)
        self.slot, self.least, self.cap = (of.take(item) for of in (problem.slots, problem.least, problem.cap))
        self.room_for_more = plans.shards[plan[job], item] < problem.most.take(item)
        shards = problem.slot_shards.take(self.slot + self.mine)
        self.nbytes, self.columns = problem.nbytes.take(shards), problem.dims.take(shards).astype(np.float64)
        self.unit = self.columns / self.mine

        devices = np.concatenate([receivers, source[:, None]], axis=1)
        known = np.maximum(self.cap, np.maximum(self.mine, self.there.max(axis=1)))
        # ms of every width on every receiver, and on the source, and where they begin: (G, R + 1)
        self.flat, self.begin = plans.added(plan[job], devices[job], item, known)
        self.whole = self.flat.take(self.begin + self.mine[:, None])  # (G, R + 1)
        self.leaves = self.whole[:, -1]
        of_job = plan[:, None]
        self.counted = level.counts[plan, source][:, None] + level.counts[of_job, receivers]
        self.load, self.load_there = level.load[plan, source], level.load[of_job, receivers]
        self.dims, self.dims_there = plans.dims[plan, source], plans.dims[of_job, receivers]
        self.free, self.free_there = plans.free[plan, source], plans.free[of_job, receivers]

    def fit(self, kept: Ints, joined: Ints, there: Ints) -> NDArray[np.bool_]:
        """Whether parts (G, P, S) are as wide as they must and may be, and not too many."""
        least, cap, more = self.least[:, None, None], self.cap[:, None, None], self.room_for_more[:, None, None]
        fits: NDArray[np.bool_] = (kept == 0) | ((kept >= least) & ((there > 0) | more))
        fits &= joined <= cap
        fits &= joined >= least
        return fits

    def bytes(self, slots: Ints) -> Ints:
        nbytes: Ints = self.problem.slot_bytes.take(slots)
        return nbytes

    def joining(self, begin: Ints, there: Ints, joined: Ints) -> Floats:
        """Ms that a device is guessed to need more where it has `joined` units instead of `there`, at most `cap`."""
        more: Floats = self.flat.take(begin + joined)
        more -= self.flat.take(begin + there)
        return more

    def change(self, amounts: Floats, column: Ints) -> Floats:
        """What the yardstick changes by where source and receiver come to so many ms, and columns, negative is better:
        (2, 2, G, P, S), overwritten -> (G, P, S)."""
        level, plan, job = self.level, self.plan, self.job
        change = level.soft(amounts, plan[job][:, None, None])
        change -= self.counted[job[:, None, None], column]
        return change

    def best(self, change: Floats) -> tuple[Ints, Ints]:
        """Of each piece the best of its steps: which pieces have one that fits, and its place."""
        flat = change.reshape(len(change), change.shape[1] * change.shape[2])
        if not flat.size:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing
        best = flat.argmin(axis=1)
        rows = np.flatnonzero(np.isfinite(flat[np.arange(len(flat)), best]))
        return rows, best[rows]

    def steps(self, rows: Ints, out: Ints, column: Ints, take: Ints, into: Ints) -> Steps:
        job = self.job[rows]
        return Steps(self.plan[job], self.source[job], self.item[rows], out, self.receivers[job, column], take, into)

    def some(self, *of: Ints, most: int) -> tuple[Ints, ...]:
        """About `most` of what there is of each job, drawn by chance: where a device holds more, many are alike. The first
        tells the job of each."""
        job = of[0]
        if len(job) <= most or (count := np.bincount(job)).max() <= most:
            return of
        kept = self.rng.random(len(job)) * count[job] < most
        return tuple(one[kept] for one in of)
