"""An order -> the cells to search: a kind of hardware, so many devices of it, so much memory each; and what is known of a cell
after its search; the rows that no other beats, the rows whose order is not certain, and what a GiB of HBM is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.text import counted, short_name
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import memory_of
from neuroshard.models.open import open_cost_model
from neuroshard.orders.search import SearchOrder, groups_fault
from neuroshard.orders.sizes import Kind, SizeOrder
from neuroshard.report.numbers import source

GIB = 2**30
MOST_OF_A_NAME = 40  # characters of a kind in a file name, far below the 255 bytes of file systems
State = Literal["fits", "proven not to fit", "no plan found", "not priced", "not tried"]


@dataclass(frozen=True)
class Cell:
    """So many devices of a kind with so much memory each, the global batch of a step (None: the cost model's), and the ranks of a
    domain and of a host (None: as the kind's cost model has it)."""

    kind: Kind
    devices: int
    memory_bytes: int
    batch_size: int | None
    domain: int | None
    local_world_size: int | None

    def search(self, options: Mapping[str, Any]) -> SearchOrder:
        """The search of this cell with the `options` of all. Raises UsageError, InvalidInput."""
        return SearchOrder.of(
            {
                **options,
                "devices": self.devices,
                "memory": f"{self.memory_bytes}B",
                "host_memory": self.kind.host_memory_bytes,
                "batch_size": self.batch_size,
                "domain": self.domain,
                "local_world_size": self.local_world_size,
            }
        )


@dataclass(frozen=True)
class Row:
    """A cell, and the `plan` found for it, or `why` there is none. No plan costs less than `bound_ms` of embeddings, by the cost
    model; None where nothing is proven. `caveats` say which of its costs are beyond what was measured."""

    cell: Cell
    state: State
    why: str = ""
    plan: Plan | None = None
    bound_ms: float | None = None
    caveats: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def found(self) -> Plan:
        """The plan of a row that has one."""
        assert self.plan is not None
        return self.plan

    @property
    def embeddings_ms(self) -> float:
        """Predicted ms of a step, of embeddings alone."""
        assert self.found.cost_ms is not None
        return self.found.cost_ms

    @property
    def step_ms(self) -> float:
        """The same with the dense time, where one is given."""
        return self.embeddings_ms + self.dense_ms

    @property
    def dense_ms(self) -> float:
        """Ms of a step that are not of embeddings; 0 where no dense time is given."""
        dense = self.cell.kind.dense
        return 0.0 if dense is None else dense.at(self.batch_size / self.cell.devices)

    @property
    def bound_step_ms(self) -> float | None:
        return None if self.bound_ms is None else self.bound_ms + self.dense_ms

    @property
    def error(self) -> float | None:
        """How far the cost model may be off, as a share of the ms of embeddings; None where it is unknown."""
        return self.found.provenance.cost_model_error

    @property
    def interval_ms(self) -> tuple[float, float] | None:
        """What a step may measure: as the plan says, in 68 % of the cases. Where its cost model states no such range, predicted =
        measured x (1 ± error); the upper end is infinite from an error of 1 on."""
        if (ranges := self.found.provenance.cost_ranges) is not None:
            return ranges.one[0] + self.dense_ms, ranges.one[1] + self.dense_ms
        if self.error is None:
            return None
        high = self.embeddings_ms / (1 - self.error) if self.error < 1 else float("inf")
        return self.embeddings_ms / (1 + self.error) + self.dense_ms, high + self.dense_ms

    @property
    def batch_size(self) -> int:
        return self.found.task.global_batch_size

    @property
    def plan_notes(self) -> tuple[str, ...]:
        """What the search notes of the plan, as `neuroshard search` says it."""
        return self.found.provenance.notes

    @property
    def sample_ms(self) -> float:
        """Ms of a step over its samples: what sizes are compared by, since their batches may differ."""
        return self.step_ms / self.batch_size

    @property
    def samples_per_s(self) -> float:
        return 1000 / self.sample_ms

    @property
    def money(self) -> float | None:
        """Price of a billion samples; None where no price is given."""
        price = self.cell.kind.price
        return None if price is None else price * self.cell.devices * self.sample_ms * 1e9 / 3.6e6

    @property
    def money_text(self) -> str:
        """The same, as people read it; empty where no price is given."""
        money = self.money
        return "" if money is None else f"{money:,.0f}" if 1000 <= money < 1e7 else f"{money:.4g}"

    @property
    def memory_left_bytes(self) -> int:
        """Of the fullest device, what is neither used nor reserved."""
        _, used, usable = self.found.fullest
        return usable - used

    @property
    def memory_used_bytes(self) -> int:
        """Of the fullest device."""
        return self.found.fullest[1]

    @property
    def host_bytes(self) -> int:
        """Of the fullest host, for tables beyond HBM."""
        return max(self.found.host_memory()) if self.found.task.host_memory_bytes else 0

    @property
    def basis(self) -> str:
        """`datasheet`, `measured`, or what else the costs come from, in a word."""
        backend = self.found.provenance.cost_model_backend or ""
        return {"analytic": "datasheet", "given": "given", "synthetic": "formula"}.get(backend, "measured")

    @property
    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        cell = self.cell
        data: dict[str, Any] = {
            "model": cell.kind.name,
            "devices": cell.devices,
            "memory_bytes": cell.memory_bytes,
            "domain": cell.domain,
            "local_world_size": cell.local_world_size,
            "state": self.state,
        }
        if self.plan is None:
            return {**data, "why": self.why}
        task, provenance, interval = self.found.task, self.found.provenance, self.interval_ms
        high = None if interval is None or interval[1] == float("inf") else interval[1]
        return {
            **data,
            "batch_size": self.batch_size,
            "groups": None if task.groups is None else task.groups.text(task.devices),
            "step_ms": self.step_ms,
            "embeddings_ms": self.embeddings_ms,
            "dense_ms": self.dense_ms,
            "lower_bound_ms": self.bound_step_ms,
            "interval_ms": None if interval is None else [interval[0], high],
            "samples_per_s": self.samples_per_s,
            "samples_per_s_per_device": self.samples_per_s / cell.devices,
            "memory_used_bytes": self.memory_used_bytes,
            "memory_left_bytes": self.memory_left_bytes,
            "host_memory_bytes": self.host_bytes,
            "money_per_billion_samples": self.money,
            "basis": self.basis,
            "costs": source(provenance.cost_model_backend, provenance.cost_model_device),
            "caveats": list(self.caveats),
            "notes": list(self.plan_notes),
            "plan": self.found.digest(),
        }


def name_of(row: Row) -> str:
    """`analytic:h100 x 8`."""
    return f"{short_name(row.cell.kind.name)} x {row.cell.devices}"


def cells_of(order: SizeOrder) -> tuple[list[Cell], list[str]]:
    """All cells, and a line for each size that a kind leaves out. Raises UsageError where none is left, or where no memory is
    known, and what `open_cost_model` raises."""
    memories = {kind: kind.memories or (_own_memory(kind, order),) for kind in order.kinds}
    cells, left_out = _cells(order)
    return [replace(cell, memory_bytes=memory) for cell in cells for memory in memories[cell.kind]], left_out


def check_order(order: SizeOrder) -> None:
    """Raise UsageError for what is wrong with an order whatever the store and the tables have: a datasheet that there is not, no
    size that the domains divide, options that contradict each other."""
    for kind in order.kinds:
        if kind.name.startswith("analytic:"):
            _own_memory(kind, order)
    for cell in _cells(order)[0]:
        cell.search(order.search)


def _own_memory(kind: Kind, order: SizeOrder) -> int:
    """Memory of a device by the cost model. It may know the batch of some size alone: then the others are not priced."""
    batches = [*dict.fromkeys(map(order.batch_size, order.devices))]
    for batch_size in batches:
        try:
            memory = memory_of(open_cost_model(kind.name, batch_size))
        except InvalidInput:
            if batch_size == batches[-1]:
                raise
        else:
            break
    if memory is None:
        raise UsageError(f"{kind.name} does not say how much memory a device has: give --memory {kind.name}=SIZE")
    return memory


def _cells(order: SizeOrder) -> tuple[list[Cell], list[str]]:
    """A cell of some memory for each kind and number of devices, and a line for each that is left out. A part of a domain is a
    domain, and of a host a host. Raises UsageError where none is left."""
    cells, left_out = list[Cell](), list[str]()
    for kind in order.kinds:
        domain, ranks = kind.domain or kind.local_world_size, kind.local_world_size or kind.domain
        for devices in order.devices:
            most, local = (None if many is None else min(many, domain or 0, devices) for many in (domain, ranks))
            fault: str | None = None
            if most is not None:
                joined = Topology.parse({"domain": most, "local_world_size": local}, "the topology")
                size = order.group_size
                fault = joined.fault(devices) or (None if size is None else groups_fault(devices, size, joined))
            if fault:
                left_out.append(f"{kind.name} with {counted(devices, 'device')} is left out: {fault}")
            else:
                cells.append(Cell(kind, devices, 2**30, order.batch_size(devices), most, local))
    if not cells:
        raise UsageError(f"no size is left: {'; '.join(left_out)}")
    return cells, left_out


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other beats in both time and money, or in time and devices where there are no prices. Time is that of a
    sample: batches may differ. Of rows alike in both, the one with the least memory."""
    kept = list[Row]()
    fitting = [row for row in rows if row.fits]
    for row in sorted(fitting, key=lambda row: (_second(row), row.sample_ms, row.cell.memory_bytes)):
        if not kept or row.sample_ms < kept[-1].sample_ms:
            kept.append(row)
    return kept


def _second(row: Row) -> float:
    return float(row.cell.devices) if row.money is None else row.money


def may_be_reversed(rows: Sequence[Row]) -> dict[int, list[int]]:
    """For each row that fits, by its place, the places of the rows of other kinds whose times a sample overlap with its own
    within the errors of both models. Rows of one kind have their error in common, and are not among them."""
    spans = {
        place: (row.cell.kind, low / row.batch_size, high / row.batch_size)
        for place, row in enumerate(rows)
        if row.fits and row.interval_ms is not None
        for low, high in (row.interval_ms,)
    }
    return {
        place: [at for at, (other, least, most) in spans.items() if other != kind and least < high and most > low]
        for place, (kind, low, high) in spans.items()
    }


def may_join_or_leave(rows: Sequence[Row]) -> set[int]:
    """The places of rows whose place on the frontier is not certain: one on it that a row of another kind beats if that is as
    fast as its model's error allows, and it as slow; one off it that no row beats if it is as fast, and those of other kinds as
    slow."""
    best = {id(row) for row in frontier(rows)}
    fitting, found = [row for row in rows if row.fits], set()
    for place, row in enumerate(rows):
        if row.fits:
            on_it = id(row) in best
            mine = _scale(row, slow=on_it)
            beaten = any(
                _beats(other, 1.0 if other.cell.kind == row.cell.kind else _scale(other, slow=not on_it) / mine, row)
                for other in fitting
                if other is not row
            )
            found |= {place} if beaten == on_it else set()
    return found


def _scale(row: Row, *, slow: bool) -> float:
    """The slowest or fastest that a row may be, over what is predicted."""
    interval = row.interval_ms
    return 1.0 if interval is None else interval[slow] / row.step_ms


def _beats(one: Row, times: float, other: Row) -> bool:
    """Whether a row that takes so many times as long, relative to the other, is no worse in both, and better in one."""
    if times != times or times == float("inf"):  # both may take for ever
        return False
    mine = one.sample_ms * times, _second(one) * (1.0 if one.money is None else times)
    its = other.sample_ms, _second(other)
    alike = mine == its and one.cell.memory_bytes < other.cell.memory_bytes
    return mine[0] <= its[0] and mine[1] <= its[1] and (mine != its or alike)


class MemoryPoint(NamedTuple):
    """A memory of a kind and number of devices, and the ms that each GiB more saved since the point before it; None at the
    first."""

    row: Row
    ms_a_gib: float | None


def memory_frontiers(rows: Sequence[Row]) -> list[list[MemoryPoint]]:
    """For each kind and number of devices with several memories: step time against HBM for tables, without the amounts that save
    nothing. What a larger dense model would cost is read from it backwards."""
    found = []
    for least, *others in with_several_memories(rows):
        points = [MemoryPoint(least, None)]
        for row in others:
            before = points[-1].row
            if row.step_ms < before.step_ms:
                gib = (row.cell.memory_bytes - before.cell.memory_bytes) / GIB
                points.append(MemoryPoint(row, (before.step_ms - row.step_ms) / gib))
        found.append(points)
    return found


def with_several_memories(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows that fit, by kind and number of devices, where these fit with several amounts of memory; the least
    memory first."""
    groups = dict[object, list[Row]]()
    for row in rows:
        if row.fits:
            groups.setdefault((row.cell.kind, row.cell.devices), []).append(row)
    return [sorted(group, key=lambda row: row.cell.memory_bytes) for group in groups.values() if len(group) > 1]


def plans_of(rows: Sequence[Row]) -> dict[str, Plan]:
    """The plans of both frontiers, by a file name that says the size."""
    points = [*frontier(rows), *(point.row for points in memory_frontiers(rows) for point in points)]
    alike = dict[str, list[Row]]()
    for row in {id(row): row for row in points}.values():
        alike.setdefault(_size_in_a_name(row), []).append(row)
    return {
        f"{size}-{number}.json" if number > 1 else f"{size}.json": row.found
        for size, of_it in alike.items()
        for number, row in enumerate(of_it, 1)
    }


def _size_in_a_name(row: Row) -> str:
    """`h100-8x40GiB`: memory is rounded, and of a path its end is taken, so sizes may be alike in it."""
    kind = "".join(letter if letter.isalnum() else "-" for letter in row.cell.kind.name.removeprefix("analytic:"))
    return f"{kind[-MOST_OF_A_NAME:].strip('-')}-{row.cell.devices}x{row.cell.memory_bytes / GIB:.4g}GiB"
