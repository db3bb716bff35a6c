"""Labels of table sets on a CPU, as if the machine were calm: reference kernels, and labels from several visits.

On a shared host the speed of a core and of its memory changes by half for seconds at a time, and nothing inside the machine
shows it. So each repeat is scaled by two reference kernels that are timed right after it, and each set is visited several times,
with other sets in between.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from neuroshard.core.case import ComputeCase
from neuroshard.core.cost import READS, SLOWDOWN_EXPONENTS, SMALL_SET, slowness
from neuroshard.core.table import Table
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.rowcap import buffer_bytes
from neuroshard.measure.timing.clocks import TimedDevice
from neuroshard.measure.timing.fbgemm import TableBatchedEmbedding
from neuroshard.measure.timing.harness import LONG_CASE_MS, MIN_REPEATS, CaseTiming, Timing, cold_ms, timing

VISITS = 4  # of a table set, which share its repeats; up to twice as many while they disagree
SETTLED_ERROR = 0.03  # standard error of a label over its visits, as a share, at which it needs no more visits …
DISTURBED_ERROR = 0.05  # … and above which it is marked as disturbed
# Labels are scaled to this quantile of the reference kernels' times. It repeats as well as the fastest time does, and is
# typical of the machine.
USUAL = 0.25

READ_DIM = 64
READ_ROWS = 6_000


def _alike(tables: int, rows: int) -> ComputeCase:
    """A set of this many tables. It depends on no setting, so all runs on a machine time the same set."""
    each = ({"name": f"{rows}-{i}", "rows": rows, "dim": READ_DIM, "pooling_factor": 16.0} for i in range(tables))
    return ComputeCase(tables=tuple(Table.model_validate(one) for one in each), batch_size=512)


SMALL = _alike(2, 512)  # a core's cache holds it
# Run before each trial of the reference kernels, since a table set runs before them later: right after one they take 6 to 9 %
# longer than after a flush alone.
BEFORE = _alike(4, 16_384)


class Repeat(NamedTuple):
    """A repeat of forward and backward, and how many times longer than in calm they take at that moment."""

    forward_ms: float
    backward_ms: float
    slowness: float


class ReferenceKernel:
    """Random reads of rows, and a small table set: their times show how fast the device is at the moment."""

    def __init__(self, device: TimedDevice, threads: int, read_bytes: int) -> None:
        import torch

        self.device, self.threads = device, threads
        self.rows = torch.ones(read_bytes // (4 * READ_DIM), READ_DIM)
        generator = torch.Generator().manual_seed(0)
        self.places, self.other_places = torch.randint(len(self.rows), (2, READ_ROWS), generator=generator)
        self.forward, self.backward = _steps(SMALL, threads)

    def ms(self) -> dict[str, float]:
        """The ms of each part, after an untimed run of both: the first one after a large table set takes up to a quarter longer
        than after a small one. The reads come from memory: no step before has read these rows."""
        self.rows.index_select(0, self.other_places)
        self.backward(self.forward())
        reads_ms, _ = self.device.timed(lambda: self.rows.index_select(0, self.places))
        forward_ms, result = self.device.timed(self.forward)
        backward_ms, _ = self.device.timed(partial(self.backward, result))
        return {READS: reads_ms, SMALL_SET: forward_ms + backward_ms}

    def slowness(self, calm_ms: Mapping[str, float]) -> float:
        """`core.cost.slowness` at this moment."""
        return slowness(self.ms(), calm_ms)

    def calm_ms(self, seconds: float) -> dict[str, float]:
        """The ms of each part in calm, in trials as `visit` makes them, as many as fit into `seconds`, at least one."""
        trials: list[dict[str, float]] = []
        before = _steps(BEFORE, self.threads)

        def in_calm() -> float:
            trials.append(self.ms())
            return 1.0

        began = time.monotonic()
        while not trials or time.monotonic() < began + seconds:
            visit(self.device, *before, 0, 1, in_calm)
        return {part: sorted(trial[part] for trial in trials)[int(USUAL * len(trials))] for part in SLOWDOWN_EXPONENTS}


def _steps(case: ComputeCase, threads: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Forward and backward of a set of our own, in buffers of its own."""
    settings = MeasureSettings(batch_size=1, threads=threads)
    buffers = buffer_bytes([case], settings.optimizer, None)
    return TableBatchedEmbedding("cpu", 0, settings, None, *buffers).steps(case)


def dealt_out(repeats: int) -> tuple[int, int]:
    """The number of visits and the repeats of each, at least `repeats` together: 7 -> (4, 2)."""
    each = -(-repeats // VISITS)
    return -(-repeats // each), each


def visit(
    device: TimedDevice,
    forward: Callable[[], Any],
    backward: Callable[[Any], Any],
    warmup: int,
    repeats: int,
    slow: Callable[[], float],
) -> list[Repeat]:
    """Warm-up, then `repeats` repeats, each step from a cold cache. `slow` is called right after each for its slowness."""
    for _ in range(warmup):
        cold_ms(device, forward, backward)
    return [Repeat(*cold_ms(device, forward, backward), slow()) for _ in range(repeats)]


def enough(visits: Sequence[Sequence[Repeat]], repeats: int) -> bool:
    """Whether these visits are enough for a label. Long cases need fewer, but at least MIN_REPEATS repeats."""
    planned, _ = dealt_out(repeats)
    together = [repeat for one in visits for repeat in one]
    if len(together) >= MIN_REPEATS and sum(r.forward_ms + r.backward_ms for r in together) > LONG_CASE_MS:
        return True
    return len(visits) >= planned and (standard_error(visits) <= SETTLED_ERROR or len(visits) >= 2 * planned)


def case_timing(visits: Sequence[Sequence[Repeat]]) -> CaseTiming:
    """The label: median and spread of the scaled repeats. Timing.median is that of the repeats before scaling."""
    repeats = [repeat for one in visits for repeat in one]

    def of(times: Sequence[float]) -> Timing:
        scaled = timing([ms / repeat.slowness for ms, repeat in zip(times, repeats, strict=True)], statistics.median)
        return scaled._replace(median=statistics.median(times))

    return CaseTiming(
        of([repeat.forward_ms for repeat in repeats]),
        of([repeat.backward_ms for repeat in repeats]),
        standard_error(visits) > DISTURBED_ERROR,
    )


def standard_error(visits: Sequence[Sequence[Repeat]]) -> float:
    """Standard error of the mean over the visits, as a share of the mean. 0 for a single visit, which has none."""
    totals = [statistics.median((r.forward_ms + r.backward_ms) / r.slowness for r in one) for one in visits]
    if len(totals) < 2 or not (mean := statistics.mean(totals)):
        return 0.0
    return statistics.stdev(totals) / mean / math.sqrt(len(totals))
