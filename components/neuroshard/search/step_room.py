"""Room for a training step.

A search adds up bytes of parts. The peak of a step is no such sum (core/step_ledger.py): it is the largest of several moments,
and depends on what all devices hold. So a search counts what parts add to the moment that is most often the peak, and keeps some
bytes of every device free for the rest. If the step of the plan that it found does not fit even so, it goes on from there with as
many as that plan needs.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.errors import Infeasible
from neuroshard.core.plan import Shard, device_memory, parts_of, peaks_of
from neuroshard.core.step_memory import EXPANDABLE_SEGMENTS, WITH_EXPANDABLE_SEGMENTS
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import format_bytes, parse_bytes
from neuroshard.search.problem.kinds import blocks_over_all, copies_of
from neuroshard.search.problem.room import searched_bytes
from neuroshard.search.problem.state import State

MOST_SEARCHES = 7
HINTS_TRIED = 6  # amounts of memory, each twice the one before; each takes a search
T = TypeVar("T")


class StepDoesNotFit(Infeasible):
    """A plan was found (`state`), and some device has too little memory for its step with these shards, by `short` bytes."""

    def __init__(self, message: str, short: int, task: ShardingTask, shards: Sequence[Shard], state: State) -> None:
        super().__init__(message)
        self.short, self.task, self.shards, self.state = short, task, shards, state

    def with_hint(self, fits: Callable[[ShardingTask], bool], task: ShardingTask) -> Infeasible:
        """The error with ways out with which the task `fits`, as tried: expandable segments, and an amount of memory more of each
        device, as a user types it."""
        said, more = str(self), math.ceil(self.short / (1 - task.constraints.reserve_share))
        segmented = task.model_copy(update={"allocator_share": WITH_EXPANDABLE_SEGMENTS})
        if (task.allocator_share or 0) > WITH_EXPANDABLE_SEGMENTS and fits(segmented):
            said += f", or {EXPANDABLE_SEGMENTS}"
        for amount in (format_bytes(more * 2**times, "up") for times in range(HINTS_TRIED)):
            roomier = tuple(nbytes + parse_bytes(amount) for nbytes in task.device_memory_bytes)
            if fits(task.model_copy(update={"device_memory_bytes": roomier})):
                return Infeasible(f"{said}, or give {amount} more of --memory")
        return Infeasible(said)

    def more_bytes(self, room: "Room") -> NDArray[np.int64]:
        """What the step takes of each device (D,) beyond what a search counts: with so many kept free it fits, unless the search
        then finds another plan."""
        more = uncounted_bytes(self.task, self.shards, counts_sent=room.counts_sent)
        return more - room.beside_blocks * self.state.problem.splits_rows


def check_step(task: ShardingTask, shards: Sequence[Shard], state: State) -> None:
    """Raise StepDoesNotFit unless every device has room for these shards of the task's tables, and a step with them."""
    over = short_bytes(task, shards)
    device = int(np.argmax(over))
    if over[device] <= 0:
        return
    usable = task.usable_bytes[device]
    peak = peaks_of(task, shards)[device]
    causes = ", ".join(f"{cause} {format_bytes(nbytes)}" for cause, nbytes in peak.causes.items())
    cures = "more devices, or a smaller batch" if peak.moment != "dense layers" else "less --dense-memory"
    if any(table.pooling == "none" and table.access is None for table in task.tables):
        cures += ", or count access (neuroshard tables --access-from; ids that come again can be sent once)"
    raise StepDoesNotFit(
        f"no plan was found whose training step fits: device {device} needs {format_bytes(usable + int(over[device]), 'up')} of "
        f"{format_bytes(usable)}, {format_bytes(peak.nbytes)} of it in a step with pipeline {task.pipeline}, at its "
        f"{peak.moment} ({causes}); take {cures}",
        int(over[device]),
        task,
        shards,
        state,
    )


def short_bytes(task: ShardingTask, shards: Sequence[Shard]) -> NDArray[np.int64]:
    """What each device (D,) has too little for these shards and a step with them; none where the task counts no steps."""
    used = [memory.total for memory in device_memory(task, shards)] if task.counts_steps else [0] * task.devices
    return np.subtract(used, task.usable_bytes)


