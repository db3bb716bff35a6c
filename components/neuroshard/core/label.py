"""Measurements of a case -> its label: the one of round 0, or the mean of several rounds.

Another process's load that lasts for minutes slows down all repeats of a measurement: only rounds that are apart reveal it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Generic, TypeVar

from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import CollectiveCost, ComputeCost, TierCost

LEAST_MS = 1e-9  # a millionth of a nanosecond

Case = TypeVar("Case", ComputeCase, CollectiveCase)
Cost = TypeVar("Cost", ComputeCost, CollectiveCost)


@dataclass(frozen=True)
class Rounds(Generic[Case, Cost]):
    """A case and its usable measurements in order of rounds; disturbed ones only if there are no others."""

    case: Case
    costs: tuple[Cost, ...]


def teaches(cost: ComputeCost | CollectiveCost | TierCost) -> bool:
    """Whether a net can learn from this cost: not from an error, nor from 0 ms or hardly more, which only a broken clock
    measures, and by which nothing can be divided."""
    if cost.error is not None:
        return False
    if isinstance(cost, ComputeCost):
        return cost.total_ms >= LEAST_MS
    if isinstance(cost, TierCost):
        return min(cost.times_ms) >= LEAST_MS
    return all(ms >= LEAST_MS for ms in (*(cost.forward_ms or ()), *(cost.backward_ms or ())))


def rounds_of(rows: Iterable[tuple[Case, Cost]]) -> list[Rounds[Case, Cost]]:
    """Each case with a round 0, in the order of these rounds. Rows with errors are left out."""
    found: dict[str, list[Cost]] = {}
    cases: dict[str, Case] = {}
    for case, cost in rows:
        if cost.error is not None:
            continue
        found.setdefault(cost.case_id, []).append(cost)
        if cost.round == 0:
            cases[cost.case_id] = case
    return [Rounds(case, _usable(found[case_id])) for case_id, case in cases.items()]


def usual_count(measured: Sequence[Rounds[Case, Cost]]) -> int:
    """How many rounds make a label: the median over the cases, at least 1."""
    return int(median(len(one.costs) for one in measured)) if measured else 1


def label(costs: Sequence[Cost]) -> Cost:
    """The mean times of several measurements of a case; other fields are those of the first."""
    if len(costs) == 1:
        return costs[0]
    times = {name: _mean([getattr(cost, name) for cost in costs]) for name in ("forward_ms", "backward_ms")}
    return costs[0].model_copy(update=times)


def labels(measured: Sequence[Rounds[Case, Cost]]) -> list[tuple[Case, Cost]]:
    """One row a case. If only few cases were measured again, their later rounds show the noise and are not in the labels."""
    several = usual_count(measured) > 1
    return [(one.case, label(one.costs if several else one.costs[:1])) for one in measured]


def _usable(costs: Sequence[Cost]) -> tuple[Cost, ...]:
    calm = [cost for cost in costs if not (isinstance(cost, ComputeCost) and cost.disturbed)]
    return tuple(sorted(calm or costs, key=lambda cost: cost.round))


def _mean(times: Sequence[float | tuple[float, ...]]) -> float | tuple[float, ...]:
    """The mean: of one time each, or of times on each device."""
    if isinstance(times[0], tuple):
        return tuple(map(fmean, zip(*times, strict=True)))
    return fmean(times)  # type: ignore[arg-type]
