"""From one plan to another: which columns of which table go from where to where, and how many bytes that is.

What a device already holds stays. Bytes in host memory go from device to device too, also in one host: each rank is a process
that allocates the memory of its own tables. Rows and tables that the old plan does not have are initialised, not moved; so is a
table whose number of columns changed. Of a table that either plan copies to every device, only weights count: no sharded table
has the state of a dense optimizer (client/checkpoint/load.py); a copied hot part has that of its table (client/rows/copies.py).

Where the plans do not hold a table's rows in the same places, by id or by one order, as many are counted in common as there are
on average: exact for shards of all rows; by another order, hot rows are those of before by chance.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from neuroshard.core.part import Part
from neuroshard.core.parts import RowsByAccess, part_names
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.tiers import Resource, element_bytes
from neuroshard.core.value import Value


class Move(Value):
    """A rectangle of a table that goes to `to_device`: from `from_device`, or, where that is None, initialised there.

    `nbytes` counts weights and optimizer state. Row-wise state moves with the first columns of its rows. Where the plans hold the
    table's rows in different places, `rows` from `row_offset` on are any as many of the shard's.
    """

    table: str
    row_offset: int
    rows: int
    column_offset: int
    dim: int
    from_device: int | None
    to_device: int
    nbytes: int


def moves(old: Plan, new: Plan) -> tuple[Move, ...]:
    """Everything that devices hold under `new` and not under `old`, in the order of the new plan's shards."""
    held, by_table, copied = HeldRows(old, new.held), new.by_table(), new.parted.constraints.data_parallel
    there = {name: held.of(name, shards) for name, shards in by_table.items()}
    tables = {name: held.table(name, copied=name in copied) for name in by_table}
    return tuple(move for shard in new.shards for move in _arriving(shard, tables[shard.table], there[shard.table]))


def moved_bytes(old: Plan, new: Plan) -> int:
    """Weights and optimizer state that go from one device to another."""
    return sum(move.nbytes for move in moves(old, new) if move.from_device is not None)


def arriving_bytes(
    table: Table, before: Sequence[Shard], after: Sequence[Shard], *, copied_before: bool, copied_after: bool = False
) -> int:
    """Bytes that devices must receive for one table, from its shards `before` to those `after`, either of which may be copies."""
    held = _OldShards(before, copies=copied_before)
    table = _stateless(table) if copied_before or copied_after else table
    arriving = (move for shard in after for move in _arriving(shard, table, held))
    return sum(move.nbytes for move in arriving if move.from_device is not None)


class HeldRows:
    """What devices hold under an `old` plan of the tables that the shards of another plan, of a `task`, are of.

    `elsewhere` are the names of those whose rows may be in other places than in the old plan's shards: held by access.
    """

    def __init__(self, old: Plan, task: ShardingTask) -> None:
        self._before, self._shards = old.parted, old.by_table()
        self._were = old.held.constraints.rows_by_access
        tables = {table.name: table for table in old.task.tables}
        parted = {table.name: table for table in task.parted.tables}
        held, self._hot = task.constraints.rows_by_access, task.by_access.hot
        self._tables: dict[str, _NewTable] = {}
        elsewhere = list[str]()
        for table in task.tables:
            for part in parts_of_table(table, held.get(table.name)):
                own = _NewTable(parted[part.name], table, held.get(table.name), part, tables.get(table.name))
                self._tables[part.name] = own
                if table.name in held or table.name in self._were:
                    elsewhere.append(part.name)
        self.elsewhere = frozenset(elsewhere)

    def table(self, name: str, *, copied: bool) -> Table:
        """The table of new shards, which may be copies, with the state that comes along."""
        before = self._before
        densely = (name in before.constraints.data_parallel - before.by_access.hot) or (
            copied and name not in self._hot
        )
        table = self._tables[name].table
        return _stateless(table) if densely else table

    def arriving_bytes(self, shards: Sequence[Shard], *, copied: bool) -> int:
        """Bytes that devices must receive for new shards of one table, or for some of its columns."""
        name = shards[0].table
        there, table = self.of(name, shards), self.table(name, copied=copied)
        arriving = (move for shard in shards for move in _arriving(shard, table, there))
        return sum(move.nbytes for move in arriving if move.from_device is not None)

    def of(self, name: str, shards: Sequence[Shard]) -> "_OldShards | _OtherRows":
        """What the old plan has of a table's new shards."""
        new, copied = self._tables[name], self._before.constraints.data_parallel
        was, there = new.before, self._shards.get(name, ())
        if was is None or was.dim != new.whole.dim:
            return _OldShards((), copies=False)
        how = self._were.get(was.name)
        order = _order(new.whole)
        if _places(how, _order(was), there) == _places(new.how, order, shards):
            return _OldShards(there, copies=name in copied)
        one_order = order is not None and _order(was) == order
        old = [(new.rows_in_both(part, one_order=one_order), part) for part in parts_of_table(was, how)]
        return _OtherRows(
            new.part.rows,
            tuple(_OldPart(both, p.rows, self._shards[p.name], p.name in copied) for both, p in old if both > 0),
        )


