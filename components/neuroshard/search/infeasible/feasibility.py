"""Whether the tables fit the devices at all. If not, one line says what is missing and what would help, in numbers."""

from collections.abc import Collection, Iterator
from itertools import combinations
from types import MappingProxyType

import numpy as np

from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.infeasible.hints import hints
from neuroshard.search.infeasible.packing import TRIED, GaveUp, pack, quick_plan
from neuroshard.search.problem.column_shards import Placement, Widths
from neuroshard.search.problem.equal_shards import HALVES
from neuroshard.search.problem.kinds import OVER_ALL, MayHold
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.room import lacking_bytes
from neuroshard.search.tuning import TUNING, Tuning

# Column shards repeat the optimizer's bytes of a row, at worst 9 times the memory, and on every device at most the bytes of a
# step. So all sums of bytes stay below 2^62.
MAX_TOTAL_BYTES = 2**58
NO_PACKING = "no packing exists"
DEVICES_SHOWN = 8
ROW_WISE_SETS_OF = 6  # tables that may be row-wise, up to which every set of them is tried: 64 packings …
TRIED_EACH = 1000  # … of at least so many placements each, 50 ms: all together take 3 s


def feasible(
    task: ShardingTask,
    model: CostModel,
    tuning: Tuning = TUNING,
    *,
    may: MayHold = MappingProxyType({}),
    pieces: Collection[str] = (),
    cut_into: int = HALVES,
) -> Problem:
    """The task as arrays, with `may`, `pieces` and `cut_into` as in Problem. Raises Infeasible if no plan can exist: too
    little memory in all, or a shard that no device can hold, or its operator, however a table is cut."""
    uncut, have = task.memories(list(map(Part.of, task.placed))), sum(task.placeable_bytes)
    need = sum(memory.total for memory in uncut)
    most = need + (task.devices - 1) * sum(memory.step for memory in uncut)
    if most > MAX_TOTAL_BYTES:
        raise Infeasible(f"tables need {format_bytes(most)}; a search counts up to {format_bytes(MAX_TOTAL_BYTES)}")
    problem = Problem(task, model, tuning, may=may, pieces=pieces, cut_into=cut_into)
    if need > have and need - _saved_bytes(problem) > have:
        reserved = task.constraints.reserve_in_words
        step = f"{format_bytes(task.least_step_bytes, 'up')} for a step's batches and outputs" * task.counts_steps
        taken = " and ".join(filter(None, [f"{reserved} reserved" if reserved else "", step]))
        beside = f" beside {taken} on each" if taken else ""
        raise Infeasible(
            f"tables{_beyond(task)} need {format_bytes(need)}{_of_step(task)}, devices have {format_bytes(have)} "
            f"together{beside}: {format_bytes(need - have + lacking_bytes(task))} short; {hints(task, model, tuning)}",
            proven=True,
        )
    unheld = next((wide.why for wide in problem.wide.values() if wide.why), None)
    if unheld is not None:
        raise Infeasible(unheld)
    lacking = problem.nbytes[problem.narrowest] - problem.roomiest()
    if lacking.max() > 0:
        lacking[problem.options.groups] = 0
    if lacking.max() > 0:
        raise Infeasible(f"{_lacking(problem, int(lacking.argmax()))}; {hints(task, model, tuning)}", proven=True)
    return problem


def _saved_bytes(problem: Problem) -> int:
    """Bytes of all devices together that tables need less if they are spread otherwise than by their rows, at most."""
    return problem.options.saved_bytes(problem.nbytes[problem.whole[problem.options.groups]])


def _beyond(task: ShardingTask) -> str:
    """In words, how many of the tables need memory of devices only for what they keep there."""
    beyond = len(task.constraints.beyond_hbm)
    return f", {'all' if beyond == len(task.placed) else beyond} of them beyond HBM," if beyond else ""


def _of_step(task: ShardingTask) -> str:
    """How much of it a step needs, in words; empty where that is not counted."""
    step = sum(memory.step for memory in task.memories(list(map(Part.of, task.placed))))
    return f" ({format_bytes(step)} of it in a step, pipeline {task.pipeline})" if step else ""


