"""Table sets in a worker process: several in turns on a CPU, so that each is timed at several moments; one by one on a GPU."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from neuroshard import system
from neuroshard.core.case import ComputeCase, TierCase
from neuroshard.core.cost import ComputeCost, TierCost
from neuroshard.core.errors import MeasureError
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.rowcap import MemoryQuotas
from neuroshard.measure.timing import calm
from neuroshard.measure.timing.beyond_hbm import time_tiers
from neuroshard.measure.timing.clocks import Cpu
from neuroshard.measure.timing.fbgemm import TableBatchedEmbedding
from neuroshard.measure.timing.harness import CaseTiming, compute_cost, time_case
from neuroshard.measure.workers.processes import first_line, out_of_memory


class TimeTableSets(NamedTuple):
    """A request: time table sets, each for its round, with `repeats` repeats.

    A CPU also needs the ms of the reference kernels in calm, and how many bytes to write before each timed step.
    """

    cases: tuple[tuple[ComputeCase, int], ...]
    repeats: int
    calm_ms: Mapping[str, float]
    flush_bytes: int | None


class TimeBeyondHbm(NamedTuple):
    """A request to a GPU: time tables beyond HBM, for a round, with `repeats` repeats."""

    case: TierCase
    round: int
    repeats: int


class ProbeCpu(NamedTuple):
    """A request: find how fast this CPU is in calm, within `seconds`, and `flush_bytes` unless they are known."""

    seconds: float
    flush_bytes: int | None


class CpuProbe(NamedTuple):
    """The answer to ProbeCpu: bytes to write before each timed step, and the ms of the reference kernels in calm."""

    flush_bytes: int
    calm_ms: dict[str, float]


class TableSets:
    """Serves `TimeTableSets -> list[ComputeCost]`, on a CPU `ProbeCpu -> CpuProbe`, on a GPU `TimeBeyondHbm -> TierCost`."""

    def __init__(
        self, kind: str, index: int, settings: MeasureSettings, limit: int | None, weight_bytes: int, state_bytes: int
    ) -> None:
        self.settings = settings
        self.sets = TableBatchedEmbedding(kind, index, settings, limit, weight_bytes, state_bytes)
        self.reference_kernel = (
            calm.ReferenceKernel(self.sets.device, settings.threads, MemoryQuotas.here().read_bytes)
            if kind == "cpu"
            else None
        )

    def __call__(self, request: TimeTableSets | ProbeCpu | TimeBeyondHbm) -> list[ComputeCost] | CpuProbe | TierCost:
        if isinstance(request, ProbeCpu):
            return self._probe(request)
        if isinstance(request, TimeBeyondHbm):
            return self._beyond_hbm(request)
        device = self.sets.device
        if isinstance(device, Cpu) and request.flush_bytes is not None:
            device.flush_with(request.flush_bytes)
        timed = (
            [self._at_once(case, request.repeats) for case, _ in request.cases]
            if self.reference_kernel is None
            else self._in_turns(request)
        )
        device.release()
        return [
            ComputeCost(case_id=case.case_id, round=round_, error=one)
            if isinstance(one, str)
            else compute_cost(case, round_, *one)
            for (case, round_), one in zip(request.cases, timed, strict=True)
        ]

    def _probe(self, request: ProbeCpu) -> CpuProbe:
        device = self.sets.device
        assert isinstance(device, Cpu)
        assert self.reference_kernel
        flush_bytes = request.flush_bytes
        if flush_bytes is None:
            most = most_bytes(MemoryQuotas.here(), system.last_level_cache_bytes())
            flush_bytes = find_flush_bytes(_read_again(device, most), most)
        device.flush_with(flush_bytes)
        return CpuProbe(flush_bytes, self.reference_kernel.calm_ms(request.seconds))

    def _beyond_hbm(self, request: TimeBeyondHbm) -> TierCost:
        case_id, round_ = request.case.case_id, request.round
        try:
            timed = time_tiers(self.sets, request.case, self.settings.warmup, request.repeats)
        except MeasureError as error:
            return TierCost(case_id=case_id, round=round_, error=str(error))
        except Exception as error:
            return TierCost(case_id=case_id, round=round_, error=_out_of_memory(error))
        finally:
            self.sets.device.release()
        return TierCost(
            case_id=case_id,
            round=round_,
            forward_ms=timed.beyond.forward.ms,
            backward_ms=timed.beyond.backward.ms,
            hbm_forward_ms=timed.hbm.forward.ms,
            hbm_backward_ms=timed.hbm.backward.ms,
            distinct_rows=timed.distinct_rows,
            missed_rows=timed.missed_rows,
            disturbed=timed.beyond.disturbed or timed.hbm.disturbed,
        )

    def _at_once(self, case: ComputeCase, repeats: int) -> CaseTiming | str:
        try:
            return time_case(self.sets.device, *self.sets.steps(case), self.settings.warmup, repeats)
        except Exception as error:
            return _out_of_memory(error)

    def _in_turns(self, request: TimeTableSets) -> list[CaseTiming | str]:
        """Visit the sets in turns until each has enough visits, or ran out of memory."""
        visits: list[list[list[calm.Repeat]]] = [[] for _ in request.cases]
        errors: dict[int, str] = {}
        left = list(range(len(request.cases)))
        while left:
            for place in left:
                try:
                    visits[place].append(self._visit(request.cases[place][0], request))
                except Exception as error:
                    errors[place] = _out_of_memory(error)
            left = [p for p in left if p not in errors and not calm.enough(visits[p], request.repeats)]
        return [errors.get(place) or calm.case_timing(one) for place, one in enumerate(visits)]

    def _visit(self, case: ComputeCase, request: TimeTableSets) -> list[calm.Repeat]:
        assert self.reference_kernel
        _, repeats = calm.dealt_out(request.repeats)
        slow = partial(self.reference_kernel.slowness, request.calm_ms)
        return calm.visit(self.sets.device, *self.sets.steps(case), self.settings.warmup, repeats, slow)


def _read_again(device: Cpu, most: int) -> Callable[[int], float]:
    """A probe for `find_flush_bytes`: the ms of reading a buffer again after writing n bytes, at most `most`."""
    import torch

    rows = torch.ones(PROBE_BYTES // 256, 64)
    places = torch.randint(len(rows), (PROBE_READS,), generator=torch.Generator().manual_seed(0))
    written = torch.zeros(most // 4)

    def read_ms_after(count: int) -> float:
        rows.index_select(0, places)
        written[: count // 4].fill_(1.0)
        milliseconds, _ = device.timed(lambda: rows.index_select(0, places))
        return milliseconds

    return read_ms_after


def _out_of_memory(error: Exception) -> str:
    """The error of a case that ran out of memory. Raises any other error again."""
    if not out_of_memory(error):
        raise error
    return f"out of memory ({first_line(error)})"


LEAST_BYTES = 8 * 2**20  # the first size tried, and more than a core's own caches
PROBE_BYTES = 4 * 2**20
PROBE_READS = 4_000  # rows of 256 bytes: 0.05 ms from a cache, 0.3 ms from memory
TRIALS = 5  # of each size, of which the median counts
# Of the way from the time after 8 MiB to the time after the most: most of the buffer has then left the cache.
EVICTED = 0.6
CLEAR = 1.5  # times the time after the least, that the time after the most must be; otherwise no size stands out


def sizes_up_to(most: int) -> list[int]:
    """Bytes to try, each size twice the one before: 8 MiB, 16 MiB, … and `most`."""
    sizes = [LEAST_BYTES]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] >= most else [*sizes, most]


def most_bytes(quotas: MemoryQuotas, last_level_cache: int | None) -> int:
    """The most bytes that a flush may write: twice the cache size in sysfs, if it gives one, and no more than memory allows."""
    return quotas.most_flush_bytes if last_level_cache is None else min(2 * last_level_cache, quotas.most_flush_bytes)


def find_flush_bytes(read_ms_after: Callable[[int], float], most: int) -> int:
    """Bytes that push a buffer out of the cache, at most `most`.

    `read_ms_after(n)` reads a buffer, writes `n` bytes elsewhere, and returns the ms of reading the buffer again. The result is
    twice the first size that makes this slow, since caches do not evict the oldest line first. If no size makes it slow (the
    cache is larger than `most`), the result is `most`.

    The cache size in sysfs is only an upper bound. A virtual machine reports the cache of a whole socket, hundreds of MiB, of
    which one core gets a part; writing all of it would take longer than the steps.
    """
    sizes = sizes_up_to(most)
    trials = [[read_ms_after(size) for size in sizes] for _ in range(TRIALS)]
    ms = [statistics.median(of_size) for of_size in zip(*trials, strict=True)]
    if ms[-1] < CLEAR * ms[0]:
        # every size is slow where one core's cache is smaller than the first size
        return most if ms[-1] <= CLEAR * read_ms_after(0) else min(2 * LEAST_BYTES, most)
    slow = ms[0] + EVICTED * (ms[-1] - ms[0])
    return min(2 * next(size for size, of_size in zip(sizes, ms, strict=True) if of_size >= slow), most)
