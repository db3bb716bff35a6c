"""Measured costs -> what a net learns from: cases and their milliseconds, by split, and how far the labels themselves scatter."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from neuroshard.core.case import CollectiveCase, ComputeCase, Split
from neuroshard.core.cost import CollectiveCost, ComputeCost
from neuroshard.core.errors import InvalidInput
from neuroshard.core.label import Case, Cost, labels, rounds_of, usual_count
from neuroshard.core.value import shown
from neuroshard.costmodel.protocol import Floats, Ints


@dataclass(frozen=True)
class Labels(Generic[Case]):
    """Cases that were measured. `ms` is (N,), or (N, D) for all-to-alls of D devices; of sets of tables it is the sum of `parts`
    (N, 2), forward and backward. `twice` (2, …) is of those that were measured again: two values as far apart as two labels of
    one case are."""

    cases: tuple[Case, ...]
    ms: Floats
    twice: Floats
    parts: Floats

    def of_split(self, *splits: Split) -> Ints:
        """Places of the cases of these splits."""
        return np.array([i for i, case in enumerate(self.cases) if case.split in splits], dtype=np.int64)


def teaches(cost: ComputeCost | CollectiveCost) -> bool:
    """Is there something to learn from? Not where a case met an error, nor from 0 ms, which no clock gives that runs."""
    if cost.error is not None:
        return False
    if isinstance(cost, ComputeCost):
        return cost.total_ms > 0
    return min(*forward_ms(cost), *backward_ms(cost)) > 0


def collect(rows: Iterable[tuple[Case, Cost]], ms: Callable[[Cost], float | tuple[float, ...]]) -> Labels[Case]:
    """The label of each case, and a second one of those that were measured again. Rows that teach nothing are left out.

    Halves of a case's rounds differ by more than labels do, which are of all of them: by the root of how many.
    """
    measured = rounds_of((case, cost) for case, cost in rows if teaches(cost))
    found, count = labels(measured), usual_count(measured)
    twice = [_twice([ms(cost) for cost in one.costs], count) for one in measured if len(one.costs) > 1]
    return Labels(
        cases=tuple(case for case, _ in found),
        ms=np.array([ms(cost) for _, cost in found], dtype=np.float64),
        twice=np.array(twice, dtype=np.float64).swapaxes(0, 1) if twice else np.empty((2, 0)),
        parts=np.array([_parts(cost) for _, cost in found], dtype=np.float64),
    )


def _twice(rounds_ms: Sequence[float | tuple[float, ...]], count: int) -> tuple[Floats, Floats]:
    """The mean of every other round, and one that is as far from it as labels of `count` rounds are from one another."""
    halves = [np.asarray(rounds_ms[place::2], dtype=np.float64) for place in (0, 1)]
    one, other = (half.mean(axis=0) for half in halves)
    nearer = math.sqrt(2 / count / sum(1 / len(half) for half in halves))
    return one, one * (other / one) ** nearer


def _parts(cost: ComputeCost | CollectiveCost) -> tuple[float, ...]:
    """Of a cost without error."""
    if not isinstance(cost, ComputeCost):
        return ()
    assert cost.forward_ms is not None
    assert cost.backward_ms is not None
    return cost.forward_ms, cost.backward_ms


def forward_ms(cost: CollectiveCost) -> tuple[float, ...]:
    """Of an all-to-all without error."""
    assert cost.forward_ms is not None
    return cost.forward_ms


def backward_ms(cost: CollectiveCost) -> tuple[float, ...]:
    """Of an all-to-all without error."""
    assert cost.backward_ms is not None
    return cost.backward_ms


def check_one_time_a_device(rows: Iterable[tuple[CollectiveCase, CollectiveCost]]) -> None:
    """Raise InvalidInput where an all-to-all's times are not one a device."""
    for case, cost in rows:
        for name, times in (("forward_ms", cost.forward_ms), ("backward_ms", cost.backward_ms)):
            if times is not None and len(times) != len(case.device_dims):
                raise InvalidInput(
                    f"all-to-all {case.case_id} has {len(times)} {name} for {len(case.device_dims)} devices; measure it again"
                )


def check_unseen(cases: Iterable[ComputeCase]) -> None:
    """Raise InvalidInput where a table of the test_tables split occurs in another: its error would be too good."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for case in cases:
        names[case.split == "test_tables"].update(table.name for table in case.tables)
    seen = sorted(names[True] & names[False])
    if seen:
        raise InvalidInput(
            f"table {shown(seen[0])} ({len(seen)} in all) is in test_tables and in another split; make the cases again, so that "
            "tests are on tables never trained on"
        )
