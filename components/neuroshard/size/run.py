"""Tables + kinds of hardware -> sizes: a plan and a bound for each cell, or why there is none.

    neuroshard size tables.json --model analytic:h100 --model analytic:b200 --devices 4-128 --batch-size 65536

Cells of one kind and number of devices are searched together, the most memory first: a plan that needs no more than a smaller
memory is the plan of that one, too, and a plan of less memory that is cheaper is the plan of more. So more memory never shows as
slower. Nothing of the sort holds for more devices: row blocks round up, and all-to-alls cross hosts.

No search starts from the plan of another kind for as many devices: with half of the rounds that took 0.66 of the time, but some
plans cost 1 % more (with a quarter of the rounds 0.42 and 7 %), of 26 MLPerf tables and of 25 of a production model.

A cell whose memory in all is less than the tables' weights and optimizer state is not searched: any plan keeps each of them once.
"""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import numpy as np

from neuroshard.core.clean import silent
from neuroshard.core.errors import Infeasible, InvalidInput, NeuroshardError
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import agreeing, counted, short_name
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.network import for_task
from neuroshard.files.constraints import resolve
from neuroshard.models.open import open_cost_model
from neuroshard.orders.sizes import Kind, SizeOrder
from neuroshard.progress import progress
from neuroshard.search.notes import beyond_measured, with_notes
from neuroshard.search.run import read_listed, search, search_in_groups, settings_of, task_of, trust_in
from neuroshard.search.tuning import TUNING
from neuroshard.search.watch import Watch
from neuroshard.size.rows import (
    Cell,
    Row,
    cells_of,
    frontier,
    may_be_reversed,
    may_join_or_leave,
    memory_frontiers,
    name_of,
)

TIME_UP = "the time budget of the sweep cut the search short: more of it might have found a better plan"
NOT_TRIED = "the time was up, or the sweep was stopped, before this size was searched"
WORTH_STARTING_S = 10.0  # time budget below which processes are not worth starting, some 2 s each: a guess
POLL_S = 0.2  # how often a sweep looks whether it shall stop


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
        return _with_sizes([(row, row.caveats) for row in self.rows])

    @property
    def plan_notes(self) -> list[str]:
        """What the searches of the sizes on the frontier note of their plans, likewise."""
        return _with_sizes([(row, [n for n in row.plan_notes if n not in row.caveats]) for row in self.frontier])

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


def _with_sizes(said: Sequence[tuple[Row, Sequence[str]]]) -> list[str]:
    """A line for each kind and line said of its rows, with the numbers of devices that it is of."""
    found = dict[tuple[Kind, str], list[int]]()
    for row, lines in said:
        for line in lines:
            devices = found.setdefault((row.cell.kind, line), [])
            devices += [row.cell.devices] * (row.cell.devices not in devices)
    return [
        f"{short_name(kind.name)} x {', '.join(f'{count:,}' for count in devices)}: {line}"
        for (kind, line), devices in found.items()
    ]


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


@dataclass(frozen=True)
class Sweep:
    """What all cells have in common: tables, notes on them, options of the search, and when all ends, by time.time() (None: after
    the last cell)."""

    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    options: dict[str, Any]
    ends: float | None

    @property
    def left_s(self) -> float:
        return float("inf") if self.ends is None else self.ends - time.time()


def sweep(cells: Sequence[Cell], what: Sweep, stop: threading.Event | None, processes: int = 1) -> list[Row]:
    """A row for each cell, in the order of the cells. Once `stop` is set, or the time is up, what is left is not tried.

    Raises InvalidInput where no cell can be priced, and UsageError for options that contradict each other.
    """
    groups = _in_order([list(group) for _, group in groupby(cells, key=lambda cell: (cell.kind, cell.devices))])
    found = dict[Cell, Row]()
    alone = processes == 1 or what.left_s < WORTH_STARTING_S
    left = None if what.ends is None else max(what.left_s, 0.0)
    with progress("size", total=len(cells), unit="sizes", ends_in_seconds=left) as bar:
        for rows in (_here if alone else _in_processes)(groups, what, stop, 1 if alone else processes):
            found |= {row.cell: row for row in rows}
            best = min((row for row in found.values() if row.fits), key=lambda row: row.sample_ms, default=None)
            bar.advance(len(rows), "" if best is None else f"best {name_of(best)}: {best.step_ms:.3f} ms")
    rows = [found[cell] for cell in cells]
    if all(row.state == "not priced" for row in rows):
        raise InvalidInput(rows[0].why)
    return rows


