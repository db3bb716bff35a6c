"""Can the tables fit the devices at all, and if not, what is missing and what would do: one line with the numbers."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import Infeasible
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.protocol import CostModel, Ints
from neuroshard.search.infeasible.hints import hints
from neuroshard.search.infeasible.packing import GaveUp, pack, quick_plan
from neuroshard.search.problem.problem import Placement, Problem, Widths
from neuroshard.search.tuning import TUNING, Tuning

# Column shards repeat the optimizer's bytes of a row, at worst 9 x the memory; so all sums of bytes stay below 2^62.
MAX_TOTAL_BYTES = 2**58
DEVICES_SHOWN = 8
TRIED_BY_ROWS = 6  # tables that may be split row-wise, of which every set is tried where memory is tight


def feasible(task: ShardingTask, model: CostModel, tuning: Tuning = TUNING) -> Problem:
    """The task as arrays. Raises Infeasible where no plan can exist: too little memory in all, or a narrowest shard that no
    device holds."""
    need, have = sum(table.memory_bytes for table in task.tables), sum(task.usable_bytes)
    if need > MAX_TOTAL_BYTES:
        raise Infeasible(f"tables need {format_bytes(need)}; a search counts up to {format_bytes(MAX_TOTAL_BYTES)}")
    if need > have:
        reserved = task.constraints.reserve_bytes
        beside = f" beside {format_bytes(reserved)} reserved on each" if reserved else ""
        raise Infeasible(
            f"tables need {format_bytes(need)}, devices have {format_bytes(have)} together{beside}: "
            f"{format_bytes(need - have)} short; {hints(task, model)}"
        )
    problem = Problem(task, model, tuning)
    narrowest = problem.first + np.maximum(problem.min_units, -(-problem.all_units // problem.max_devices))
    lacking = problem.nbytes[narrowest] - problem.roomiest()
    lacking[problem.row_blocks.groups] = 0
    if lacking.max() > 0:
        raise Infeasible(f"{_lacking(problem, narrowest, int(lacking.argmax()))}; {hints(task, model)}")
    return problem


def _lacking(problem: Problem, narrowest: Ints, item: int) -> str:
    """That no device has room for a shard that an item cannot do without, in words."""
    shard, members = int(narrowest[item]), problem.tables[item]
    of = f" ({members[0].rows:,} rows x {problem.dims[shard]} columns)" * (len(members) == 1)
    where = "no device" if problem.allowed[item].all() else "no device it may lie on"
    return (
        f"{problem.name(item)} has a shard that {where} can hold: cut as far as it may be, its widest{of} needs "
        f"{format_bytes(int(problem.nbytes[shard]))}, the largest of them has {format_bytes(int(problem.roomiest()[item]))}"
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
        f"{problem.dims[largest]} columns of {problem.name(problem.group[largest])}{others} find no room: "
        f"{format_bytes(problem.nbytes[largest])} needed, left on the devices: {shown}{more}"
    )


def any_plan(problem: Problem) -> tuple[Problem, Widths]:
    """Units of every item on every device that fit, in the problem or one with tables split row-wise, where they may be.

    Raises Infeasible with the way out where nothing fits, or is found.
    """
    why, splittable = "no packing exists", len(problem.row_blocks.groups)
    if splittable and (found := quick_plan(problem)):
        return found
    for there in _all_row_wise(problem) if splittable <= TRIED_BY_ROWS else iter([problem]):
        try:
            widths = pack(there)
        except GaveUp:
            widths, why = None, "no packing found"
        if widths is not None:
            return there, widths
    if splittable > TRIED_BY_ROWS:
        why = "no packing found"
    raise Infeasible(f"{why} of {_amount(problem)}: {hints(problem.task, problem.model)}")


def _all_row_wise(problem: Problem) -> Iterator[Problem]:
    """The problem with every set of its tables row-wise for which there is room, the smallest sets first."""
    items = problem.row_blocks.groups
    for count in range(len(items) + 1):
        for chosen in combinations(items.tolist(), count):
            there = problem.with_row_wise(np.array(chosen, dtype=np.int64))
            if there is not None:
                yield there


def _amount(problem: Problem) -> str:
    need = int(problem.nbytes[problem.whole].sum())
    constraints = problem.task.constraints
    under = " under these constraints" * (constraints != Constraints(row_wise=constraints.row_wise))
    return f"{format_bytes(need)} on devices of {format_bytes(int(problem.memory.sum()))} together{under}"
