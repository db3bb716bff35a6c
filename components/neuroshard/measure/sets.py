"""Table sets in a worker process: several in turns on a CPU, so that each is seen at several moments; one by one on a GPU."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from neuroshard import system
from neuroshard.core.case import ComputeCase
from neuroshard.core.cost import ComputeCost
from neuroshard.measure import calm
from neuroshard.measure.backends import Settings
from neuroshard.measure.fbgemm import TableBatchedEmbedding
from neuroshard.measure.flush import PROBE_BYTES, PROBE_READS, find_flush_bytes, most_bytes
from neuroshard.measure.harness import CaseTiming, Cpu, compute_cost, out_of_memory, time_case
from neuroshard.measure.room import Room
from neuroshard.measure.worker import first_line


class Lot(NamedTuple):
    """Table sets to measure, each in its round, with so many repeats; and on a CPU the calm ms of the reference
    kernels, and how many bytes are written before each timed step."""

    cases: tuple[tuple[ComputeCase, int], ...]
    repeats: int
    calm_ms: Mapping[str, float]
    flush_bytes: int | None


class Look(NamedTuple):
    """Ask what this CPU is like: how much to write before each timed step, unless that is known, and how fast it is in calm,
    found in `seconds`."""

    seconds: float
    flush_bytes: int | None


class Seen(NamedTuple):
    """The answer to a Look."""

    flush_bytes: int
    calm_ms: dict[str, float]


class TableSets:
    """Serves lots, `Lot -> list[ComputeCost]`, and looks at a CPU, `Look -> Seen`."""

    def __init__(
        self, kind: str, index: int, settings: Settings, limit: int | None, weight_bytes: int, state_bytes: int
    ) -> None:
        self.settings = settings
        self.sets = TableBatchedEmbedding(kind, index, settings, limit, weight_bytes, state_bytes)
        self.reference_kernel = (
            calm.ReferenceKernel(self.sets.device, settings.threads, Room.here().read_bytes) if kind == "cpu" else None
        )

    def __call__(self, asked: Lot | Look) -> list[ComputeCost] | Seen:
        if isinstance(asked, Look):
            return self._look(asked)
        lot, device = asked, self.sets.device
        if isinstance(device, Cpu) and lot.flush_bytes is not None:
            device.flush_with(lot.flush_bytes)
        timed = (
            [self._at_once(case, lot.repeats) for case, _ in lot.cases]
            if self.reference_kernel is None
            else self._in_turns(lot)
        )
        self.sets.device.release()
        return [
            ComputeCost(case_id=case.case_id, round=round_, error=one)
            if isinstance(one, str)
            else compute_cost(case, round_, *one)
            for (case, round_), one in zip(lot.cases, timed, strict=True)
        ]

    def _look(self, asked: Look) -> Seen:
        device = self.sets.device
        assert isinstance(device, Cpu)
        assert self.reference_kernel
        flush_bytes = asked.flush_bytes
        if flush_bytes is None:
            most = most_bytes(Room.here(), system.last_level_cache_bytes())
            flush_bytes = find_flush_bytes(_reading_again(device, most), most)
        device.flush_with(flush_bytes)
        return Seen(flush_bytes, self.reference_kernel.calm_ms(asked.seconds))

    def _at_once(self, case: ComputeCase, repeats: int) -> CaseTiming | str:
        try:
            return time_case(self.sets.device, *self.sets.steps(case), self.settings.warmup, repeats)
        except Exception as error:
            return _memory(error)

    def _in_turns(self, lot: Lot) -> list[CaseTiming | str]:
        """A visit to each set in turns, until each has enough of them, or ran out of memory."""
        visits: list[list[list[calm.Repeat]]] = [[] for _ in lot.cases]
        errors: dict[int, str] = {}
        left = list(range(len(lot.cases)))
        while left:
            for place in left:
                try:
                    visits[place].append(self._visit(lot.cases[place][0], lot))
                except Exception as error:
                    errors[place] = _memory(error)
            left = [p for p in left if p not in errors and not calm.enough(visits[p], lot.repeats)]
        return [errors.get(place) or calm.case_timing(one) for place, one in enumerate(visits)]

    def _visit(self, case: ComputeCase, lot: Lot) -> list[calm.Repeat]:
        assert self.reference_kernel
        _, repeats = calm.dealt_out(lot.repeats)
        slow = partial(self.reference_kernel.slowness, lot.calm_ms)
        return calm.visit(self.sets.device, *self.sets.steps(case), self.settings.warmup, repeats, slow)


def _reading_again(device: Cpu, most: int) -> Callable[[int], float]:
    """What `find_flush_bytes` asks: the ms of reading a buffer again after n bytes, at most `most`, were written."""
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


def _memory(error: Exception) -> str:
    """What is told where memory ran out. Raises what is anything else."""
    if not out_of_memory(error):
        raise error
    return f"out of memory ({first_line(error)})"
