"""Swaps of shards of two devices, by a linear guess: whole ones, a part for a whole one, and a whole one for a part."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.steps import Steps
from neuroshard.search.improve.view import View

Bools = NDArray[np.bool_]

SEEN, OFFERS = 2048, 512  # that are weighed for a device, about, and of these to choose from, at most
TRIED = 24  # swaps for each piece that a linear guess is made of in full
PARTLY = 0.5  # what a swap is off the level of two devices counts by so much, since parts of it may level them
NARROW = 0.95  # columns count where a device comes to hold so much of the most that any has


class _Offers(NamedTuple):
    """What lies on the receivers of each job (J, S): shards, and what they would do at the source and undo where they are."""

    of_a_kind: tuple[Ints, Bools, Floats]  # all that follows, for some of the offers to be taken in three goes
    take: Ints  # item
    column: Ints  # which of the job's receivers has it
    theirs: Ints  # units
    slot: Ints  # of no units of the item
    least: Ints  # units of a shard of it
    free_there: Ints  # bytes, without it
    spare: Ints  # bytes left at the source, with it
    may_split: Bools
    fits: Bools
    comes: Floats  # ms more at the source
    goes: Floats  # ms less where it is
    take_ms: Floats  # what it weighs in the level of the two
    half: Floats  # ms that bring the two to their level
    dims: Floats
    load_there: Floats
    dims_there: Floats

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
        rows, of_job, source = np.arange(len(plan))[:, None], plan[:, None], view.source[:, None]
        slot, cap = problem.slots.take(take), problem.cap.take(take)
        shards = problem.slot_shards.take(slot + theirs)
        here, to = plans.widths[of_job, take, source], view.receivers[rows, column]
        filled, load_there = here + theirs, view.load_there[rows, column]
        came = view.bytes(slot + np.minimum(filled, cap)) - view.bytes(slot + here)

        of_a_kind = ints, bools, floats = (
            np.empty((7, *take.shape), dtype=np.int64),
            np.empty((2, *take.shape), dtype=bool),
            np.empty((7, *take.shape)),
        )
        ints[0], ints[1], ints[2], ints[3], ints[4] = take, column, theirs, slot, problem.least.take(take)
        np.add(view.free_there[rows, column], problem.nbytes.take(shards), out=ints[5])
        np.subtract(view.free[:, None], came, out=ints[6])
        np.logical_and(here == 0, plans.shards[of_job, take] < problem.most.take(take), out=bools[0])
        np.logical_and(pieces < count[:, None], filled <= cap, out=bools[1])
        if not problem.free_to_go:
            bools[1] &= problem.allowed[take, source]
        comes, goes, take_ms = floats[:3]
        comes[:] = plans.added_each(of_job, source, take, theirs)
        goes[:] = plans.added_each(of_job, to, take, theirs)
        floats[4] = problem.dims.take(shards)
        np.add(comes, goes, out=take_ms)
        take_ms /= 2
        take_ms += view.level.stick.own_ms * floats[4]
        np.subtract(view.load[:, None], load_there, out=floats[3])
        floats[3] /= 2
        floats[5], floats[6] = load_there, view.dims_there[rows, column]
        return cls(of_a_kind, *ints, *bools, *floats)

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
        ints, bools, floats = of_a_kind = (
            self.of_a_kind[0].reshape(7, -1).take(place, axis=1),
            self.of_a_kind[1].reshape(2, -1).take(place, axis=1),
            self.of_a_kind[2].reshape(7, -1).take(place, axis=1),
        )
        return _Offers(of_a_kind, *ints, *bools, *floats)


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
    change, fits = _changes(view, offers, out, into)
    change[~fits] = np.inf
    rows, best = view.best(change)
    kind, piece = np.divmod(best, out.shape[1])
    out = np.where(kind == 1, out[rows, piece], view.mine[rows])
    into = np.where(kind == 2, into[rows, piece], offers.theirs[rows, piece])
    return view.steps(rows, out, offers.column[rows, piece], offers.take[rows, piece], into)


def _levelling(view: View, offers: _Offers, give_ms: Floats) -> Ints:
    """Of what lies on the receivers what promises most in all-to-all for each piece, which weighs so many ms (G, S): (G, TRIED).

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


