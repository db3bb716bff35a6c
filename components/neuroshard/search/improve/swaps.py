"""The best swaps of shards of two devices: a shard or a part of it is given, and a whole one taken back; where memory is nearly
full also a part, since few whole shards have as many bytes as those given.

They are ranked by a linear estimate, as single moves are; the cost model prices only the best swap of each shard. Give and take
are those of the drawing in `neighborhood.py`.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.moves import Moves
from neuroshard.search.improve.neighborhood import Neighborhood, nonzero
from neuroshard.search.problem.problem import Problem

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Takes:
    """S shards on the receivers of each source, or parts of them, which it may take in a swap: (J, S) each."""

    take: Ints  # table group
    column: Ints  # which of the source's receivers holds it
    held: Ints  # units of it that are taken
    fits: Bools  # the source may hold it, with those that are here
    more_bytes: Ints  # on the source with it
    free: Ints  # bytes on the receiver without it
    columns: Floats
    source_ms: Floats  # that it adds to the source
    receiver_ms: Floats  # of which the receiver is relieved
    ms: Floats  # mean of the two, with its columns
    half_gap_ms: Floats  # half of the ms by which the source is slower than the receiver

    @classmethod
    def of(cls, near: Neighborhood) -> "Takes | None":
        """All of them; sources that have fewer are padded with shards that do not fit. None if there are none."""
        problem, plans, plan = near.problem, near.plans, near.plan
        there = nonzero(plans.held[plan[:, None], near.receivers])
        of, column, group = near.drawn(*there, most=problem.tuning.offers_seen)
        if not len(of) or not len(near.of):
            return None
        held = plans.widths[plan[of], group, near.receivers[of, column]]
        if problem.is_full and problem.tuning.partial_moves:
            of, column, group, held = _with_parts(problem, of, column, group, held)
        count = np.bincount(of, minlength=len(plan))
        number = np.arange(int(count.max(initial=0)))
        place = np.minimum((np.cumsum(count) - count)[:, None] + number, len(of) - 1)
        take, column, held = group.take(place), column.take(place), held.take(place)
        rows, of_plan, source = np.arange(len(plan))[:, None], plan[:, None], near.source[:, None]
        slot, here = problem.slots.take(take), plans.widths[of_plan, take, source]
        receiver = near.receivers[rows, column]
        there = plans.widths[of_plan, take, receiver]
        kept = there - held
        shards = problem.slot_shards.take(slot + held)
        joined = np.minimum(here + held, problem.max_units.take(take))
        fits = (number < count[:, None]) & (joined == here + held)
        fits &= (kept == 0) | (here > 0) | (plans.shards[of_plan, take] < problem.max_shards.take(take))
        if not problem.any_device:
            fits &= problem.allowed[take, source]
        source_ms = plans.added_each(of_plan, source, take, held)
        receiver_ms = plans.added_each(of_plan, receiver, take, there)
        if kept.any():
            receiver_ms -= plans.added_each(of_plan, receiver, take, kept)
        columns = problem.dims.take(shards)
        return cls(
            take=take,
            column=column,
            held=held,
            fits=fits,
            more_bytes=near.bytes(slot + joined) - near.bytes(slot + here),
            free=near.receiver_free[rows, column] + near.bytes(slot + there) - near.bytes(slot + kept),
            columns=columns,
            source_ms=source_ms,
            receiver_ms=receiver_ms,
            ms=(source_ms + receiver_ms) / 2 + near.soft.objective.own_ms * columns,
            half_gap_ms=(near.source_ms[:, None] - near.receiver_ms[rows, column]) / 2,
        )

    def chosen(self, of: Ints, best: Ints) -> "Takes":
        """Those at these places for each shard of a source: `of` (N,) and `best` (N, S) -> (N, S) each."""
        place = of[:, None] * self.take.shape[1] + best
        return Takes(*(getattr(self, field.name).take(place) for field in fields(self)))


def _with_parts(problem: Problem, of: Ints, column: Ints, group: Ints, held: Ints) -> tuple[Ints, ...]:
    """These shards, and parts of each, where what is left may be a shard: of a large shard every part, since few have as many
    bytes as what is given; of another a half and the narrowest."""
    is_large = problem.nbytes.take(problem.shards_of(group, held)) >= problem.tuning.large * problem.memory.max()
    large, small = np.flatnonzero(is_large), np.flatnonzero(~is_large)
    each, counts = np.repeat(large, held[large]), held[large]
    parts = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    place = np.concatenate([each, small, small, small])
    units = np.concatenate([parts, held[small], held[small] // 2, problem.min_units.take(group[small])])
    least, left = problem.min_units.take(group[place]), held[place] - units
    valid = np.flatnonzero((units >= least) & ((left == 0) | (left >= least)))
    some = valid[np.argsort(of[place[valid]], kind="stable")]
    place = place[some]
    return of[place], column[place], group[place], units[some]


def swaps(near: Neighborhood) -> Moves:
    """The best swap of each shard: of all of it, or of as much as levels the two devices, or as there is memory for."""
    takes = Takes.of(near)
    if takes is None:
        nothing = np.zeros(0, dtype=np.int64)
        return near.moves(nothing, nothing, nothing, nothing, nothing)
    each = np.arange(len(near.of))[:, None]
    give_ms = near.give_receiver_ms[each, takes.column[near.of]]
    give_ms += near.give_source_ms[:, None]
    give_ms *= 0.5
    give_ms += near.soft.objective.own_ms * near.give_columns[:, None]
    best = _levelling(near, takes, give_ms)
    takes, give_ms = takes.chosen(near.of, best), give_ms[each, best]
    units = _units(near, takes, give_ms)
    rows, part, place = near.best(_change(near, takes, units))
    taken = takes.take[rows, place], takes.held[rows, place]
    return near.moves(rows, units[rows, part, place], takes.column[rows, place], *taken)


def _levelling(near: Neighborhood, takes: Takes, give_ms: Floats) -> Ints:
    """The places of the best shards to take for each shard, which takes `give_ms` (N, S) along: (N, swaps_estimated).

    These come closest to levelling the two devices; where memory is nearly full, by as much as there is memory for.
    """
    of, tuning = near.of, near.problem.tuning
    if give_ms.shape[1] <= tuning.swaps_estimated:
        return np.broadcast_to(np.arange(give_ms.shape[1]), give_ms.shape)
    wanted, fits = (takes.ms + takes.half_gap_ms)[of], takes.fits[of]
    if near.problem.is_full:
        share, has_room = _with_room(near, takes, wanted / np.maximum(give_ms, 1e-30))
        give_ms, fits = give_ms * share, fits & has_room
    off = give_ms - wanted
    score = np.abs(off, out=off)
    score *= tuning.unlevel
    mean_ms = np.take_along_axis(near.receiver_ms, takes.column, axis=1) + takes.half_gap_ms
    score += np.where(fits, mean_ms[of], np.inf)
    return np.argpartition(score, tuning.swaps_estimated, axis=1)[:, : tuning.swaps_estimated]


def _with_room(near: Neighborhood, takes: Takes, share: Floats) -> tuple[Floats, Bools]:
    """The share of each shard that is given for each that is taken, in whole units: at most so much, and what the receiver has
    room for; and whether both devices then have room. (N, S) each."""
    problem, of, held = near.problem, near.of, near.held[:, None]
    unit, more = problem.unit_bytes[near.give][:, None], problem.shard_bytes[near.give][:, None]
    there = np.take_along_axis(near.there, takes.column[of], axis=1) > 0
    room = (takes.free[of] - np.where(there, 0, more)) / np.maximum(unit, 1)
    units = np.floor(np.clip(np.minimum(share * held, room), 1, held))
    less_bytes = units * unit + np.where(units == held, more, 0)
    fits = (units <= room) & (takes.more_bytes[of] - less_bytes <= near.source_free[of][:, None])
    return units / held, fits


def _units(near: Neighborhood, takes: Takes, give_ms: Floats) -> Ints:
    """Units to give in each swap, (N, P, S): all; and, where a part may move, as many as level the two devices or fit."""
    held = near.held[:, None]
    level = (takes.half_gap_ms + takes.ms) * held
    level /= np.maximum(give_ms, 1e-30)
    np.minimum(level, takes.free / np.maximum(near.give_bytes / near.held, 1.0)[:, None], out=level)
    part = np.minimum(np.maximum(level, 1.0), held).astype(np.int64)
    parts = (np.broadcast_to(held, part.shape), part)
    return np.stack(parts[: 2 if near.problem.tuning.partial_moves else 1], axis=1)


def _change(near: Neighborhood, takes: Takes, units: Ints) -> Floats:
    """Estimated change of the objective by swaps of so many units (N, P, S), infinite where one does not fit or may not be."""
    given = near.given(units, takes.column)
    fits = given.fits & (takes.fits & (near.give[:, None] != takes.take))[:, None]
    fits &= given.more_bytes <= takes.free[:, None]
    fits &= takes.more_bytes[:, None] - given.less_bytes <= near.source_free[near.of][:, None, None]
    change = near.change(
        takes.column,
        given.source_ms + takes.source_ms[:, None],
        given.receiver_ms - takes.receiver_ms[:, None],
        given.columns - takes.columns[:, None],
    )
    if near.soft.objective.byte_ms:
        taken = takes.more_bytes - takes.free + np.take_along_axis(near.receiver_free[near.of], takes.column, axis=1)
        change += near.soft.objective.byte_ms * (given.more_bytes - given.less_bytes + taken[:, None])
    change[~fits] = np.inf
    return change
