"""Devices that moves start from, the devices that they go to, and what a move changes, by a linear estimate.

          source                              receiver
    .------------------.    give_units    .------------------.
    | give: held units | ---------------> | there: units of  |
    |                  |                  | the same group   |
    |                  |    take_units    |                  |
    | here: units of   | <--------------- | take: held units |
    | the same group   |                  |                  |
    '------------------'                  '------------------'

A move gives a shard or a part of it, and takes nothing, or in a swap a shard or a part of it. What is given joins the units that
are `there`, and what is taken those that are `here`: a device has at most one shard of a table group.

Each array operation is about all sources. There are J of them, each a device of a plan, with R receivers each.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.moves import Moves
from neuroshard.search.problem.objective import SoftMaximum
from neuroshard.search.problem.plans import Plans


def nonzero(held: NDArray[np.bool_]) -> tuple[Ints, ...]:
    """As `np.nonzero`, which takes several times as long for arrays of several axes."""
    return np.unravel_index(np.flatnonzero(held), held.shape)


@dataclass(frozen=True)
class Given:
    """What N shards give to C receivers each, in P amounts each: what then changes, (N, P, C) each."""

    fits: NDArray[
        np.bool_
    ]  # as wide as shards must and may be, not too many, and allowed there; memory is not looked at
    less_bytes: Ints  # on the source
    more_bytes: Ints  # on the receiver
    source_ms: Floats  # of the source then, the all-to-all aside
    receiver_ms: Floats
    columns: Floats  # that move


class Neighborhood:
    """The N shards that J sources may give, the source `of` each (N,), and J x R receivers.

    Of sources (J,), and of their receivers (J, R): `ms`, `columns` and `free` bytes. Of the shards (N,): the group `give`, `held`
    units, `give_bytes`, `give_columns`, and `give_source_ms`, of which the source is relieved; `there` and `give_receiver_ms`
    (N, R), what the whole shard takes on an empty receiver.
    """

    def __init__(
        self, plans: Plans, soft: SoftMaximum, plan: Ints, source: Ints, receivers: Ints, rng: np.random.Generator
    ) -> None:
        self.plans, self.soft, self.plan, self.source, self.receivers = plans, soft, plan, source, receivers
        self.rng, problem, of_plan = rng, plans.problem, plan[:, None]
        self.problem = problem
        self.source_ms, self.receiver_ms = soft.load[plan, source], soft.load[of_plan, receivers]
        self.source_columns, self.receiver_columns = plans.dims[plan, source], plans.dims[of_plan, receivers]
        self.source_free, self.receiver_free = plans.free[plan, source], plans.free[of_plan, receivers]
        self.objective_now = soft.shares[plan, source][:, None] + soft.shares[of_plan, receivers]  # (J, R)

        of, give = self.of, self.give = self.drawn(*nonzero(plans.held[plan, source]), most=problem.tuning.shards_seen)
        self.held = plans.widths[plan[of], give, source[of]]
        self.there = plans.widths[plan[of, None], give[:, None], receivers[of]]
        self.slot, self.least, self.most = (
            array.take(give) for array in (problem.slots, problem.min_units, problem.max_units)
        )
        self.may_split = plans.shards[plan[of], give] < problem.max_shards.take(give)
        shards = problem.slot_shards.take(self.slot + self.held)
        self.give_bytes, self.give_columns = problem.nbytes.take(shards), problem.dims.take(shards)
        self.unit_columns = self.give_columns / self.held

        # ms of every width on every receiver and on the source, flat, and where those of 0 units begin: (N, R + 1)
        devices = np.concatenate([receivers, source[:, None]], axis=1)
        known = np.maximum(self.most, np.maximum(self.held, self.there.max(axis=1)))
        self.unit_ms, self.begin = plans.added(plan[of], devices[of], give, known)
        whole_ms = self.unit_ms.take(self.begin + self.held[:, None])
        self.give_source_ms, self.give_receiver_ms = whole_ms[:, -1], whole_ms[:, :-1]

    def given(self, units: Ints, column: Ints) -> "Given":
        """What changes if each shard gives so many units (N, P, C) to each of C receivers, those at `column` (N, C)."""
        new, each = np.newaxis, np.arange(len(self.of))[:, None]
        there, begin = self.there[each, column][:, new], self.begin[each, column][:, new]
        slot, least, most = self.slot[:, new, new], self.least[:, new, new], self.most[:, new, new]
        kept, joined = self.held[:, new, new] - units, there + units
        fits = (kept == 0) | ((np.minimum(kept, joined) >= least) & ((there > 0) | self.may_split[:, new, new]))
        fits &= joined <= most
        np.minimum(joined, most, out=joined)
        if not self.problem.any_device:
            fits &= self.problem.allowed[self.give[:, new], self.receivers[self.of[:, new], column]][:, new]
        source_ms = (self.source_ms[self.of] - self.give_source_ms)[:, new, new]
        receiver_ms = self.unit_ms.take(begin + joined)
        receiver_ms -= self.unit_ms.take(begin + there)
        receiver_ms += self.receiver_ms[self.of[:, new], column][:, new]
        return Given(
            fits=fits,
            less_bytes=self.give_bytes[:, new, new] - self.bytes(slot + kept),
            more_bytes=self.bytes(slot + joined) - self.bytes(slot + there),
            source_ms=source_ms + self.unit_ms.take(self.begin[:, -1, new, new] + kept),
            receiver_ms=receiver_ms,
            columns=self.unit_columns[:, new, new] * units,
        )

    def change(self, column: Ints, source_ms: Floats, receiver_ms: Floats, moved: Floats) -> Floats:
        """By how much the objective changes where devices then take so many ms, and so many columns have moved: (N, P, C), of
        receivers at `column` (N, C). Less is better."""
        of = self.of[:, None]
        ms, columns = amounts = np.empty((2, 2, *moved.shape))  # of the source, and of the receiver
        moved_ms = self.soft.objective.own_ms * moved
        np.subtract(source_ms, moved_ms, out=ms[0])
        np.add(receiver_ms, moved_ms, out=ms[1])
        np.subtract(self.source_columns[of][:, None], moved, out=columns[0])
        np.add(self.receiver_columns[of, column][:, None], moved, out=columns[1])
        change = self.soft.added(amounts, self.plan[of][:, None])
        change -= self.objective_now[of, column][:, None]
        return change

    def bytes(self, slots: Ints) -> Ints:
        nbytes: Ints = self.problem.slot_bytes.take(slots)
        return nbytes

    def best(self, change: Floats) -> tuple[Ints, Ints, Ints]:
        """The best of the P x C moves of each shard: which shards have one that fits, and its two places."""
        flat = change.reshape(len(change), change.shape[1] * change.shape[2])
        if not flat.size:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, nothing
        best = flat.argmin(axis=1)
        rows = np.flatnonzero(np.isfinite(flat[np.arange(len(flat)), best]))
        return rows, *np.divmod(best[rows], change.shape[2])

    def moves(self, rows: Ints, give_units: Ints, column: Ints, take: Ints, take_units: Ints) -> Moves:
        of = self.of[rows]
        receiver = self.receivers[of, column]
        return Moves(self.plan[of], self.source[of], self.give[rows], give_units, receiver, take, take_units)

    def drawn(self, *entries: Ints, most: int) -> tuple[Ints, ...]:
        """About `most` entries of each source, drawn at random; the first array has the sources. Of more many are alike."""
        of = entries[0]
        if len(of) <= most or (count := np.bincount(of)).max() <= most:
            return entries
        kept = self.rng.random(len(of)) * count[of] < most
        return tuple(one[kept] for one in entries)