class _NewTable(NamedTuple):
    """A `table` of new shards: a `part` of the `whole`, held so; and what this was `before`, if it was there."""

    table: Table
    whole: Table
    how: RowsByAccess | None
    part: "PlanPart"
    before: Table | None

    def rows_in_both(self, old: "PlanPart", *, one_order: bool) -> float:
        """How many rows this part of the table has in common with an `old` one: by another order as many as by chance."""
        part, rows = self.part, self.before.rows if self.before else 0
        if one_order:
            return max(0, min(old.first + old.rows, part.first + part.rows) - max(old.first, part.first))
        return old.rows * (part.rows / max(rows, self.whole.rows))


def _stateless(table: Table) -> Table:
    """The same table without optimizer state."""
    return table.model_copy(update={"optimizer_bytes_per_row": 0, "optimizer_bytes_per_element": 0})


def changed_state(old: Plan, new: Plan) -> tuple[str, ...]:
    """Tables of both plans whose optimizer state does not carry over exactly (client.checkpoint says how it is loaded):
    those with state per row and shard whose column cuts differ, and those with any state that only one of the plans copies to
    every device, where the dense optimizer trains them. A table with another number of columns is initialised."""
    before = {table.name: table for table in old.task.tables}
    densely = new.held.constraints.data_parallel ^ old.held.constraints.data_parallel
    densely -= new.held.by_access.hot | old.held.by_access.hot
    cuts, were = new.by_table(), old.by_table()
    parts, old_parts = plan_parts(new), plan_parts(old)

    def cut_otherwise(table: Table) -> bool:
        """Whether rows of the table may have been cut in other columns: not where each part has the same, cut alike."""
        was = {part: _spans(were[part.name]) for part in old_parts[table.name]}
        now = {part: _spans(cuts[part.name]) for part in parts[table.name]}
        if was == now and (len(now) == 1 or _order(before[table.name]) == _order(table)):
            return False
        every = [*was.values(), *now.values()]
        return any(each != every[0] for each in every)

    return tuple(
        table.name
        for table in new.task.tables
        if table.name in before
        and before[table.name].dim == table.dim
        and (
            (table.optimizer_bytes_per_row and cut_otherwise(table))
            or (table.optimizer_bytes_per_row + table.optimizer_bytes_per_element and table.name in densely)
        )
    )


def ids_lost(old: Plan, task: ShardingTask) -> tuple[str, ...]:
    """Tables whose ids, given rows as they trained, cannot keep these on as many devices as the task has."""
    before = {table.name: table for table in old.task.mapped}
    return tuple(
        table.name
        for table in task.mapped
        if table.id_map is not None
        and table.name in before
        and before[table.name].rows == table.rows
        and not table.id_map.goes_to(table.rows, old.task.devices, task.devices)
    )


def said_ids_lost(old: Plan, task: ShardingTask) -> str:
    """A line about `ids_lost`; empty where there are none."""
    if not (names := ids_lost(old, task)):
        return ""
    return (
        f"{counted(len(names), 'table')} gave rows to ids on {old.task.devices} devices, and {task.devices} cannot have these "
        f"ids in whole blocks of rows ({first_few(names)}): no trainer can go on from a checkpoint of the plan before; take a "
        "number of devices with whole blocks of it"
    )


def changed_tiers(old: Plan, new: Plan) -> dict[str, int]:
    """Bytes of weights and of optimizer state of elements that lie in other memory (HBM, that of hosts) by one plan than by the
    other, by table. Those of caches are copies. Of a table in two parts, those of so many rows as the plans' differ in."""
    known, found = {table.name for table in old.task.tables}, dict[str, int]()
    before, after = (_rows_beyond_hbm(plan) for plan in (old, new))
    for table in (table for table in new.task.tables if table.name in known):
        changed = 0
        for resource in before[table.name] | after[table.name]:
            was, now = before[table.name][resource], after[table.name][resource]
            rows = min(abs(now - was), table.rows) if was and now else max(now, min(was, table.rows))
            changed = max(changed, rows)
        if changed:
            found[table.name] = element_bytes(Part(table, changed, table.dim))
    return found


def _rows_beyond_hbm(plan: Plan) -> dict[str, Counter[Resource]]:
    """The rows of each table of a plan's task that are not in HBM, by where they are."""
    beyond, found = plan.parted.constraints.beyond_hbm, defaultdict[str, Counter[Resource]](Counter)
    for name, parts in plan_parts(plan).items():
        for part in parts:
            if part.name in beyond:
                found[name][beyond[part.name].in_tier.elements] += part.rows
    return found


