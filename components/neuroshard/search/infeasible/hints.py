"""Infeasibility hints: what would make a plan possible. More memory, more devices or a looser rule, each by itself.

Every hint is tried as it is worded, with amounts rounded up. A search finds a plan wherever one is found here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.step_memory import EXPANDABLE_SEGMENTS, WITH_EXPANDABLE_SEGMENTS
from neuroshard.core.table import DIM_STEP
from neuroshard.core.task import MAX_DEVICES, MAX_MEMORY_BYTES, ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes, parse_bytes
from neuroshard.costmodel.protocol import CostModel
from neuroshard.costmodel.tiers import knows_tiers
from neuroshard.search.infeasible.packing import GaveUp, pack, quick_plan
from neuroshard.search.problem.layout import lay_out
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.room import contradicts_itself, lacking_bytes
from neuroshard.search.problem.state import State
from neuroshard.search.step_room import Room, check_step, expected_room, with_room
from neuroshard.search.tuning import Tuning

TRIED = 1000  # placements of one group each, in one trial: some 50 ms
SMALL = 1024  # tables x devices; above it greedy orders alone are tried
CLOSE = 2000  # an amount of bytes is at most 1 / CLOSE above the largest one that was tried and did not fit
ONE_BY_ONE = 16  # rules or devices, at most, that are tried each by itself


def hints(task: ShardingTask, model: CostModel, tuning: Tuning) -> str:
    """All hints that were found, in one line."""
    if not tuning.hints or task.keeps_free:
        return "more devices or memory may do"
    trials = _Trials(task, model)
    alone = task.groups is None  # a group's size is a divisor, and it has no host memory
    found = [*trials.memory(), *(trials.more_devices() if alone else ()), *trials.rules(), *trials.row_wise()]
    found += trials.host_memory() if alone else ()
    return ", or ".join(found) if found else "add devices or memory"


class _Trials:
    """Changes of a task that has no plan, each tried and put in words."""

    def __init__(self, task: ShardingTask, model: CostModel) -> None:
        self.task, self.model = task, model
        self.tables = {table.name: table for table in task.tables}
        self.need = task.need_bytes
        self.short = max(self.need - sum(task.placeable_bytes), 0) + lacking_bytes(task)

    def memory(self) -> Iterator[str]:
        """The fewest bytes more on each device, what that leaves to reserve, and if devices differ, the fewest on one device."""
        task, constraints = self.task, self.task.constraints
        memory, reserve = task.device_memory_bytes, constraints.reserve_bytes
        each = self._least_bytes(-(-self.short // task.devices), lambda more: tuple(one + more for one in memory))
        if each is None:
            return
        one = self._one_device(each)
        if one is None or parse_bytes(one[1]) > each:
            yield f"give each device {format_bytes(each, 'up')} more"
        if one is not None:
            yield f"give device {one[0]} {one[1]} more"
        if (task.allocator_share or 0) > WITH_EXPANDABLE_SEGMENTS:
            task = task.model_copy(update={"allocator_share": WITH_EXPANDABLE_SEGMENTS})
            if _Trials(task, self.model)._fits():
                yield EXPANDABLE_SEGMENTS
        if reserve >= each and self._fits(reserve_bytes=reserve - each):
            left = format_bytes(reserve - each, "down")
            yield f"--reserve {left} instead of {format_bytes(reserve)}" if reserve > each else "leave out --reserve"
        share = constraints.reserve_share
        percents = range(math.ceil(100 * share) - 1, -1, -1)
        less = self._first(percents, lambda percent: {"reserve_share": percent / 100})
        if less is not None:
            yield f"--reserve {less}% instead of {constraints.reserve_in_words}"

    def _one_device(self, each: int) -> tuple[int, str] | None:
        """The device on which the fewest bytes more are enough, and these bytes; None if all devices are alike."""
        task, pins = self.task, [rule.devices for rule in self.task.constraints.tables if rule.devices is not None]
        memory, alike = task.device_memory_bytes, len(set(task.device_memory_bytes)) == 1
        if task.devices == 1 or (alike and not pins):
            return None
        by_size = sorted(range(task.devices), key=lambda device: -memory[device])
        devices = dict.fromkeys([*(device for pinned in pins for device in pinned), by_size[0], by_size[-1]])
        best: tuple[int, int] | None = None
        for device in list(devices)[:ONE_BY_ONE]:

            def with_more(more: int, at: int = device) -> tuple[int, ...]:
                return (*memory[:at], memory[at] + more, *memory[at + 1 :])

            more = self._least_bytes(self.short, with_more, each * task.devices if best is None else best[0])
            if more is not None and (best is None or more < best[0]):
                best = more, device
        return None if best is None else (best[1], format_bytes(best[0], "up"))

    def more_devices(self) -> Iterator[str]:
        """The fewest devices in whole domains, new ones like the smallest.

        Tried up to twice as many as the bytes alone need.
        """
        memory = self.task.device_memory_bytes
        smallest, least = min(memory), min(self.task.placeable_bytes)
        fewest = max(-(-self.short // max(least, 1)), 1)
        most = min(2 * (len(memory) + fewest), MAX_DEVICES) - len(memory)
        topology = self.task.topology
        step = 1 if topology is None else topology.domain  # which is whole hosts
        steps = _least(-(-fewest // step), most // step, lambda n: self._fits(memory + (smallest,) * n * step), close=0)
        if steps is not None:
            more = steps * step
            new = "" if len(set(memory)) == 1 else f", the new with {format_bytes(smallest, 'up')}"
            yield f"use {len(memory) + more} devices instead of {len(memory)}{new}"

    def rules(self) -> Iterator[str]:
        """The smallest change of each kind of rule."""
        constraints, devices = self.task.constraints, self.task.devices
        yield from self._limit(
            "max_shards",
            lambda was, dim: range(was + 1, min(devices, dim // DIM_STEP) + 1),
            lambda new, was: f"allow {counted(new, 'shard')} a table instead of {was} (--max-shards)",
            lambda table, new, was: f"allow {counted(new, 'shard')} of table {table!r} instead of {was}",
            ("to be cut further", devices),
        )
        yield from self._limit(
            "min_dim",
            lambda was, dim: range(min(was, dim) - DIM_STEP, DIM_STEP - 1, -DIM_STEP),
            lambda new, was: f"allow shards of {new} columns instead of at least {was} (--min-dim)",
            lambda table, new, was: f"allow shards of {new} columns of table {table!r} instead of at least {was}",
            ("to be cut into narrower shards", DIM_STEP),
        )
        yield from self._pins()
        for group in constraints.together[:ONE_BY_ONE]:
            if self._fits(together=tuple(one for one in constraints.together if one is not group)):
                yield f"do not keep tables {first_few(group)} together"
                return

    def _limit(
        self,
        field: str,
        values: Callable[[int, int], Sequence[int]],
        for_all: Callable[[int, int], str],
        for_one: Callable[[str, int, int], str],
        for_several: tuple[str, int],
    ) -> Iterator[str]:
        """The first of the `values` (from today's, for a table of so many columns) of this limit with which the tables fit: of
        all tables, of one, or of several. The others say it in words."""
        was = getattr(self.task.constraints, field)
        if was is not None:
            tried = values(was, max(table.dim for table in self.task.tables))
            new = self._first(tried, lambda value: {field: value})
            if new is not None:
                yield for_all(new, was)
                return
        ruled = self._ruled(field)
        for rule in ruled[:ONE_BY_ONE]:
            was = getattr(rule, field)

            def changed(value: int, rule: TableRule = rule) -> dict[str, Any]:
                return {"tables": self._changed([rule], **{field: value})}

            new = self._first(values(was, self.tables[rule.table].dim), changed)
            if new is not None:
                yield for_one(rule.table, new, was)
                return
        yield from self._several(ruled, for_several[0], **{field: for_several[1]})

    def _first(self, values: Sequence[int], change: Callable[[int], dict[str, Any]]) -> int | None:
        """The first value with which the tables fit, if they also do with all later ones."""
        place = _least(0, len(values) - 1, lambda place: self._fits(**change(values[place])), close=0)
        return None if place is None else values[place]

    def _pins(self) -> Iterator[str]:
        ruled = self._ruled("devices")
        for rule in ruled[:ONE_BY_ONE]:
            if not self._fits(tables=self._changed([rule], devices=None)):
                continue
            pinned = rule.devices or ()
            for device in [one for one in range(self.task.devices) if one not in pinned][:ONE_BY_ONE]:
                if self._fits(tables=self._changed([rule], devices=(*pinned, device))):
                    yield f"allow table {rule.table!r} on device {device} too"
                    return
            yield f"allow table {rule.table!r} on other devices too"
            return
        yield from self._several(ruled, "on other devices too", devices=None)

    def row_wise(self) -> Iterator[str]:
        """The tables that would have to be row-wise, if they may not be."""
        constraints = self.task.constraints
        if constraints.row_wise or constraints.max_shards is not None or not self.model.prices_rows:
            return
        found = self._plan(self._task(row_wise=True))
        if found is not None and len(groups := found.problem.spread.tolist()):
            names = [found.problem.tables[group][0].name for group in groups]
            tables = (
                f"table {names[0]!r}" if len(names) == 1 else f"{counted(len(names), 'table')} ({first_few(names)})"
            )
            yield f"allow {tables} to be split row-wise (--row-wise)"

    def host_memory(self) -> Iterator[str]:
        """Host memory, which a search would put tables into, if HBM holds what they need there even so."""
        if self.task.host_memory_bytes is not None or not knows_tiers(self.model):
            return
        task = self.task.model_copy(update={"host_memory_bytes": MAX_MEMORY_BYTES})
        task = task.with_tiers({table.name: ("host", None) for table in task.without_tier})
        if self._plan(task) is not None:
            yield "let tables lie in host memory (--host-memory SIZE)"

    def _several(self, ruled: Sequence[TableRule], what: str, **loose: object) -> Iterator[str]:
        """How many rules, those of the largest tables first, must be loosened at once, if that is enough."""

        def loosened(count: int) -> bool:
            return self._fits(tables=self._changed(ruled[:count], **loose))

        count = _least(2, len(ruled), loosened, close=0)
        if count is not None:
            yield f"allow {counted(count, 'table')} ({first_few([rule.table for rule in ruled[:count]])}) {what}"

    def _ruled(self, field: str) -> list[TableRule]:
        """The rules with this field, those of the largest tables first."""
        ruled = [rule for rule in self.task.constraints.tables if getattr(rule, field) is not None]
        return sorted(ruled, key=lambda rule: -self.tables[rule.table].memory_bytes)

    def _changed(self, rules: Sequence[TableRule], **change: object) -> tuple[TableRule, ...]:
        names = {rule.table for rule in rules}
        return tuple(
            rule.model_copy(update=change) if rule.table in names else rule for rule in self.task.constraints.tables
        )

    def _least_bytes(self, least: int, memory: Callable[[int], tuple[int, ...]], most: int | None = None) -> int | None:
        """The fewest bytes more with which the tables fit, as a user will type them."""
        constraints = self.task.constraints
        if most is None:
            step = int(expected_room(self.task).nbytes.max()) if self.task.counts_steps else 0
            most = math.ceil(
                (self.need + self.short + step + constraints.reserve_bytes) / (1 - constraints.reserve_share)
            )
        found = _least(max(least, 1), max(most, 1), lambda more: self._fits(memory=memory(_typed(more))), CLOSE)
        return None if found is None else _typed(found)

    def _fits(self, memory: tuple[int, ...] | None = None, **change: object) -> bool:
        return self._plan(self._task(memory, **change)) is not None

    def _plan(self, task: ShardingTask) -> State | None:
        return first_fit(Problem(task, self.model)) if _sound(task) else None

    def _task(self, memory: tuple[int, ...] | None = None, **change: object) -> ShardingTask:
        constraints: Constraints = self.task.constraints.model_copy(update=change)
        changed = {"device_memory_bytes": memory or self.task.device_memory_bytes, "constraints": constraints}
        return self.task.model_copy(update=changed)


def first_fit(problem: Problem) -> State | None:
    """A plan with room for its step, by a few greedy orders or a few placements; None if none is found soon."""

    def found(room: Room | None, _: State | None) -> State:
        there = problem if room is None else problem.keeping_free(*room)
        quick = quick_plan(there)
        with suppress(GaveUp):
            if quick is None and there.allowed.size <= SMALL and (widths := pack(there, TRIED)) is not None:
                quick = there, widths
        if quick is None:
            raise Infeasible("none is found soon")
        state = State(*quick)
        check_step(problem.task, lay_out(state), state)
        return state

    with suppress(Infeasible):
        return with_room(problem.task, found)
    return None


def _sound(task: ShardingTask) -> bool:
    """Whether the constraints agree with each other, and all devices together have enough bytes."""
    return not contradicts_itself(task) and task.need_bytes <= sum(task.placeable_bytes)


def _least(low: int, high: int, fits: Callable[[int], bool], close: int) -> int | None:
    """The least number from `low` to `high` that fits, or one at most 1 / `close` above it; None if `high` does not fit."""
    if low > high or not fits(high):
        return None
    if fits(low):
        return low
    while high - low > max(high // close if close else 0, 1):
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _typed(nbytes: int) -> int:
    """The bytes that an amount means as it is printed."""
    return parse_bytes(format_bytes(nbytes, "up"))
