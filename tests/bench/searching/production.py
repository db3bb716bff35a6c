"""A printed production plan under its own printed costs: first its figures are reproduced, then it is searched anew.

The file says of each table what TorchRec's planner thought it costs and stores, and on which of 96 ranks it lay. Half a shard
costs and stores half. Two sequence tables are split row-wise over all ranks: what they cost and store a rank is fixed.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.given import Given, GivenCosts, Narrow

RANKS, PRINTED_SLOWEST_MS, PRINTED_MEAN_MS = 96, 1300.3, 1003.6
NARROW = (Narrow(below=64, factor=1.75), Narrow(below=128, factor=1.15))  # TorchRec's penalties
GB = 10**9


@dataclass(frozen=True)
class Printed:
    """The printed plan: its sharding task with storage as printed, its costs, and what it put where."""

    task: ShardingTask
    costs: GivenCosts
    rank_ms: np.ndarray  # (96,)
    rank_bytes: np.ndarray

    def model(self, narrow: bool) -> Given:
        costs = self.costs.model_copy(update={"narrow": NARROW if narrow else ()})
        return Given(costs, self.task.batch_size)


def read_printed(path: Path) -> Printed:
    """From the JSON of the table set. A rank has the memory that the printed plan needs on its fullest."""
    entries = json.loads(path.read_text())
    rank_ms, rank_bytes, fixed_ms, fixed_bytes = np.zeros(RANKS), np.zeros(RANKS), 0.0, 0.0
    costs, tables = [], []
    names: Counter[str] = Counter()
    for entry in entries["tables"]:
        ranks = _ranks(entry["meta_ranks"])
        ms, nbytes = entry["meta_perf_ms"], entry["meta_storage_hbm_gb"] * GB
        np.add.at(rank_ms, ranks, ms / len(ranks))  # a rank may hold two shards of a table
        np.add.at(rank_bytes, ranks, nbytes / len(ranks))
        if entry["meta_sharding"] == "RW":
            fixed_ms, fixed_bytes = fixed_ms + ms / RANKS, fixed_bytes + nbytes / RANKS
            continue
        names[entry["name"]] += 1  # one name occurs twice
        name = entry["name"] + (f"_{names[entry['name']]}" if names[entry["name"]] > 1 else "")
        costs.append({"name": name, "cost_ms": ms})
        tables.append(_stored(name, entry, nbytes))
    costs_file = {"tables": costs, "fixed_ms": fixed_ms, "batch_size": entries["batch_size"]}
    task = ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=(int(rank_bytes.max() - fixed_bytes),) * RANKS,
        batch_size=entries["batch_size"],
    )
    return Printed(task, GivenCosts.parse(costs_file, str(path)), rank_ms, rank_bytes)


def _stored(name: str, entry: dict[str, Any], nbytes: float) -> Table:
    """A table that stores as much as was printed, inputs and outputs included: so many rows, no optimizer state."""
    return Table(
        name=name,
        rows=max(1, int(nbytes / (2 * entry["dim"]))),
        dim=entry["dim"],
        pooling_factor=entry["pooling_factor"],
        element_bytes=2,
        optimizer_bytes_per_row=0,
    )


def _ranks(text: str) -> list[int]:
    """`3`, `1,5,9` or `0-95`."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks
