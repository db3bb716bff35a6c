"""Re-planning with the column cuts of the current plan: each of its column shards is a table of its own, which is never cut.

Row-wise Adagrad keeps a moment for each row of each shard, so a trainer can load that state only if columns are cut as before. A
table that is whole or split row-wise has one moment a row, and may be either. Tables without state by the row are free, and so
are those that were data-parallel, whose state was the dense optimizer's.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from neuroshard.core.constraints import TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import joined
from neuroshard.core.operator_limits import held, widest_shard
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.costmodel.protocol import CostModel, trains_on

WAY_OUT = "leave out --keep-optimizer-state"


class Columns(NamedTuple):
    """Columns that one shard, or one row of shards, has of a table."""

    offset: int
    dim: int


class KeptCuts:
    """The `task` and the current `plan`, with column shards as tables.

    `tables` are the names of those that keep their cuts, `cut` of those that have any. A table wider than the cost model has seen
    is not split row-wise. The shards of the cut tables that `stay` are where they were. Raises Infeasible where today's rules
    forbid the plan's cuts, or the operator does not hold a shard.
    """

    def __init__(self, task: ShardingTask, plan: Plan, model: CostModel, stay: Collection[str] = ()) -> None:
        old, shards, before = {table.name: table for table in plan.task.tables}, plan.by_table(), list(plan.task.tables)
        constraints, rules = task.constraints, dict(task.constraints.rules())
        may_split_rows = set(task.may_split_rows)
        names = {*old, *(table.name for table in task.tables)}
        self._before = plan.task.tables
        self.tables: list[str] = []
        self.cut: list[str] = []
        self._of: dict[str, tuple[str, int]] = {}  # of each piece, its table and its first column there
        pieces: list[Table] = []
        for table in task.tables:
            was = old.get(table.name)
            copied = plan.task.constraints.data_parallel | constraints.data_parallel
            stateless = not table.optimizer_bytes_per_row or table.name in copied
            if was is None or was.dim != table.dim or stateless or table.id_map is not None:
                pieces.append(table)
                continue
            rule = rules.pop(table.name, TableRule(table=table.name))
            cuts = _cuts(was, shards[table.name])
            self.tables.append(table.name)
            _check_widths(table, cuts, model)
            if len(cuts) == 1:
                row_wise = table.name in may_split_rows and table.dim <= model.max_dim
                whole = {"min_dim": table.dim} if row_wise else {"max_shards": 1, "row_wise": None}
                rules[table.name] = rule.model_copy(update=whole)
                pieces.append(table)
                continue
            self._check_rules(table, cuts, task)
            self.cut.append(table.name)
            for columns in cuts:
                name = _unlike(f"{table.name}[{columns.offset}:{columns.offset + columns.dim}]", names)
                self._of[name] = table.name, columns.offset
                pieces.append(_piece(table, name, columns))
                before.append(_piece(was, name, columns))
                devices = _where(table, columns, shards, rule, task.devices) if table.name in stay else rule.devices
                in_tier = {"tier": rule.tier, "cached_rows": rule.cached_rows}
                rules[name] = TableRule(table=name, devices=devices, max_shards=1, **in_tier)
        in_pieces = constraints.model_copy(update={"tables": tuple(rules.values())})
        self._device = trains_on(model)
        self.task = task.model_copy(update={"tables": tuple(pieces), "constraints": in_pieces})
        pieces_of = {of: name for name, of in self._of.items()}
        self.plan = plan.model_copy(
            update={
                "task": plan.task.model_copy(update={"tables": tuple(t for t in before if t.name not in self.cut)}),
                "shards": tuple(_as_piece(shard, pieces_of) for shard in plan.shards),
            }
        )

    @property
    def note(self) -> str:
        """What is kept, in words."""
        return (
            f"{counted(len(self.tables), 'table')} with optimizer state by the row cut into columns as in the plan to start from "
            f"({len(self.cut)} of them cut), so that a trainer can load the state"
        )

    @property
    def no_plan(self) -> str:
        """That nothing was found that keeps the cuts, in words."""
        return (
            "no plan was found that keeps the column cuts of the plan to start from, those of "
            f"{counted(len(self.tables), 'table')} ({first_few(self.tables)}); {WAY_OUT}, without which tables fit"
        )

    @property
    def pieces(self) -> Collection[str]:
        """Names of the task's tables that are shards of cut tables."""
        return self._of.keys()

    @property
    def columns_of(self) -> Mapping[str, tuple[str, int]]:
        """Of each of these, its table and its first column there."""
        return self._of

    def table_of(self, name: str) -> str:
        """The table of a piece, or the name itself."""
        return self._of.get(name, (name, 0))[0]

    def shards(self, in_pieces: Sequence[Shard]) -> tuple[Shard, ...]:
        """The shards of a plan for the pieces as those of the tables."""
        found = []
        for shard in in_pieces:
            table, offset = self._of.get(shard.table, (shard.table, 0))
            found.append(shard.model_copy(update={"table": table, "column_offset": offset + shard.column_offset}))
        return tuple(found)

    def mixed_up(self, shards: Sequence[Shard]) -> frozenset[str]:
        """The cut tables whose shards in a plan TorchRec would mix up: on one device, of unequal widths, and no neighbours, or
        neighbours that are together wider than the operator holds."""
        widest = {table.name: widest_shard(table, self._device) for table in self._before if table.name in self.cut}
        found = set()
        for name, most in widest.items():
            as_held = joined([shard for shard in shards if shard.table == name])
            widths = {(shard.device, shard.dim) for shard in as_held}
            if len(widths) > len({shard.device for shard in as_held}) or any(dim > (most or dim) for _, dim in widths):
                found.add(name)
        return frozenset(found)

    def _check_rules(self, table: Table, cuts: Sequence[Columns], task: ShardingTask) -> None:
        constraints = task.constraints
        least, most = constraints.allowed(constraints.rules().get(table.name), table.dim)
        narrowest = min(columns.dim for columns in cuts)
        for broken, rule in (
            (most is not None and len(cuts) > most, f"may have {counted(most or 0, 'shard')} at most"),
            (narrowest < least, f"may have no shard of fewer than {least} columns"),
            (any(table.name in group for group in constraints.together), "is kept together with others"),
            (not constraints.may_use("column-wise"), "may not be cut column-wise"),
        ):
            if broken:
                raise Infeasible(
                    f"table {table.name!r} is cut into {len(cuts)} shards, the narrowest of {narrowest} columns, in the plan to "
                    f"start from, and {rule} today; {WAY_OUT}, or loosen that rule"
                )


