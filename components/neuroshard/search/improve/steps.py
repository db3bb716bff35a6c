"""Steps away from a device, and what they change by the cost model.

A step takes `out` units of item `give` from a device to another, `to`, and `into` units of item `take` (or none, -1) from
there: a move of a table or of any part of it, a swap, or a swap for a part. What an item has on the other device already, the
units join. A step changes two devices only, so these are all that is asked of the compute net.
"""

from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.plans import Level, Plans


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
    items, devices, units = cells(steps)
    both = devices[:2]
    sums, dims = plans.sums[plan, both], plans.dims[plan, both]
    slots = problem.slots.take(items) + plans.widths[plan, items, devices]
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
    change = level.soft(np.array([level.stick.load(compute, dims), dims]), plan)
    for counts in level.counts[plan, both]:
        change -= counts
    return Priced(change, sums, dims, compute)


def cells(steps: Steps) -> tuple[Ints, Ints, Ints]:
    """What steps change: items, devices, and how many units more or fewer, three (4, C).

    What is taken joins the source and leaves the other, of none no units; then what is given, the other way round.
    """
    return (
        np.array([steps.take, steps.take, steps.give, steps.give]),
        np.array([steps.source, steps.to, steps.source, steps.to]),
        np.array([steps.into, -steps.into, -steps.out, steps.out]),
    )


def changes(steps: Steps, chosen: int) -> tuple[Ints, Ints, Ints]:
    """What one of the steps changes: items, devices, and how many units more or fewer."""
    items, devices, units = (of[:, 0] for of in cells(steps[np.array([chosen])]))
    some = items >= 0
    return items[some], devices[some], units[some]
