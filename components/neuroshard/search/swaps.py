"""Swaps of shards of two devices, by a linear guess: whole ones, a part for a whole one, and a whole one for a part."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.steps import Steps
from neuroshard.search.view import View

Bools = NDArray[np.bool_]

SEEN, OFFERS = 2048, 512  # that are weighed for a device, about, and of these to choose from, at most
TRIED = 24  # swaps for each piece that a linear guess is made of in full
PARTLY = 0.5  # what a swap is off the level of two devices counts by so much, since parts of it may level them
NARROW = 0.95  # columns count where a device comes to hold so much of the most that any has


class _Offers(NamedTuple):
    """What lies on the receivers of each job (J, S): shards, and what they would do at the source and undo where they are."""

    take: Ints  # item
    column: Ints  # which of the job's receivers has it
    theirs: Ints  # units
    first: Ints  # number of the item's first shard
    least: Ints  # units of a shard of it
    may_split: Bools
    fits: Bools
    comes: Floats  # ms more at the source
    goes: Floats  # ms less where it is
    take_ms: Floats  # what it weighs in the level of the two
    half: Floats  # ms that bring the two to their level
    dims: Ints
    load_there: Floats
    dims_there: Floats
    free_there: Ints  # bytes, without it
    spare: Ints  # bytes left at the source, with it

    @classmethod
    def of(cls, view: View) -> "_Offers | None":
        """All of them; jobs that have fewer are filled up with what does not fit. None where there is nothing."""
        problem, plans, plan = view.problem, view.plans, view.plan
        at, column, item = view.some(*np.nonzero(view.wide), most=SEEN)
        if not len(at) or not len(view.job):
            return None
        count = np.bincount(at, minlength=len(plan))
        pieces = np.arange(int(count.max(initial=0)))
        place = np.minimum((np.cumsum(count) - count)[:, None] + pieces, len(at) - 1)
        take, column, theirs = item.take(place), column.take(place), view.wide[at, column, item].take(place)
        first, rows = problem.first.take(take), np.arange(len(plan))[:, None]
        shards = first + theirs
        problem.price(shards.ravel())
        to = view.receivers[rows, column]
        vectors, dims, nbytes = (
            problem.vectors.take(shards, axis=0),
            problem.dims.take(shards),
            problem.nbytes.take(shards),
        )
        slopes = plans.slope[plan]
        comes = np.matmul(vectors, slopes[rows[:, 0], view.source][..., None])[..., 0]
        goes = np.einsum("jsk,jsk->js", vectors, slopes[rows, to])
        here = plans.widths[plan[:, None], take, view.source[:, None]]
        cap = problem.cap.take(take)
        fits = (pieces < count[:, None]) & (here + theirs <= cap)
        if not problem.free_to_go:
            fits &= problem.allowed[take, view.source[:, None]]
        came = problem.nbytes.take(first + np.minimum(here + theirs, cap)) - view.bytes(here, first)
        load_there = view.load_there[rows, column]
        return cls(
            take=take,
            column=column,
            theirs=theirs,
            first=first,
            least=problem.least.take(take),
            may_split=(here == 0) & (plans.shards[plan[:, None], take] < problem.most.take(take)),
            fits=fits,
            comes=comes,
            goes=goes,
            take_ms=(comes + goes) / 2 + view.level.stick.own_ms * dims,
            half=(view.load[:, None] - load_there) / 2,
            dims=dims,
            load_there=load_there,
            dims_there=view.dims_there[rows, column],
            free_there=view.free_there[rows, column] + nbytes,
            spare=view.free[:, None] - came,
        )

    def thinned(self) -> "_Offers":
        """OFFERS of each job that fit, evenly by what they weigh: where devices hold hundreds of shards, many are alike."""
        order = np.argsort(np.where(self.fits, self.take_ms, np.inf), axis=1, kind="stable")
        fitting = np.maximum(np.count_nonzero(self.fits, axis=1), OFFERS)[:, None]
        return self.chosen(
            np.arange(len(order)), np.take_along_axis(order, np.arange(OFFERS) * fitting // OFFERS, axis=1)
        )

    def chosen(self, job: Ints, best: Ints) -> "_Offers":
        """For each piece those that are tried with it: two (G,) and (G, S) -> (G, S)."""
        place = job[:, None] * self.take.shape[1] + best
        tried: list[Any] = [of_all.take(place) for of_all in self]
        return _Offers(*tried)


def swaps(view: View) -> Steps:
    """The best swap of each piece, as much of the two as levels both devices, or as there is memory for."""
    offers = _Offers.of(view)
    if offers is None:
        nothing = np.zeros(0, dtype=np.int64)
        return view.steps(nothing, nothing, nothing, nothing, nothing)
    if offers.take.shape[1] > OFFERS:
        offers = offers.thinned()
    each = np.arange(len(view.job))[:, None]
    give_ms = view.whole[each, offers.column[view.job]]
    give_ms += view.leaves[:, None]
    give_ms *= 0.5
    give_ms += view.level.stick.own_ms * view.columns[:, None]
    best = _levelling(view, offers, give_ms)
    offers, give_ms = offers.chosen(view.job, best), give_ms[each, best]
    out, into = _parts(view, offers, give_ms)
    change = _change(view, offers, out, into)
    change[~_fit(view, offers, out, into)] = np.inf
    rows, best = view.best(change)
    kind, piece = np.divmod(best, out.shape[1])
    out = np.where(kind == 1, out[rows, piece], view.mine[rows])
    into = np.where(kind == 2, into[rows, piece], offers.theirs[rows, piece])
    return view.steps(rows, out, offers.column[rows, piece], offers.take[rows, piece], into)


def _levelling(view: View, offers: _Offers, give_ms: Floats) -> Ints:
    """Of what lies on the receivers what promises most in exchange for each piece, which weighs so many ms (G, S): (G, TRIED).

    Those that would about level the two devices, and not make one of them the widest.
    """
    job, all_ms = view.job, view.level.stick.all_ms
    if give_ms.shape[1] <= TRIED:
        return np.broadcast_to(np.arange(give_ms.shape[1]), give_ms.shape)
    off = give_ms - (offers.take_ms + offers.half)[job]
    score = np.abs(off, out=off)
    score *= PARTLY
    score += np.where(offers.fits, offers.load_there + offers.half, np.inf)[job]
    if all_ms:
        moved = view.columns[:, None] - offers.dims[job]
        wide = np.maximum(view.dims[job][:, None] - moved, offers.dims_there[job] + moved)
        np.maximum(wide, NARROW * view.level.widest[view.plan[job]][:, None], out=wide)
        wide *= all_ms
        score += wide
    return np.argpartition(score, TRIED, axis=1)[:, :TRIED]


def _parts(view: View, offers: _Offers, give_ms: Floats) -> tuple[Ints, Ints]:
    """How much of each piece levels the two devices where the other shard goes whole, and the reverse, in units: two (G, S)."""
    mine = view.mine[:, None]
    part = (offers.half + offers.take_ms) * mine
    part /= np.maximum(give_ms, 1e-30)
    np.minimum(part, offers.free_there / np.maximum(view.nbytes / view.mine, 1.0)[:, None], out=part)
    np.maximum(part, 1.0, out=part)
    back = (give_ms - offers.half) * offers.theirs
    back /= np.maximum(offers.take_ms, 1e-30)
    np.maximum(back, 1.0, out=back)
    return np.minimum(part, mine).astype(np.int64), np.minimum(back, offers.theirs).astype(np.int64)


def _fit(view: View, offers: _Offers, out: Ints, into: Ints) -> Bools:
    """Whether the whole two, a part for the other, and one for a part of the other may be swapped, and fit: (G, 3, S)."""
    problem, item, first, mine = view.problem, view.item[:, None], view.first[:, None], view.mine[:, None]
    there = view.there[np.arange(len(view.job))[:, None], offers.column]
    cap, released, bytes_there = view.cap[:, None], view.nbytes[:, None], view.bytes(there, first)
    kept, joined, filled, left = mine - out, there + out, there + mine, offers.theirs - into
    grown = problem.nbytes.take(first + np.minimum(filled, cap)) - bytes_there
    arrived = problem.nbytes.take(first + np.minimum(joined, cap)) - bytes_there
    fits = offers.fits & (item != offers.take)
    if not problem.free_to_go:
        fits &= problem.allowed[item, view.receivers[view.job[:, None], offers.column]]
    whole, spare = fits & (filled <= cap), offers.spare + released
    fit = np.empty((len(out), 3, out.shape[1]), dtype=bool)
    np.logical_and(whole, (grown <= offers.free_there) & (spare >= 0), out=fit[:, 0])
    fit[:, 1] = fits & (kept > 0) & view.fit(kept[:, None], joined[:, None], there[:, None])[:, 0]
    fit[:, 1] &= (arrived <= offers.free_there) & (spare - problem.nbytes.take(first + kept) >= 0)
    fit[:, 2] = whole & offers.may_split & (left >= offers.least) & (into >= offers.least) & (left > 0)
    fit[:, 2] &= grown <= offers.free_there - problem.nbytes.take(offers.first + left)
    fit[:, 2] &= problem.nbytes.take(offers.first + into) - released <= view.free[view.job][:, None]
    return fit


def _change(view: View, offers: _Offers, out: Ints, into: Ints) -> Floats:
    """What the yardstick is guessed to change by, of the three: (G, 3, S)."""
    job, mine, own_ms = view.job, view.mine[:, None], view.level.stick.own_ms
    each = np.arange(len(job))[:, None]
    there, begin = view.there[each, offers.column], view.begin[each, offers.column]
    load, all_dims = np.empty((2, 2, len(job), 3, out.shape[1]))
    here_ms, there_ms = load
    gone = view.load[job][:, None] - view.leaves[:, None] + offers.comes
    share = into / offers.theirs
    moved = np.empty(here_ms.shape)
    np.subtract(view.columns[:, None], offers.dims, out=moved[:, 0])
    np.subtract(view.unit[:, None] * out, offers.dims, out=moved[:, 1])
    np.subtract(view.columns[:, None], offers.dims * share, out=moved[:, 2])
    here_ms[:, 0], there_ms[:, 1] = gone, view.joining(begin, there, there + out)
    here_ms[:, 1] = gone + view.flat.take(view.begin[:, -1, None] + (mine - out))
    here_ms[:, 2] = gone + offers.comes * (share - 1)
    arrives = view.joining(begin, there, np.minimum(there + mine, view.cap[:, None]))
    there_ms[:, 0], there_ms[:, 2] = arrives - offers.goes, arrives - offers.goes * share
    there_ms[:, 1] -= offers.goes
    there_ms += offers.load_there[:, None]
    moved_ms = own_ms * moved
    here_ms -= moved_ms
    there_ms += moved_ms
    np.subtract(view.dims[job][:, None, None], moved, out=all_dims[0])
    np.add(offers.dims_there[:, None], moved, out=all_dims[1])
    return view.change(load, all_dims, offers.column[:, None])