def _in_order(groups: list[list[Cell]]) -> list[list[Cell]]:
    """In the order of what they tell, for a sweep that is cut short: of each kind the largest number of devices, then the
    smallest, then the one in the middle of the widest gap between those before, by their order."""
    sizes = sorted({group[0].devices for group in groups})
    away = np.full(len(sizes), len(sizes))  # of each size: places to the nearest one before, 0 for these
    place, ranks = len(sizes) - 1, dict[int, int]()
    while len(ranks) < len(sizes):
        ranks[sizes[place]] = len(ranks)
        away = np.minimum(away, np.abs(np.arange(len(sizes)) - place))
        place = int(away.argmax())
    return sorted(groups, key=lambda group: ranks[group[0].devices])


def _here(
    groups: Sequence[Sequence[Cell]], what: Sweep, stop: threading.Event | None, processes: int
) -> Iterator[list[Row]]:
    for done, group in enumerate(groups):
        yield _rows(group, what, stop, _share(what, len(groups) - done, processes))


def _share(what: Sweep, left: int, processes: int) -> float | None:
    """Seconds of the next group of cells: all have the same, and what one leaves goes to the others."""
    return None if what.ends is None else max(what.left_s, 0.0) * processes / max(left, processes)


_stop: Any = None  # of a worker process: the event of the process that started it


def _begin(stop: Any) -> None:
    """A worker leaves signals to the process that started it, which asks it to stop; and ends where that one was killed."""
    global _stop  # events travel to a process when it starts, not later
    _stop = stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)  # nobody takes the rows; the main thread may be in the middle of a search


def _in_worker(group: Sequence[Cell], what: Sweep, seconds: float | None) -> list[Row]:
    with silent(True):
        return _rows(group, what, _stop, seconds)


def _in_processes(
    groups: Sequence[Sequence[Cell]], what: Sweep, stop: threading.Event | None, processes: int
) -> Iterator[list[Row]]:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    asked, waiting = context.Event(), list(groups)
    with ProcessPoolExecutor(min(processes, len(groups)), context, _begin, (asked,)) as pool:
        running = set[Future[list[Row]]]()
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    seconds = _share(what, len(waiting) + len(running), processes)
                    running.add(pool.submit(_in_worker, waiting.pop(0), what, seconds))
                ended, running = wait(running, POLL_S, FIRST_COMPLETED)
                if stop is not None and stop.is_set():
                    asked.set()
                for one in ended:
                    yield one.result()
        except BrokenProcessPool:
            raise NeuroshardError(
                "a process of the sweep was ended from outside, as for want of memory; search with --processes 1"
            ) from None
        finally:
            asked.set()


def _rows(cells: Sequence[Cell], what: Sweep, stop: threading.Event | None, seconds: float | None) -> list[Row]:
    """Of the cells of one kind and number of devices."""
    proven: Row | None = None  # with the most memory
    rows, ends = dict[Cell, Row](), None if seconds is None else time.monotonic() + seconds
    for cell in sorted(cells, key=lambda cell: -cell.memory_bytes):
        more = next(reversed(rows.values()), None)
        if more is not None and more.state == "proven not to fit":
            proven = proven or more
            why = f"not even with {format_bytes(proven.cell.memory_bytes)}: {proven.why}"
            rows[cell] = replace(proven, cell=cell, why=why)
        elif more is not None and more.fits and more.memory_used_bytes <= _usable(more, cell):
            rows[cell] = _with(more, cell, more.bound_ms)  # no plan of less memory is cheaper
        elif (stop is not None and stop.is_set()) or what.left_s <= 0:
            rows[cell] = Row(cell, "not tried", NOT_TRIED)
        else:
            left = None if ends is None else max(ends - time.monotonic(), 0.001) / (len(cells) - len(rows))
            rows[cell] = _row(cell, what, stop, left)
    return _envelope([rows[cell] for cell in cells])


