"""Tables too large for memory are measured with fewer rows: how many, so that every case fits.

Times hardly change by it: a capped table is still far larger than any cache, and its lookups are folded into the rows it has.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from neuroshard.core.case import ComputeCase
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.units import format_bytes

MOST_BYTES = 2 * 2**30  # touched in seconds; 15 tables of 136 MiB, each still 4 times a last-level cache of 32 MiB
SHARE_OF_AVAILABLE = 0.25  # the machine may be shared with other runs, and with the exchange's processes
CAP_STEP = 2**20  # caps are whole MiB


def default_memory_limit() -> int:
    """Bytes for weights and optimizer state on this machine: a quarter of what is available, and 2 GiB at most."""
    return min(MOST_BYTES, int(available_bytes() * SHARE_OF_AVAILABLE))


def available_bytes() -> int:
    """Memory that this process can still have: what Linux says is available, less where the container has a limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def row_bytes(table: Table, optimizer: str) -> int:
    """Bytes of one row while it is measured: weights and the optimizer's state."""
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    return table.dim * (table.element_bytes + per_element) + per_row


def capped_rows(table: Table, optimizer: str, cap: int | None) -> int:
    """Rows that the table is measured with: no more than `cap` bytes hold, and at least one."""
    return table.rows if cap is None else min(table.rows, max(1, cap // row_bytes(table, optimizer)))


def row_cap_bytes(cases: Iterable[ComputeCase], optimizer: str, limit: int) -> int | None:
    """The most bytes that one table may have so that each case fits `limit`, in whole MiB; None where all fit as they are.

    Raises MeasureError where the limit leaves a table less than one MiB.
    """
    caps = [cap for case in cases if (cap := _cap_of(case.tables, optimizer, limit)) is not None]
    if not caps:
        return None
    cap = int(min(caps)) // CAP_STEP * CAP_STEP
    if cap < CAP_STEP:
        raise MeasureError(
            f"{format_bytes(limit)} of memory leaves the tables of the largest case {format_bytes(min(caps))} each; "
            f"measure with a memory limit of at least {format_bytes(limit / min(caps) * CAP_STEP)}"
        )
    return cap


def _cap_of(tables: Sequence[Table], optimizer: str, limit: int) -> float | None:
    """The cap at which the sum of the capped tables is just `limit`; None where the tables fit without one."""
    sizes = sorted(table.rows * row_bytes(table, optimizer) for table in tables)
    smaller = [0, *accumulate(sizes)]
    if smaller[-1] <= limit:
        return None
    # cut the larger tables to what the smaller ones leave, and of all ways take the first that cuts whom it means to
    return next(
        cap for whole, size in enumerate(sizes) if size > (cap := (limit - smaller[whole]) / (len(sizes) - whole))
    )


def capped_tables(cases: Iterable[ComputeCase], optimizer: str, cap: int | None) -> tuple[str, ...]:
    """Names of the tables that have more rows than they are measured with, at some dim, in order."""
    return tuple(sorted({t.name for case in cases for t in case.tables if capped_rows(t, optimizer, cap) < t.rows}))


def buffer_bytes(cases: Iterable[ComputeCase], optimizer: str, cap: int | None) -> tuple[int, int]:
    """The most bytes of weights, and of optimizer state, that any one case has when it is measured."""
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    weights = state = 0
    for case in cases:
        rows = [capped_rows(table, optimizer, cap) for table in case.tables]
        elements = [r * t.dim for r, t in zip(rows, case.tables, strict=True)]
        weights = max(weights, sum(n * t.element_bytes for n, t in zip(elements, case.tables, strict=True)))
        state = max(state, per_row * sum(rows) + per_element * sum(elements))
    return weights, state
