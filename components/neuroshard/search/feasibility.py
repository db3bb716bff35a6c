"""Can the tables fit the devices at all, and if not, what is missing: one line with the numbers."""

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.table import DIM_STEP
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import format_bytes
from neuroshard.search.problem import Placement, Problem

# Column shards repeat the optimizer's bytes of a row, at worst 9 x the memory; so all sums of bytes stay below 2^62.
MAX_TOTAL_BYTES = 2**58
DEVICES_SHOWN = 8


def check_feasible(task: ShardingTask) -> None:
    """Raise Infeasible where no plan can exist: too little memory in all, or a narrowest shard that no device holds."""
    need, have = sum(table.memory_bytes for table in task.tables), sum(task.device_memory_bytes)
    if need > have:
        raise Infeasible(
            f"tables need {format_bytes(need)}, devices have {format_bytes(have)} together: "
            f"{format_bytes(need - have)} short; add devices or memory"
        )
    if need > MAX_TOTAL_BYTES:
        raise Infeasible(f"tables need {format_bytes(need)}; a search counts up to {format_bytes(MAX_TOTAL_BYTES)}")
    narrow = max(task.tables, key=lambda table: table.shard_bytes(table.rows, DIM_STEP))
    least, largest = narrow.shard_bytes(narrow.rows, DIM_STEP), max(task.device_memory_bytes)
    if least > largest:
        raise Infeasible(
            f"table {narrow.name!r} has a row that no device can hold: its narrowest shard ({narrow.rows:,} rows x "
            f"{DIM_STEP} columns, since rows are not split yet) needs {format_bytes(least)}, the largest device has "
            f"{format_bytes(largest)}; give a device {format_bytes(least)} or more"
        )


def misfit(problem: Problem, placement: Placement) -> str:
    """How far a placement is from fitting: what found no room, and how much room each device has left."""
    lost = placement.shards[placement.devices < 0]
    largest = lost[np.argmax(problem.nbytes[lost])]
    placed = Placement(placement.shards[placement.devices >= 0], placement.devices[placement.devices >= 0])
    left = problem.memory - problem.sums(placed)[2]
    shown = ", ".join(format_bytes(room) for room in left[:DEVICES_SHOWN])
    more = f" and {len(left) - DEVICES_SHOWN} more" if len(left) > DEVICES_SHOWN else ""
    others = f" (and {len(lost) - 1} more shards)" if len(lost) > 1 else ""
    return (
        f"{problem.dims[largest]} columns of table {problem.task.tables[problem.table[largest]].name!r}{others} find no room: "
        f"{format_bytes(problem.nbytes[largest])} needed, left on the devices: {shown}{more}"
    )
