"""How a case is timed: warm-up, cold cache, repeats until the fastest agree.

On a device that nothing else uses, disturbances only add time, so the label is the fastest repeat. A CPU is shared:
calm.py times table sets there.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import MOST_MS, CollectiveCost, ComputeCost
from neuroshard.measure.timing.clocks import TimedDevice

MIN_REPEATS = 3
LONG_CASE_MS = 500.0  # after which a case needs no more than MIN_REPEATS
FASTEST = 3  # repeats that must agree
SETTLED_DIFFERENCE = 0.03  # of the fastest repeats, as a share: above it, up to twice the repeats are taken …
DISTURBED_DIFFERENCE = 0.05  # … and above this the label is disturbed: such labels were 2.7 % off instead of 1.4 %


class Timing(NamedTuple):
    """Milliseconds: the label of the repeats, half their interquartile range, and their median."""

    ms: float
    spread: float
    median: float


def timing(samples: Sequence[float], counts: Callable[[Sequence[float]], float]) -> Timing:
    """The Timing of at least one sample. `counts` makes the label of them: `min`, or `statistics.median`."""
    low, middle, high = (
        statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (samples[0],) * 3
    )
    return Timing(counts(samples), (high - low) / 2, middle)


def compute_cost(
    case: ComputeCase, round_: int, forward: Timing, backward: Timing, disturbed: bool = False
) -> ComputeCost:
    """The row of the costs for a measured table set."""
    if error := _too_long((forward, backward)):
        return ComputeCost(case_id=case.case_id, round=round_, error=error)
    fields = _fields("forward", *forward) | _fields("backward", *backward)
    return ComputeCost(case_id=case.case_id, round=round_, disturbed=disturbed, **fields)


def collective_cost(
    case: CollectiveCase, round_: int, forwards: Sequence[Timing], backwards: Sequence[Timing]
) -> CollectiveCost:
    """The row of the costs for a measured all-to-all, from one timing of each device."""
    if error := _too_long((*forwards, *backwards)):
        return CollectiveCost(case_id=case.case_id, round=round_, error=error)
    fields = _fields("forward", *zip(*forwards, strict=True)) | _fields("backward", *zip(*backwards, strict=True))
    return CollectiveCost(case_id=case.case_id, round=round_, **fields)


def _fields(way: str, ms: Any, spread: Any, median: Any) -> dict[str, Any]:
    """The fields of a cost for one way, of one device or of each."""
    return {f"{way}_ms": ms, f"{way}_spread_ms": spread, f"{way}_median_ms": median}


def _too_long(timings: Sequence[Timing]) -> str:
    """The error of a case that took longer than costs can say; empty for any other."""
    longest = max(max(timing) for timing in timings)
    return f"took {longest:.3g} ms, more than the {MOST_MS:.3g} that a cost may be" if longest > MOST_MS else ""


class CaseTiming(NamedTuple):
    """The label of a table set, and whether its repeats did not agree."""

    forward: Timing
    backward: Timing
    disturbed: bool


def time_case(
    device: TimedDevice,
    forward: Callable[[], Any],
    backward: Callable[[Any], Any],
    warmup: int,
    repeats: int,
    before: Callable[[], None] = lambda: None,
) -> CaseTiming:
    """Forward and backward of a case, each from a cold cache: warm-up, then the fastest of `repeats` repeats. `before` is called
    before each repeat, untimed.

    `backward` gets what `forward` returned. While the fastest disagree, up to `repeats` more are taken. A long case ends
    early, but not before MIN_REPEATS. The case is disturbed if the fastest still differ by more than DISTURBED_DIFFERENCE.
    """
    forwards: list[float] = []
    backwards: list[float] = []
    for repeat in range(warmup + 2 * repeats):
        before()
        forward_ms, backward_ms = cold_ms(device, forward, backward)
        if repeat < warmup:
            continue
        forwards.append(forward_ms)
        backwards.append(backward_ms)
        settled = max(disagreement(forwards), disagreement(backwards)) <= SETTLED_DIFFERENCE
        if settled and len(forwards) >= repeats:
            break
        if len(forwards) >= MIN_REPEATS and sum(forwards) + sum(backwards) > LONG_CASE_MS:
            break
    disturbed = max(disagreement(forwards), disagreement(backwards)) > DISTURBED_DIFFERENCE
    return CaseTiming(timing(forwards, min), timing(backwards, min), disturbed)


def cold_ms(device: TimedDevice, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> tuple[float, float]:
    """Ms of a forward and of its backward, each from a cold cache. Cache lines that are used again and again outlast one flush,
    so a warm-up is cold too."""
    device.flush()
    forward_ms, result = device.timed(forward)
    device.flush()
    return forward_ms, device.timed(partial(backward, result))[0]


def disagreement(samples: Sequence[float]) -> float:
    """By what share the slowest of the FASTEST fastest samples is slower than the fastest."""
    fastest = sorted(samples)[:FASTEST]
    return fastest[-1] / fastest[0] - 1 if fastest[0] else 0.0
