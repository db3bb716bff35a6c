"""Tables + kinds of hardware -> sizes.

neuroshard size tables.json --model analytic:h100 --model analytic:b200 --devices 4-128 --batch-size 65536
"""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuroshard.core.clean import silent
from neuroshard.core.errors import Infeasible
from neuroshard.core.table import Table
from neuroshard.core.text import counted, short_name
from neuroshard.core.units import format_bytes
from neuroshard.files.constraints import resolve
from neuroshard.orders.sizes import Kind, SizeOrder
from neuroshard.search.run import read_listed
from neuroshard.size.cells import Cell, Row, cells_of, name_of
from neuroshard.size.frontier import frontier, may_be_reversed, may_join_or_leave, memory_frontiers
from neuroshard.size.sweep import Sweep, kept_bytes, sweep


@dataclass(frozen=True)
class Sizes:
    """The rows of a sweep, in the order of kinds, devices and memory, and `notes` on what was left out or assumed."""

    tables: tuple[Table, ...]
    order: SizeOrder
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def what(self) -> str:
        """What is swept, as a title says it."""
        kept = format_bytes(kept_bytes(self.tables))
        scaling = (
            "the global batch is fixed" if self.order.batch_per_device is None else "the batch of a device is fixed"
        )
        return f"{counted(len(self.tables), 'table')}, {kept} of weights and optimizer state; {scaling}"

    @property
    def frontier(self) -> list[Row]:
        """The rows that no other beats in both time and money (or devices)."""
        return frontier(self.rows)

    @property
    def places_of_frontier(self) -> list[int]:
        """Where in `rows` those of the frontier are, in the order of the frontier."""
        places = {id(row): place for place, row in enumerate(self.rows)}
        return [places[id(row)] for row in self.frontier]

    @property
    def caveats(self) -> list[str]:
        """What is beyond what was measured: a line for each kind and thing, with the numbers of devices that it is of."""
        found = dict[tuple[Kind, str], list[int]]()
        for row in self.rows:
            for line in row.caveats:
                devices = found.setdefault((row.cell.kind, line), [])
                devices += [row.cell.devices] * (row.cell.devices not in devices)
        return [
            f"{short_name(kind.name)} x {', '.join(f'{count:,}' for count in devices)}: {line}"
            for (kind, line), devices in found.items()
        ]

    @property
    def fewest_devices(self) -> dict[tuple[str, int], int]:
        """For each kind and memory of a device: the number of devices below which nothing fits, as proven. By their bytes alone,
        and from there on by the sizes that were searched, one after another. None of it where hosts have memory for tables."""
        found = {}
        for row in self.rows:
            cell = row.cell
            key = (cell.kind.name, cell.memory_bytes)
            if cell.kind.host_memory_bytes is None and key not in found:
                found[key] = self._fewest(cell)
        return found

    def _fewest(self, cell: Cell) -> int:
        with silent(True):  # of constraints.json all was said before
            constraints = resolve(cell.search(self.order.search).constraints, self.tables, "constraints")
        usable = cell.memory_bytes - constraints.reserved(cell.memory_bytes)
        fewest = max(math.ceil(kept_bytes(self.tables) / usable), 1) if usable > 0 else 1
        proven = {
            row.cell.devices
            for row in self.rows
            if row.cell.kind == cell.kind
            and row.cell.memory_bytes == cell.memory_bytes
            and row.state == "proven not to fit"
        }
        while fewest in proven:
            fewest += 1
        return fewest

    @property
    def data(self) -> dict[str, Any]:
        """All of it as JSON has it. Places are of `rows`."""
        best, uncertain = self.places_of_frontier, may_join_or_leave(self.rows)
        reversed_with = may_be_reversed(self.rows)
        places = {id(row): place for place, row in enumerate(self.rows)}
        rows = [
            {
                **row.data,
                "frontier": place in best,
                "frontier_is_uncertain": place in uncertain,
                "may_be_reversed_with": reversed_with.get(place, []),
            }
            for place, row in enumerate(self.rows)
        ]
        curves = [
            [{"row": places[id(point.row)], "ms_a_gib": point.ms_a_gib} for point in points]
            for points in memory_frontiers(self.rows)
        ]
        fewest = [
            {"model": name, "memory_bytes": memory, "devices": devices}
            for (name, memory), devices in self.fewest_devices.items()
        ]
        return {
            "format_version": 1,
            "scaling": "strong" if self.order.batch_per_device is None else "weak",
            "batch_per_device": self.order.batch_per_device,
            "currency": self.order.currency,
            "dense_time": self.order.has_dense_time,
            "rows": rows,
            "frontier": best,
            "memory_frontiers": curves,
            "fewest_devices": fewest,
            "notes": list(self.notes),
        }


def run(
    tables: Path | Sequence[Table],
    order: SizeOrder,
    *,
    stop: threading.Event | None = None,
    processes: int = 1,
) -> Sizes:
    """Search all sizes of an order. Once `stop` is set, or the time budget is spent, the sizes that were found are returned.

    Raises UsageError and InvalidInput for a bad order, and Infeasible where no size fits.
    """
    ends = None if order.time_budget_s is None else time.time() + order.time_budget_s
    listed, notes = read_listed(tables) if isinstance(tables, Path) else (tuple(tables), ())
    cells, left_out = cells_of(order)
    cells[0].search(order.search)  # checks the options, and says what constraints.json does, once
    rows = sweep(cells, Sweep(listed, notes, dict(order.search), ends), stop, processes)
    if not any(row.fits or row.state == "not tried" for row in rows):
        raise Infeasible(_nearest(rows), proven=all(row.state == "proven not to fit" for row in rows))
    untried = sum(row.state == "not tried" for row in rows)
    cut_short = (
        [f"{counted(untried, 'size')} not searched: the time was up, or the sweep was stopped"] if untried else []
    )
    return Sizes(listed, order, tuple(rows), (*left_out, *cut_short, *_assumed(order)))


def _nearest(rows: Sequence[Row]) -> str:
    """The size that lacks least, and what it lacks."""
    row = max(
        (row for row in rows if row.state != "not priced"), key=lambda row: row.cell.devices * row.cell.memory_bytes
    )
    size = f"{name_of(row)} of {format_bytes(row.cell.memory_bytes)}"
    return f"no size of any kind fits; the one with most memory in all is {size}: {row.why}"


def _assumed(order: SizeOrder) -> list[str]:
    said = []
    if not order.has_dense_time:
        money = ", and money," if order.priced else ""
        said.append(
            f"times{money} are of embeddings alone: a smaller size looks too good (--dense-time adds the rest of a step)"
        )
    elif any(kind.dense and kind.dense.samples for kind in order.kinds):
        said.append("the dense time is taken to be in proportion to the samples of a device")
    elif order.batch_per_device is None and len(order.devices) > 1:
        said.append(
            "the dense time is as given at every size, though devices have fewer samples where they are more: say of how many it "
            "is (--dense-time 12ms@8192)"
        )
    if any(kind.name.startswith("analytic:") for kind in order.kinds):
        said.append("sizes of analytic: kinds are by datasheets, not measured")
    return said
