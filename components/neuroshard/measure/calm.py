"""A table set's ms on a CPU as calm as it can be: what is timed beside each repeat, and how visits become a label.

On a shared host the speed of a core and of its memory moves by half for seconds at a time, without a trace in the machine
itself. So each repeat is scaled by two fixed things that are timed right after it, and a set is visited several times, other
sets in between: docs/measure.md.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from neuroshard.core.case import ComputeCase
from neuroshard.core.cost import READS, SHARES, SMALL_SET, slowness
from neuroshard.core.table import Table
from neuroshard.measure.backends import Settings
from neuroshard.measure.fbgemm import TableBatchedEmbedding
from neuroshard.measure.harness import LONG_CASE_MS, MIN_REPEATS, CaseTiming, Device, Timing, timing

VISITS = 4  # of a table set, to which its repeats are dealt out; up to twice as many while they disagree
SETTLED = 0.03  # standard error of a label, by its visits
DISTURBED = 0.05
CALMEST = 0.01  # share of the looks at the reference kernel that are faster than what labels are scaled to

READ_DIM = 64
READ_ROWS = 6_000
# A core's cache holds it. Of the user's settings only the threads count, so that it is the same for all on a machine.
SMALL = ComputeCase(
    tables=tuple(
        Table.model_validate({"name": f"small-{i}", "rows": 512, "dim": 64, "pooling_factor": 16.0}) for i in range(2)
    ),
    batch_size=512,
)


class Repeat(NamedTuple):
    """A repeat of forward and backward, and how long they take of what they take in calm."""

    forward_ms: float
    backward_ms: float
    slowness: float


class ReferenceKernel:
    """Random reads of rows, and a small table set: timed on the device, they say how fast it is just now."""

    def __init__(self, device: Device, threads: int, read_bytes: int) -> None:
        import torch

        self.device = device
        self.rows = torch.ones(read_bytes // (4 * READ_DIM), READ_DIM)
        self.places = torch.randint(len(self.rows), (READ_ROWS,), generator=torch.Generator().manual_seed(0))
        sets = TableBatchedEmbedding("cpu", 0, Settings(batch_size=1, threads=threads), None, *(2**19,) * 2)
        self.forward, self.backward = sets.steps(SMALL)

    def ms(self) -> dict[str, float]:
        """What each takes, the reads from memory that a step before has not read."""
        reads_ms, _ = self.device.timed(lambda: self.rows.index_select(0, self.places))
        forward_ms, result = self.device.timed(self.forward)
        backward_ms, _ = self.device.timed(partial(self.backward, result))
        return {READS: reads_ms, SMALL_SET: forward_ms + backward_ms}

    def slowness(self, calm_ms: Mapping[str, float]) -> float:
        """As `slowness`, now."""
        return slowness(self.ms(), calm_ms)

    def calm_ms(self, seconds: float) -> dict[str, float]:
        """What each takes at the calmest of the looks that there is time for; of one at least."""
        looks: list[dict[str, float]] = []
        began = time.monotonic()
        while not looks or time.monotonic() < began + seconds:
            self.device.flush()
            looks.append(self.ms())
        return {part: sorted(look[part] for look in looks)[int(CALMEST * len(looks))] for part in SHARES}


def dealt_out(repeats: int) -> tuple[int, int]:
    """Visits, and repeats of each, that are at least `repeats` together: 7 -> (4, 2)."""
    each = -(-repeats // VISITS)
    return -(-repeats // each), each


def visit(
    device: Device,
    forward: Callable[[], Any],
    backward: Callable[[Any], Any],
    warmup: int,
    repeats: int,
    slow: Callable[[], float],
) -> list[Repeat]:
    """`repeats` repeats after the warm-up, each step from a cold cache; `slow` tells how slow the device was right after each."""
    taken = []
    for repeat in range(warmup + repeats):
        device.flush()
        forward_ms, result = device.timed(forward)
        device.flush()
        backward_ms, _ = device.timed(partial(backward, result))
        if repeat >= warmup:
            taken.append(Repeat(forward_ms, backward_ms, slow()))
    return taken


def enough(visits: Sequence[Sequence[Repeat]], repeats: int) -> bool:
    """Are these visits enough for a label? Of long cases fewer are, but not before MIN_REPEATS."""
    planned, _ = dealt_out(repeats)
    together = [repeat for one in visits for repeat in one]
    if len(together) >= MIN_REPEATS and sum(r.forward_ms + r.backward_ms for r in together) > LONG_CASE_MS:
        return True
    return len(visits) >= planned and (standard_error(visits) <= SETTLED or len(visits) >= 2 * planned)


def case_timing(visits: Sequence[Sequence[Repeat]]) -> CaseTiming:
    """The median of the scaled repeats. Spreads are theirs too; the medians beside are of the repeats as they were timed."""
    repeats = [repeat for one in visits for repeat in one]

    def of(times: Sequence[float]) -> Timing:
        scaled = timing([ms / repeat.slowness for ms, repeat in zip(times, repeats, strict=True)], statistics.median)
        return scaled._replace(median=statistics.median(times))

    return CaseTiming(
        of([repeat.forward_ms for repeat in repeats]),
        of([repeat.backward_ms for repeat in repeats]),
        standard_error(visits) > DISTURBED,
    )


def standard_error(visits: Sequence[Sequence[Repeat]]) -> float:
    """Of the mean over the visits, as a share of it; 0 where a single visit tells nothing of it."""
    totals = [statistics.median((r.forward_ms + r.backward_ms) / r.slowness for r in one) for one in visits]
    if len(totals) < 2 or not (mean := statistics.mean(totals)):
        return 0.0
    return statistics.stdev(totals) / mean / math.sqrt(len(totals))
