"""The plan to start from, as one of the tables that are searched: where a table is held by access in it or by the task, a search
begins with parts that are cut and lie as those did, and counts what must move by the rows that devices really have."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from neuroshard.core.constraints import TableRule
from neuroshard.core.moves import HeldRows, PlanPart, parts_of_table, plan_parts
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask


class Elsewhere(NamedTuple):
    """Tables whose rows may be in other places in the plan to start from than its shards say. `pieces` are columns of one that
    are searched as tables of their own: the table, and the first column."""

    held: HeldRows
    pieces: Mapping[str, tuple[str, int]] = {}

    def has(self, table: str) -> bool:
        return self._whole(table)[0] in self.held.elsewhere

    def arriving_bytes(self, shards: Sequence[Shard], *, copied: bool) -> int:
        """Bytes that devices must receive for shards of one of these tables, or pieces."""
        if not shards:  # of a table group in pieces, which has no other shards
            return 0
        name, first = self._whole(shards[0].table)
        moved = [s.model_copy(update={"table": name, "column_offset": first + s.column_offset}) for s in shards]
        return self.held.arriving_bytes(moved, copied=copied)

    def _whole(self, table: str) -> tuple[str, int]:
        return self.pieces.get(table, (table, 0))


class Previous(NamedTuple):
    """The plan to start from, of tables and parts as a task's; `elsewhere` where it, or the task, holds some by access."""

    plan: Plan
    elsewhere: Elsewhere | None = None

    @classmethod
    def of(cls, plan: Plan, task: ShardingTask) -> "Previous":
        """Of a plan, for a task before it is parted."""
        held, were = task.constraints.rows_by_access, plan.task.constraints.rows_by_access
        if not held and not were:
            return cls(plan)
        today = {table.name for table in task.tables}
        # a table that is gone stays as it was, to be named as such
        as_today = {
            table.name: how
            for table in plan.task.tables
            if (how := (held if table.name in today else were).get(table.name)) is not None
            and (how.hot_rows or 0) < table.rows
        }
        task_then, shards = plan.task.with_rows_by_access(as_today), list[Shard]()
        rules, before, by_table = dict(task_then.constraints.rules()), plan.parted.constraints.rules(), plan.by_table()
        old_parts = plan_parts(plan)
        for table in plan.task.tables:
            old = {part.name: part for part in old_parts[table.name]}
            parts = parts_of_table(table, as_today.get(table.name))
            if parts[0].name not in old and len(parts) > 1:
                rules[table.name] = TableRule(table=table.name, rows_by_access=as_today[table.name])
            for part in parts:
                source = old.get(part.name) or list(old.values())[-1]  # the cold part, or the whole table
                shards += cut_alike(by_table[source.name], source, part, table)
                if source.name != part.name:
                    rule, own = before.get(source.name), rules.get(part.name, TableRule(table=part.name))
                    rules[part.name] = own.model_copy(update=_tier(rule if part is parts[-1] else None))
        constraints = task_then.constraints.model_copy(update={"tables": tuple(rules.values())})
        parted = task_then.model_copy(update={"constraints": constraints}).parted
        as_tables = plan.model_copy(update={"task": parted, "shards": tuple(shards)})
        return cls(as_tables, Elsewhere(HeldRows(plan, task)))


def _tier(rule: TableRule | None) -> dict[str, object]:
    """The tier that a rule names, and whether it copies; without a rule HBM, as of hot rows."""
    fields = ("tier", "cached_rows", "data_parallel")
    return {name: None if rule is None else getattr(rule, name) for name in fields}


def cut_alike(shards: Sequence[Shard], source: PlanPart, part: PlanPart, table: Table) -> list[Shard]:
    """Shards of a part of a table, cut and placed as those of another part of it; one where it has too few rows for that."""
    if source.name == part.name and source.rows == part.rows:
        return list(shards)
    firsts = sorted({shard.row_offset for shard in shards})
    blocks = table.model_copy(update={"rows": part.rows}).row_blocks(len(firsts))
    if any(rows == 0 for _, rows in blocks):
        return [Shard(table=part.name, rows=part.rows, dim=table.dim, device=shards[0].device)]
    of = dict(zip(firsts, blocks, strict=True))
    moved = [(shard, *of[shard.row_offset]) for shard in shards]
    return [s.model_copy(update={"table": part.name, "row_offset": at, "rows": rows}) for s, at, rows in moved]
