"""All steps away from a device, ranked by a linear guess: the most promising of many plans at once.

A step takes `out` units of item `give` from a device to another, `to`, and `into` units of item `take` (or none, -1) from
there: a move of a table or of any part of it, a swap, or a swap for a part. What an item has on the other device already, the
units join. A step changes two devices only, so these are all that is asked of the compute net.

Each array operation is about all jobs: a job is a plan, and a device of it that steps are sought from.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.plans import Level, Plans

RECEIVERS = 24  # devices that are tried at a step, the least loaded ones
TRIED = 24  # swaps for each piece that a linear guess is made of in full
PARTLY = 0.5  # what a swap is off the level of two devices counts by so much, since parts of it may level them
NARROW = 0.95  # columns count where a device comes to hold so much of the most that any has


@dataclass(frozen=True)
class Steps:
    """C steps, a number each; those of a job stand together."""

    plan: Ints
    source: Ints
    give: Ints
    out: Ints
    to: Ints
    take: Ints
    into: Ints

    def __len__(self) -> int:
        return len(self.give)

    def __add__(self, other: "Steps") -> "Steps":
        return Steps(*(np.concatenate([one, more]) for one, more in zip(self._all, other._all, strict=True)))

    def __getitem__(self, chosen: Ints) -> "Steps":
        return Steps(*(one[chosen] for one in self._all))

    @property
    def _all(self) -> tuple[Ints, ...]:
        return self.plan, self.source, self.give, self.out, self.to, self.take, self.into


def promising(plans: Plans, level: Level, plan: Ints, source: Ints) -> Steps:
    """Of each table of each job (J,) the move and the swap with the best linear guess, of those that fit."""
    devices = plans.problem.devices
    receivers = (source[:, None] + np.arange(1, devices)) % devices
    if devices - 1 > RECEIVERS:
        least = np.argpartition(level.load[plan[:, None], receivers], RECEIVERS, axis=1)[:, :RECEIVERS]
        receivers = np.take_along_axis(receivers, least, axis=1)
    view = _View(plans, level, plan, source, receivers)
    return view.moves() + view.swaps()


class _View:
    """What the sources hold (G pieces of J jobs), and what every width of it is guessed to add to every receiver (R of
    each job), and to the source."""

    def __init__(self, plans: Plans, level: Level, plan: Ints, source: Ints, receivers: Ints) -> None:
        self.plans, self.level, self.plan, self.source, self.receivers = plans, level, plan, source, receivers
        problem = self.problem = plans.problem
        held = plans.widths[plan, :, source]
        self.wide = plans.widths[plan[:, None], :, receivers]  # (J, R, I)
        job, item = self.job, self.item = np.nonzero(held)
        self.mine, self.there = held[job, item], self.wide[job, :, item]  # (G,), (G, R)
        self.first, self.least, self.cap = problem.first[item], problem.least[item], problem.cap[item]
        self.room_for_more = plans.shards[plan[job], item] < problem.most[item]
        self.nbytes = problem.nbytes[self.first + self.mine]
        self.columns = problem.dims[self.first + self.mine].astype(np.float64)
        self.unit = self.columns / self.mine

        known = np.maximum(self.cap, np.maximum(self.mine, self.there.max(axis=1)))
        width = np.arange(int(known.max(initial=0)) + 1)
        shards = np.where((width > 0) & (width <= known[:, None]), self.first[:, None] + width, 0)
        devices = np.concatenate([receivers, source[:, None]], axis=1)
        self.added = plans.added(plan[job], devices[job], shards)  # (G, R + 1, U)
        self.longest = len(width)
        self.begin = self.longest * np.arange(self.added.shape[0] * self.added.shape[1]).reshape(self.added.shape[:2])
        self.flat = self.added.reshape(-1)
        self.whole = self.flat[self.begin + self.mine[:, None]]  # (G, R + 1)
        self.leaves = self.whole[:, -1]
        of_job = plan[:, None]
        self.load, self.load_there = level.load[plan, source], level.load[of_job, receivers]
        self.dims, self.dims_there = plans.dims[plan, source], plans.dims[of_job, receivers]
        self.free, self.free_there = plans.free[plan, source], plans.free[of_job, receivers]

    def moves(self) -> Steps:
        """Moves of whole shards, and of those parts of them which level the two devices in ms or in columns."""
        problem, job, mine = self.problem, self.job, self.mine[:, None]
        own, unit = self.level.stick.own_ms, self.unit[:, None]
        unit_ms = (self.whole[:, :-1] + self.leaves[:, None]) / mine + 2 * own * unit
        level = (self.load[:, None] - self.load_there)[job] / np.maximum(unit_ms, 1e-30)
        even = (self.dims[:, None] - self.dims_there)[job] / (2 * unit)
        parts = np.empty((len(job), 6, level.shape[1]))
        parts[:, 0], parts[:, 1], parts[:, 2], parts[:, 3], parts[:, 5] = mine, level, level + 1, even, 0.5 * mine
        np.minimum(level, even, out=parts[:, 4])
        np.maximum(parts, 1.0, out=parts)
        np.minimum(parts, mine[:, None], out=parts)
        out = parts.astype(np.int64)  # (G, 6, R)

        there, first = self.there[:, None], self.first[:, None, None]
        kept, joined = mine[:, None] - out, there + out
        fits = self._fit(kept, joined, there)
        arrived = problem.nbytes[first + np.minimum(joined, self.cap[:, None, None])] - self._bytes(there, first)
        fits &= arrived <= self.free_there[job][:, None]
        if not problem.free_to_go:
            fits &= problem.allowed[self.item[:, None], self.receivers[job]][:, None]
        moved = unit[:, None] * out
        moved_ms = own * moved
        load, dims = np.empty((2, 2, *out.shape))
        np.take(self.flat, self.begin[:, -1, None, None] + kept, out=load[0])
        load[0] += (self.load[job] - self.leaves)[:, None, None] - moved_ms
        load[1] = self._joining(self.begin[:, None, :-1], there, joined)
        load[1] += self.load_there[job][:, None] + moved_ms
        np.subtract(self.dims[job][:, None, None], moved, out=dims[0])
        np.add(self.dims_there[job][:, None], moved, out=dims[1])
        change = self._change(load, dims, np.arange(out.shape[2]))
        change[~fits] = np.inf
        rows, best = self._best(change)
        part, column = np.divmod(best, out.shape[2])
        none = np.full(len(rows), -1)
        return self._steps(rows, out[rows, part, column], column, none, np.zeros_like(none))

    def swaps(self) -> Steps:
        """Swaps of whole shards, of a part for a whole one, and of a whole one for a part: as much as levels both devices,
        or as there is memory for."""
        problem, plans, plan, job = self.problem, self.plans, self.plan, self.job
        # what lies on the receivers (J, S), filled up with what is no shard
        at, column, item = np.nonzero(self.wide)
        count = np.bincount(at, minlength=len(plan))
        pieces = np.arange(int(count.max(initial=0)))
        place = np.minimum((np.cumsum(count) - count)[:, None] + pieces, len(at) - 1)
        if not len(at) or not len(job):
            nothing = np.zeros(0, dtype=np.int64)
            return self._steps(nothing, nothing, nothing, nothing, nothing)
        take, column, theirs = item[place], column[place], self.wide[at, column, item][place]
        first, rows = problem.first[take], np.arange(len(plan))[:, None]
        shards = first + theirs
        problem.price(shards.ravel())
        to = self.receivers[rows, column]
        vectors, dims, nbytes = problem.vectors[shards], problem.dims[shards], problem.nbytes[shards]
        slopes = plans.slope[plan]
        comes = np.matmul(vectors, slopes[rows[:, 0], self.source][..., None])[..., 0]
        goes = np.einsum("jsk,jsk->js", vectors, slopes[rows, to])
        here = plans.widths[plan[:, None], take, self.source[:, None]]
        least, cap = problem.least[take], problem.cap[take]
        may_split = (here == 0) & (plans.shards[plan[:, None], take] < problem.most[take])
        fits = (pieces < count[:, None]) & (here + theirs <= cap)
        if not problem.free_to_go:
            fits &= problem.allowed[take, self.source[:, None]]
        came = problem.nbytes[first + np.minimum(here + theirs, cap)] - self._bytes(here, first)
        load_there, free_there = self.load_there[rows, column], self.free_there[rows, column] + nbytes
        half, dims_there = (self.load[:, None] - load_there) / 2, self.dims_there[rows, column]
        own = self.level.stick.own_ms
        take_ms = (comes + goes) / 2 + own * dims
        spare = self.free[:, None] - came  # at the source, once it is here

        # with what the sources hold, of which each is tried with those that would about level the two devices (G, S)
        mine, leaves = self.mine[:, None], self.leaves[:, None]
        each = np.arange(len(job))[:, None]
        give_ms = self.whole[each, column[job]]
        give_ms += leaves
        give_ms *= 0.5
        give_ms += own * self.columns[:, None]
        best = self._levelling(give_ms - (take_ms + half)[job], load_there + half, dims, dims_there, fits)
        of_job = job[:, None]
        take, column, theirs, first, least, may_split = (
            a[of_job, best] for a in (take, column, theirs, first, least, may_split)
        )
        fits, comes, goes, take_ms, half = (a[of_job, best] for a in (fits, comes, goes, take_ms, half))
        dims, load_there, dims_there = (a[of_job, best] for a in (dims, load_there, dims_there))
        free_there, spare, free = free_there[of_job, best], spare[of_job, best], self.free[of_job]
        give_ms, there, begin = give_ms[each, best], self.there[each, column], self.begin[each, column]
        own_first = self.first[:, None]
        bytes_there = self._bytes(there, own_first)
        part = (half + take_ms) * mine
        part /= np.maximum(give_ms, 1e-30)
        np.minimum(part, free_there / np.maximum(self.nbytes / self.mine, 1.0)[:, None], out=part)
        np.maximum(part, 1.0, out=part)
        out = np.minimum(part, mine).astype(np.int64)
        back = (give_ms - half) * theirs
        back /= np.maximum(take_ms, 1e-30)
        np.maximum(back, 1.0, out=back)
        into = np.minimum(back, theirs).astype(np.int64)

        kept, joined, filled = mine - out, there + out, there + mine
        left = theirs - into
        capped = np.minimum(filled, self.cap[:, None])
        grown = problem.nbytes[own_first + capped] - bytes_there
        fits &= self.item[:, None] != take
        if not problem.free_to_go:
            fits &= problem.allowed[self.item[:, None], self.receivers[job[:, None], column]]
        fit = np.empty((len(job), 3, fits.shape[1]), dtype=bool)
        whole = fits & (filled <= self.cap[:, None])
        released = self.nbytes[:, None]
        np.logical_and(whole, (grown <= free_there) & (spare + released >= 0), out=fit[:, 0])
        arrived = problem.nbytes[own_first + np.minimum(joined, self.cap[:, None])] - bytes_there
        fit[:, 1] = fits & (kept > 0) & self._fit(kept[:, None], joined[:, None], there[:, None])[:, 0]
        fit[:, 1] &= (arrived <= free_there) & (spare + released - problem.nbytes[own_first + kept] >= 0)
        fit[:, 2] = whole & may_split & (left >= least) & (into >= least) & (left > 0)
        fit[:, 2] &= grown <= free_there - problem.nbytes[first + left]
        fit[:, 2] &= problem.nbytes[first + into] - released <= free

        load, all_dims = np.empty((2, 2, *fit.shape))
        here_ms, there_ms = load
        gone = self.load[job][:, None] - leaves + comes
        share = into / theirs
        moved = np.empty(fit.shape)
        np.subtract(self.columns[:, None], dims, out=moved[:, 0])
        np.subtract(self.unit[:, None] * out, dims, out=moved[:, 1])
        np.subtract(self.columns[:, None], dims * share, out=moved[:, 2])
        here_ms[:, 0], there_ms[:, 1] = gone, self._joining(begin, there, joined)
        here_ms[:, 1] = gone + self.flat[self.begin[:, -1, None] + kept]
        here_ms[:, 2] = gone + comes * (share - 1)
        arrives = self._joining(begin, there, capped)
        there_ms[:, 0], there_ms[:, 2] = arrives - goes, arrives - goes * share
        there_ms[:, 1] -= goes
        there_ms += load_there[:, None]
        moved_ms = own * moved
        here_ms -= moved_ms
        there_ms += moved_ms
        np.subtract(self.dims[job][:, None, None], moved, out=all_dims[0])
        np.add(dims_there[:, None], moved, out=all_dims[1])
        change = self._change(load, all_dims, column[:, None])
        change[~fit] = np.inf
        rows, best = self._best(change)
        kind, piece = np.divmod(best, fit.shape[2])
        out = np.where(kind == 1, out[rows, piece], self.mine[rows])
        into = np.where(kind == 2, into[rows, piece], theirs[rows, piece])
        return self._steps(rows, out, column[rows, piece], take[rows, piece], into)

    def _levelling(self, off: Floats, level: Floats, dims: Ints, dims_there: Floats, fits: NDArray[np.bool_]) -> Ints:
        """Of what lies on the receivers (J, S) what promises most in exchange for each piece (G, TRIED), by how many ms a swap is
        `off` (G, S) the `level` of the two devices (J, S), and by columns."""
        if off.shape[1] <= TRIED:
            return np.broadcast_to(np.arange(off.shape[1]), off.shape)
        job, all_ms = self.job, self.level.stick.all_ms
        score = np.abs(off, out=off)
        score *= PARTLY
        score += np.where(fits, level, np.inf)[job]
        if all_ms:
            moved = self.columns[:, None] - dims[job]
            wide = np.maximum(self.dims[job][:, None] - moved, dims_there[job] + moved)
            np.maximum(wide, NARROW * self.level.widest[self.plan[job]][:, None], out=wide)
            wide *= all_ms
            score += wide
        return np.argpartition(score, TRIED, axis=1)[:, :TRIED]

    def _fit(self, kept: Ints, joined: Ints, there: Ints) -> NDArray[np.bool_]:
        """Whether parts (G, P, S) are as wide as they must and may be, and not too many."""
        least, cap, more = self.least[:, None, None], self.cap[:, None, None], self.room_for_more[:, None, None]
        fits: NDArray[np.bool_] = (kept == 0) | ((kept >= least) & ((there > 0) | more))
        fits &= joined <= cap
        fits &= joined >= least
        return fits

    def _bytes(self, units: Ints, first: Ints) -> Ints:
        return self.problem.nbytes[np.where(units > 0, first + units, 0)]

    def _joining(self, begin: Ints, there: Ints, joined: Ints) -> Floats:
        """Ms that a device is guessed to need more where it has `joined` units instead of `there`."""
        more: Floats = self.flat[begin + np.minimum(joined, self.longest - 1)]
        more -= self.flat[begin + there]
        return more

    def _change(self, load: Floats, dims: Floats, column: Ints) -> Floats:
        """What the yardstick changes by where source and receiver come to so many ms and columns, negative is better: two
        (2, G, P, S), overwritten -> (G, P, S)."""
        level, plan, job = self.level, self.plan, self.job
        change = level.soft(load, dims, plan[job][:, None, None])
        before = level.before(plan, self.source)[:, None] + level.before(plan[:, None], self.receivers)
        change -= before[job[:, None, None], column]
        return change

    def _best(self, change: Floats) -> tuple[Ints, Ints]:
        """Of each piece the best of its steps: which pieces have one that fits, and its place."""
        flat = change.reshape(len(change), change.shape[1] * change.shape[2])
        if not flat.size:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing
        best = flat.argmin(axis=1)
        rows = np.flatnonzero(np.isfinite(flat[np.arange(len(flat)), best]))
        return rows, best[rows]

    def _steps(self, rows: Ints, out: Ints, column: Ints, take: Ints, into: Ints) -> Steps:
        job = self.job[rows]
        return Steps(self.plan[job], self.source[job], self.item[rows], out, self.receivers[job, column], take, into)


@dataclass(frozen=True)
class Priced:
    """C steps by the cost model: what each changes the yardstick by, and the two devices after it, the source first."""

    change: Floats  # (C,)
    sums: Floats  # (2, C, K)
    dims: Floats  # (2, C)
    compute: Floats  # (2, C)


def price(plans: Plans, level: Level, steps: Steps) -> Priced:
    """The steps, by the cost model's compute ms of the two devices."""
    problem, count, plan = plans.problem, len(steps), steps.plan
    devices = np.stack([steps.source, steps.to])
    sums, dims = plans.sums[plan, devices], plans.dims[plan, devices]
    taking = np.flatnonzero(steps.take >= 0)
    for on, items, units, rows in (
        (0, steps.give, -steps.out, slice(None)),
        (1, steps.give, steps.out, slice(None)),
        (0, steps.take[taking], steps.into[taking], taking),
        (1, steps.take[taking], -steps.into[taking], taking),
    ):
        before = plans.widths[plan[rows], items, devices[on, rows]]
        old, new = problem.numbers(items, before), problem.numbers(items, before + units)
        problem.price(new)
        sums[on, rows] += problem.vectors[new] - problem.vectors[old]
        dims[on, rows] += problem.dims[new] - problem.dims[old]
    compute = problem.model.compute_ms(sums.reshape(2 * count, -1)).reshape(2, count)
    compute = np.where(dims > 0, compute, 0.0)
    load = level.stick.load(compute, dims)
    change = level.soft(load, dims.copy(), plan)
    for device in devices:
        change -= level.before(plan, device)
    return Priced(change, sums, dims, compute)


def changes(steps: Steps, chosen: int) -> tuple[Ints, Ints, Ints]:
    """What one of the steps changes: items, devices, and how many units more or fewer."""
    source, give, out, to = steps.source[chosen], steps.give[chosen], steps.out[chosen], steps.to[chosen]
    changed = [(give, source, -out), (give, to, out)]
    if steps.take[chosen] >= 0:
        changed += [(steps.take[chosen], source, steps.into[chosen]), (steps.take[chosen], to, -steps.into[chosen])]
    items, devices, units = np.array(changed).T
    return items, devices, units
