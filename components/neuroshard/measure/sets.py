"""Table sets in a worker process: several in turns on a CPU, so that each is seen at several moments; one by one on a GPU."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from neuroshard.core.case import ComputeCase
from neuroshard.core.cost import ComputeCost
from neuroshard.measure import calm
from neuroshard.measure.backends import Settings
from neuroshard.measure.fbgemm import TableBatchedEmbedding
from neuroshard.measure.harness import CaseTiming, compute_cost, out_of_memory, time_case
from neuroshard.measure.worker import first_line


class Lot(NamedTuple):
    """Table sets to measure, each in its round, and what the sentinel takes in calm, on a CPU."""

    cases: tuple[tuple[ComputeCase, int], ...]
    calm_ms: Mapping[str, float]


class TableSets:
    """Serves lots, `Lot -> list[ComputeCost]`, and what the sentinel takes in calm, `seconds of looking -> dict[str, float]`."""

    def __init__(
        self, kind: str, index: int, settings: Settings, limit: int | None, weight_bytes: int, state_bytes: int
    ) -> None:
        self.settings = settings
        self.sets = TableBatchedEmbedding(kind, index, settings, limit, weight_bytes, state_bytes)
        self.sentinel = calm.Sentinel(self.sets.device, settings.threads) if kind == "cpu" else None

    def __call__(self, lot: Lot | float) -> list[ComputeCost] | dict[str, float]:
        if not isinstance(lot, Lot):
            return self.sentinel.calm_ms(lot) if self.sentinel else {}
        timed = [self._at_once(case) for case, _ in lot.cases] if self.sentinel is None else self._in_turns(lot)
        self.sets.device.release()
        return [
            ComputeCost(case_id=case.case_id, round=round_, error=one)
            if isinstance(one, str)
            else compute_cost(case, round_, *one)
            for (case, round_), one in zip(lot.cases, timed, strict=True)
        ]

    def _at_once(self, case: ComputeCase) -> CaseTiming | str:
        try:
            return time_case(self.sets.device, *self.sets.steps(case), self.settings.warmup, self.settings.repeats)
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
                    visits[place].append(self._visit(lot.cases[place][0], lot.calm_ms))
                except Exception as error:
                    errors[place] = _memory(error)
            left = [p for p in left if p not in errors and not calm.enough(visits[p], self.settings.repeats)]
        return [errors.get(place) or calm.case_timing(one) for place, one in enumerate(visits)]

    def _visit(self, case: ComputeCase, calm_ms: Mapping[str, float]) -> list[calm.Repeat]:
        assert self.sentinel
        _, repeats = calm.dealt_out(self.settings.repeats)
        slow = partial(self.sentinel.slowness, calm_ms)
        return calm.visit(self.sets.device, *self.sets.steps(case), self.settings.warmup, repeats, slow)


def _memory(error: Exception) -> str:
    """What is told where memory ran out. Raises what is anything else."""
    if not out_of_memory(error):
        raise error
    return f"out of memory ({first_line(error)})"
