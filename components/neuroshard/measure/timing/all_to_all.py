"""The cost of an all-to-all among processes, one a device, with torch.distributed (gloo on CPUs, NCCL on GPUs).

In forward, each device has pooled embeddings of the whole batch for its own dims, and sends each peer that peer's samples. The
time runs from the device's own start (some delay after the first device) until everything it needs lies in one matrix, waiting
included. Backward is the reverse, timed by itself with all devices starting together. Values are fp32. Covers one host only.

The copies around the all-to-all are TorchRec's (`All2All_Pooled_Req` and `All2All_Pooled_Wait` of its `comm_ops`), written with
torch alone. They are bound by memory, and within a host they take longer than the all-to-all itself. `TimeReorder` times one
more, which a plan with cut tables needs.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from neuroshard.core.case import CollectiveCase
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.timing.clocks import open_device, take_core
from neuroshard.measure.timing.harness import Timing, disagreement, timing
from neuroshard.measure.workers.processes import first_line, out_of_memory

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl"}
# A burst is one forward and BACKWARDS backwards, which are shorter (no delays) and need more repeats for the same certainty.
BACKWARDS = 3
BURSTS = 2  # for each repeat of a table set; only 1 for an all-to-all that takes longer than LONG_SECONDS …
MOST_BURSTS = 4  # … and up to so many while the fastest of them differ by more than AGREEMENT
AGREEMENT = 0.1
LONG_SECONDS = 1.0
BUFFERS = 5  # that a rank has for an all-to-all, none larger than its widest device's columns of the whole batch
REFERENCE_DIM = 256  # columns of each device in the reference all-to-all
# Of the reference all-to-all when a run begins. Labels are scaled to the median trial: what was scaled to the fastest one was a
# quarter shorter than in a trainer.
CALM_TRIALS = 5
REORDERED_COLUMNS, SHARD_COLUMNS = 1024, 64  # in all, and of each shard, when columns are put into another order
REORDERED_SAMPLES = 16_384  # at most: 64 MiB in and 64 MiB out, which no cache holds
REORDER_SECONDS = 1.0  # for which that is repeated
LEAD_SECONDS = 0.001  # from agreeing on a start to the start; every device knows it by then


def samples_per_device(batch_size: int, devices: int) -> list[int]:
    """The batch in nearly equal shares: the first devices get one sample more where it does not divide."""
    share, more = divmod(batch_size, devices)
    return [share + (device < more) for device in range(devices)]


def agreed(*sampled: Sequence[float]) -> bool:
    """Whether the fastest samples of each series agree. A series without samples does."""
    return all(disagreement(samples) <= AGREEMENT for samples in sampled if samples)


def reference_all_to_all(devices: int) -> CollectiveCase:
    """The reference kernel of all-to-alls: its time shows how fast an all-to-all is at the moment."""
    return CollectiveCase(device_dims=(REFERENCE_DIM,) * devices, start_delays_ms=(0.0,) * devices)


class RankTiming(NamedTuple):
    """What one rank measured. `reference_ms` is None on GPUs."""

    forward: Timing
    backward: Timing
    reference_ms: float | None


class TimeAllToAll(NamedTuple):
    """A request to a rank: time an all-to-all with so many repeats."""

    case: CollectiveCase
    repeats: int


class TimeReorder(NamedTuple):
    """A request to a rank: time putting the outputs of its samples into another order, on so many devices at once."""

    devices: int


class Rank:
    """One rank of the all-to-alls. Serves `TimeAllToAll -> RankTiming`, or the text of an out-of-memory error.

    It also serves `TimeReorder -> ms`: what a column of all samples and its gradients take together.

    All ranks join one process group of `max(counts)` devices. An all-to-all of fewer devices is among the first of them.
    """

    goes_first = True  # ahead of other processes, on a CPU

    def __init__(self, kind: str, rank: int, counts: tuple[int, ...], folder: str, settings: MeasureSettings) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.settings = rank, settings
        if kind == "cpu":
            take_core(rank, first=self.goes_first)
        self.device = open_device(kind, rank, threads=1)
        dist.init_process_group(
            COLLECTIVES[kind],
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=max(counts),
            timeout=timedelta(seconds=settings.timeout_seconds),
        )
        self.groups = {count: dist.new_group(list(range(count))) for count in counts}
        # ranks agree on a start over gloo, also where NCCL is measured
        on_cpu = COLLECTIVES[kind] == "gloo"
        self.clocks = self.groups if on_cpu else {n: dist.new_group(list(range(n)), backend="gloo") for n in counts}
        for count in counts:
            if rank < count:  # NCCL connects at its first use; that must not be part of a case
                one = torch.zeros(count, device=self.device.torch)
                dist.all_to_all_single(torch.zeros_like(one), one, group=self.groups[count])
        if rank == 0:  # all ranks took part in the all-to-all above, so none needs the folder any more
            shutil.rmtree(folder, ignore_errors=True)

        # GPUs need no reference kernel: NCCL shares its links with nobody
        self.references = (
            {n: self._steps(reference_all_to_all(n))[1] for n in counts if rank < n} if kind == "cpu" else {}
        )

    def __call__(self, request: TimeAllToAll | TimeReorder) -> RankTiming | float | str:
        answer = self._reorder_ms(request.devices) if isinstance(request, TimeReorder) else self._all_to_all(*request)
        self.device.release()
        return answer

    def _reorder_ms(self, devices: int) -> float:
        """By FBGEMM's operator, as TorchRec calls it (`PermutePooledEmbeddingsSplit`); gradients take as long as outputs."""
        import fbgemm_gpu  # noqa: F401  registers the operator
        import torch

        share = samples_per_device(self.settings.batch_size, devices)[self.rank]
        if not share:  # a batch of fewer samples than devices
            return 0.0
        samples = min(share, REORDERED_SAMPLES)
        outputs = torch.ones(samples, REORDERED_COLUMNS, device=self.device.torch)
        shards = REORDERED_COLUMNS // SHARD_COLUMNS
        offsets = torch.arange(shards + 1, device=self.device.torch) * SHARD_COLUMNS
        order = torch.arange(shards, device=self.device.torch).flip(0)

        def reorder() -> None:
            torch.ops.fbgemm.permute_pooled_embs_auto_grad_split(outputs, offsets, order, offsets, order)

        taken: list[float] = []
        until = time.monotonic() + REORDER_SECONDS
        while not taken or time.monotonic() < until:
            self.device.flush()  # on a GPU also: wait until the host has launched what is timed
            taken.append(self.device.timed(reorder)[0])
        of_column = statistics.median(taken) / REORDERED_COLUMNS * share / samples
        return 2 * of_column * devices

    def _all_to_all(self, case: CollectiveCase, repeats: int) -> RankTiming | str:
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
        references: list[float] = []
        reference = self.references.get(devices)
        warmup = self.settings.warmup
        until = time.monotonic() + LONG_SECONDS
        for burst in range(warmup + MOST_BURSTS * repeats):
            if burst >= warmup + repeats and not self._all_say(devices, time.monotonic() < until):
                break
            if burst >= warmup + BURSTS * repeats and self._all_say(
                devices, agreed(forwards[warmup:], backwards[BACKWARDS * warmup :], references[warmup:])
            ):
                break
            forwards.append(self._timed(forward, devices, delay_ms))
            backwards += [self._timed(backward, devices, 0.0) for _ in range(BACKWARDS)]
            references += [self._timed(reference, devices, 0.0)] if reference else []
        return RankTiming(
            timing(forwards[warmup:], statistics.median),
            timing(backwards[BACKWARDS * warmup :], statistics.median),
            statistics.median(references[warmup:]) if references else None,
        )

    def _timed(self, step: Callable[[], Any], devices: int, delay_ms: float) -> float:
        self._start_together(devices, delay_ms)
        milliseconds, _ = self.device.timed(step, waiting=True)
        return milliseconds

    def _steps(self, case: CollectiveCase) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Forward and backward all-to-all of this rank, on new buffers. The steps allocate nothing: a rank that ran out of
        memory within one would let its peers wait."""
        import torch
        import torch.distributed as dist

        dims = list(case.device_dims)
        shares = samples_per_device(self.settings.batch_size, len(dims))
        share = shares[self.rank]
        to_peers = [each * dims[self.rank] for each in shares]
        from_peers = [share * dim for dim in dims]

        def ones(*shape: int) -> Any:
            return torch.ones(shape, device=self.device.torch)

        pooled, mine = ones(sum(to_peers)), ones(sum(to_peers))
        theirs, apart = ones(sum(from_peers)), ones(sum(from_peers))
        joined = ones(share, sum(dims))
        of_peers, gradients_apart = (
            [part.view(share, dim) for part, dim in zip(torch.split(flat, from_peers), dims, strict=True)]
            for flat in (theirs, apart)
        )
        gradients = torch.split(joined, dims, dim=1)
        group = self.groups[len(dims)]

        def forward() -> None:
            mine.copy_(pooled)
            dist.all_to_all_single(theirs, mine, from_peers, to_peers, group=group)
            torch.cat(of_peers, dim=1, out=joined)

        def backward() -> None:
            for part, gradient in zip(gradients_apart, gradients, strict=True):
                part.copy_(gradient)
            torch.cat([part.view(-1) for part in gradients_apart], out=theirs)
            dist.all_to_all_single(mine, theirs, to_peers, from_peers, group=group)
            mine.div_(len(dims))

        return forward, backward

    def _all_say(self, devices: int, yes: bool) -> bool:
        """Whether all ranks say yes. Ranks that cannot go on must say so, or the others would wait for them."""
        import torch
        import torch.distributed as dist

        least = torch.tensor([int(yes)])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.clocks[devices])
        return bool(least.item())

    def _start_together(self, devices: int, delay_ms: float) -> None:
        """Sleep until `delay_ms` after a moment that rank 0 chooses on the host's clock, which all ranks share."""
        import torch
        import torch.distributed as dist

        moment = torch.tensor([time.monotonic() + LEAD_SECONDS], dtype=torch.float64)
        dist.broadcast(moment, 0, group=self.clocks[devices])
        time.sleep(max(0.0, moment.item() + delay_ms / 1e3 - time.monotonic()))
