"""Moves from one device to another, and what they change by the cost model.

A move takes `give_units` of group `give` from device `source` to device `receiver`, and `take_units` of group `take` (or of none,
-1) back: a shard or a part of it is moved, or two are swapped (`neighborhood.py` has a drawing). Units join what the other device
has of their group already. A move changes two devices only, so the compute net prices these alone.
"""

from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.objective import SoftMaximum
from neuroshard.search.problem.plans import Plans


@dataclass(frozen=True)
class Moves:
    """C moves, (C,) each: the plan, and what moves."""

    plan: Ints
    source: Ints
    give: Ints
    give_units: Ints
    receiver: Ints
    take: Ints
    take_units: Ints

    def __len__(self) -> int:
        return len(self.give)

    def __add__(self, other: "Moves") -> "Moves":
        return Moves(*(np.concatenate([one, more]) for one, more in zip(self._all, other._all, strict=True)))

    def __getitem__(self, chosen: Ints) -> "Moves":
        return Moves(*(one[chosen] for one in self._all))

    @property
    def _all(self) -> tuple[Ints, ...]:
        return self.plan, self.source, self.give, self.give_units, self.receiver, self.take, self.take_units


@dataclass(frozen=True)
class Priced:
    """C moves by the cost model: what each changes the objective by, and the two devices after it, the source first."""

    change: Floats  # (C,) ms
    sums: Floats  # (2, C, K)
    dims: Floats  # (2, C)
    compute: Floats  # (2, C) ms


def price(plans: Plans, soft: SoftMaximum, moves: Moves) -> Priced:
    """The moves, by the cost model's compute ms of the two devices."""
    problem, count, plan = plans.problem, len(moves), moves.plan
    groups, devices, units = cells(moves)
    both = devices[:2]
    sums, dims = plans.sums[plan, both], plans.dims[plan, both]
    slots = problem.slots.take(groups) + plans.widths[plan, groups, devices]
    old, new = problem.slot_shards.take(slots), problem.slot_shards.take(slots + units)
    problem.price(new.ravel())
    vectors, columns = problem.vectors.take(new, axis=0), problem.dims.take(new)
    vectors -= problem.vectors.take(old, axis=0)
    columns -= problem.dims.take(old)
    for given_or_taken in (slice(2, 4), slice(2)):
        sums += vectors[given_or_taken]
        dims += columns[given_or_taken]
    compute = problem.model.compute_ms(sums.reshape(2 * count, -1)).reshape(2, count)
    compute = np.where(dims > 0, compute, 0.0)
    change = soft.added(np.array([soft.objective.load(compute, dims), dims]), plan)
    for share in soft.shares[plan, both]:
        change -= share
    if soft.objective.byte_ms:
        change += soft.objective.byte_ms * (problem.nbytes.take(new) - problem.nbytes.take(old)).sum(axis=0)
    return Priced(change, sums, dims, compute)


def cells(moves: Moves) -> tuple[Ints, Ints, Ints]:
    """What the moves change: groups, devices, and how many units more or fewer, three (4, C).

    In this order: what is taken joins the source and leaves the other device, then what is given leaves the source and joins
    the other. Where nothing is taken the first two change no units.
    """
    return (
        np.array([moves.take, moves.take, moves.give, moves.give]),
        np.array([moves.source, moves.receiver, moves.source, moves.receiver]),
        np.array([moves.take_units, -moves.take_units, -moves.give_units, moves.give_units]),
    )


def changes(moves: Moves, chosen: int) -> tuple[Ints, Ints, Ints]:
    """What one of the moves changes: groups, devices, and how many units more or fewer, two or four of each."""
    groups, devices, units = (of[:, 0] for of in cells(moves[np.array([chosen])]))
    some = groups >= 0
    return groups[some], devices[some], units[some]
