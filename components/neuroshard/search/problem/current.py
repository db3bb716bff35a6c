"""Re-planning: what the devices hold under the current plan, and how many bytes must move for another one.

A plan says how many columns of a table each device holds. Which columns these are is chosen so that most stay where they are:
by the order in which the shards are laid out. Bytes are counted from that layout, so a move budget is kept exactly.

A device may hold several spans of a table's columns that are not adjacent (TorchRec's planner deals columns out in turns). The
search counts them as one shard. Joining them moves columns, so within a budget such a table keeps its spans unless its widths
change.

A table that is spread over devices stays so if that is still permitted. A table whose rows are split otherwise is placed anew;
what a device already holds of it need not move there.
"""

import copy
from collections.abc import Sequence

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import arriving_bytes
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.protocol import Ints
from neuroshard.search.problem.changes import compare
from neuroshard.search.problem.column_shards import Widths
from neuroshard.search.problem.kinds import blocks_over_all, copies_of
from neuroshard.search.problem.previous import Elsewhere
from neuroshard.search.problem.problem import Problem

ORDERED = 8  # shards of a table of which every order is tried: 2^8 subsets; of more, their order is kept

Spans = list[tuple[int, int]]  # columns, from and to


class CurrentPlacement:
    """The spans of columns of each table that each device holds under the current plan, and the move budget, if there is one.

    Groups `spread` (P,) are at these `places` now, and may stay so. `reserved_bytes` (D,) are what tables in several spans on a
    device take more than as one shard. `notes` say what changed in the task since. Raises Infeasible where the copies of the
    task's data-parallel tables take more than the budget to move. Of tables `elsewhere` bytes are counted by the rows that the
    devices really have.
    """

    def __init__(
        self, problem: Problem, plan: Plan, budget_bytes: int | None, elsewhere: Elsewhere | None = None
    ) -> None:
        self.problem, self.budget_bytes, self._elsewhere = problem, budget_bytes, elsewhere
        self.shards = {name: shards for name, shards in plan.by_table().items() if len(shards) > 0}
        self.copied = plan.parted.constraints.data_parallel  # every device has a copy: taken apart, nothing moves
        self.spans: dict[str, dict[int, Spans]] = {}  # by table and device
        self.rows: dict[str, int] = {}
        self.not_whole: set[str] = set()  # tables of which some shard does not have all rows
        dims = {table.name: table.dim for table in problem.task.tables}
        before = {table.name: table for table in plan.parted.tables}
        for shard in plan.shards:
            if dims.get(shard.table) != before[shard.table].dim:
                continue  # another table by now: made anew
            self.rows[shard.table] = before[shard.table].rows
            if shard.rows != before[shard.table].rows:
                self.not_whole.add(shard.table)
            elif shard.device < problem.devices:
                spans = self.spans.setdefault(shard.table, {}).setdefault(shard.device, [])
                spans.append((shard.column_offset, shard.column_offset + shard.dim))
        permitted = problem.options.groups.tolist()
        found = {group: self._place_of(group, before.get(problem.tables[group][0].name)) for group in permitted}
        stay = {group: place for group, place in found.items() if place is not None}
        self.spread: Ints = np.array(list(stay), dtype=np.int64)
        self.places: Ints = np.array(list(stay.values()), dtype=np.int64)
        self.notes = (*compare(problem.task, plan), *self._dealt_anew())
        self._arriving: dict[tuple[int, bytes], int] = {}
        self._arriving_pieces: dict[tuple[int, int], int] = {}  # by group and place
        self._in_spans: dict[tuple[int, bytes], list[tuple[int, int, int]]] = {}
        self.reserved_bytes = np.zeros(problem.devices, dtype=np.int64)
        self._copies_bytes = self._arriving_copies()
        if budget_bytes is not None:
            self._check_copies(budget_bytes)
            self._keep_spans()

    def _place_of(self, group: int, table: Table | None) -> int | None:
        """Where the current plan has a table of its task spread, as a search may spread it now; None if it has not."""
        if table is None or table.name not in self.not_whole | self.copied:
            return None
        held = sorted(self.shards[table.name], key=lambda shard: (shard.column_offset, shard.row_offset, shard.device))
        options = self.problem.options
        allowed = options.allowed[options.positions(np.array([group]))[0], options.way_of]
        places = np.flatnonzero(allowed).tolist()
        had_rows = (place for place in places if table.has_rows_for(options.kinds[options.way_of[place]].blocks))
        return next((place for place in had_rows if held == options.shards(table, place)), None)

    def _arriving_copies(self) -> int:
        """Bytes that devices must receive for the tables that the task has data-parallel, and for those with id maps."""
        copied = self.problem.copied
        new = {t.name: copies_of([t], self.problem.devices) for t in copied}
        arriving = sum(self._arriving_shards(t, self._before(t), new[t.name], copied=True) for t in copied)
        mapped = ((t, blocks_over_all([t], self.problem.devices)) for t in self.problem.mapped)
        return arriving + sum(self._arriving_shards(t, self._before(t), shards) for t, shards in mapped)

    def _check_copies(self, budget_bytes: int) -> None:
        if self._copies_bytes > budget_bytes:
            raise Infeasible(
                f"new copies of data-parallel tables, and blocks of tables with id maps, take "
                f"{format_bytes(self._copies_bytes, 'up')} to move, more than the budget of "
                f"{format_bytes(budget_bytes)}; give a larger --move-budget, or let fewer be data-parallel"
            )

    def _dealt_anew(self) -> list[str]:
        """A line about tables in shards of some rows that cannot stay as they are."""
        names = self._not_kept()
        if not names:
            return []
        return [
            f"{counted(len(names), 'table')} split row-wise in the plan to start from, and placed anew ({first_few(names)})"
        ]

    def _not_kept(self) -> list[str]:
        kept = {self.problem.tables[group][0].name for group in self.spread.tolist()}
        kept |= {table.name for table in (*self.problem.copied, *self.problem.mapped)}
        return [name for name in self.shards if name in self.not_whole - kept]

    def _keep_spans(self) -> None:
        """Note the groups that are in several spans on a device, by their widths, and reserve what one more shard takes."""
        problem, rules = self.problem, self.problem.task.constraints.rules()
        for group, row in enumerate(self.widths()):
            table, unit = problem.tables[group][0], self._unit(group)
            spans = [(d, *span) for d, held in self.spans.get(table.name, {}).items() for span in _joined(held)]
            more = np.bincount([d for d, _, _ in spans], minlength=problem.devices) - 1
            narrowest = min((end - begin for _, begin, end in spans), default=0)
            most = problem.task.constraints.allowed(rules.get(table.name), table.dim)[1]
            allowed = len(spans) <= (most or len(spans)) and narrowest >= problem.min_units[group] * unit
            allowed &= self._held(group, [(begin, end) for _, begin, end in spans])
            allowed &= not self._is_elsewhere(table)
            if row.any() and len(problem.tables[group]) == 1 and (more > 0).any() and allowed:
                self._in_spans[group, row.tobytes()] = sorted(spans, key=lambda span: span[1])
                of_shard = problem.task.memory(Part(table, table.rows, 0)).total  # however wide it is
                self.reserved_bytes += more.clip(0) * of_shard

    def widths(self) -> Widths:
        """Units of every group that the current plan has whole on devices that are still there; of the others none. (G, D)"""
        problem = self.problem
        widths = np.zeros((len(problem.whole), problem.devices), dtype=np.int64)
        for group, tables in enumerate(problem.tables):
            unit = self._unit(group)
            for device, held in self.spans.get(tables[0].name, {}).items():
                if len(tables) == 1:
                    widths[group, device] = sum(end - begin for begin, end in held) // unit
                elif all(_is_whole(table, self.spans.get(table.name, {}).get(device, [])) for table in tables):
                    widths[group, device] = 1
            used = widths[group][widths[group] > 0]
            bad = widths[group].sum() != problem.all_units[group] or (widths[group] > 0)[~problem.allowed[group]].any()
            held = (used <= problem.operator_units[group]).all()
            if bad or len(used) > problem.max_shards[group] or (used < problem.min_units[group]).any() or not held:
                widths[group] = 0
        return widths

    def _held(self, group: int, spans: Spans) -> bool:
        """Whether the operator holds these spans of a group's columns, in equal shards where it must be so."""
        unit, most = self._unit(group), int(self.problem.operator_units[group])
        return all((end - begin) % unit == 0 and (end - begin) // unit <= most for begin, end in spans)

    def _unit(self, group: int) -> int:
        """Columns of a group's unit."""
        return int(self.problem.columns[self.problem.first[group] + 1])

    def moving_bytes(self, problem: Problem, widths: Widths) -> int:
        """Bytes that must move for a plan (G, D) of a problem that has the same tables, some spread."""
        pieces = sum(map(self._arriving_in_pieces, problem.spread.tolist(), problem.places.tolist()))
        return self._copies_bytes + pieces + sum(self._arriving_in(group, row) for group, row in enumerate(widths))

    def within_budget(self, problem: Problem, widths: Widths) -> bool:
        """Whether such a plan keeps the move budget, if there is one."""
        return self.budget_bytes is None or self.moving_bytes(problem, widths) <= self.budget_bytes

    def limited(self, budget_bytes: int) -> "CurrentPlacement":
        """The same placement with another move budget. Spans may be joined as before."""
        other = copy.copy(self)
        other.budget_bytes = budget_bytes
        return other

    def affords(self, problem: Problem, widths: Widths, groups: Sequence[int], changed: Widths) -> bool:
        """Whether a plan (G, D) of which some groups get other widths (N, D) keeps the budget, or moves no more than before."""
        if self.budget_bytes is None:
            return True
        pairs = zip(groups, changed, strict=True)
        more = sum(self._arriving_in(group, row) - self._arriving_in(group, widths[group]) for group, row in pairs)
        return more <= 0 or self.moving_bytes(problem, widths) + more <= self.budget_bytes

    def check(self, nbytes: int) -> None:
        """Raise Infeasible if the least that was found to move is more than the budget."""
        if self.budget_bytes is not None and nbytes > self.budget_bytes:
            raise Infeasible(
                "by today's tables and constraints the current plan cannot stay as it is, and the least found to move is "
                f"{format_bytes(nbytes, 'up')}, more than the budget of {format_bytes(self.budget_bytes)}; give a larger "
                f"--move-budget{', or let tables that lie row-wise stay so (--row-wise)' * bool(self._not_kept())}"
            )

    def lay_out(self, group: int, widths: Widths) -> list[Shard]:
        """Shards of a group's tables for these units (D,), with as many columns where they are as can be."""
        if spans := self._in_spans.get((group, widths.tobytes())):
            table = self.problem.tables[group][0]
            return [shard for span in spans for shard in self.problem.shards_on(group, table, *span)]
        return [shard for table in self.problem.tables[group] for shard in self._laid_out(table, group, widths)]

    def _laid_out(self, table: Table, group: int, widths: Widths) -> list[Shard]:
        """The columns of a table, in the order of the devices that keeps most of them."""
        return self.problem.dealt(group, table, widths, self._order(table, group, widths)[0])

    def _arriving_in(self, group: int, widths: Widths) -> int:
        """Bytes that devices must receive for these units (D,) of a group, of tables that the current plan has."""
        key = (group, widths.tobytes())
        if key in self._in_spans:
            return 0
        if key not in self._arriving:
            self._arriving[key] = sum(self._arriving_of(table, group, widths) for table in self.problem.tables[group])
        return self._arriving[key]

    def _arriving_in_pieces(self, group: int, place: int) -> int:
        """Bytes that devices must receive for the pieces of a group at a place."""
        if (group, place) not in self._arriving_pieces:
            table, options = self.problem.tables[group][0], self.problem.options
            copied = options.kinds[options.way_of[place]].sharding.copied
            pieces = options.shards(table, place)
            found = self._arriving_shards(table, self._before(table), pieces, copied=copied)
            self._arriving_pieces[group, place] = found
        return self._arriving_pieces[group, place]

    def _before(self, table: Table) -> Sequence[Shard]:
        """The shards of a table in the current plan, none where it is another by now."""
        return self.shards.get(table.name, ()) if table.name in self.rows else ()

    def _arriving_shards(
        self, table: Table, before: Sequence[Shard], after: Sequence[Shard], *, copied: bool = False
    ) -> int:
        if self._elsewhere is not None and self._elsewhere.has(table.name):
            return self._elsewhere.arriving_bytes(after, copied=copied)
        return arriving_bytes(table, before, after, copied_before=table.name in self.copied, copied_after=copied)

    def _is_elsewhere(self, table: Table) -> bool:
        return self._elsewhere is not None and self._elsewhere.has(table.name)

    def _arriving_of(self, table: Table, group: int, widths: Widths) -> int:
        if table.name not in self.rows:
            return 0
        if table.name in self.not_whole | self.copied or self._is_elsewhere(table):
            return self._arriving_shards(table, self.shards[table.name], self._laid_out(table, group, widths))
        devices, kept = self._order(table, group, widths)
        moved = sum(self.problem.dim_of(group, table, int(widths[device])) for device in devices) - kept
        new = sum(device not in self.spans.get(table.name, {}) for device in devices)
        rows = min(table.rows, self.rows[table.name])
        element = table.element_bytes + table.optimizer_bytes_per_element
        return rows * (moved * element + new * table.optimizer_bytes_per_row)

    def _order(self, table: Table, group: int, widths: Widths) -> tuple[list[int], int]:
        """The order of the devices along the columns that keeps the most columns where they are, and how many those are."""
        spans = self.spans.get(table.name, {})
        devices = np.flatnonzero(widths).tolist()
        dims = {device: self.problem.dim_of(group, table, int(widths[device])) for device in devices}

        def kept(device: int, offset: int) -> int:
            end = offset + dims[device]
            return sum(max(0, min(end, stop) - max(offset, begin)) for begin, stop in spans.get(device, []))

        if len(devices) > ORDERED:
            devices.sort(key=lambda device: min((begin for begin, _ in spans.get(device, [])), default=table.dim))
            offsets = np.cumsum([0, *(dims[device] for device in devices)]).tolist()
            return devices, sum(kept(device, offset) for device, offset in zip(devices, offsets, strict=False))
        # the best order of every subset of the devices, which fills the columns from the left
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


def _joined(spans: Spans) -> Spans:
    """The same columns in as few spans as can be."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _is_whole(table: Table, spans: Spans) -> bool:
    return sum(end - begin for begin, end in spans) == table.dim
