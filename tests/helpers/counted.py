"""What trainers might have counted."""

from collections.abc import Sequence
from typing import Any

from neuroshard.core.access import stated_curve
from neuroshard.core.counted import CountedAccess
from neuroshard.core.table import Table

BATCH = 1024


def counted_access(tables: Sequence[Table], **more: Any) -> CountedAccess:
    """Of these tables, each read twice as often as it says, by Zipf."""
    read = []
    for table in tables:
        often = 2 * table.pooling_factor
        curve = stated_curve("zipf:1.1", table.rows, often, BATCH)
        said = table.resized(table.rows, table.dim, often).model_dump()
        said |= {"access": curve.model_dump(), "reuse_bins": None, "reuse_batch_size": BATCH}
        read.append(Table.parse({name: value for name, value in said.items() if value is not None}, table.name))
    fields = {
        "model": "ads",
        "run": "0" * 16,
        "ranks": 4,
        "steps": 500,
        "batch_size": BATCH,
        "time": "2026-01-05T00:00:00Z",
    }
    return CountedAccess(**{**fields, "tables": tuple(read), **more})
