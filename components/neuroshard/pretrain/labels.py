"""Measured costs -> labels: cases with their milliseconds, by split, and pairs that show how noisy labels are."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from scipy.stats import kendalltau

from neuroshard.core.case import CollectiveCase, ComputeCase, Split
from neuroshard.core.cost import CollectiveCost, ComputeCost
from neuroshard.core.errors import InvalidInput
from neuroshard.core.label import Case, Cost, labels, rounds_of, teaches, usual_count
from neuroshard.core.value import shown
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.costmodel.report import Errors


@dataclass(frozen=True)
class Labels(Generic[Case]):
    """Measured cases. `ms` is (N,) for table sets, and (N, D) for all-to-alls of D devices.

    For table sets `parts` (N, 2) are forward and backward ms, whose sum is `ms`. `twice` (2, …) holds two values for each case
    that was measured again. They differ as much as two labels of the same case would.
    """

    cases: tuple[Case, ...]
    ms: Floats
    twice: Floats
    parts: Floats

    def of_split(self, *splits: Split) -> Ints:
        """Places of the cases in these splits."""
        return np.array([i for i, case in enumerate(self.cases) if case.split in splits], dtype=np.int64)


def collect(rows: Iterable[tuple[Case, Cost]], ms: Callable[[Cost], float | tuple[float, ...]]) -> Labels[Case]:
    """The label of each case, and pairs of those measured again. Rows without a usable time are left out.

    A label combines all rounds of a case. The two halves of its rounds are noisier than that, so their distance is scaled down
    by the square root of the numbers of rounds.
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
    """Two values as far apart as two labels of `count` rounds: the mean of every other round, and one at a scaled distance."""
    halves = [np.asarray(rounds_ms[place::2], dtype=np.float64) for place in (0, 1)]
    one, other = (half.mean(axis=0) for half in halves)
    nearer = math.sqrt(2 / count / sum(1 / len(half) for half in halves))
    return one, one * (other / one) ** nearer


def _parts(cost: ComputeCost | CollectiveCost) -> tuple[float, ...]:
    """Forward and backward ms of a table set without error; nothing for an all-to-all."""
    if not isinstance(cost, ComputeCost):
        return ()
    assert cost.forward_ms is not None
    assert cost.backward_ms is not None
    return cost.forward_ms, cost.backward_ms


def check_one_time_a_device(rows: Iterable[tuple[CollectiveCase, CollectiveCost]]) -> None:
    """Raise InvalidInput unless each all-to-all has one time for each device."""
    for case, cost in rows:
        for name, times in (("forward_ms", cost.forward_ms), ("backward_ms", cost.backward_ms)):
            if times is not None and len(times) != len(case.device_dims):
                raise InvalidInput(
                    f"all-to-all {case.case_id} has {len(times)} {name} for {len(case.device_dims)} devices; measure it again"
                )


def check_unseen(cases: Iterable[ComputeCase]) -> None:
    """Raise InvalidInput if a table of the split test_tables occurs in another split: its error would be too small."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for case in cases:
        names[case.split == "test_tables"].update(table.name for table in case.tables)
    seen = sorted(names[True] & names[False])
    if seen:
        raise InvalidInput(
            f"table {shown(seen[0])} ({len(seen)} in all) is in test_tables and in another split; make the cases again, so that "
            "tests are on tables never trained on"
        )


CLOCK_MS = 1e-3  # a microsecond: shorter times are below what the clocks resolve, so errors are relative to this


def errors(measured_ms: Floats, predicted_ms: Floats) -> Errors | None:
    """The figures of two arrays of one shape. None without values; a figure that needs variety is None without it."""
    if measured_ms.size == 0:
        return None
    measured, predicted = measured_ms.ravel(), predicted_ms.ravel()
    mse = float(np.mean((predicted - measured) ** 2))
    varied = measured.size > 1 and np.ptp(measured) > 0
    ranked = varied and np.ptp(predicted) > 0
    return Errors(
        values=measured.size,
        mse=mse,
        mape=mape(measured, predicted),
        r2=1 - mse / float(measured.var()) if varied else None,
        kendall_tau=float(kendalltau(predicted, measured).statistic) if ranked else None,
    )


def mape(measured_ms: Floats, predicted_ms: Floats) -> float:
    """Mean absolute error relative to what was measured, 0.1 for 10 %."""
    return float(np.mean(np.abs(predicted_ms - measured_ms) / np.maximum(measured_ms, CLOCK_MS)))
