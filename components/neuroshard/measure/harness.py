"""How anything is timed: warm-up, cold cache, repeats until the fastest agree. One harness for the CPU and for CUDA.

A device times a step on its own clock and can flush its own caches: CPU clock and L3 on a CPU, CUDA events and L2 on a GPU.
On a device of one's own whatever disturbs only ever adds, so the fastest repeat is the one to be had again: docs/measure.md.
Of table sets on a CPU see calm.py.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import CollectiveCost, ComputeCost
from neuroshard.core.errors import MeasureError

if TYPE_CHECKING:
    import torch

MIN_REPEATS = 3
LONG_CASE_MS = 500.0  # a case that has taken this long has enough repeats once it has MIN_REPEATS
AGREEING = 3  # of the repeats, the fastest: while they differ by more than SETTLED, up to twice the repeats are taken
SETTLED = 0.03
CALM = 0.05  # where they still differ by more, labels were 2.7 % off instead of 1.4 %
# Before a timed step a GPU idles, in which time the host enqueues the step: at least so long, and LAUNCH_MARGIN times what the
# host took for the last ones. Of a table set of 4 operators FBGEMM's Python alone takes half a millisecond.
LEAST_AHEAD_MS = 0.5
MOST_AHEAD_MS = 5.0
LAUNCH_MARGIN = 2.0
CYCLES_A_MS = 2_000_000  # at 2 GHz


class Timing(NamedTuple):
    """Milliseconds: what counts of the repeats, half their interquartile range, and their median."""

    ms: float
    spread: float
    median: float


def timing(samples: Sequence[float], counts: Callable[[Sequence[float]], float]) -> Timing:
    """Of at least one sample: what `counts` makes of them, as in `min` or `statistics.median`, their spread and median."""
    low, middle, high = (
        statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (samples[0],) * 3
    )
    return Timing(counts(samples), (high - low) / 2, middle)


def compute_cost(
    case: ComputeCase, round_: int, forward: Timing, backward: Timing, disturbed: bool = False
) -> ComputeCost:
    """A measured table set as a row of the costs."""
    return ComputeCost(
        case_id=case.case_id,
        round=round_,
        forward_ms=forward.ms,
        backward_ms=backward.ms,
        forward_spread_ms=forward.spread,
        backward_spread_ms=backward.spread,
        forward_median_ms=forward.median,
        backward_median_ms=backward.median,
        disturbed=disturbed,
    )


def collective_cost(
    case: CollectiveCase, round_: int, forwards: Sequence[Timing], backwards: Sequence[Timing]
) -> CollectiveCost:
    """A measured all-to-all, one timing a device, as a row of the costs."""
    return CollectiveCost(
        case_id=case.case_id,
        round=round_,
        forward_ms=tuple(timing.ms for timing in forwards),
        backward_ms=tuple(timing.ms for timing in backwards),
        forward_spread_ms=tuple(timing.spread for timing in forwards),
        backward_spread_ms=tuple(timing.spread for timing in backwards),
        forward_median_ms=tuple(timing.median for timing in forwards),
        backward_median_ms=tuple(timing.median for timing in backwards),
    )


class Device(Protocol):
    """What is measured: where its tensors lie, its clock, and its cache."""

    torch: "torch.device"

    def flush(self) -> None:
        """Push what the last step left out of the device's cache."""

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        """Milliseconds that the step took on this device, and what it returned. `waiting` for other devices counts if said."""

    def release(self) -> None:
        """Give back what was freed and kept for the next step, where another process of ours needs the device's memory."""


