"""An order -> the cells to search: a kind of hardware, so many devices of it, so much memory each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.text import counted
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import memory_of
from neuroshard.models.open import open_cost_model
from neuroshard.orders.search import SearchOrder, groups_fault
from neuroshard.orders.sizes import Kind, SizeOrder


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


def cells_of(order: SizeOrder) -> tuple[list[Cell], list[str]]:
    """All cells, and a line for each size that a kind leaves out. Raises UsageError where none is left, or where no memory is
    known, and what `open_cost_model` raises."""
    cells, left_out = list[Cell](), list[str]()
    for kind in order.kinds:
        memories, sizes = kind.memories or (_own_memory(kind, order),), list(_sizes(kind, order, left_out))
        for devices, domain, ranks in sizes:
            batch = order.batch_size(devices)
            cells += [Cell(kind, devices, memory, batch, domain, ranks) for memory in memories]
    if not cells:
        raise UsageError(f"no size is left: {'; '.join(left_out)}")
    return cells, left_out


def check_order(order: SizeOrder) -> None:
    """Raise UsageError for what is wrong with an order whatever the store and the tables have: a datasheet that there is not, no
    size that the domains divide, options that contradict each other."""
    left_out = list[str]()
    for kind in order.kinds:
        if kind.name.startswith("analytic:"):
            _own_memory(kind, order)
    sizes = [(kind, size) for kind in order.kinds for size in _sizes(kind, order, left_out)]
    if not sizes:
        raise UsageError(f"no size is left: {'; '.join(left_out)}")
    for kind, (devices, domain, ranks) in sizes:
        Cell(kind, devices, 2**30, order.batch_size(devices), domain, ranks).search(order.search)


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


def _sizes(kind: Kind, order: SizeOrder, left_out: list[str]) -> Iterator[tuple[int, int | None, int | None]]:
    """Numbers of devices with the ranks of a domain and of a host. A part of a domain, or of a host, is a domain, or a host."""
    domain, ranks = kind.domain or kind.local_world_size, kind.local_world_size or kind.domain
    for devices in order.devices:
        if domain is None or ranks is None:
            yield devices, None, None
            continue
        most = min(domain, devices)
        topology = {"domain": most, "local_world_size": min(ranks, most)}
        if fault := Topology.parse(topology, "the topology").fault(devices):
            left_out.append(f"{kind.name} with {counted(devices, 'device')} is left out: {fault}")
            continue
        joined = Topology.parse(topology, "the topology")
        if (size := order.group_size) is not None and (fault := groups_fault(devices, size, joined)):
            left_out.append(f"{kind.name} with {counted(devices, 'device')} is left out: {fault}")
            continue
        yield devices, most, min(ranks, most)