def _lacking(problem: Problem, group: int) -> str:
    """Which shard no device can hold, in words."""
    shard, members = int(problem.narrowest[group]), problem.tables[group]
    several = len(members) > 1
    where = "no device" + f" that {'they are' if several else 'it is'} allowed on" * (not problem.allowed[group].all())
    need, most = format_bytes(int(problem.nbytes[shard])), format_bytes(int(problem.roomiest()[group]))
    if several:
        return f"{where} can hold {problem.name(group)}: they need {need}, the largest of these devices has {most}"
    of = f" ({members[0].rows:,} rows x {problem.columns[shard]} columns)"
    return (
        f"{problem.name(group)} has a shard that {where} can hold: cut as far as it may be, its widest{of} needs {need}, the "
        f"largest of these devices has {most}"
    )


def misfit(problem: Problem, placement: Placement) -> str:
    """How far a placement is from fitting: the largest shard without room, and how much room each device has left."""
    lost = placement.shards[placement.devices < 0]
    largest = lost[np.argmax(problem.nbytes[lost])]
    placed = Placement(placement.shards[placement.devices >= 0], placement.devices[placement.devices >= 0])
    left = problem.memory.copy()
    np.subtract.at(left, placed.devices, problem.nbytes[placed.shards])
    if problem.capped[problem.group[largest]]:
        return (
            f"{problem.columns[largest]} columns of {problem.name(problem.group[largest])} would be on one device with others of "
            "it, together wider than FBGEMM's operator holds"
        )
    shown = ", ".join(format_bytes(room) for room in left[:DEVICES_SHOWN])
    more = f" and {len(left) - DEVICES_SHOWN} more" if len(left) > DEVICES_SHOWN else ""
    others = f" (and {counted(len(lost) - 1, 'more shard')})" if len(lost) > 1 else ""
    return (
        f"{problem.columns[largest]} columns of {problem.name(problem.group[largest])}{others} could not be placed: they need "
        f"{format_bytes(problem.nbytes[largest])}, left on the devices are {shown}{more}"
    )


def any_plan(problem: Problem) -> tuple[Problem, Widths]:
    """A plan that fits: the problem, or the same with some tables spread, and units of every group on every device (G, D).

    Raises Infeasible if no plan fits, or none is found.
    """
    why, splittable = NO_PACKING, len(problem.options.groups)
    if splittable and (found := quick_plan(problem)):
        return found
    sets = list(_all_row_wise(problem)) if splittable <= ROW_WISE_SETS_OF else [problem]
    for there in sets:
        try:
            widths = pack(there, max(TRIED // len(sets), TRIED_EACH))
        except GaveUp:
            widths, why = None, "no packing found"
        if widths is not None:
            return there, widths
    narrowed = (problem.max_units < problem.all_units).any()  # shards wider than the cost model has seen are not tried
    if narrowed or splittable > ROW_WISE_SETS_OF or (splittable and problem.options.over_domains):
        why = "no packing found"
    ways_out = hints(problem.task, problem.model, problem.tuning)
    raise Infeasible(f"{why}: {_amount(problem)}; {ways_out}", proven=why == NO_PACKING)


def _all_row_wise(problem: Problem) -> Iterator[Problem]:
    """The problem with every set of tables row-wise that has room for its blocks, the smallest sets first."""
    options = problem.options
    groups = options.groups[options.allowed[:, OVER_ALL]]
    for count in range(len(groups) + 1):
        for chosen in combinations(groups.tolist(), count):
            there = problem.with_spread(np.array(chosen, dtype=np.int64), np.full(count, options.place_of(OVER_ALL)))
            if there is not None:
                yield there


def _amount(problem: Problem) -> str:
    need = int(problem.nbytes[problem.whole].sum())
    constraints = problem.task.constraints
    under = " under these constraints" * (constraints != Constraints(row_wise=constraints.row_wise))
    return f"tables of {format_bytes(need)} on devices of {format_bytes(int(problem.memory.sum()))} together{under}"
