"""The sharding tasks of the benchmark, drawn by seed from table sets that are read by path."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from neuroshard.core.constraints import Constraints
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.files.importers.presets import preset
from neuroshard.files.importers.tables_source import import_tables

BATCH_SIZE = 65536
ACCESS = "zipf:1.05"  # the files do not say how rows are read; this is what NVIDIA's synthetic models say
PAPER_DIMS = (4, 8, 16, 32, 64, 128)  # a table's dim is drawn from these: the paper's largest dim 128
# Memory of a device, drawn for each task: so many times what the tables need in all / devices, but no less than such a share
# of the largest table. So some tables must be split, as with the 4 GB of the paper; the published search misses about a fifth.
TIGHTNESS = (1.1, 1.6)
LARGEST = (0.4, 1.2)
PAPER_TABLES = {4: (10, 59), 8: (20, 119), 16: (40, 239)}  # by devices; 16 is ours
ABLATION_SEED = 1_250_000  # a new one for each ablation that decides: tasks that have been looked at are not fresh
ABLATION_DEVICES = (4, 8, 16)
ZOO = {"small": 8, "medium": 16, "large": 32, "jumbo": 64, "colossal": 128}  # NVIDIA's synthetic models, and devices


@dataclass(frozen=True)
class Task:
    """A sharding task under a name, and the pool of tables that its cost nets are trained on."""

    name: str
    pool: str
    task: ShardingTask


@cache
def pool(name: str, folder: Path) -> tuple[Table, ...]:
    """Tables of a pool: `meta` in the paper's dims or any, `meta-production` in its own, `mlperf`, or the whole `zoo`.

    Those of `meta` are all pooled, as in the paper: drawn in any width, sequences would make no collection of TorchRec's.
    """
    if name == "mlperf":
        return preset("mlperf-dlrm-dcnv2")
    if name == "zoo":
        sets = [(size, import_tables(folder / f"nvidia-synthetic-{size}.json", access=ACCESS).tables) for size in ZOO]
        return tuple(t.model_copy(update={"name": f"{size}_{t.name}"}) for size, tables in sets for t in tables)
    dtype = "fp16" if name == "meta-production" else "fp32"
    tables = import_tables(folder / "meta-production-1935.json", access=ACCESS, dtype=dtype).tables
    return tuple(t.model_copy(update={"pooling": "sum"}) for t in tables) if name == "meta" else tables


def drawn(
    count: int, devices: int, seed: int, folder: Path, tightness: float | None = None, largest: float | None = None
) -> ShardingTask:
    """`count` tables of the pool in dims of the paper, on devices whose memory is tight unless said."""
    rng = np.random.default_rng([seed, count, devices])
    tables = pool("meta", folder)
    chosen = rng.choice(len(tables), size=count, replace=False)
    dims = rng.choice(PAPER_DIMS, size=count)
    some = [tables[i].with_dim(int(dim)) for i, dim in zip(chosen, dims, strict=True)]
    return fitted(some, devices, tightness or rng.uniform(*TIGHTNESS), largest or rng.uniform(*LARGEST))


def fitted(tables: Sequence[Table], devices: int, tightness: float, largest: float) -> ShardingTask:
    """On devices that have together `tightness` times what the tables need, and room for such a share of the largest."""
    nbytes = [table.memory_bytes for table in tables]
    memory = int(max(tightness * sum(nbytes) / devices, largest * max(nbytes)))
    return ShardingTask(tables=tuple(tables), device_memory_bytes=(memory,) * devices, batch_size=BATCH_SIZE)


def paper_protocol(devices: int, index: int, folder: Path) -> Task:
    """Task `index` of the paper's protocol: a random number of tables, memory tight."""
    low, high = PAPER_TABLES[devices]
    count = int(np.random.default_rng([1, devices, index]).integers(low, high + 1))
    return Task(f"{devices} devices #{index}", "meta", drawn(count, devices, index, folder))


def ablation(devices: int, index: int, folder: Path) -> Task:
    """A task of other seeds than all other sections', memory tight; every other one may be split row-wise."""
    low, high = PAPER_TABLES[devices]
    seed = ABLATION_SEED + index
    count = int(np.random.default_rng([seed, devices]).integers(low, high + 1))
    return Task(f"{count} x {devices} #{seed}", "meta", _row_wise(drawn(count, devices, seed, folder), index))


def _row_wise(task: ShardingTask, index: int) -> ShardingTask:
    return task.model_copy(update={"constraints": Constraints(row_wise=index % 2 == 1)})


def sized(count: int, devices: int, index: int, folder: Path) -> Task:
    """So many tables, on devices with room for any: to compare times where all have a plan."""
    return Task(
        f"{count} x {devices} #{index}", "meta", drawn(count, devices, 1000 + index, folder, tightness=1.6, largest=1.2)
    )


def mlperf(folder: Path) -> Task:
    tables = pool("mlperf", folder)
    task = ShardingTask(tables=tables, device_memory_bytes=(16 * 2**30,) * 8, batch_size=BATCH_SIZE)
    return Task("MLPerf x 8 of 16 GiB", "mlperf", task)


def production(folder: Path) -> Task:
    """The whole production model on as many ranks as it ran on, each of 16 GiB; by our nets, not by its printed costs."""
    tables = pool("meta-production", folder)
    task = ShardingTask(tables=tables, device_memory_bytes=(16 * 2**30,) * 96, batch_size=BATCH_SIZE)
    return Task("meta-production x 96", "meta-production", task)


def zoo(size: str, folder: Path) -> Task:
    """One of NVIDIA's synthetic models on devices with 1.5 times the memory that it needs."""
    tables = [t for t in pool("zoo", folder) if t.name.startswith(f"{size}_")]
    return Task(f"nvidia-{size} x {ZOO[size]}", "zoo", fitted(tables, ZOO[size], 1.5, 0.25))