class PlanPart(NamedTuple):
    """A table of a plan's shards, a table of its task or a part of one: rows `first` to `first + rows` of it, in its order."""

    name: str
    first: int
    rows: int


def plan_parts(plan: Plan) -> dict[str, tuple[PlanPart, ...]]:
    """The tables of a plan's shards that have the rows of each table of its task: two of one in two parts."""
    held = plan.held.constraints.rows_by_access
    return {table.name: parts_of_table(table, held.get(table.name)) for table in plan.task.tables}


def parts_of_table(table: Table, how: RowsByAccess | None) -> tuple[PlanPart, ...]:
    """The tables that have the rows of a table that is held so."""
    if how is None or how.hot_rows is None:
        return (PlanPart(table.name, 0, table.rows),)
    hot, cold = part_names(table.name)
    return PlanPart(hot, 0, how.hot_rows), PlanPart(cold, how.hot_rows, table.rows - how.hot_rows)


def carried_over(changed: int) -> str:
    """How many tables `changed_state` found, for people."""
    return f"the optimizer state of {counted(changed, 'table')} does not carry over exactly"


def _spans(shards: Sequence[Shard]) -> set[tuple[int, int]]:
    """The columns of each of a table's shards: first, number."""
    return {(shard.column_offset, shard.dim) for shard in joined(shards)}


def joined(shards: Sequence[Shard]) -> list[Shard]:
    """The shards of a table as TorchRec can hold them. On a device with several column shards of unequal widths, adjacent ones
    are joined; shards of some rows stay as they are."""
    if any(shard.row_offset for shard in shards):
        return list(shards)
    shards = sorted(shards, key=lambda shard: shard.column_offset)
    widths: dict[int, set[int]] = defaultdict(set)
    for shard in shards:
        widths[shard.device].add(shard.dim)
    found: list[Shard] = []
    for shard in shards:
        last = found[-1] if found else None
        if last and last.device == shard.device and len(widths[shard.device]) > 1:
            found[-1] = last.model_copy(update={"dim": last.dim + shard.dim})
        else:
            found.append(shard)
    return found


def bytes_by_device(found: Iterable[Move], devices: int) -> dict[str, list[int]]:
    """Bytes that each device must get from others (`arriving`), give to others (`leaving`) and initialise (`made`)."""
    sums = {name: [0] * devices for name in ("arriving", "leaving", "made")}
    for move in found:
        if move.from_device is None:
            sums["made"][move.to_device] += move.nbytes
        else:
            sums["arriving"][move.to_device] += move.nbytes
            sums["leaving"][move.from_device] += move.nbytes
    return sums


