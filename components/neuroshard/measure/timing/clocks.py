"""A device that times a step on its own clock and flushes its own cache: a CPU, or a GPU."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from neuroshard.core.errors import MeasureError

if TYPE_CHECKING:
    import torch

# A GPU waits before each timed step while the host enqueues it: at least LEAST_AHEAD_MS, and LAUNCH_MARGIN times what enqueueing
# the last steps took. FBGEMM's Python alone takes half a millisecond for a table set of 4 operators.
LEAST_AHEAD_MS = 0.5
MOST_AHEAD_MS = 5.0
LAUNCH_MARGIN = 2.0
CYCLES_A_MS = 2_000_000  # at 2 GHz


class TimedDevice(Protocol):
    """What is measured: its place in torch, its clock, and its cache."""

    torch: "torch.device"

    def flush(self) -> None:
        """Evict what the last step left in the device's cache."""

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        """Milliseconds that the step took on this device, and what it returned. With `waiting`, time spent waiting counts."""

    def release(self) -> None:
        """Return cached memory to the device, if another process of ours needs it."""


class Cpu:
    """This machine's CPU with `threads` threads. It flushes its cache by writing memory: see
    `table_sets.find_flush_bytes`.

    One thread is timed by its own CPU clock, unless waiting counts. That clock stands still while other processes have the core;
    on an idle machine it agrees with the wall clock.
    """

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.threads = threads
        self.torch = torch.device("cpu")
        self.eviction = torch.empty(0)

    def flush_with(self, flush_bytes: int) -> None:
        """Write this many bytes at each flush from now on."""
        import torch

        if self.eviction.nbytes != flush_bytes:
            self.eviction = torch.empty(0)  # free the old buffer before allocating the new one
            self.eviction = torch.zeros(flush_bytes // 4)

    def flush(self) -> None:
        self.eviction.fill_(1.0)

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        clock = time.perf_counter if waiting or self.threads > 1 else time.thread_time
        began = clock()
        result = step()
        return (clock() - began) * 1e3, result

    def release(self) -> None:
        """Nothing to do: the memory limit leaves enough for all processes on a CPU."""


class Cuda:
    """GPU `index`. Flushes by writing twice its L2, and times with CUDA events. Raises MeasureError without such a GPU."""

    def __init__(self, index: int) -> None:
        import torch

        if index >= torch.cuda.device_count():
            raise MeasureError(f"backend cuda needs GPU {index}, but torch sees {torch.cuda.device_count()} GPUs here")
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self.enqueued_in_ms = (0.0, 0.0)  # of the last two steps, forward and backward

    @cached_property
    def eviction(self) -> "torch.Tensor":
        import torch

        l2_bytes = torch.cuda.get_device_properties(self.torch).L2_cache_size
        return torch.zeros(2 * l2_bytes // 4, device=self.torch)

    def flush(self) -> None:
        import torch

        self.eviction.fill_(1.0)
        # Otherwise the gaps that slow Python leaves between kernels would be timed. In training the host runs ahead of the GPU.
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

        if torch.cuda.device_count() > 1:  # with one GPU there are no all-to-alls, so no second process on it
            torch.cuda.empty_cache()


def open_device(kind: str, index: int, threads: int) -> TimedDevice:
    """The CPU, or GPU `index`."""
    return Cuda(index) if kind == "cuda" else Cpu(threads)


FIRST = 1  # the lowest real-time priority, ahead of every process without one


def may_go_first() -> bool:
    """Whether processes here may run in real time, ahead of others. It needs CAP_SYS_NICE or an RLIMIT_RTPRIO."""
    if sys.platform != "linux":
        return False
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    allowed = _go_first()
    if allowed:
        os.sched_setscheduler(0, policy, parameters)
    return allowed


def _go_first() -> bool:
    """Run ahead of others from now on, and return whether that is allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(FIRST))
    except OSError:
        return False
    return True


def take_core(rank: int, *, first: bool) -> None:
    """Keep this process and its later threads on one core, in turns with the other ranks there.

    A rank that wakes up does not interrupt a running rank: with interruptions, a quarter of the all-to-alls of 4 ranks on 2 cores
    took five times as long as the others. If it goes `first`, where allowed, it does interrupt other processes: otherwise each
    message waits for their time slice of 4 ms, in all-to-alls of 0.7 ms.
    """
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
            if not (first and _go_first()):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
