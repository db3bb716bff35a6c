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
    """These shards, and of each a half and the narrowest part, where what is left may be a shard."""
    least = problem.min_units.take(group)
    units = np.concatenate([held, held // 2, least])
    of, column, group, left = (np.tile(one, 3) for one in (of, column, group, held))
    left = left - units
    valid = np.flatnonzero((units >= problem.min_units.take(group)) & ((left == 0) | (left >= np.tile(least, 3))))
    some = valid[np.argsort(of[valid], kind="stable")]
    return of[some], column[some], group[some], units[some]


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

    These come closest to levelling the two devices.
    """
    of, tuning = near.of, near.problem.tuning
    if give_ms.shape[1] <= tuning.swaps_estimated:
        return np.broadcast_to(np.arange(give_ms.shape[1]), give_ms.shape)
    off = give_ms - (takes.ms + takes.half_gap_ms)[of]
    score = np.abs(off, out=off)
    score *= tuning.unlevel
    mean_ms = np.take_along_axis(near.receiver_ms, takes.column, axis=1) + takes.half_gap_ms
    score += np.where(takes.fits, mean_ms, np.inf)[of]
    return np.argpartition(score, tuning.swaps_estimated, axis=1)[:, : tuning.swaps_estimated]


def _units(near: Neighborhood, takes: Takes, give_ms: Floats) -> Ints:
    """Units to give in each swap, (N, P, S): all; and, where a part may move, as many as level the two devices, or as there is
    memory for."""
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
    change[~fits] = np.inf
    return change