def _where(
    table: Table, columns: Columns, shards: Mapping[str, Sequence[Shard]], rule: TableRule, devices: int
) -> tuple[int, ...]:
    """The device of a column shard in the plan to start from. Raises Infeasible where today it may not be there."""
    place = next(s.device for s in shards[table.name] if s.column_offset == columns.offset)
    if place >= devices or (rule.devices is not None and place not in rule.devices):
        raise Infeasible(
            f"table {table.name!r} is cut into shards of unequal widths in the plan to start from; no place was found for them "
            f"that TorchRec can hold, and today device {place} cannot keep its shard; {WAY_OUT}, so that it is cut anew"
        )
    return (place,)


def _check_widths(table: Table, cuts: Sequence[Columns], model: CostModel) -> None:
    device, widest = trains_on(model), max(columns.dim for columns in cuts)
    most = widest_shard(table, device)
    if most is not None and widest > most:
        raise Infeasible(
            f"table {table.name!r} has a shard of {widest:,} columns in the plan to start from; {held(most, device)}; {WAY_OUT}, "
            "so that it is cut anew"
        )


def _cuts(table: Table, shards: Sequence[Shard]) -> list[Columns]:
    """The columns that a table is cut into, from the left. Raises Infeasible where its rows are split too."""
    cuts = sorted({Columns(shard.column_offset, shard.dim) for shard in shards})
    if len(cuts) > 1 and any(shard.rows < table.rows for shard in shards):
        raise Infeasible(
            f"table {table.name!r} is cut by rows and by columns in the plan to start from, which no search keeps; {WAY_OUT}"
        )
    return cuts


def _piece(table: Table, name: str, columns: Columns) -> Table:
    return table.with_dim(columns.dim).model_copy(update={"name": name})


def _as_piece(shard: Shard, pieces: dict[tuple[str, int], str]) -> Shard:
    piece = pieces.get((shard.table, shard.column_offset))
    return shard if piece is None else shard.model_copy(update={"table": piece, "column_offset": 0})


def _unlike(name: str, names: set[str]) -> str:
    """The name, or one like it that no table has."""
    while name in names:
        name += "'"
    names.add(name)
    return name
