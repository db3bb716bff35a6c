"""model.json: what a trained cost model was trained on, what it predicts, and how far it can be trusted."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from neuroshard.core.cost import Bench
from neuroshard.core.table import MAX_DIM
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.value import SparseValue, Value
from neuroshard.costmodel.report import ModelReport

MOST_RATE_MS = 1e6  # a lookup that takes longer was not measured
BatchSize = Annotated[int, Field(gt=0, le=2**31)]
Rate = Annotated[float, Field(ge=0, le=MOST_RATE_MS)]


class Rates(Value):
    """Ms of a pass more than in HBM: of a table, of a lookup, of a row that comes over the bus, and of a byte of such rows."""

    table_ms: Rate = 0.0
    lookup_ms: Rate = 0.0
    row_ms: Rate = 0.0
    byte_ms: Rate = 0.0

    def ms(self, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of work (…, 4): tables, lookups, rows and bytes -> (…)."""
        ms: NDArray[np.float64] = work @ np.array([self.table_ms, self.lookup_ms, self.row_ms, self.byte_ms])
        return ms


class MeasuredTiers(Value):
    """The constants of each pass, and from how many measurements they are. Rows of a cache are those that it missed, before
    forward; rows in host memory are read forward, and written backward, as is state of elements there."""

    cached_forward: Rates
    cached_backward: Rates
    host_forward: Rates
    host_backward: Rates
    cases: Annotated[int, Field(ge=0)]


def rates(constants: Sequence[float]) -> Rates:
    """Constants in the order of `Rates.ms`."""
    names: dict[str, Any] = dict(zip(Rates.model_fields, constants, strict=True))
    return Rates(**names)


MODEL_FORMAT: Final = 1


class TrainedFrom(Value):
    """What a cost model was trained from. It holds no time: the same costs and seed give the same bytes."""

    neuroshard_version: str
    seed: int
    compute_cases: int  # measured without error, all splits together
    collective_cases: int
    started_from: str | None = None  # digest of the cost model whose weights the training started from


class Manifest(SparseValue):
    """The fields of model.json."""

    UNSAID: ClassVar = ("tiers",)

    format_version: Literal[1] = MODEL_FORMAT
    feature_version: int
    features: tuple[str, ...]
    bench: Bench
    hardware_fingerprint: str
    batch_size: BatchSize  # of the bench: all-to-alls, and compute cases without a batch size
    batch_sizes: Annotated[tuple[BatchSize, ...], Field(min_length=1)]  # of the compute cases
    max_dim: Annotated[int, Field(gt=0, le=MAX_DIM)]
    device_counts: tuple[Annotated[int, Field(ge=2, le=MAX_DEVICES)], ...]  # whose all-to-all was measured
    tensors_sha256: str
    report: ModelReport
    provenance: TrainedFrom
    tiers: MeasuredTiers | None = None  # what tables beyond HBM take more; None where that was not measured

    @property
    def main_batch_size(self) -> int:
        """The bench's batch size, or the largest measured one where no compute case was measured at the bench's."""
        return self.batch_size if self.batch_size in self.batch_sizes else max(self.batch_sizes)
