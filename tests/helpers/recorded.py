"""What a trainer might have recorded, in a store."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuroshard.core.table import Table
from neuroshard.files.traces import Lookups, Recorded, Traces, bytes_of_traces
from neuroshard.store.protocol import Store
from neuroshard.store.traces import put_trace

SAMPLES, BATCHES = 32, 100  # of a trace
TIME = "2026-01-05T00:00:00Z"


def recorded_trace(tables: Sequence[Table], *, seed: int = 0, **more: Any) -> tuple[bytes, Recorded]:
    """Tables that are each read 4 times a sample, by Zipf over every third id."""
    rng, read = np.random.default_rng(seed), {}
    for table in tables:
        ids = (rng.zipf(1.3, 4 * SAMPLES * BATCHES) * 3) % table.rows
        read[table.name] = Lookups(ids.astype(np.int64), np.full(SAMPLES * BATCHES, 4))
    said = {"batch_size": SAMPLES, "batches": BATCHES, "steps": 3 * BATCHES, "time": TIME}
    recorded = Recorded.parse({"rows": {table.name: table.rows for table in tables}, **said, **more}, "recorded")
    return bytes_of_traces(Traces(read), recorded), recorded


def record(store: Store, tables: Sequence[Table], model: str = "ads", **more: Any) -> str:
    data, recorded = recorded_trace(tables, **more)
    return put_trace(store, model, data, recorded)
