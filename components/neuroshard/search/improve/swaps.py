"""The best swaps of shards of two devices: two whole shards, or a whole one for a part of the other.

They are ranked by a linear estimate, as single moves are; the cost model prices only the best swap of each shard.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.moves import Moves
from neuroshard.search.improve.neighborhood import Neighborhood

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Offers:
    """S shards on the receivers of each job, (J, S) each: what a swap would bring to the source, and relieve the receiver of."""

    take: Ints  # table group
    column: Ints  # which of the job's receivers holds it
    theirs: Ints  # units
    slot: Ints  # slot of no units of the group
    least: Ints  # units of a shard of it
    free_there: Ints  # bytes on the receiver, without it
    spare: Ints  # bytes left on the source, with it
    may_split: Bools
    fits: Bools
    comes: Floats  # ms more on the source
    goes: Floats  # ms less on the receiver
    take_ms: Floats  # mean of the two, with its columns
    half: Floats  # half of the ms by which the source is slower than the receiver
    dims: Floats  # columns
    load_there: Floats  # ms of the receiver
    dims_there: Floats  # columns of the receiver

    @classmethod
    def of(cls, near: Neighborhood) -> "Offers | None":
        """All of them; jobs that have fewer are padded with shards that do not fit. None if there are none."""
        problem, plans, plan = near.problem, near.plans, near.plan
        at, column, group = near.some(*np.nonzero(near.wide), most=problem.tuning.offers_seen)
        if not len(at) or not len(near.job):
            return None
        count = np.bincount(at, minlength=len(plan))
        number = np.arange(int(count.max(initial=0)))
        place = np.minimum((np.cumsum(count) - count)[:, None] + number, len(at) - 1)
        take, column, theirs = group.take(place), column.take(place), near.wide[at, column, group].take(place)
        rows, of_job, source = np.arange(len(plan))[:, None], plan[:, None], near.source[:, None]
        slot, cap = problem.slots.take(take), problem.max_units.take(take)
        shards = problem.slot_shards.take(slot + theirs)
        here, to = plans.widths[of_job, take, source], near.receivers[rows, column]
        filled, load_there = here + theirs, near.load_there[rows, column]
        grows = near.bytes(slot + np.minimum(filled, cap)) - near.bytes(slot + here)
        fits = (number < count[:, None]) & (filled <= cap)
        if not problem.any_device:
            fits &= problem.allowed[take, source]
        comes = plans.added_each(of_job, source, take, theirs)
        goes = plans.added_each(of_job, to, take, theirs)
        dims = problem.dims.take(shards)
        return cls(
            take=take,
            column=column,
            theirs=theirs,
            slot=slot,
            least=problem.min_units.take(take),
            free_there=near.free_there[rows, column] + problem.nbytes.take(shards),
            spare=near.free[:, None] - grows,
            may_split=(here == 0) & (plans.shards[of_job, take] < problem.max_shards.take(take)),
            fits=fits,
            comes=comes,
            goes=goes,
            take_ms=(comes + goes) / 2 + near.soft.objective.own_ms * dims,
            half=(near.load[:, None] - load_there) / 2,
            dims=dims,
            load_there=load_there,
            dims_there=near.dims_there[rows, column],
        )

    def chosen(self, job: Ints, best: Ints) -> "Offers":
        """The offers at these places for each shard of a source: `job` (N,) and `best` (N, S) -> (N, S) each."""
        place = job[:, None] * self.take.shape[1] + best
        return Offers(*(getattr(self, field.name).take(place) for field in fields(self)))


def swaps(near: Neighborhood) -> Moves:
    """The best swap of each shard: both whole, or of one as much as levels the two devices, or as there is memory for."""
    offers = Offers.of(near)
    if offers is None:
        nothing = np.zeros(0, dtype=np.int64)
        return near.moves(nothing, nothing, nothing, nothing, nothing)
    each = np.arange(len(near.job))[:, None]
    give_ms = near.whole[each, offers.column[near.job]]
    give_ms += near.leaves[:, None]
    give_ms *= 0.5
    give_ms += near.soft.objective.own_ms * near.columns[:, None]
    best = _levelling(near, offers, give_ms)
    offers, give_ms = offers.chosen(near.job, best), give_ms[each, best]
    out, into = _parts(near, offers, give_ms)
    change, fits = _changes(near, offers, out, into)
    change[~fits] = np.inf
    rows, best = near.best(change)
    kind, offer = np.divmod(best, out.shape[1])
    out = np.where(kind == 1, out[rows, offer], near.mine[rows])
    into = np.where(kind == 2, into[rows, offer], offers.theirs[rows, offer])
    return near.moves(rows, out, offers.column[rows, offer], offers.take[rows, offer], into)


def _levelling(near: Neighborhood, offers: Offers, give_ms: Floats) -> Ints:
    """The places of the best offers in exchange for each shard, which takes `give_ms` (N, S) along: (N, swaps_estimated).

    These come closest to levelling the two devices, and make neither the widest.
    """
    job, all_ms, tuning = near.job, near.soft.objective.all_ms, near.problem.tuning
    if give_ms.shape[1] <= tuning.swaps_estimated:
        return np.broadcast_to(np.arange(give_ms.shape[1]), give_ms.shape)
    off = give_ms - (offers.take_ms + offers.half)[job]
    score = np.abs(off, out=off)
    score *= tuning.unlevel
    score += np.where(offers.fits, offers.load_there + offers.half, np.inf)[job]
    if all_ms:
        moved = near.columns[:, None] - offers.dims[job]
        wide = np.maximum(near.dims[job][:, None] - moved, offers.dims_there[job] + moved)
        np.maximum(wide, near.soft.widest[near.plan[job]][:, None], out=wide)
        wide *= all_ms
        score += wide
    return np.argpartition(score, tuning.swaps_estimated, axis=1)[:, : tuning.swaps_estimated]


def _parts(near: Neighborhood, offers: Offers, give_ms: Floats) -> tuple[Ints, Ints]:
    """Units of each shard that level the two devices if the other one moves whole, and the reverse: two (N, S)."""
    mine = near.mine[:, None]
    part = (offers.half + offers.take_ms) * mine
    part /= np.maximum(give_ms, 1e-30)
    np.minimum(part, offers.free_there / np.maximum(near.nbytes / near.mine, 1.0)[:, None], out=part)
    np.maximum(part, 1.0, out=part)
    back = (give_ms - offers.half) * offers.theirs
    back /= np.maximum(offers.take_ms, 1e-30)
    np.maximum(back, 1.0, out=back)
    return np.minimum(part, mine).astype(np.int64), np.minimum(back, offers.theirs).astype(np.int64)


def _changes(near: Neighborhood, offers: Offers, out: Ints, into: Ints) -> tuple[Floats, Bools]:
    """Estimated change of the objective by three swaps: of both whole, of a part for the other, of one for a part of the other;
    and whether each is allowed and fits: two (N, 3, S)."""
    each, mine, slot, cap = np.arange(len(near.job))[:, None], near.mine[:, None], near.slot[:, None], near.cap[:, None]
    there, kept = near.there[each, offers.column], mine - out
    filled, joined = there + mine, there + out
    slot_there, slot_kept = slot + there, slot + kept
    slot_filled, slot_joined = slot + np.minimum(filled, cap), slot + np.minimum(joined, cap)

    problem, group, released = near.problem, near.group[:, None], near.nbytes[:, None]
    left, room = offers.theirs - into, offers.free_there + near.bytes(slot_there)
    grown, spare = near.bytes(slot_filled), offers.spare + released
    fits = offers.fits & (group != offers.take)
    if not problem.any_device:
        fits &= problem.allowed[group, near.receivers[near.job[:, None], offers.column]]
    whole = fits & (filled <= cap)
    fit = np.empty((len(out), 3, out.shape[1]), dtype=bool)
    np.logical_and(whole, (grown <= room) & (spare >= 0), out=fit[:, 0])
    least = near.least[:, None]
    np.logical_and(fits, (np.minimum(kept, joined) >= least) & (joined <= cap), out=fit[:, 1])
    fit[:, 1] &= (there > 0) | near.may_split[:, None]
    fit[:, 1] &= (near.bytes(slot_joined) <= room) & (spare >= near.bytes(slot_kept))
    np.logical_and(whole & offers.may_split, np.minimum(left, into) >= offers.least, out=fit[:, 2])
    fit[:, 2] &= grown <= room - near.bytes(offers.slot + left)
    fit[:, 2] &= near.bytes(offers.slot + into) - released <= near.free[near.job][:, None]

    if not problem.tuning.partial_moves:
        fit[:, 1:] = False

    # ms and columns of the source, and of the receiver
    load, dims = amounts = np.empty((2, 2, *fit.shape))
    here_ms, there_ms = load
    begin = near.begin[each, offers.column] - slot
    gone = (near.load[near.job] - near.leaves)[:, None] + offers.comes
    share = into / offers.theirs
    moved = np.empty(fit.shape)
    np.subtract(near.columns[:, None], offers.dims, out=moved[:, 0])
    np.subtract(near.unit[:, None] * out, offers.dims, out=moved[:, 1])
    np.subtract(near.columns[:, None], offers.dims * share, out=moved[:, 2])
    here_ms[:, 0] = gone
    np.add(gone, near.flat.take(near.begin[:, -1, None] + kept), out=here_ms[:, 1])
    np.add(gone, offers.comes * (share - 1), out=here_ms[:, 2])
    before = near.flat.take(begin + slot_there)
    np.subtract(near.flat.take(begin + slot_joined), before, out=there_ms[:, 1])
    arrives = near.flat.take(begin + slot_filled) - before
    np.subtract(arrives, offers.goes, out=there_ms[:, 0])
    np.subtract(arrives, offers.goes * share, out=there_ms[:, 2])
    there_ms[:, 1] -= offers.goes
    there_ms += offers.load_there[:, None]
    moved_ms = near.soft.objective.own_ms * moved
    here_ms -= moved_ms
    there_ms += moved_ms
    np.subtract(near.dims[near.job][:, None, None], moved, out=dims[0])
    np.add(offers.dims_there[:, None], moved, out=dims[1])
    return near.change(amounts, offers.column[:, None]), fit
