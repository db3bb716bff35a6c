"""What to measure: sets of tables on one device, all-to-alls between devices, and tables beyond HBM."""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from neuroshard.core.table import Table
from neuroshard.core.tiers import BeyondHbmTier
from neuroshard.core.value import SparseValue, Value, canonical_json, sha256

# train and valid: sets of training tables. test_sets: unseen sets of those. test_tables: only tables never in the others.
Split = Literal["train", "valid", "test_sets", "test_tables"]
VALID_SHARE = TEST_SETS_SHARE = 0.1  # of the cases of training tables
TRAIN_SHARE = 1 - VALID_SHARE - TEST_SETS_SHARE

# The fewest cases to train a net on. A net of fewer predicts no better than a calibrated analytic model.
FEWEST_TRAIN_SETS = 24
FEWEST_TRAIN_ALL_TO_ALLS = 20  # of one number of ranks

MOST_COLUMNS = 2**53  # of one device: columns are added up as floats
MOST_DELAY_MS = 1e10  # more than any device is measured to take before it sends


class ComputeCase(SparseValue):
    """Tables (or column shards) that one device holds together. The same table may occur at several dims.

    `batch_size` is the global batch that looks them up; None means the bench's.
    """

    UNSAID: ClassVar = ("batch_size",)

    kind: ClassVar[Literal["compute"]] = "compute"
    tables: Annotated[tuple[Table, ...], Field(min_length=1)]
    split: Split = "train"
    batch_size: Annotated[int, Field(gt=0, le=2**31)] | None = None

    @cached_property
    def case_id(self) -> str:
        """16 hex digits of what is measured; the split does not count."""
        shape: list[Any] = [_shape(table) for table in self.tables]
        return sha256(canonical_json(shape if self.batch_size is None else [self.batch_size, *shape]))[:16]


def _shape(table: Table) -> list[Any]:
    shape = [table.name, table.rows, table.dim, table.pooling_factor, table.element_bytes, *table.reuse_bins]
    if table.pooling != "sum" or table.weighted:
        shape += [table.pooling, table.weighted]
    if len(table.features) > 1 and table.pooling_factor:
        # rounded shares, since lookups of features that are computed again from a Parquet row differ in their last digits
        shape += [[round(feature.pooling_factor / table.pooling_factor, 6) for feature in table.features]]
    return shape


class CollectiveCase(Value):
    """One embedding all-to-all: the summed dims of each device, and how many ms after the first each device starts."""

    kind: ClassVar[Literal["collective"]] = "collective"
    device_dims: tuple[Annotated[int, Field(ge=0, le=MOST_COLUMNS)], ...]
    start_delays_ms: tuple[Annotated[float, Field(ge=0, le=MOST_DELAY_MS)], ...]
    split: Split = "train"

    @field_validator("device_dims")
    @classmethod
    def _some_devices(cls, dims: tuple[int, ...]) -> tuple[int, ...]:
        if len(dims) < 2:
            raise ValueError(f"an all-to-all needs at least 2 devices, not {len(dims)}")
        return dims

    @model_validator(mode="after")
    def _one_delay_a_device(self) -> Self:
        if len(self.start_delays_ms) != len(self.device_dims):
            raise ValueError(f"{len(self.start_delays_ms)} start delays for {len(self.device_dims)} devices")
        return self

    @property
    def waiting_ms(self) -> tuple[float, ...]:
        """How long each device waits in forward for the last one to start."""
        last = max(self.start_delays_ms)
        return tuple(last - delay for delay in self.start_delays_ms)

    @cached_property
    def case_id(self) -> str:
        """16 hex digits of what is measured; the split does not count."""
        return sha256(canonical_json([list(self.device_dims), list(self.start_delays_ms)]))[:16]


class TierCase(Value):
    """Tables that one device holds in another tier (core/tiers.py), measured beside the same tables in HBM.

    A cached table is an operator of its own, and each batch misses `missed_share` of the distinct rows that it reads. A table
    gets more rows where the batches need more. `batch_size` is as in ComputeCase.
    """

    kind: ClassVar[Literal["tiers"]] = "tiers"
    tables: Annotated[tuple[Table, ...], Field(min_length=1)]
    tier: BeyondHbmTier
    missed_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    split: Split = "train"
    batch_size: Annotated[int, Field(gt=0, le=2**31)] | None = None

    @model_validator(mode="after")
    def _misses_of_a_cache(self) -> Self:
        if self.tier == "host" and self.missed_share:
            raise ValueError(f"missed_share {self.missed_share:g} in host memory: only a cache misses rows")
        return self

    @cached_property
    def case_id(self) -> str:
        """16 hex digits of what is measured; the split does not count."""
        return sha256(canonical_json([self.tier, self.missed_share, self.batch_size, *map(_shape, self.tables)]))[:16]


Case = ComputeCase | CollectiveCase | TierCase


class Cases(Value):
    """A whole case set, as `augment` writes it and `measure` reads it. Case ids are distinct."""

    tables: tuple[Table, ...]  # the base tables that the cases were made from
    compute: tuple[ComputeCase, ...]
    collective: tuple[CollectiveCase, ...]
    tiers: tuple[TierCase, ...] = ()
    max_dim: int
    seed: int
