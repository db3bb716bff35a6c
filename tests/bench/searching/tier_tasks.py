"""Sharding tasks of the benchmark whose tables HBM does not hold, drawn by seed from a public table set."""

import math
from functools import cache
from pathlib import Path

import numpy as np

from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.files.importers.tables_source import import_tables

SET = "meta-production-1935.json"
EXPONENTS = (0.6, 1.3)  # of zipf, drawn by table
BATCHES = (512, 1024, 2048, 4096)  # samples a device
SHARES = (0.1, 0.25, 0.5)  # HBM of all devices over what the tables need
HOST_BYTES = 2**44
MOST_COLUMNS = 1024  # of an operator of FBGEMM: a wider table may not stay whole


@cache
def _pool(folder: Path) -> tuple[Table, ...]:
    """Pooled tables in their own widths, in fp16."""
    tables = import_tables(folder / SET, dtype="fp16").tables
    return tuple(table for table in tables if table.pooling == "sum")


def drawn(
    count: int, devices: int, seed: int, share: float, folder: Path, *, most_lookups: float = math.inf
) -> ShardingTask:
    """`count` tables, of at most so many lookups a sample, on devices whose HBM is such a share of what the tables need."""
    rng = np.random.default_rng([seed, count, devices])
    pool = [table for table in _pool(folder) if table.pooling_factor <= most_lookups and table.dim <= MOST_COLUMNS]
    chosen = rng.choice(len(pool), size=count, replace=False).tolist()
    a_device = int(rng.choice(BATCHES))
    tables = []
    for number in chosen:
        given = pool[number].model_dump(exclude={"reuse_bins", "reuse_batch_size", "access"})
        tables.append(Table(**given, access=f"zipf:{rng.uniform(*EXPONENTS):.2f}"))
    everything = ShardingTask(
        tables=tuple(tables), device_memory_bytes=(2**50,) * devices, batch_size=a_device * devices
    )
    memory = int(share * everything.need_bytes / devices)
    return everything.model_copy(update={"device_memory_bytes": (memory,) * devices, "host_memory_bytes": HOST_BYTES})
