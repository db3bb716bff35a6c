"""Steps of a plan's embeddings as a trainer takes them: all devices at the same time, compute and all-to-alls in turn.

Ranks on one CPU share its memory, so their tables take longer together than one after another.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.plan import DeviceCost
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.timing.all_to_all import Rank, TimeAllToAll, TimeReorder
from neuroshard.measure.timing.clocks import Cpu
from neuroshard.measure.timing.fbgemm import TableBatchedEmbedding


class TimeSteps(NamedTuple):
    """A request to a rank: take so many steps, and write `flush_bytes` before each part of a table set, as its labels were made.

    Each device has its table set, None where it has no tables.
    """

    sets: tuple[ComputeCase | None, ...]
    all_to_all: CollectiveCase
    repeats: int
    flush_bytes: int | None


class StepRank(Rank):
    """A rank of the all-to-alls that also has tables.

    It serves `TimeSteps -> DeviceCost`: the median ms of its steps. All-to-alls include what it waits for others.
    """

    goes_first = False  # as a trainer; and Linux now and then pauses a process in real time that never waits

    def __init__(
        self,
        kind: str,
        rank: int,
        counts: tuple[int, ...],
        folder: str,
        settings: MeasureSettings,
        limit: int | None,
        weight_bytes: int,
        state_bytes: int,
    ) -> None:
        super().__init__(kind, rank, counts, folder, settings)
        self.tables = TableBatchedEmbedding(kind, rank, settings, limit, weight_bytes, state_bytes)

    def __call__(self, request: TimeAllToAll | TimeReorder | TimeSteps) -> Any:
        return self._timing(request) if isinstance(request, TimeSteps) else super().__call__(request)

    def _timing(self, request: TimeSteps) -> DeviceCost:
        own = request.sets[self.rank]
        look_up, update = self.tables.steps(own) if own else (_nothing, _nothing)
        send, send_back = self._steps(request.all_to_all)
        if isinstance(self.device, Cpu) and request.flush_bytes is not None:
            self.device.flush_with(request.flush_bytes)
        taken: list[tuple[float, float, float]] = []
        # Only once: in a trainer a rank may look up while others still update, and all wait in the next all-to-all
        self._start_together(len(request.sets), 0.0)
        for _ in range(self.settings.warmup + request.repeats):
            self.device.flush()
            looked_up, pooled = self._wall_ms(look_up)
            forward, _ = self._wall_ms(send)
            backward, _ = self._wall_ms(send_back)
            self.device.flush()
            updated, _ = self._wall_ms(partial(update, pooled))
            taken.append((looked_up + updated, forward, backward))
        compute, forward, backward = map(statistics.median, zip(*taken[self.settings.warmup :], strict=True))
        return DeviceCost(compute_ms=compute, forward_collective_ms=forward, backward_collective_ms=backward)

    def _wall_ms(self, step: Callable[[], Any]) -> tuple[float, Any]:
        return self.device.timed(step, waiting=True)


def _nothing(*_: Any) -> None:
    """The step of a device without tables."""
