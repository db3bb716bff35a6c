"""What to measure: sets of tables on one device, and exchanges between devices."""

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from neuroshard.core.table import Table
from neuroshard.core.value import Value, canonical_json, sha256

# train and valid: sets of training tables. test_sets: unseen sets of those. test_tables: only tables never in the others.
Split = Literal["train", "valid", "test_sets", "test_tables"]


class ComputeCase(Value):
    """Tables (or column shards) that one device holds together. The same table may occur at several dims."""

    tables: Annotated[tuple[Table, ...], Field(min_length=1)]
    split: Split = "train"

    @cached_property
    def case_id(self) -> str:
        """16 hex digits of what is measured; the split does not count."""
        shape = [[t.name, t.rows, t.dim, t.pooling_factor, t.element_bytes, *t.reuse_bins] for t in self.tables]
        return sha256(canonical_json(shape))[:16]


class CommCase(Value):
    """One embedding exchange: the summed dims of each device, and how many ms after the first each device starts."""

    device_dims: tuple[Annotated[int, Field(ge=0)], ...]
    start_delays_ms: tuple[Annotated[float, Field(ge=0)], ...]
    split: Split = "train"

    @field_validator("device_dims")
    @classmethod
    def _some_devices(cls, dims: tuple[int, ...]) -> tuple[int, ...]:
        if len(dims) < 2:
            raise ValueError(f"an exchange needs at least 2 devices, not {len(dims)}")
        return dims

    @model_validator(mode="after")
    def _one_delay_a_device(self) -> Self:
        if len(self.start_delays_ms) != len(self.device_dims):
            raise ValueError(f"{len(self.start_delays_ms)} start delays for {len(self.device_dims)} devices")
        return self

    @cached_property
    def case_id(self) -> str:
        """16 hex digits of what is measured; the split does not count."""
        return sha256(canonical_json([list(self.device_dims), list(self.start_delays_ms)]))[:16]


class Cases(Value):
    """A whole case set, as `augment` writes it and `measure` reads it. Case ids are distinct."""

    tables: tuple[Table, ...]  # the base tables that the cases were made from
    compute: tuple[ComputeCase, ...]
    comm: tuple[CommCase, ...]
    max_dim: int
    seed: int
