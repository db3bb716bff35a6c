"""An order -> the cells to search: a kind of hardware, so many devices of it, so much memory each; and what is known of a cell
after its search."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.text import counted, short_name
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import memory_of
from neuroshard.models.open import open_cost_model
from neuroshard.orders.search import SearchOrder, groups_fault
from neuroshard.orders.sizes import Kind, SizeOrder
from neuroshard.report.numbers import source

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
                "memory": self.memory_bytes,
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
        task = self.found.task
        return min(have - used for have, used in zip(task.usable_bytes, self.found.memory_bytes(), strict=True))

    @property
    def memory_used_bytes(self) -> int:
        """Of the fullest device."""
        return max(self.found.memory_bytes())

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
