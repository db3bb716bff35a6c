"""Re-planning: what the devices hold already, and how many bytes would have to move for other widths.

Columns of a table are dealt out anew so that most of them stay: the shards of a table, one on each device, are laid out in the
order that keeps the most columns where they are. Bytes are counted from that layout, so a budget is kept exactly.

A device may hold several pieces of a table that do not adjoin (TorchRec's planner deals columns out in turns). The search sees
them as one shard; joining them moves columns, so within a budget such a table stays in its pieces unless its widths change.

A table that lies row-wise over all devices stays so where it may be; one that may not, or lies in other rectangles, is dealt out
anew, and what of it a device holds already need not arrive there.
"""

import copy
from collections.abc import Sequence

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import arriving_bytes
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.protocol import Ints
from neuroshard.search.problem.changes import compare
from neuroshard.search.problem.problem import Placement, Problem, Widths
from neuroshard.search.problem.row_blocks import row_shards

ORDERED = 8  # shards of a table whose every order is tried; of more, the order in which they lay is kept


class Held:
    """The columns of each table that each device holds under the old plan. Items `row_wise` lay so there, and may again."""

    def __init__(self, problem: Problem, old: Plan, budget_bytes: int | None) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.spans: dict[str, dict[int, list[tuple[int, int]]]] = {}
        self.rows: dict[str, int] = {}
        self.before = {name: shards for name, shards in old.by_table().items() if len(shards) > 0}
        self.in_rows: set[str] = set()  # tables whose shards do not all have all rows
        dims = {table.name: table.dim for table in problem.task.tables}
        before = {table.name: table for table in old.task.tables}
        for shard in old.shards:
            if dims.get(shard.table) != before[shard.table].dim:
                continue  # another table by now: made anew
            self.rows[shard.table] = before[shard.table].rows
            if shard.rows != before[shard.table].rows:
                self.in_rows.add(shard.table)
            elif shard.device < problem.devices:
                spans = self.spans.setdefault(shard.table, {}).setdefault(shard.device, [])
                spans.append((shard.column_offset, shard.column_offset + shard.dim))
        splittable = problem.row_blocks.items.tolist()
        there = [item for item in splittable if self._lies_row_wise(before.get(problem.members[item][0].name))]
        self.row_wise: Ints = np.array(there, dtype=np.int64)
        self.arriving_rows = 0  # bytes that must move for the blocks of rows of a plan
        self.notes = (*compare(problem.task, old), *self._anew())
        self._arriving: dict[tuple[int, bytes], int] = {}
        self._arriving_blocks: dict[int, int] = {}
        self._pieces: dict[tuple[int, bytes], list[tuple[int, int, int]]] = {}
        if budget_bytes is not None:
            self._keep_pieces()

    def _lies_row_wise(self, table: Table | None) -> bool:
        """Whether the old plan has a table of its task row-wise over as many devices as there are now."""
        if table is None or table.name not in self.in_rows:
            return False
        lay = sorted((shard.row_offset, shard.device) for shard in self.before[table.name])
        blocks = enumerate(table.row_blocks(self.problem.devices))
        return lay == [(first, device) for device, (first, _) in blocks]

    def _anew(self) -> list[str]:
        """Of tables in shards of some rows that cannot stay as they are, a line."""
        names = self._not_kept()
        if not names:
            return []
        return [
            f"{counted(len(names), 'table')} split row-wise in the plan to start from, and placed anew ({first_few(names)})"
        ]

    def _not_kept(self) -> list[str]:
        kept = {self.problem.members[item][0].name for item in self.row_wise.tolist()}
        return [name for name in self.before if name in self.in_rows - kept]

    def with_rows(self, problem: Problem) -> "Held":
        """The same for the problem with some items row-wise."""
        new = copy.copy(self)
        new.problem = problem
        new.arriving_rows = sum(map(self._rows_of_item, problem.row_wise.tolist()))
        return new

    def _rows_of_item(self, item: int) -> int:
        """Bytes that must move for the blocks of an item."""
        if item not in self._arriving_blocks:
            table = self.problem.members[item][0]
            blocks = row_shards(table, self.problem.devices)
            before = self.before.get(table.name, ()) if table.name in self.rows else ()
            self._arriving_blocks[item] = arriving_bytes(table, before, blocks)
        return self._arriving_blocks[item]

    def _keep_pieces(self) -> None:
        """Note the items that lie in pieces, by their widths, and set aside the memory that a piece more of a row needs."""
        problem, rules = self.problem, self.problem.task.constraints.rules()
        for item, row in enumerate(self.widths()):
            table = problem.members[item][0]
            pieces = [(d, *span) for d, held in self.spans.get(table.name, {}).items() for span in _joined(held)]
            more = np.bincount([d for d, _, _ in pieces], minlength=problem.devices) - 1
            unit = self._unit(item)
            narrowest = min((end - begin for _, begin, end in pieces), default=0)
            rule = problem.task.constraints.allowed(rules.get(table.name), table.dim)[1]
            allowed = len(pieces) <= (rule or len(pieces)) and narrowest >= problem.least[item] * unit
            if row.any() and len(problem.members[item]) == 1 and (more > 0).any() and allowed:
                self._pieces[item, row.tobytes()] = sorted(pieces, key=lambda piece: piece[1])
                problem.memory = problem.memory - more.clip(0) * table.rows * table.optimizer_bytes_per_row

    def as_it_lies(self, placement: Placement) -> Placement:
        """The same placement with what stays in pieces as several shards."""
        problem = self.problem
        widths = problem.widths(placement)
        in_pieces = {
            item: self._pieces[key] for item, row in enumerate(widths) if (key := (item, row.tobytes())) in self._pieces
        }
        rest = ~np.isin(problem.item[placement.shards], list(in_pieces))
        shards, devices = placement.shards[rest].tolist(), placement.devices[rest].tolist()
        for item, pieces in in_pieces.items():
            unit = self._unit(item)
            shards += [int(problem.first[item]) + (end - begin) // unit for _, begin, end in pieces]
            devices += [device for device, _, _ in pieces]
        return Placement(np.array(shards, dtype=np.int64), np.array(devices, dtype=np.int64), placement.row_wise)

    def widths(self) -> Widths:
        """The old plan's units of every item that it has whole on devices that are there still; of the others none."""
        problem = self.problem
        widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
        for item, members in enumerate(problem.members):
            spans = self.spans.get(members[0].name, {})
            unit = self._unit(item)
            for device, held in spans.items():
                if len(members) == 1:
                    widths[item, device] = sum(end - begin for begin, end in held) // unit
                elif all(_whole(table, self.spans.get(table.name, {}).get(device, [])) for table in members):
                    widths[item, device] = 1
            wrong = widths[item].sum() != problem.widest[item] or (widths[item] > 0)[~problem.allowed[item]].any()
            used = widths[item][widths[item] > 0]
            if wrong or len(used) > problem.most[item] or (used < problem.least[item]).any():
                widths[item] = 0
        return widths

    def _unit(self, item: int) -> int:
        """Columns of an item's unit."""
        return int(self.problem.dims[self.problem.first[item] + 1])

    def arriving(self, item: int, widths: Widths) -> int:
        """Bytes that devices must get for these units (D,) of an item, of tables that the old plan has."""
        key = (item, widths.tobytes())
        if key in self._pieces:
            return 0
        if key not in self._arriving:
            self._arriving[key] = sum(self._of_table(table, item, widths) for table in self.problem.members[item])
        return self._arriving[key]

    def total(self, widths: Widths) -> int:
        """Bytes that must move for a whole plan (I, D)."""
        return self.arriving_rows + sum(self.arriving(item, row) for item, row in enumerate(widths))

    def affords(self, before: Widths, items: Sequence[int], after: Widths, spent: int) -> bool:
        """Whether the rows `after` (n, D) of these items in place of those of `before` (I, D) keep within the budget."""
        if self.budget_bytes is None:
            return True
        more = sum(self.arriving(i, row) - self.arriving(i, before[i]) for i, row in zip(items, after, strict=True))
        return more <= 0 or spent + more <= self.budget_bytes

    def check(self, nbytes: int) -> None:
        """Raise Infeasible where the least that was found to move is more than the budget."""
        if self.budget_bytes is not None and nbytes > self.budget_bytes:
            raise Infeasible(
                "today's tables and constraints do not fit where they lie, and the least found to move is "
                f"{format_bytes(nbytes, 'up')}, more than the budget of {format_bytes(self.budget_bytes)}; give a larger "
                f"--move-budget{', or let tables that lie by rows stay so (--row-wise)' * bool(self._not_kept())}"
            )

    def lay_out(self, item: int, widths: Widths) -> list[Shard]:
        """Shards of an item's tables, as many columns as can be where they lie."""
        if pieces := self._pieces.get((item, widths.tobytes())):
            table = self.problem.members[item][0]
            return [
                Shard(table=table.name, rows=table.rows, column_offset=begin, dim=end - begin, device=device)
                for device, begin, end in pieces
            ]
        return [shard for table in self.problem.members[item] for shard in self._dealt(table, item, widths)]

    def _dealt(self, table: Table, item: int, widths: Widths) -> list[Shard]:
        """The columns of a table, in the order of the devices that keeps most of them."""
        shards, offset = [], 0
        for device in self._order(table, item, widths)[0]:
            dim = self._dim(table, item, int(widths[device]))
            shards.append(Shard(table=table.name, rows=table.rows, column_offset=offset, dim=dim, device=device))
            offset += dim
        return shards

    def _dim(self, table: Table, item: int, units: int) -> int:
        return (
            table.dim
            if len(self.problem.members[item]) > 1
            else int(self.problem.dims[self.problem.first[item] + units])
        )

    def _of_table(self, table: Table, item: int, widths: Widths) -> int:
        if table.name not in self.rows:
            return 0
        if table.name in self.in_rows:
            return arriving_bytes(table, self.before[table.name], self._dealt(table, item, widths))
        devices, kept = self._order(table, item, widths)
        moved = sum(self._dim(table, item, int(widths[device])) for device in devices) - kept
        strange = sum(device not in self.spans.get(table.name, {}) for device in devices)
        rows = min(table.rows, self.rows[table.name])
        element = table.element_bytes + table.optimizer_bytes_per_element
        return rows * (moved * element + strange * table.optimizer_bytes_per_row)

    def _order(self, table: Table, item: int, widths: Widths) -> tuple[list[int], int]:
        """The order of the devices along the columns that keeps the most columns where they are, and how many those are."""
        spans = self.spans.get(table.name, {})
        devices = np.flatnonzero(widths).tolist()
        dims = {device: self._dim(table, item, int(widths[device])) for device in devices}

        def kept(device: int, offset: int) -> int:
            end = offset + dims[device]
            return sum(max(0, min(end, stop) - max(offset, begin)) for begin, stop in spans.get(device, []))

        if len(devices) > ORDERED:
            devices.sort(key=lambda device: min((begin for begin, _ in spans.get(device, [])), default=table.dim))
            offsets = np.cumsum([0, *(dims[device] for device in devices)]).tolist()
            return devices, sum(kept(device, offset) for device, offset in zip(devices, offsets, strict=False))
        # best order of every subset of the devices, which fill the columns from the left
        best: dict[int, tuple[int, list[int], int]] = {0: (0, [], 0)}
        for subset in range(1, 1 << len(devices)):
            options = []
            for place, device in enumerate(devices):
                if subset >> place & 1:
                    stays, order, offset = best[subset & ~(1 << place)]
                    options.append((stays + kept(device, offset), [*order, device], offset + dims[device]))
            best[subset] = max(options, key=lambda option: option[0])
        stays, order, _ = best[(1 << len(devices)) - 1]
        return order, stays


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same columns in as few spans as can be."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _whole(table: Table, spans: list[tuple[int, int]]) -> bool:
    return sum(end - begin for begin, end in spans) == table.dim