class Cpu:
    """This machine's CPU with `threads` threads. Writes `flush_bytes` to flush its cache: see flush.py.

    One thread is timed by its own CPU clock, unless waiting counts: while others take the core from it, that stands still. On
    an idle machine it agrees with the wall clock.
    """

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.threads = threads
        self.torch = torch.device("cpu")
        self.eviction = torch.empty(0)

    def flush_with(self, flush_bytes: int) -> None:
        """Write so many bytes from the next flush on."""
        import torch

        if self.eviction.nbytes != flush_bytes:
            self.eviction = torch.empty(0)  # the old buffer goes before the new one comes
            self.eviction = torch.zeros(flush_bytes // 4)

    def flush(self) -> None:
        self.eviction.fill_(1.0)

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        clock = time.perf_counter if waiting or self.threads > 1 else time.thread_time
        began = clock()
        result = step()
        return (clock() - began) * 1e3, result

    def release(self) -> None:
        """Nothing: processes on a CPU have memory enough by their limit."""


class Cuda:
    """GPU `index`. Writes twice its L2 to flush it, and times with events. Raises MeasureError where there is no such GPU."""

    def __init__(self, index: int) -> None:
        import torch

        if index >= torch.cuda.device_count():
            raise MeasureError(f"backend cuda needs GPU {index}, but torch sees {torch.cuda.device_count()} GPUs here")
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self.enqueued_in_ms = (0.0, 0.0)  # the last two steps: forward and backward

    @cached_property
    def eviction(self) -> "torch.Tensor":
        import torch

        l2_bytes = torch.cuda.get_device_properties(self.torch).L2_cache_size
        return torch.zeros(2 * l2_bytes // 4, device=self.torch)

    def flush(self) -> None:
        import torch

        self.eviction.fill_(1.0)
        # Without this the gaps between kernels that a slow Python host leaves would be timed; a trainer's host runs ahead.
        ahead_ms = min(max(LEAST_AHEAD_MS, LAUNCH_MARGIN * max(self.enqueued_in_ms)), MOST_AHEAD_MS)
        torch.cuda._sleep(int(ahead_ms * CYCLES_A_MS))  # type: ignore[no-untyped-call]

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        import torch

        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        asked = time.perf_counter()
        began.record()
        result = step()
        ended.record()
        self.enqueued_in_ms = (self.enqueued_in_ms[1], (time.perf_counter() - asked) * 1e3)
        ended.synchronize()
        return began.elapsed_time(ended), result

    def release(self) -> None:
        import torch

        if torch.cuda.device_count() > 1:  # else there are no all-to-alls, and no second process on this GPU
            torch.cuda.empty_cache()


def open_device(kind: str, index: int, threads: int) -> Device:
    """`cpu` or GPU `index`."""
    return Cuda(index) if kind == "cuda" else Cpu(threads)


class CaseTiming(NamedTuple):
    forward: Timing
    backward: Timing
    disturbed: bool


def time_case(
    device: Device, forward: Callable[[], Any], backward: Callable[[Any], Any], warmup: int, repeats: int
) -> CaseTiming:
    """Forward and backward of a case, each from a cold cache: warm-up first, then the fastest of `repeats` repeats.

    `backward` gets what `forward` returned. Until the fastest agree, up to as many repeats again are taken. A long case ends
    early, but not before MIN_REPEATS. It was disturbed where the fastest differ by more than CALM in the end.
    """
    forwards: list[float] = []
    backwards: list[float] = []
    for repeat in range(warmup + 2 * repeats):
        device.flush()  # also in the warm-up, since lines used again and again outlast one flush
        forward_ms, result = device.timed(forward)
        device.flush()
        backward_ms, _ = device.timed(partial(backward, result))
        if repeat < warmup:
            continue
        forwards.append(forward_ms)
        backwards.append(backward_ms)
        settled = max(disagreement(forwards), disagreement(backwards)) <= SETTLED
        if settled and len(forwards) >= repeats:
            break
        if len(forwards) >= MIN_REPEATS and sum(forwards) + sum(backwards) > LONG_CASE_MS:
            break
    disturbed = max(disagreement(forwards), disagreement(backwards)) > CALM
    return CaseTiming(timing(forwards, min), timing(backwards, min), disturbed)


def disagreement(samples: Sequence[float]) -> float:
    """How much slower than the fastest sample the last of the AGREEING fastest is, as a share."""
    fastest = sorted(samples)[:AGREEING]
    return fastest[-1] / fastest[0] - 1 if fastest[0] else 0.0


def out_of_memory(error: Exception) -> bool:
    """Is this torch's, CUDA's or Python's way of saying that memory ran out?"""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
