"""What would make a plan possible where there is none: more memory, more devices or a rule less, each by itself.

Each is tried before it is told, as it is told: an amount is rounded up first. What packs here is found by a search as well.
"""

from collections.abc import Callable, Iterator, Sequence

from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.table import DIM_STEP
from neuroshard.core.task import MAX_DEVICES, ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes, parse_bytes
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.infeasible.packing import GaveUp, pack, quick_plan
from neuroshard.search.problem.problem import Problem

TRIED = 1000  # placements of one item: some 50 ms
SMALL = 1024  # tables x devices, above which greedy orders alone are tried
CLOSE = 2000  # what is told as the least is at most a share of 1 / CLOSE above the most that was tried in vain
ONE_BY_ONE = 16  # rules and devices, of which each is tried by itself


def hints(task: ShardingTask, model: CostModel) -> str:
    """All that was found, in one line."""
    outs = _Outs(task, model)
    found = [*outs.memory(), *outs.more_devices(), *outs.rules(), *outs.row_wise()]
    return ", or ".join(found) if found else "add devices or memory"


class _Outs:
    """Ways out of a task that has no plan, in words."""

    def __init__(self, task: ShardingTask, model: CostModel) -> None:
        self.task, self.model = task, model
        self.tables = {table.name: table for table in task.tables}
        self.need = sum(table.memory_bytes for table in task.tables)
        self.short = max(self.need - sum(task.usable_bytes), 0)

    def memory(self) -> Iterator[str]:
        """The least bytes more on each device, what that leaves to be reserved, and where devices differ, the least on one."""
        task, constraints = self.task, self.task.constraints
        memory, reserve = task.device_memory_bytes, constraints.reserve_bytes
        each = self._least_bytes(-(-self.short // task.devices), lambda more: tuple(one + more for one in memory))
        if each is None:
            return
        one = self._one_device(each)
        if one is None or parse_bytes(one[1]) > each:
            yield f"give each device {_up(each)} more"
        if one is not None:
            yield f"give device {one[0]} {one[1]} more"
        if reserve >= each:
            left = format_bytes(reserve - each, "down") if reserve > each else "nothing"
            yield f"reserve {left} instead of {format_bytes(reserve)}"

    def _one_device(self, each: int) -> tuple[int, str] | None:
        """The device on which the least bytes more are enough, where something tells devices apart, and these bytes."""
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
        return None if best is None else (best[1], _up(best[0]))

    def more_devices(self) -> Iterator[str]:
        """The least number of devices, the new ones like the smallest; up to twice as many as bytes alone ask for."""
        memory = self.task.device_memory_bytes
        smallest, least = min(memory), min(self.task.usable_bytes)
        fewest = max(-(-self.short // max(least, 1)), 1)
        most = min(2 * (len(memory) + fewest), MAX_DEVICES) - len(memory)
        more = _least(fewest, most, lambda count: self._fits(memory=memory + (smallest,) * count), close=0)
        if more is not None:
            new = "" if len(set(memory)) == 1 else f", the new with {format_bytes(smallest, 'up')}"
            yield f"use {len(memory) + more} devices instead of {len(memory)}{new}"

    def rules(self) -> Iterator[str]:
        """The least change of the rules of one kind."""
        constraints = self.task.constraints
        yield from self._shards()
        yield from self._widths()
        yield from self._pins()
        for group in constraints.together[:ONE_BY_ONE]:
            others = tuple(one for one in constraints.together if one is not group)
            if self._fits(together=others):
                yield f"let tables {first_few(group)} not be kept together"
                return

    def _shards(self) -> Iterator[str]:
        constraints = self.task.constraints
        most = constraints.max_shards
        if most is not None:
            shards = _least(most + 1, self.task.devices, lambda count: self._fits(max_shards=count), close=0)
            if shards is not None:
                yield f"let tables have {counted(shards, 'shard')} instead of {most} (--max-shards)"
                return
        ruled = self._ruled("max_shards")
        for rule in ruled[:ONE_BY_ONE]:
            was = rule.max_shards or 1
            units = self.tables[rule.table].dim // DIM_STEP

            def with_shards(count: int, rule: TableRule = rule) -> bool:
                return self._fits(tables=self._changed([rule], max_shards=count))

            shards = _least(was + 1, min(self.task.devices, units), with_shards, close=0)
            if shards is not None:
                yield f"let table {rule.table!r} have {counted(shards, 'shard')} instead of {was}"
                return
        yield from self._several(ruled, "be cut further", max_shards=self.task.devices)

    def _widths(self) -> Iterator[str]:
        constraints = self.task.constraints

        def narrower(width: int, fits: Callable[[int], bool]) -> int | None:
            steps = _least(1, width // DIM_STEP - 1, lambda steps: fits(width - DIM_STEP * steps), close=0)
            return None if steps is None else width - DIM_STEP * steps

        width = narrower(constraints.min_dim, lambda width: self._fits(min_dim=width))
        if width is not None:
            yield f"let shards have {width} columns instead of {constraints.min_dim} at least (--min-dim)"
            return
        ruled = self._ruled("min_dim")
        for rule in ruled[:ONE_BY_ONE]:

            def with_width(width: int, rule: TableRule = rule) -> bool:
                return self._fits(tables=self._changed([rule], min_dim=width))

            width = narrower(min(rule.min_dim or DIM_STEP, self.tables[rule.table].dim), with_width)
            if width is not None:
                yield f"let table {rule.table!r} be cut to {width} columns instead of {rule.min_dim}"
                return
        yield from self._several(ruled, "be cut narrower", min_dim=DIM_STEP)

    def _pins(self) -> Iterator[str]:
        ruled = self._ruled("devices")
        for rule in ruled[:ONE_BY_ONE]:
            if not self._fits(tables=self._changed([rule], devices=None)):
                continue
            pinned = rule.devices or ()
            for device in [one for one in range(self.task.devices) if one not in pinned][:ONE_BY_ONE]:
                if self._fits(tables=self._changed([rule], devices=(*pinned, device))):
                    yield f"let table {rule.table!r} lie on device {device} too"
                    return
            yield f"let table {rule.table!r} lie on other devices too"
            return
        yield from self._several(ruled, "lie on other devices too", devices=None)

    def row_wise(self) -> Iterator[str]:
        """That tables may be split row-wise, where they pack so and may not."""
        constraints = self.task.constraints
        if constraints.row_wise or constraints.max_shards is not None or not self.model.prices_rows:
            return
        task = self._task(row_wise=True)
        found = quick_plan(Problem(task, self.model)) if _sound(task) else None
        if found is not None and len(items := found[0].row_wise.tolist()):
            names = [found[0].members[item][0].name for item in items]
            tables = (
                f"table {names[0]!r}" if len(names) == 1 else f"{counted(len(names), 'table')} ({first_few(names)})"
            )
            yield f"let {tables} be split row-wise (--row-wise)"

    def _several(self, ruled: Sequence[TableRule], what: str, **loose: object) -> Iterator[str]:
        """How many of the rules, those of the largest tables first, must be loosened at once, where that is enough."""

        def loosened(count: int) -> bool:
            return self._fits(tables=self._changed(ruled[:count], **loose))

        count = _least(2, len(ruled), loosened, close=0)
        if count is not None:
            yield f"let {counted(count, 'table')} ({first_few([rule.table for rule in ruled[:count]])}) {what}"

    def _ruled(self, field: str) -> list[TableRule]:
        """The rules that say something of it, those of the largest tables first."""
        ruled = [rule for rule in self.task.constraints.tables if getattr(rule, field) is not None]
        return sorted(ruled, key=lambda rule: -self.tables[rule.table].memory_bytes)

    def _changed(self, rules: Sequence[TableRule], **change: object) -> tuple[TableRule, ...]:
        names = {rule.table for rule in rules}
        return tuple(
            rule.model_copy(update=change) if rule.table in names else rule for rule in self.task.constraints.tables
        )

    def _least_bytes(self, least: int, memory: Callable[[int], tuple[int, ...]], most: int | None = None) -> int | None:
        """The least bytes with which it fits, such as a user will type them."""
        most = self.need + self.task.constraints.reserve_bytes if most is None else most
        found = _least(max(least, 1), max(most, 1), lambda more: self._fits(memory=memory(_typed(more))), CLOSE)
        return None if found is None else _typed(found)

    def _fits(self, memory: tuple[int, ...] | None = None, **change: object) -> bool:
        task = self._task(memory, **change)
        if not _sound(task):
            return False
        problem = Problem(task, self.model)
        if quick_plan(problem) is not None:
            return True
        try:
            return problem.allowed.size <= SMALL and pack(problem, TRIED) is not None
        except GaveUp:
            return False

    def _task(self, memory: tuple[int, ...] | None = None, **change: object) -> ShardingTask:
        constraints: Constraints = self.task.constraints.model_copy(update=change)
        changed = {"device_memory_bytes": memory or self.task.device_memory_bytes, "constraints": constraints}
        return self.task.model_copy(update=changed)


def _sound(task: ShardingTask) -> bool:
    """Whether the constraints go together, and there are enough bytes in all."""
    try:
        task.constraints.check([table.name for table in task.tables], task.device_memory_bytes)
    except ValueError:
        return False
    return sum(table.memory_bytes for table in task.tables) <= sum(task.usable_bytes)


def _least(low: int, high: int, fits: Callable[[int], bool], close: int) -> int | None:
    """The least number from `low` to `high` that fits, or one at most 1 / `close` above it; None where `high` does not."""
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


def _up(nbytes: int) -> str:
    return format_bytes(nbytes, "up")


def _typed(nbytes: int) -> int:
    """The bytes of an amount as it is told."""
    return parse_bytes(_up(nbytes))
