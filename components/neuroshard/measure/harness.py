"""How anything is timed: warm-up, cold cache, repeats, median and spread. One harness for the CPU and for CUDA.

A device times a step on its own clock and can flush its own caches: wall clock and L3 on a CPU, CUDA events and L2 on a GPU.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from neuroshard.core.case import CommCase, ComputeCase
from neuroshard.core.cost import CommCost, ComputeCost
from neuroshard.core.errors import MeasureError

if TYPE_CHECKING:
    import torch

MIN_REPEATS = 3
LONG_CASE_MS = 250.0  # a case that has taken this long has enough repeats once it has MIN_REPEATS
CALM_SPREAD = 0.05  # of the median; with more, labels on a busy machine were 11 % too high instead of 4 %
CALM_WAIT = 0.1  # of the CPU time; when others had the core for longer, labels were 7 % too high instead of 2 %
LAUNCH_AHEAD_CYCLES = 1_000_000  # 0.5 ms of GPU time at 2 GHz, in which the host enqueues what is then timed


class Timing(NamedTuple):
    """Milliseconds: the median over the repeats, and half their interquartile range."""

    median: float
    spread: float


def timing(samples: Sequence[float]) -> Timing:
    """Median and half interquartile range of at least one sample."""
    if len(samples) < 2:
        return Timing(samples[0], 0.0)
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(middle, (high - low) / 2)


def compute_cost(
    case: ComputeCase, round_: int, forward: Timing, backward: Timing, disturbed: bool = False
) -> ComputeCost:
    """A measured table set as a row of the costs."""
    return ComputeCost(
        case_id=case.case_id,
        round=round_,
        forward_ms=forward.median,
        backward_ms=backward.median,
        forward_spread_ms=forward.spread,
        backward_spread_ms=backward.spread,
        disturbed=disturbed,
    )


def comm_cost(case: CommCase, round_: int, forwards: Sequence[Timing], backwards: Sequence[Timing]) -> CommCost:
    """A measured exchange, one timing a device, as a row of the costs."""
    return CommCost(
        case_id=case.case_id,
        round=round_,
        forward_ms=tuple(timing.median for timing in forwards),
        backward_ms=tuple(timing.median for timing in backwards),
        forward_spread_ms=tuple(timing.spread for timing in forwards),
        backward_spread_ms=tuple(timing.spread for timing in backwards),
    )


class Device(Protocol):
    """What is measured: where its tensors lie, its clock, and its cache."""

    torch: "torch.device"

    def flush(self) -> None:
        """Push what the last step left out of the device's cache."""

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        """Milliseconds that the step took on this device, and what it returned. `waiting` for other devices counts if said."""

    def waited(self) -> float:
        """How long the steps since the last call had to wait for the device itself, as a share of their time on it."""


class Cpu:
    """This machine's CPU with `threads` threads. Writes twice the last-level cache to flush it.

    One thread is timed by its own CPU clock, unless waiting counts: while others take the core from it, that stands still. On
    an idle machine it agrees with the wall clock; with three busy processes a core labels vary half as much.
    """

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.threads = threads
        self.torch = torch.device("cpu")
        self.spent = self.passed = 0.0  # seconds of CPU time, and of wall clock, in steps timed by the former

    @cached_property
    def eviction(self) -> "torch.Tensor":
        import torch

        return torch.zeros(2 * last_level_cache_bytes() // 4)

    def flush(self) -> None:
        self.eviction.fill_(1.0)

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        by_wall = waiting or self.threads > 1
        began, began_wall = time.thread_time(), time.perf_counter()
        result = step()
        spent, passed = time.thread_time() - began, time.perf_counter() - began_wall
        if by_wall:
            return passed * 1e3, result
        self.spent, self.passed = self.spent + spent, self.passed + passed
        return spent * 1e3, result

    def waited(self) -> float:
        share = self.passed / self.spent - 1 if self.spent else 0.0
        self.spent = self.passed = 0.0
        return share


class Cuda:
    """GPU `index`. Writes twice its L2 to flush it, and times with events. Raises MeasureError where there is no such GPU."""

    def __init__(self, index: int) -> None:
        import torch

        if index >= torch.cuda.device_count():
            raise MeasureError(f"backend cuda needs GPU {index}, but torch sees {torch.cuda.device_count()} GPUs here")
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)

    @cached_property
    def eviction(self) -> "torch.Tensor":
        import torch

        l2_bytes = torch.cuda.get_device_properties(self.torch).L2_cache_size
        return torch.zeros(2 * l2_bytes // 4, device=self.torch)

    def flush(self) -> None:
        import torch

        self.eviction.fill_(1.0)
        # Without this the gaps between kernels that a slow Python host leaves would be timed; a trainer's host runs ahead.
        torch.cuda._sleep(LAUNCH_AHEAD_CYCLES)  # type: ignore[no-untyped-call]

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        import torch

        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        result = step()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended), result

    def waited(self) -> float:
        return 0.0  # nothing tells; a shared GPU shows in the spread


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
    """Forward and backward of a case, each from a cold cache: warm-up first, then up to `repeats` repeats.

    `backward` gets what `forward` returned. A long case ends early, but not before MIN_REPEATS. It was disturbed where the
    repeats scatter, or others had the core meanwhile, by more than CALM_SPREAD or CALM_WAIT.
    """
    forwards: list[float] = []
    backwards: list[float] = []
    spent_ms = 0.0
    device.waited()
    for repeat in range(warmup + repeats):
        if repeat >= warmup + MIN_REPEATS and spent_ms > LONG_CASE_MS:
            break
        device.flush()  # also in the warm-up, since lines used again and again outlast one flush
        forward_ms, result = device.timed(forward)
        device.flush()
        backward_ms, _ = device.timed(partial(backward, result))
        if repeat >= warmup:
            forwards.append(forward_ms)
            backwards.append(backward_ms)
            spent_ms += forward_ms + backward_ms
    both = timing([forward_ms + backward_ms for forward_ms, backward_ms in zip(forwards, backwards, strict=True)])
    disturbed = both.spread > CALM_SPREAD * both.median or device.waited() > CALM_WAIT
    return CaseTiming(timing(forwards), timing(backwards), disturbed)


def last_level_cache_bytes() -> int:
    """Size of the CPU's largest cache, from sysfs; 32 MiB where the system does not say."""
    sizes = [
        int(path.read_text().strip().removesuffix("K")) * 1024
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=32 * 2**20)


def out_of_memory(error: Exception) -> bool:
    """Is this torch's, CUDA's or Python's way of saying that memory ran out?"""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