class Room(NamedTuple):
    """What a search keeps free of each device (D,), and how much more where a table is split row-wise, in bytes; and whether it
    counts the copies of lookups' outputs that are sent."""

    nbytes: NDArray[np.int64]
    beside_blocks: int
    counts_sent: bool


def with_room(task: ShardingTask, search: Callable[[Room | None, State | None], T]) -> T:
    """What `search` finds for the task on devices that keep room for a step, from a plan that keeps too little where there is
    one. Raises what it raises.

    Copies that are sent count for all parts, unless nothing is found so: where exchanges overlap, a step needs fewer at once.
    """
    if not task.counts_steps:
        return search(None, None)
    misses = list[StepDoesNotFit]()
    with suppress(Infeasible):
        return _with_room(expected_room(task), search, misses)
    try:
        return _with_room(Room(np.zeros(task.devices, dtype=np.int64), 0, counts_sent=False), search, misses)
    except Infeasible as error:
        raise min(misses, key=lambda one: one.short) if misses else error from None


def _with_room(room: Room, search: Callable[[Room | None, State | None], T], misses: list[StepDoesNotFit]) -> T:
    """As `with_room`, with this room at first, which grows by what the plans found need, as long as there are some."""
    kept, too_few, near = room.nbytes, None, None
    for _ in range(MOST_SEARCHES):
        try:
            return search(room._replace(nbytes=kept), near)
        except StepDoesNotFit as error:
            misses.append(error)
            near, more = error.state, error.more_bytes(room)
            kept, too_few = more if too_few is None else np.maximum(kept, more), kept
        except Infeasible:
            if too_few is None:
                raise
            kept, near = (kept + too_few) // 2, None
    raise misses[-1]


def expected_room(task: ShardingTask) -> Room:
    """What a step takes of each device beyond what a search counts if lookups are balanced and a table is cut, so that outputs
    need to be put into order; and what it takes more if a table is split row-wise too."""
    more = int(np.median(uncounted_bytes(task, _even_shards(task), counts_sent=True)))
    beside_blocks = 0
    names = set(task.may_split_rows)
    over_all = [table for table in task.placed if table.name in names and table.has_rows_for(task.devices)]
    if over_all:
        largest = max(over_all, key=lambda one: one.memory_bytes)
        with_blocks = uncounted_bytes(task, _even_shards(task, [largest]), counts_sent=True)
        beside_blocks = max(int(np.median(with_blocks)) - more, 0)
    return Room(np.full(task.devices, more), beside_blocks, counts_sent=True)


def _even_shards(task: ShardingTask, in_blocks: Sequence[Table] = ()) -> list[Shard]:
    """Shards of all tables, with about as many columns on each device: the widest table is cut, and some are row-wise."""
    devices, columns = task.devices, np.zeros(task.devices)
    shards = [*copies_of(task.copied, devices), *blocks_over_all([*task.mapped, *in_blocks], devices)]
    whole = sorted((table for table in task.placed if table not in in_blocks), key=lambda one: -one.dim)
    for number, table in enumerate(whole):
        half = table.dim // DIM_STEP // 2 * DIM_STEP if number == 0 and devices > 1 else 0
        for offset, dim in filter(itemgetter(1), ((0, half), (half, table.dim - half))):
            device = int(columns.argmin())
            columns[device] += dim
            shards.append(Shard(table=table.name, rows=table.rows, column_offset=offset, dim=dim, device=device))
    return shards


def uncounted_bytes(task: ShardingTask, shards: Sequence[Shard], *, counts_sent: bool) -> NDArray[np.int64]:
    """What these shards and a step with them take of each device (D,) beyond what a search counts for them."""
    parted = task.parted.keeping_free((), counts_sent=counts_sent)
    beside = task.by_access.map_bytes + task.least_step_bytes
    more = np.array([memory.total - beside for memory in device_memory(task, shards)])
    for shard, counted in zip(shards, searched_bytes(parted, parts_of(task, shards)), strict=True):
        more[shard.device] -= counted
    return more
