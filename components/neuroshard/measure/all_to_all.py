"""The cost of an all-to-all among processes, one a device, with torch.distributed (gloo on CPUs, NCCL on GPUs).

Forward, each device has pooled embeddings of the whole batch for its own dims, and sends every peer that peer's samples. It
is timed from the device's own start (a delay after the first) until all that it needs has arrived, waiting included. Backward
is the reverse, timed by itself with all devices starting together. Numbers are fp32. One host; several are not covered.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from neuroshard.core.case import CollectiveCase
from neuroshard.measure.backends import Settings
from neuroshard.measure.cores import take_core
from neuroshard.measure.harness import Timing, disagreement, open_device, out_of_memory, timing
from neuroshard.measure.worker import first_line

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl"}
BACKWARDS = 3  # to one forward, which takes longer for its delays: short times need more repeats for the same certainty
BURSTS = 2  # of a forward and its backwards, to one repeat of a table set; as many as repeats where they take long …
MOST_BURSTS = 4  # … and up to so many while the fastest differ by more than ALIKE
ALIKE = 0.1
LONG_EXCHANGE_SECONDS = 1.0
REFERENCE_DIM = 256  # of each device, in the all-to-all that is measured beside each case on CPUs
CALM_LOOKS = 5  # at the reference kernel when a run begins; the calmest is what labels are scaled to
LEAD_SECONDS = 0.001  # between agreeing on a start and the start; by then all have heard of it


def samples_per_device(batch_size: int, devices: int) -> list[int]:
    """The batch cut as evenly as it goes: the first devices get one sample more where it does not divide."""
    share, more = divmod(batch_size, devices)
    return [share + (device < more) for device in range(devices)]


def lower_decile(samples: Sequence[float]) -> float:
    """Of at least one sample. Of few the fastest."""
    return sorted(samples)[len(samples) // 10]


def alike(*sampled: Sequence[float]) -> bool:
    """Do the fastest of each agree? Of none, too."""
    return all(disagreement(samples) <= ALIKE for samples in sampled if samples)


def reference_kernel(devices: int) -> CollectiveCase:
    """The all-to-all whose time tells how fast an all-to-all is just now."""
    return CollectiveCase(device_dims=(REFERENCE_DIM,) * devices, start_delays_ms=(0.0,) * devices)


def at_speed(timed: Timing, speed: float, waiting_ms: float = 0.0) -> Timing:
    """A time that took `speed` of what it takes otherwise, but for the waiting in it, which takes as long at any."""

    def scaled(ms: float) -> float:
        waited = min(waiting_ms, ms)
        return waited + (ms - waited) * speed

    return Timing(scaled(timed.ms), timed.spread * speed, scaled(timed.median))


class Measured(NamedTuple):
    """What one device measured; the reference kernel on CPUs only."""

    forward: Timing
    backward: Timing
    reference_ms: float | None


class AllToAll(NamedTuple):
    """An all-to-all to measure, with so many repeats."""

    case: CollectiveCase
    repeats: int


class Rank:
    """Device `rank` of the all-to-alls, serving `All-to-all -> Measured` or the text of an out-of-memory error.

    All ranks join one process group of `max(counts)` devices. An all-to-all among fewer is among the first of them.
    """

    def __init__(self, kind: str, rank: int, counts: tuple[int, ...], folder: str, settings: Settings) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.settings = rank, settings
        if kind == "cpu":
            take_core(rank)
        self.device = open_device(kind, rank, threads=1)
        dist.init_process_group(
            COLLECTIVES[kind],
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=max(counts),
            timeout=timedelta(seconds=settings.timeout_seconds),
        )
        self.groups = {count: dist.new_group(list(range(count))) for count in counts}
        # devices agree on a start over gloo, also where NCCL is measured
        on_cpu = COLLECTIVES[kind] == "gloo"
        self.clocks = self.groups if on_cpu else {n: dist.new_group(list(range(n)), backend="gloo") for n in counts}
        for count in counts:
            if rank < count:  # NCCL connects at the first use, which no case should pay for
                one = torch.zeros(count, device=self.device.torch)
                dist.all_to_all_single(torch.zeros_like(one), one, group=self.groups[count])
        if rank == 0:  # all ranks are in the all-to-all above, so all have met
            shutil.rmtree(folder, ignore_errors=True)

        # NCCL has its links to itself, and needs no reference kernel
        self.reference_kernels = (
            {n: self._steps(reference_kernel(n))[1] for n in counts if rank < n} if kind == "cpu" else {}
        )

    def __call__(self, asked: AllToAll) -> Measured | str:
        answer = self._all_to_all(*asked)
        self.device.release()
        return answer

    def _all_to_all(self, case: CollectiveCase, repeats: int) -> Measured | str:
        devices, delay_ms = len(case.device_dims), case.start_delays_ms[self.rank]
        try:
            forward, backward = self._steps(case)
            error = ""
        except Exception as caught:
            if not out_of_memory(caught):
                raise
            error = f"out of memory on device {self.rank} ({first_line(caught)})"
        if not self._all_say(devices, not error):
            return error

        forwards: list[float] = []
        backwards: list[float] = []
        reference_kernels: list[float] = []
        beside = self.reference_kernels.get(devices)
        warmup = self.settings.warmup
        until = time.monotonic() + LONG_EXCHANGE_SECONDS
        for burst in range(warmup + MOST_BURSTS * repeats):
            if burst >= warmup + repeats and not self._all_say(devices, time.monotonic() < until):
                break
            if burst >= warmup + BURSTS * repeats and self._all_say(
                devices, alike(forwards[warmup:], backwards[BACKWARDS * warmup :], reference_kernels[warmup:])
            ):
                break
            forwards.append(self._timed(forward, devices, delay_ms))
            backwards += [self._timed(backward, devices, 0.0) for _ in range(BACKWARDS)]
            reference_kernels += [self._timed(beside, devices, 0.0)] if beside else []
        return Measured(
            timing(forwards[warmup:], lower_decile),
            timing(backwards[BACKWARDS * warmup :], lower_decile),
            lower_decile(reference_kernels[warmup:]) if reference_kernels else None,
        )

    def _timed(self, step: Callable[[], Any], devices: int, delay_ms: float) -> float:
        self._start_together(devices, delay_ms)
        milliseconds, _ = self.device.timed(step, waiting=True)
        return milliseconds

    def _steps(self, case: CollectiveCase) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Forward and backward all-to-all of this device, on buffers of their own."""
        import torch
        import torch.distributed as dist

        dims = case.device_dims
        shares = samples_per_device(self.settings.batch_size, len(dims))
        to_peers = [share * dims[self.rank] for share in shares]
        from_peers = [shares[self.rank] * dim for dim in dims]
        mine, theirs = (torch.ones(sum(sizes), device=self.device.torch) for sizes in (to_peers, from_peers))
        group = self.groups[len(dims)]

        def forward() -> None:
            dist.all_to_all_single(theirs, mine, from_peers, to_peers, group=group)

        def backward() -> None:
            dist.all_to_all_single(mine, theirs, to_peers, from_peers, group=group)

        return forward, backward

    def _all_say(self, devices: int, yes: bool) -> bool:
        """Do all devices say yes? What one cannot do, like having its buffers, none may wait for."""
        import torch
        import torch.distributed as dist

        least = torch.tensor([int(yes)])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.clocks[devices])
        return bool(least.item())

    def _start_together(self, devices: int, delay_ms: float) -> None:
        """Sleep until `delay_ms` after a moment that device 0 chooses on the host's clock, which all processes share."""
        import torch
        import torch.distributed as dist

        moment = torch.tensor([time.monotonic() + LEAD_SECONDS], dtype=torch.float64)
        dist.broadcast(moment, 0, group=self.clocks[devices])
        time.sleep(max(0.0, moment.item() + delay_ms / 1e3 - time.monotonic()))
