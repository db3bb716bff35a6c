"""What was measured: costs of cases, on which bench, on which hardware."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from neuroshard.core.case import Case, CollectiveCase, ComputeCase, TierCase
from neuroshard.core.table import Table
from neuroshard.core.value import SparseValue, Value, canonical_json, sha256

MOST_MS = 1e9  # eleven days: no measured step takes longer, and squares stay finite
Milliseconds = Annotated[float, Field(ge=0, le=MOST_MS)]
NumberOfBytes = Annotated[int, Field(ge=0, le=2**63)]
Repeats = Annotated[int, Field(ge=0, le=10**6)]  # no measuring asks for more
BackendName = Literal["synthetic", "cpu", "cuda"]  # measure/backends.py has them
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

READS, SMALL_SET = "random reads", "small table set"  # timed after each repeat of a table set on a CPU
# Exponents of both in the slowdown of a table set, fitted on six kinds of sets. Both are noisy, so they sum to less than 1.
SLOWDOWN_EXPONENTS: dict[str, float] = {READS: 0.4, SMALL_SET: 0.2}


def slowness(now_ms: Mapping[str, float], calm_ms: Mapping[str, float]) -> float:
    """How many times longer table sets take than on a calm machine, where READS and SMALL_SET take `calm_ms`, not `now_ms`."""
    slower: list[float] = [(now_ms[part] / calm_ms[part]) ** share for part, share in SLOWDOWN_EXPONENTS.items()]
    return math.prod(slower)


class Hardware(Value):
    """A kind of device. Its fingerprint is the key of a cost model.

    `machine` is the maker's name of the machine (DGX-H100, p5.48xlarge), which determines how its devices are connected.
    `sharing` is how several processes share a device, empty if they do not.
    """

    kind: BackendName
    name: str
    memory_bytes: NumberOfBytes
    driver: str = ""
    interconnect: str = ""
    compute_capability: str = ""
    machine: str = ""
    sharing: str = ""

    @property
    def driver_major(self) -> str:
        return self.driver.partition(".")[0]

    @property
    def fingerprint(self) -> str:
        """16 hex digits, the same for every machine of this kind: a digest of what changes speed and is known without a login.

        It uses the major version of the driver, the machine instead of the interconnect, and the name without blanks, since NVML
        and a node's label spell it differently.
        """
        facts = (
            self.kind,
            self.name.replace(" ", "-"),
            self.memory_bytes,
            self.driver_major,
            self.compute_capability,
            self.machine,
            self.sharing,
        )
        return sha256(canonical_json(facts))[:16]


class Bench(SparseValue):
    """The conditions under which one cost set was measured. Costs of different benches are never mixed silently."""

    UNSAID: ClassVar = (
        "memory_limit_bytes",
        "flush_bytes",
        "facts",
        "calm_all_to_all_ms",
        "calm_compute_ms",
        "reorder_ms",
    )

    format_version: Literal[1] = 1
    backend: BackendName
    hardware: Hardware
    batch_size: Annotated[int, Field(gt=0, le=2**31)]  # global batch: samples a step over all devices
    warmup: Repeats
    repeats: Repeats
    optimizer: str
    threads: int
    seed: int
    # where the tables of a case need more, the larger ones get fewer rows …
    memory_limit_bytes: NumberOfBytes | None = None
    row_cap_bytes: NumberOfBytes | None = None  # … but never fewer bytes than this
    capped_tables: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, str] = Field(default_factory=dict)  # of the hardware, beyond its kind: clocks, power cap, links
    notes: tuple[str, ...] = ()
    flush_bytes: NumberOfBytes | None = None  # written before each timed step, on a CPU
    # of the reference kernel, by devices: what labels are scaled to
    calm_all_to_all_ms: dict[str, Milliseconds] = Field(default_factory=dict)
    # to copy a column of outputs of all samples into another order and, backward, its gradients (CostModel.reorder_ms)
    reorder_ms: Milliseconds | None = None
    # of both reference kernels of table sets
    calm_compute_ms: dict[str, Annotated[float, Field(gt=0, le=MOST_MS)]] = Field(default_factory=dict)

    @field_validator("calm_compute_ms")
    @classmethod
    def _all_parts(cls, calm_ms: dict[str, float]) -> dict[str, float]:
        if calm_ms and calm_ms.keys() != SLOWDOWN_EXPONENTS.keys():
            raise ValueError(
                f"must be of {' and '.join(SLOWDOWN_EXPONENTS)}, not of {', '.join(sorted(calm_ms))!r:.80}"
            )
        return calm_ms


class ComputeCost(SparseValue):
    """ms of one ComputeCase, or the error that it met (out of memory, say). Exactly one.

    On a CPU the times are scaled to the bench's `calm_compute_ms`; on a GPU they are the fastest repeat's. Spreads are half
    the interquartile range of the repeats, in the same ms; medians are of the repeats as they were timed. `round` 0 is the first
    measurement; later rounds are the same case measured again, for a label of several rounds (label.py) or its noise.
    `disturbed` says that the label is uncertain: its visits, or its fastest repeats, disagree.
    """

    UNSAID: ClassVar = ("disturbed", "forward_median_ms", "backward_median_ms")

    case_id: str
    round: int = Field(0, ge=0)
    forward_ms: Milliseconds | None = None
    backward_ms: Milliseconds | None = None
    forward_spread_ms: Milliseconds = 0.0
    backward_spread_ms: Milliseconds = 0.0
    forward_median_ms: Milliseconds | None = None
    backward_median_ms: Milliseconds | None = None
    error: str | None = None
    disturbed: bool = False

    @model_validator(mode="after")
    def _times_or_error(self) -> Self:
        check_times_or_error(self.case_id, self.forward_ms, self.backward_ms, self.error)
        return self

    def scaled(self, by: float) -> Self:
        """The same on a machine that is `by` times slower. Medians stay, as they are what was timed."""
        if self.error is not None:
            return self
        times = ("forward_ms", "backward_ms", "forward_spread_ms", "backward_spread_ms")
        return self.model_copy(update={name: getattr(self, name) * by for name in times})

    @property
    def total_ms(self) -> float:
        """Forward and backward. Ask only where there is no error."""
        assert self.forward_ms is not None
        assert self.backward_ms is not None
        return self.forward_ms + self.backward_ms


class CollectiveCost(Value):
    """ms of one CollectiveCase on each device, or error: the median of many all-to-alls.

    Forward is counted from the device's own start, waiting included. On a CPU all but the waiting is scaled to the bench's
    `calm_all_to_all_ms`; medians are of the repeats as they were timed.
    """

    case_id: str
    round: int = Field(0, ge=0)
    forward_ms: tuple[Milliseconds, ...] | None = None
    backward_ms: tuple[Milliseconds, ...] | None = None
    forward_spread_ms: tuple[Milliseconds, ...] = ()
    backward_spread_ms: tuple[Milliseconds, ...] = ()
    forward_median_ms: tuple[Milliseconds, ...] = ()
    backward_median_ms: tuple[Milliseconds, ...] = ()
    error: str | None = None

    @model_validator(mode="after")
    def _times_or_error(self) -> Self:
        check_times_or_error(self.case_id, self.forward_ms, self.backward_ms, self.error)
        return self

    def scaled(self, by: float, waiting_ms: Sequence[float]) -> Self:
        """The same on a machine that is `by` times slower, except for the `waiting_ms` of each device and medians."""
        if self.forward_ms is None or self.backward_ms is None:
            return self
        waited = [min(pair) for pair in zip(self.forward_ms, waiting_ms, strict=True)]
        times = {
            "forward_ms": tuple(w + (ms - w) * by for w, ms in zip(waited, self.forward_ms, strict=True)),
            "backward_ms": tuple(ms * by for ms in self.backward_ms),
            "forward_spread_ms": tuple(ms * by for ms in self.forward_spread_ms),
            "backward_spread_ms": tuple(ms * by for ms in self.backward_spread_ms),
        }
        return self.model_copy(update=times)


class TierCost(Value):
    """ms of one TierCase and, measured right after it, of the same tables in HBM; or error.

    Labels are as in ComputeCost. `distinct_rows` are those that a batch reads of each table, and `missed_rows` those of them that
    were not in its cache: FBGEMM counted them, in batches that were not timed.
    """

    case_id: str
    round: int = Field(0, ge=0)
    forward_ms: Milliseconds | None = None
    backward_ms: Milliseconds | None = None
    hbm_forward_ms: Milliseconds | None = None
    hbm_backward_ms: Milliseconds | None = None
    distinct_rows: tuple[Annotated[float, Field(ge=0)], ...] = ()
    missed_rows: tuple[Annotated[float, Field(ge=0)], ...] = ()
    error: str | None = None
    disturbed: bool = False

    @model_validator(mode="after")
    def _times_or_error(self) -> Self:
        check_times_or_error(self.case_id, self.forward_ms, self.backward_ms, self.error)
        check_times_or_error(self.case_id, self.hbm_forward_ms, self.hbm_backward_ms, self.error)
        if len(self.distinct_rows) != len(self.missed_rows):
            raise ValueError(
                f"case {self.case_id} has {len(self.distinct_rows)} distinct_rows, but {len(self.missed_rows)} missed_rows"
            )
        return self

    @property
    def times_ms(self) -> tuple[float, float, float, float]:
        """Forward and backward beyond HBM, then both in HBM. Ask only where there is no error."""
        times = (self.forward_ms, self.backward_ms, self.hbm_forward_ms, self.hbm_backward_ms)
        assert None not in times
        return times  # type: ignore[return-value]


def check_times_or_error(case_id: str, forward: object, backward: object, error: str | None) -> None:
    """A cost is both times, or an error, and not both. Raises ValueError."""
    if (forward is None) != (backward is None) or (forward is None) == (error is None):
        raise ValueError(f"case {case_id} must have both times or an error, and not both")


Cost = ComputeCost | CollectiveCost | TierCost
COST_OF_KIND: dict[str, type[Cost]] = {"compute": ComputeCost, "collective": CollectiveCost, "tiers": TierCost}


class Costs(Value):
    """A whole cost set: every measured case with its cost, and the bench. All rounds of a case have its case_id.

    `tables` are those that the cases were drawn from. `device_counts` are the numbers of ranks asked for, if measured or not.
    """

    bench: Bench
    compute: tuple[tuple[ComputeCase, ComputeCost], ...]
    collective: tuple[tuple[CollectiveCase, CollectiveCost], ...]
    tables: tuple[Table, ...] = ()
    device_counts: tuple[int, ...] = ()
    tiers: tuple[tuple[TierCase, TierCost], ...] = ()

    @property
    def every(self) -> tuple[tuple[Case, Cost], ...]:
        """The cases of all kinds."""
        return (*self.compute, *self.collective, *self.tiers)
