"""Room for a training step.

A search adds up bytes of parts. The peak of a step is no such sum (core/step_ledger.py): it is the largest of several moments,
and depends on what all devices hold. So a search counts what each part takes at least, keeps some bytes of every device free for
the rest, and is repeated with more of them if the step of the plan that it found does not fit.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.errors import Infeasible
from neuroshard.core.plan import Plan, Shard, device_memory, parts_of, peaks_of
from neuroshard.core.step_memory import EXPANDABLE_SEGMENTS, WITH_EXPANDABLE_SEGMENTS
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import format_bytes

MOST_SEARCHES = 7
TIGHT = 0.8  # from this share of memory on that uncut tables need, room for a step is kept in the first search: a guess


class StepDoesNotFit(Infeasible):
    """A plan was found, and some device has too little memory for its step, which takes `more_bytes` (D,) beyond what a search
    counts: with so many kept free it fits, unless the search then finds another plan."""

    def __init__(self, message: str, more_bytes: NDArray[np.int64]) -> None:
        super().__init__(message)
        self.more_bytes = more_bytes


def check_step(task: ShardingTask, shards: Sequence[Shard]) -> None:
    """Raise StepDoesNotFit unless every device has room for these shards of the task's tables, and a step with them."""
    if not task.counts_steps:
        return
    memory, usable = device_memory(task, shards), task.usable_bytes
    over = [one.total - limit for one, limit in zip(memory, usable, strict=True)]
    device = int(np.argmax(over))
    if over[device] <= 0:
        return
    peak = peaks_of(task, shards)[device]
    causes = ", ".join(f"{cause} {format_bytes(nbytes)}" for cause, nbytes in peak.causes.items())
    cures = "more devices, or a smaller batch" if peak.moment != "dense layers" else "or less to --dense-memory"
    if (task.allocator_share or 0) > WITH_EXPANDABLE_SEGMENTS:
        cures += f", or {EXPANDABLE_SEGMENTS}"
    raise StepDoesNotFit(
        f"no plan was found whose training step fits: device {device} needs {format_bytes(memory[device].total, 'up')} of "
        f"{format_bytes(usable[device])}, {format_bytes(peak.nbytes)} of it in a step with pipeline {task.pipeline}, at its "
        f"{peak.moment} ({causes}); give {format_bytes(over[device], 'up')} more of --memory, {cures}",
        np.maximum(_uncounted(task, shards), 0),
    )


def with_room(task: ShardingTask, search: Callable[[ShardingTask], Plan]) -> Plan:
    """What `search` finds for the task, on devices that keep enough bytes free for a step of the plan found. Raises what it
    raises."""
    if not task.counts_steps:
        return search(task)
    kept, misses = np.full(task.devices, _expected_bytes(task)), list[StepDoesNotFit]()
    too_few: NDArray[np.int64] | None = None
    for _ in range(MOST_SEARCHES):
        try:
            plan = search(task.keeping_free(kept.tolist()))
        except StepDoesNotFit as error:
            misses.append(error)
            kept, too_few = error.more_bytes if too_few is None else np.maximum(kept, error.more_bytes), kept
        except Infeasible:
            if not kept.any():
                raise
            kept = np.zeros_like(kept) if too_few is None else (kept + too_few) // 2
        else:
            return _bounded(plan, int(kept.max()))
    raise misses[0]


def _bounded(plan: Plan, kept_bytes: int) -> Plan:
    """The plan; what was kept free for its step is among what its bound assumes."""
    if not kept_bytes or plan.lower_bound_ms is None:
        return plan
    why = f"devices keep up to {format_bytes(kept_bytes)} free for what a step needs beyond its least"
    return Plan.model_validate({**dict(plan), "bound_assumptions": (*plan.bound_assumptions, why)})


def _expected_bytes(task: ShardingTask) -> int:
    """What a step takes beyond what a search counts, if lookups are balanced; 0 where memory is not tight."""
    if task.need_bytes < TIGHT * sum(task.placeable_bytes) or not task.placed:
        return 0
    columns, shards = np.zeros(task.devices), list[Shard]()
    for table in sorted(task.placed, key=lambda one: -one.dim):
        device = int(columns.argmin())
        columns[device] += table.dim
        shards.append(Shard(table=table.name, rows=table.rows, dim=table.dim, device=device))
    return max(int(np.median(_uncounted(task, shards))), 0)


def _uncounted(task: ShardingTask, shards: Sequence[Shard]) -> NDArray[np.int64]:
    """What a step takes of each device (D,) beyond what a search counts: that of parts, and `least_step_bytes`."""
    parted = task.parted
    counted = np.full(task.devices, task.least_step_bytes)
    for shard, memory in zip(shards, parted.memories(parts_of(task, shards)), strict=True):
        counted[shard.device] += memory.step
    steps = np.array([peak.nbytes for peak in peaks_of(task, shards)])
    more: NDArray[np.int64] = steps - counted
    return more
