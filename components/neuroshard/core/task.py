"""A sharding task: which tables, on which devices, under which constraints."""

from typing import Annotated, Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from neuroshard.core.constraints import Constraints
from neuroshard.core.table import Table, check_distinct
from neuroshard.core.value import Value

MAX_DEVICES = 4096


class ShardingTask(Value):
    """Tables to place on `len(device_memory_bytes)` devices; `batch_size` is the global batch of one training step."""

    tables: tuple[Table, ...]
    device_memory_bytes: tuple[Annotated[int, Field(gt=0)], ...]
    batch_size: Annotated[int, Field(gt=0, le=2**31)]
    constraints: Constraints = Field(default_factory=Constraints)  # built at its first use: see core/value.py

    @field_validator("tables")
    @classmethod
    def _distinct(cls, tables: tuple[Table, ...]) -> tuple[Table, ...]:
        return check_distinct(tables)

    @field_validator("device_memory_bytes")
    @classmethod
    def _devices(cls, memory: tuple[int, ...]) -> tuple[int, ...]:
        if not 1 <= len(memory) <= MAX_DEVICES:
            raise ValueError(f"must list between 1 and {MAX_DEVICES} devices, not {len(memory)}")
        return memory

    @model_validator(mode="after")
    def _constraints(self) -> Self:
        self.constraints.check({table.name for table in self.tables}, self.device_memory_bytes)
        return self

    @model_serializer(mode="wrap")
    def _without_needless_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Constraints are written only if there are any."""
        data: dict[str, Any] = handler(self)
        if self.constraints == Constraints():
            del data["constraints"]
        return data

    @property
    def devices(self) -> int:
        return len(self.device_memory_bytes)

    @property
    def usable_bytes(self) -> tuple[int, ...]:
        """Memory of each device that is for tables."""
        return tuple(memory - self.constraints.reserve_bytes for memory in self.device_memory_bytes)
