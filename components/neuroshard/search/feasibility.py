"""Can the tables fit the devices at all, and if not, what is missing and what would do: one line with the numbers."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.table import DIM_STEP
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import format_bytes
from neuroshard.search.packing import GaveUp, fill, pack
from neuroshard.search.problem import Placement, Problem, Widths

# Column shards repeat the optimizer's bytes of a row, at worst 9 x the memory; so all sums of bytes stay below 2^62.
MAX_TOTAL_BYTES = 2**58
DEVICES_SHOWN = 8
TRIED_BY_ROWS = 6  # tables that may be split by rows, of which every set is tried where memory is tight


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
    by_rows = set(task.constraints.may_split_rows(task.tables, task.devices))
    whole_rows = [table for table in task.tables if table.name not in by_rows]
    narrow = max(whole_rows, key=lambda table: table.shard_bytes(table.rows, DIM_STEP), default=None)
    if narrow is None:
        return
    least, largest = narrow.shard_bytes(narrow.rows, DIM_STEP), max(task.device_memory_bytes)
    if least > largest:
        block = narrow.shard_bytes(narrow.block_rows(task.devices), narrow.dim)
        by_rows_fits = narrow.has_rows_for(task.devices) and block <= min(task.device_memory_bytes)
        raise Infeasible(
            f"table {narrow.name!r} has a column that no device can hold: its narrowest shard ({narrow.rows:,} rows x "
            f"{DIM_STEP} columns) needs {format_bytes(least)}, the largest device has {format_bytes(largest)}; give a device "
            f"{format_bytes(least)} or more{', or let it be split by rows (--row-wise)' * by_rows_fits}"
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
        f"{problem.dims[largest]} columns of {problem.name(problem.item[largest])}{others} find no room: "
        f"{format_bytes(problem.nbytes[largest])} needed, left on the devices: {shown}{more}"
    )


def any_plan(problem: Problem) -> tuple[Problem, Widths]:
    """Units of every item on every device that fit, in the problem or one with tables split by rows, where they may be.

    Raises Infeasible with the way out where nothing fits, or is found.
    """
    why, splittable = "no packing exists", len(problem.row_blocks.items)
    if splittable and (found := quick_plan(problem)):
        return found
    for there in _all_by_rows(problem) if splittable <= TRIED_BY_ROWS else iter([problem]):
        try:
            widths = pack(there)
        except GaveUp:
            widths, why = None, "no packing found"
        if widths is not None:
            return there, widths
    if splittable > TRIED_BY_ROWS:
        why = "no packing found"
    raise Infeasible(f"{why} of {_amount(problem)}: {way_out(problem)}")


def quick_plan(problem: Problem) -> tuple[Problem, Widths] | None:
    """The same by a few greedy orders: by columns, or with as few of the largest tables by rows as will do."""
    blocks = problem.row_blocks
    largest, count = blocks.items[np.argsort(-blocks.nbytes.sum(axis=1), kind="stable")], 0
    while count <= len(largest):
        there = problem.with_rows(largest[:count])
        if there is None:
            break
        widths = fill(there)
        if widths is not None:
            return there, widths
        count = min(count + max(1, count // 4), max(len(largest), count + 1))
    return None


def _all_by_rows(problem: Problem) -> Iterator[Problem]:
    """The problem with every set of its tables by rows for which there is room, the smallest sets first."""
    items = problem.row_blocks.items
    for count in range(len(items) + 1):
        for chosen in combinations(items.tolist(), count):
            there = problem.with_rows(np.array(chosen, dtype=np.int64))
            if there is not None:
                yield there


def _amount(problem: Problem) -> str:
    need = int(problem.nbytes[problem.whole].sum())
    under = " under these constraints" if problem.task.constraints.tables or problem.task.constraints.together else ""
    return f"{format_bytes(need)} on devices of {format_bytes(int(problem.memory.sum()))} together{under}"


def way_out(problem: Problem) -> str:
    """The least that would make a plan possible, each by itself: memory, devices, or a constraint less."""
    outs = []
    if extra := _more_memory(problem):
        outs.append(f"give each device {format_bytes(extra)} more")
    if devices := _more_devices(problem):
        outs.append(f"use {devices} devices instead of {problem.devices}")
    outs += [f"let {name} be {what}" for name, what in _looser(problem)]
    if by_rows := _by_rows(problem):
        outs.append(by_rows)
    return ", or ".join(outs) if outs else "add devices or memory"


def _fits(task: ShardingTask, problem: Problem) -> bool:
    return quick_plan(Problem(task, problem.model)) is not None


def _with_memory(task: ShardingTask, memory: tuple[int, ...]) -> ShardingTask:
    return task.model_copy(update={"device_memory_bytes": memory})


def _more_memory(problem: Problem) -> int | None:
    """The least bytes more on each device, to a 64th of what is needed, with which the tables pack; None if none do."""
    task, memory = problem.task, problem.task.device_memory_bytes
    high = int(problem.nbytes[problem.whole].sum())
    if not _fits(_with_memory(task, tuple(bytes_ + high for bytes_ in memory)), problem):
        return None
    low, step = 0, max(high // 64 // len(memory), 1)
    while high - low > step:
        middle = (low + high) // 2
        if _fits(_with_memory(task, tuple(bytes_ + middle for bytes_ in memory)), problem):
            high = middle
        else:
            low = middle
    return high


def _more_devices(problem: Problem) -> int | None:
    """The least number of devices, the new ones like the smallest, on which the tables pack; None up to twice as many."""
    memory = problem.task.device_memory_bytes
    for more in range(1, len(memory) + 1):
        if _fits(_with_memory(problem.task, memory + (min(memory),) * more), problem):
            return len(memory) + more
    return None


def _by_rows(problem: Problem) -> str | None:
    """That tables may be split by rows, where they pack so and may not."""
    task, constraints = problem.task, problem.task.constraints
    allowed = constraints.model_copy(update={"row_wise": True, "max_shards": None})
    if constraints.row_wise or constraints.max_shards is not None:
        return None
    found = quick_plan(Problem(task.model_copy(update={"constraints": allowed}), problem.model))
    if found is None:
        return None
    items = found[0].by_rows.tolist()
    names = found[0].name(items[0]) if len(items) == 1 else f"{len(items)} tables ({found[0].name(items[0])}, …)"
    return f"let {names} be split by rows (--row-wise)"


def _looser(problem: Problem) -> list[tuple[str, str]]:
    """The first constraint of a table without which the tables pack, and how it would be."""
    task, constraints = problem.task, problem.task.constraints
    for rule in constraints.tables:
        others = tuple(one for one in constraints.tables if one is not rule)
        for field, what in (
            ("max_shards", "cut further"),
            ("min_dim", "cut narrower"),
            ("devices", "on other devices too"),
        ):
            if getattr(rule, field) is None:
                continue
            loose = rule.model_copy(update={field: None})
            without = constraints.model_copy(update={"tables": (*others, loose)})
            if _fits(task.model_copy(update={"constraints": without}), problem):
                return [(f"table {rule.table!r}", what)]
    return []