def _envelope(rows: Sequence[Row]) -> list[Row]:
    """The rows, of ascending memory, each with the plan of less memory where that is cheaper, and a bound that is no lower than
    that of more memory."""
    found = list[Row]()
    for row in rows:
        less = next((one for one in reversed(found) if one.fits), None)
        may_take = row.fits or row.state in ("no plan found", "not tried")
        if less is not None and may_take and (not row.fits or less.embeddings_ms < row.embeddings_ms):
            row = _with(less, row.cell, row.bound_ms)
        found.append(row)
    bound: float | None = None
    for place in range(len(found) - 1, -1, -1):
        row = found[place]
        if row.fits:
            bounds = [ms for ms in (bound, row.bound_ms) if ms is not None]
            bound = min(max(bounds), row.embeddings_ms) if bounds else None
            plan = row.found.model_copy(update={"lower_bound_ms": bound})
            found[place] = replace(row, plan=plan, bound_ms=bound)
    return found


def _usable(row: Row, cell: Cell) -> int:
    """Memory for tables of a device of another cell, under the constraints of a row's plan."""
    return cell.memory_bytes - row.found.task.constraints.reserved(cell.memory_bytes)


def _with(row: Row, cell: Cell, bound_ms: float | None) -> Row:
    """The row of a cell of other memory, with the same plan and a bound of its own."""
    plan, memory = row.found, (cell.memory_bytes,) * row.found.task.devices
    task = plan.task.model_copy(update={"device_memory_bytes": memory})
    bound = None if bound_ms is None else min(bound_ms, row.embeddings_ms)
    other = {"task": task, "task_digest": task.digest(), "lower_bound_ms": bound}
    return replace(row, cell=cell, plan=Plan.parse({**dict(plan), **other}, "a plan"), bound_ms=bound)


def _row(cell: Cell, what: Sweep, stop: threading.Event | None, seconds: float | None) -> Row:
    with silent(True):  # notes on constraints.json were said when the order was made
        order = cell.search(what.options)
        settings = replace(settings_of(order), tuning=replace(TUNING, hints=False))
    try:
        model = open_cost_model(cell.kind.name, cell.batch_size) if order.groups is None else None
        task = task_of(order, what.tables, model)
        if task.pipeline == "prefetch" and task.host_memory_bytes is not None:  # rows are fetched meanwhile
            dense = cell.kind.dense
            task = task.model_copy(update={"dense_ms": dense and dense.at(task.batch_size / task.devices)})
        if fault := too_small(task):
            return Row(cell, "proven not to fit", fault)
        watch = Watch(seconds, stop=stop)

        def find(one: ShardingTask, watch: Watch) -> Plan:
            own = model or open_cost_model(cell.kind.name, one.batch_size)
            return search(one, own, settings, trust=trust_in(own), notes=what.notes, watch=watch)

        with silent(True):
            plan = search_in_groups(order, task, find, watch)
    except Infeasible as error:
        return Row(cell, "proven not to fit" if error.proven else "no plan found", str(error))
    except InvalidInput as error:
        return Row(cell, "not priced", str(error))
    if watch.expired and not watch.stopped:
        plan = with_notes(plan, TIME_UP)
    model = model or open_cost_model(cell.kind.name, plan.task.batch_size)  # a group's
    caveats = beyond_measured(plan, for_task(model, plan.held))
    if plan.task.groups is not None:
        caveats.append(f"trained in {plan.task.groups.text(plan.task.devices)}")
    return Row(cell, "fits", plan=plan, bound_ms=plan.lower_bound_ms, caveats=tuple(caveats))


def too_small(task: ShardingTask) -> str:
    """Why a task cannot fit for its bytes alone: every plan in HBM keeps all weights and optimizer state at least once. Empty
    where that proves nothing."""
    have, need = sum(task.usable_bytes), kept_bytes(task.tables)
    if task.host_memory_bytes is not None or need <= have:
        return ""
    return (
        f"weights and optimizer state need {format_bytes(need, 'up')}, "
        f"{agreeing(task.devices, 'device', 'has', 'have')} {format_bytes(have)} "
        f"together: {format_bytes(need - have, 'up')} short"
    )


def kept_bytes(tables: Sequence[Table]) -> int:
    """Weights and optimizer state of all tables, each kept once."""
    return sum(table.memory_bytes for table in tables)
