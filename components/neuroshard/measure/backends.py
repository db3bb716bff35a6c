"""What can measure, by name. A backend turns a case into its cost, and says on what bench it does so."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, Hardware
from neuroshard.core.errors import UsageError

# Imported when used: the formula needs neither torch nor FBGEMM.
BACKENDS = {
    "synthetic": "neuroshard.measure.synthetic:Synthetic",
    "cpu": "neuroshard.measure.hardware:cpu",
    "cuda": "neuroshard.measure.hardware:cuda",
}
MAX_BATCH_SIZE = 2**31  # as in a sharding task
MAX_REPEATS = 1_000_000
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")  # that FBGEMM fuses into backward on the CPU and on CUDA alike


@dataclass(frozen=True)
class Settings:
    """How to measure. `batch_size` is global: samples a step over all devices.

    A device looks up the whole batch in its own tables, and then keeps its 1/devices of the samples of every table.
    Where `repeats` do not agree, up to as many again are taken. `memory_limit_bytes` is for the tables of one case; None takes
    the backend's default. `budget_seconds` is for the whole run, None for as long as it takes. `hardware` is the kind that must
    be found here, or that the formula stands in for; None for whatever there is.
    """

    batch_size: int
    warmup: int = 1
    repeats: int = 7
    optimizer: str = "rowwise_adagrad"
    threads: int = 1
    memory_limit_bytes: int | None = None
    traces: Path | None = None
    seed: int = 0
    timeout_seconds: float = 60.0
    budget_seconds: float | None = None
    hardware: Hardware | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"unknown optimizer {self.optimizer!r}; there are {', '.join(OPTIMIZERS)}")
        for name, least in (("batch_size", 1), ("warmup", 0), ("repeats", 1), ("threads", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name, most in (("batch_size", MAX_BATCH_SIZE), ("warmup", MAX_REPEATS), ("repeats", MAX_REPEATS)):
            if getattr(self, name) > most:
                raise UsageError(f"{name} must be at most {most:,}, not {getattr(self, name):,}")
        if self.timeout_seconds <= 0:
            raise UsageError(f"timeout_seconds must be above 0, not {self.timeout_seconds}")


class Backend(Protocol):
    """Measures cases one at a time. Made from cases, settings, and the bench of the run that is to go on, if any."""

    bench: Bench
    most_devices: int | None  # largest all-to-all that can be measured here; None for any
    repeats: int  # of each case from now on: a run may lower those of its settings to fit its budget
    apart: bool  # table sets and all-to-alls are measured by processes that memory does not hold at once: change seldom

    @property
    def concurrency(self) -> int:
        """How many table sets are best measured at once, side by side or in turns: just now, as they take long or not."""

    def compute(self, case: ComputeCase, round_: int) -> ComputeCost:
        """The cost of a table set. Out of memory is a cost with its error. Raises WorkerLost, MeasureError."""

    def compute_concurrency(self, cases: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        """The costs of at most `concurrency` table sets in their rounds, measured at once. Raises as `compute`."""

    def all_to_all(self, case: CollectiveCase, round_: int) -> CollectiveCost:
        """The cost of an all-to-all. Raises WorkerLost, MeasureError."""

    def close(self) -> None:
        """End what was started. The backend is not used afterwards."""


def open_backend(name: str, cases: Cases, settings: Settings, begun: Bench | None = None) -> Backend:
    """The backend `name`, ready to measure `cases`. Raises UsageError for an unknown name, MeasureError where it cannot run."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")
    module, _, member = BACKENDS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), member)(cases, settings, begun)
    return backend
