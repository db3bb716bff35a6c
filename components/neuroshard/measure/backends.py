"""The backends by name, and how they measure. A backend turns a case into its cost, and reports the bench it measures on."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase, TierCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, Hardware, TierCost
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import DeviceCost
from neuroshard.orders import values as take
from neuroshard.orders.options import BYTES, Option, Seed

# Imported when used: the synthetic backend needs neither torch nor FBGEMM.
BACKENDS = {
    "synthetic": "neuroshard.measure.formula:Synthetic",
    "cpu": "neuroshard.measure.real_devices:cpu",
    "cuda": "neuroshard.measure.real_devices:cuda",
}
MAX_BATCH_SIZE = 2**31  # as in a sharding task
MAX_REPEATS = 1_000_000
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")  # FBGEMM fuses these into backward on the CPU and on CUDA


@dataclass(frozen=True)
class MeasureSettings:
    """How to measure. Raises UsageError for a value out of range.

    A device looks up the whole batch in its own tables, and then keeps its share of the samples. `budget_seconds` is for the
    whole run. Without `memory_limit_bytes` the limit is the backend's. `hardware` is the kind that this machine must be, or that
    the formula simulates; None takes any.
    """

    batch_size: Annotated[int, "Samples a step over all devices.", Option(int, least=1, default=65536)]
    budget_seconds: Annotated[
        float | None,
        "Stop after this long: 90s, 3m, 1h [default: when all is done].",
        Option(take.duration, "TIME", flag="--budget"),
    ] = None
    warmup: Annotated[int, "Repeats discarded first.", Option(int, least=0)] = 1
    repeats: Annotated[int, "Repeats of a case; up to twice as many while they disagree.", Option(int, least=1)] = 7
    optimizer: Annotated[
        str, "Optimizer fused into backward: sgd, rowwise_adagrad or adagrad.", Option(str, "WORD", choices=OPTIMIZERS)
    ] = "rowwise_adagrad"
    threads: Annotated[int, "CPU threads a device may use (cpu).", Option(int, least=1)] = 1
    memory_limit_bytes: Annotated[
        int | None,
        "Most memory for weights and optimizer state of a case: larger tables get fewer rows.",
        Option(BYTES, "SIZE", flag="--memory-limit"),
    ] = None
    traces: Annotated[
        Path | None, "Real lookups, as `neuroshard tables --traces` wrote them.", Option(Path, "FILE")
    ] = None
    seed: Seed = 0
    timeout_seconds: Annotated[
        float,
        "Longest time of a case; a slower one is an error.",
        Option(take.duration, "TIME", "60s", flag="--timeout"),
    ] = 60.0
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


def of_bench(given: MeasureSettings | Bench) -> dict[str, Any]:
    """What settings and the bench that was measured by them say alike."""
    return {name: getattr(given, name) for name in ("batch_size", "warmup", "repeats", "optimizer", "threads", "seed")}


class Backend(Protocol):
    """Measures cases. It is made from cases, settings, and the bench of an earlier run that this one continues, if any."""

    bench: Bench
    most_devices: int | None  # of the largest all-to-all here; None for any
    no_tiers: str  # why no table lies beyond HBM here; empty where it may
    repeats: int  # of each case from now on; a run lowers it to fit its budget
    # Memory does not hold the processes for table sets and those for all-to-alls together, so a change between them is slow.
    apart: bool

    @property
    def concurrency(self) -> int:
        """How many table sets to measure at once, side by side or in turns. It falls while they take long."""

    def compute(self, case: ComputeCase, round_: int) -> ComputeCost:
        """The cost of a table set. Out of memory is a cost with an error. Raises WorkerLost, MeasureError."""

    def compute_many(self, cases: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        """The costs of at most `concurrency` table sets with their rounds, measured at once. Raises as `compute`."""

    def all_to_all(self, case: CollectiveCase, round_: int) -> CollectiveCost:
        """The cost of an all-to-all. Raises WorkerLost, MeasureError."""

    def beyond_hbm(self, case: TierCase, round_: int) -> TierCost:
        """The cost of tables beyond HBM. Out of memory is a cost with an error. Raises WorkerLost, MeasureError; ask only where
        there are tiers."""

    def steps(self, sets: Sequence[ComputeCase | None], all_to_all: CollectiveCase) -> list[DeviceCost] | None:
        """What each device takes in a step, while all take theirs at the same time: each with its table set, or none.

        None where devices do not slow each other down, or cannot run at the same time here. Raises WorkerLost, MeasureError.
        """

    def close(self) -> None:
        """End all processes. The backend cannot be used afterwards."""


def open_backend(name: str, cases: Cases, settings: MeasureSettings, begun: Bench | None = None) -> Backend:
    """The backend `name`, ready to measure `cases`. Raises UsageError for an unknown name, MeasureError where it cannot run."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")
    module, _, member = BACKENDS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), member)(cases, settings, begun)
    return backend