def _changes(view: View, offers: _Offers, out: Ints, into: Ints) -> tuple[Floats, Bools]:
    """What the yardstick is guessed to change by where the whole two, a part for the other, and one for a part of the other are
    swapped, and whether these may be swapped, and fit: two (G, 3, S)."""
    each, mine, slot, cap = np.arange(len(view.job))[:, None], view.mine[:, None], view.slot[:, None], view.cap[:, None]
    there, kept = view.there[each, offers.column], mine - out
    filled, joined = there + mine, there + out
    slot_there, slot_kept = slot + there, slot + kept
    slot_filled, slot_joined = slot + np.minimum(filled, cap), slot + np.minimum(joined, cap)

    problem, item, released = view.problem, view.item[:, None], view.nbytes[:, None]
    left, room = offers.theirs - into, offers.free_there + view.bytes(slot_there)
    grown, spare = view.bytes(slot_filled), offers.spare + released
    fits = offers.fits & (item != offers.take)
    if not problem.free_to_go:
        fits &= problem.allowed[item, view.receivers[view.job[:, None], offers.column]]
    whole = fits & (filled <= cap)
    fit = np.empty((len(out), 3, out.shape[1]), dtype=bool)
    np.logical_and(whole, (grown <= room) & (spare >= 0), out=fit[:, 0])
    least = view.least[:, None]
    np.logical_and(fits, (np.minimum(kept, joined) >= least) & (joined <= cap), out=fit[:, 1])
    fit[:, 1] &= (there > 0) | view.room_for_more[:, None]
    fit[:, 1] &= (view.bytes(slot_joined) <= room) & (spare >= view.bytes(slot_kept))
    np.logical_and(whole & offers.may_split, np.minimum(left, into) >= offers.least, out=fit[:, 2])
    fit[:, 2] &= grown <= room - view.bytes(offers.slot + left)
    fit[:, 2] &= view.bytes(offers.slot + into) - released <= view.free[view.job][:, None]

    # ms and columns at the source, and at the receiver
    load, dims = amounts = np.empty((2, 2, *fit.shape))
    here_ms, there_ms = load
    begin = view.begin[each, offers.column] - slot
    gone = (view.load[view.job] - view.leaves)[:, None] + offers.comes
    share = into / offers.theirs
    moved = np.empty(fit.shape)
    np.subtract(view.columns[:, None], offers.dims, out=moved[:, 0])
    np.subtract(view.unit[:, None] * out, offers.dims, out=moved[:, 1])
    np.subtract(view.columns[:, None], offers.dims * share, out=moved[:, 2])
    here_ms[:, 0] = gone
    np.add(gone, view.flat.take(view.begin[:, -1, None] + kept), out=here_ms[:, 1])
    np.add(gone, offers.comes * (share - 1), out=here_ms[:, 2])
    before = view.flat.take(begin + slot_there)
    np.subtract(view.flat.take(begin + slot_joined), before, out=there_ms[:, 1])
    arrives = view.flat.take(begin + slot_filled) - before
    np.subtract(arrives, offers.goes, out=there_ms[:, 0])
    np.subtract(arrives, offers.goes * share, out=there_ms[:, 2])
    there_ms[:, 1] -= offers.goes
    there_ms += offers.load_there[:, None]
    moved_ms = view.level.stick.own_ms * moved
    here_ms -= moved_ms
    there_ms += moved_ms
    np.subtract(view.dims[view.job][:, None, None], moved, out=dims[0])
    np.add(offers.dims_there[:, None], moved, out=dims[1])
    return view.change(amounts, offers.column[:, None]), fit
