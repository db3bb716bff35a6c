"""What a measurement may take of memory. Tables too large for it are measured with fewer rows: how many, so that the case fits.

This hardly changes the times. The tables of a capped case are together still far larger than any cache, and their lookups are
folded into the rows that they have.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from neuroshard import system
from neuroshard.core.case import ComputeCase
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import Table
from neuroshard.core.units import format_bytes

MOST_BYTES = 2 * 2**30  # written in seconds; each of 15 tables still has 4 times a last-level cache of 32 MiB
SHARE_OF_AVAILABLE = 0.25  # the rest is for other runs, and for the ranks of all-to-alls
LEAST_BYTES = 256 * 2**20  # with any budget: several times most last-level caches
TOUCH_BYTES = 128 * 2**20  # written to find out how fast new memory is
TOUCH_SHARE = 0.05  # of a budget, for writing the buffers
CAP_STEP = 2**16  # caps are multiples of this


def default_memory_limit(budget_seconds: float | None = None) -> int:
    """Bytes for weights and optimizer state on this machine: a quarter of the available memory, at most 2 GiB.

    With a budget, also at most what can be written in TOUCH_SHARE of it, but at least LEAST_BYTES. A new virtual machine may get
    memory from its host at only 0.4 GB/s.
    """
    limit = min(MOST_BYTES, int(system.available_bytes() * SHARE_OF_AVAILABLE))
    if budget_seconds is None or limit <= LEAST_BYTES:
        return limit
    touched = int(TOUCH_BYTES / _seconds_to_touch(TOUCH_BYTES) * TOUCH_SHARE * budget_seconds)
    return min(limit, max(touched, LEAST_BYTES))


def _seconds_to_touch(count: int) -> float:
    """The seconds to write `count` bytes of memory that are new to this process."""
    import numpy as np

    began = time.monotonic()
    np.full(count // 4, 1, dtype=np.float32)
    return max(time.monotonic() - began, 1e-6)


def row_bytes(table: Table, optimizer: str) -> int:
    """Bytes of one row: weights and optimizer state."""
    return sum(table.row_bytes(table.dim, optimizer))


def capped_rows(table: Table, optimizer: str, cap: int | None) -> int:
    """Rows to measure the table with: as many as `cap` bytes hold, at least one."""
    return table.rows if cap is None else min(table.rows, max(1, cap // row_bytes(table, optimizer)))


def case_cap(tables: Sequence[Table], optimizer: str, limit: int | None) -> int | None:
    """The most bytes of one table with which these tables fit `limit` together; None where they fit uncut.

    Each case has its own cap, so that a set of 600 tables does not cut the tables of a set of two. Raises MeasureError for a cap
    below CAP_STEP.
    """
    cap = None if limit is None else _cap_of(tables, optimizer, limit)
    if cap is None or limit is None:
        return None
    if cap < CAP_STEP:
        raise MeasureError(
            f"{format_bytes(limit)} of memory leaves {format_bytes(cap)} for each of the {len(tables)} tables of a case; measure "
            f"with a memory limit of at least {format_bytes(limit / cap * CAP_STEP)}"
        )
    return int(cap) // CAP_STEP * CAP_STEP


def least_cap(cases: Iterable[ComputeCase], optimizer: str, limit: int | None) -> int | None:
    """The lowest cap of any case; None where no case is cut. Raises MeasureError as `case_cap`."""
    caps = (case_cap(case.tables, optimizer, limit) for case in cases)
    return min((cap for cap in caps if cap is not None), default=None)


def _cap_of(tables: Sequence[Table], optimizer: str, limit: int) -> float | None:
    """The cap at which the capped tables add up to `limit`; None where the tables fit uncut."""
    sizes = sorted(table.rows * row_bytes(table, optimizer) for table in tables)
    smaller = [0, *accumulate(sizes)]
    if smaller[-1] <= limit:
        return None
    # the first `whole` tables by size stay uncut, and the larger ones share the rest: take the first cap that cuts all of these
    return next(
        cap for whole, size in enumerate(sizes) if size > (cap := (limit - smaller[whole]) / (len(sizes) - whole))
    )


def capped_tables(cases: Iterable[ComputeCase], optimizer: str, limit: int | None) -> tuple[str, ...]:
    """Names of the tables that are measured with fewer rows in some case, sorted."""
    names: set[str] = set()
    for case in cases:
        cap = case_cap(case.tables, optimizer, limit)
        names.update(table.name for table in case.tables if capped_rows(table, optimizer, cap) < table.rows)
    return tuple(sorted(names))


def buffer_bytes(cases: Iterable[ComputeCase], optimizer: str, limit: int | None) -> tuple[int, int]:
    """The most bytes of weights, and of optimizer state, of any one case."""
    weights = state = 0
    for case in cases:
        cap = case_cap(case.tables, optimizer, limit)
        rows = [(capped_rows(table, optimizer, cap), table.row_bytes(table.dim, optimizer)) for table in case.tables]
        weights = max(weights, sum(count * of_weights for count, (of_weights, _) in rows))
        state = max(state, sum(count * of_state for count, (_, of_state) in rows))
    return weights, state


PROCESS_BYTES = 256 * 2**20  # a worker with torch and FBGEMM loaded holds 180 MiB of its own, a rank without FBGEMM 150
MOST_FLUSH_BYTES = 256 * 2**20  # 25 ms at 10 GB/s, ten times as long as most steps
MOST_READ_BYTES = 256 * 2**20  # of the reference kernel of random reads; far more than most last-level caches
# Kept for later cases with the same table: 2,000 tables at batch 65,536 and pooling factor 2.
MOST_LOOKUP_BYTES = 2 * 2**30
SHARE = 1 / 16  # of all memory, for the flush, and another for the random reads
LOOKUP_SHARE = 1 / 8


@dataclass(frozen=True)
class MemoryQuotas:
    """Bytes for each part of a measurement on the CPU, on a machine or in a container with `memory_bytes`. Shares of the total,
    not of what is free: a run that continues must have the sizes with which its costs were measured."""

    memory_bytes: int

    @classmethod
    def here(cls) -> "MemoryQuotas":
        return cls(system.memory_bytes())

    @property
    def most_flush_bytes(self) -> int:
        return min(MOST_FLUSH_BYTES, int(self.memory_bytes * SHARE))

    @property
    def read_bytes(self) -> int:
        return min(MOST_READ_BYTES, int(self.memory_bytes * SHARE))

    @property
    def lookup_bytes(self) -> int:
        return min(MOST_LOOKUP_BYTES, int(self.memory_bytes * LOOKUP_SHARE))

    @property
    def worker_bytes(self) -> int:
        """Bytes of the worker for table sets, without the tables."""
        return PROCESS_BYTES + self.most_flush_bytes + self.read_bytes + self.lookup_bytes