class _Rows:
    """Rows as spans that do not touch, in order."""

    def __init__(self, begins: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        self.begins, self.ends = list(begins), list(ends)

    def add(self, first: int, end: int) -> int:
        """Add the rows from `first` to `end`; how many of them are new."""
        left, right = bisect_left(self.ends, first), bisect_right(self.begins, end)
        spans = list(zip(self.begins[left:right], self.ends[left:right], strict=True))
        known = sum(max(0, min(stop, end) - max(begin, first)) for begin, stop in spans)
        self.begins[left:right] = [min([first, *(begin for begin, _ in spans)])]
        self.ends[left:right] = [max([end, *(stop for _, stop in spans)])]
        return end - first - known

    def near(self, first: int, end: int) -> "_Rows":
        """Those of the spans that touch the rows from `first` to `end`."""
        left, right = bisect_left(self.ends, first), bisect_right(self.begins, end)
        return _Rows(self.begins[left:right], self.ends[left:right])


class _OldShards:
    """The shards of a table under the old plan, sorted so that those that overlap a shard are found without looking at all.

    Where they are `copies`, a device takes its own, and a device without one that of one other device."""

    def __init__(self, shards: Sequence[Shard], *, copies: bool) -> None:
        self.copies = {shard.device: shard for shard in shards} if copies else {}
        self.in_columns: dict[tuple[int, int], list[Shard]] = defaultdict(list)
        self.rows: dict[int, _Rows] = defaultdict(_Rows)
        for one in sorted(shards, key=lambda shard: shard.row_offset):
            self.in_columns[one.column_offset, one.dim].append(one)
            self.rows[one.device].add(one.row_offset, one.row_offset + one.rows)
        self.columns = sorted(self.in_columns)
        self.widest = max((dim for _, dim in self.columns), default=0)

    def overlapping(self, shard: Shard) -> list[Shard]:
        """Those that have elements of it, by their columns and rows."""
        if self.copies:
            one = self.copies.get(shard.device) or self.copies[shard.device % len(self.copies)]
            return [one] if _area(shard, one) else []
        found = []
        left = bisect_left(self.columns, (shard.column_offset - self.widest + 1, 0))
        right = bisect_left(self.columns, (shard.column_offset + shard.dim, 0))
        for columns in self.columns[left:right]:
            stack = self.in_columns[columns]  # of a plan, so no two have rows in common
            first = max(bisect_right(stack, shard.row_offset, key=_first_row) - 1, 0)
            end = bisect_left(stack, shard.row_offset + shard.rows, key=_first_row)
            found += [one for one in stack[first:end] if _area(shard, one)]
        return sorted(found, key=lambda one: (one.column_offset, one.row_offset))


def _first_row(shard: Shard) -> int:
    return shard.row_offset


class _OldPart(NamedTuple):
    """A part of a table, of `rows` rows, and how many of them are `in_both`: it and that of a new shard."""

    in_both: float
    rows: int
    shards: Sequence[Shard]
    copied: bool

    def shards_for(self, device: int) -> Sequence[Shard]:
        """All shards; of copies the device's own or, where it has none, that of one other."""
        if not self.copied:
            return self.shards
        own = [one for one in self.shards if one.device == device]
        return own or [self.shards[device % len(self.shards)]]


class _OtherRows(NamedTuple):
    """What the old plan has of a new shard's part of a table, of `rows` rows, where it holds these in other places. The rows that
    two parts have in common are spread evenly over the shards of both."""

    rows: int
    old: tuple[_OldPart, ...]

    def in_common(self, shard: Shard) -> _OldShards:
        """The old shards as if what they have of the new one's rows lay in it part by part, in their order."""
        begin, found = float(shard.row_offset), list[Shard]()
        for part in self.old:
            share = part.in_both * shard.rows / self.rows / part.rows  # rows of the new shard for one of the part
            for one in part.shards_for(shard.device):
                first, end = (round(begin + share * at) for at in (one.row_offset, one.row_offset + one.rows))
                if first < end:
                    found.append(one.model_copy(update={"row_offset": first, "rows": end - first}))
            begin += share * part.rows
        return _OldShards(found, copies=False)


def _places(how: RowsByAccess | None, order: str | None, shards: Sequence[Shard]) -> object:
    """What decides in which rows of these shards, of a table held so or a part of one, ids are: None if their own row."""
    if how is None:
        return None
    blocks = frozenset((shard.row_offset, shard.rows) for shard in shards)
    return how, order, blocks if len(blocks) > 1 else None


def _order(table: Table) -> str | None:
    """What tells row orders apart, their lists: when they were made, and from what, does not."""
    return None if table.row_order is None else table.row_order.ids_digest


def _arriving(shard: Shard, table: Table, held: _OldShards | _OtherRows) -> Iterator[Move]:
    if isinstance(held, _OtherRows):
        held = held.in_common(shard)
    element_bytes = table.element_bytes + table.optimizer_bytes_per_element
    last = shard.row_offset + shard.rows
    with_state = held.rows[shard.device].near(shard.row_offset, last) if shard.device in held.rows else _Rows()
    there = held.overlapping(shard)
    missing = shard.rows * shard.dim - sum(_area(shard, one) for one in there)
    for one in there:
        if one.device == shard.device:
            continue
        first, end = _rows(shard, one) or (0, 0)
        left, right = _columns(shard, one)
        bare = with_state.add(first, end)
        yield Move(
            table=table.name,
            row_offset=first,
            rows=end - first,
            column_offset=left,
            dim=right - left,
            from_device=one.device,
            to_device=shard.device,
            nbytes=(end - first) * (right - left) * element_bytes + bare * table.optimizer_bytes_per_row,
        )
    if missing:
        bare = with_state.add(shard.row_offset, last)
        yield Move(
            table=table.name,
            row_offset=shard.row_offset,
            rows=shard.rows,
            column_offset=shard.column_offset,
            dim=shard.dim,
            from_device=None,
            to_device=shard.device,
            nbytes=missing * element_bytes + bare * table.optimizer_bytes_per_row,
        )


def _rows(one: Shard, other: Shard) -> tuple[int, int] | None:
    """First row, and the one after the last, that both have."""
    first = max(one.row_offset, other.row_offset)
    end = min(one.row_offset + one.rows, other.row_offset + other.rows)
    return (first, end) if first < end else None


def _columns(one: Shard, other: Shard) -> tuple[int, int]:
    end = min(one.column_offset + one.dim, other.column_offset + other.dim)
    return max(one.column_offset, other.column_offset), end


def _area(one: Shard, other: Shard) -> int:
    rows, (left, right) = _rows(one, other), _columns(one, other)
    return (rows[1] - rows[0]) * max(0, right - left) if rows else 0
