"""A sharding task: which tables, on which devices."""

from typing import Annotated

from pydantic import Field, field_validator

from neuroshard.core.table import Table, check_distinct
from neuroshard.core.value import Value

MAX_DEVICES = 4096


class ShardingTask(Value):
    """Tables to place on `len(device_memory_bytes)` devices; `batch_size` is the global batch of one training step."""

    tables: tuple[Table, ...]
    device_memory_bytes: tuple[Annotated[int, Field(gt=0)], ...]
    batch_size: Annotated[int, Field(gt=0, le=2**31)]

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

    @property
    def devices(self) -> int:
        return len(self.device_memory_bytes)
