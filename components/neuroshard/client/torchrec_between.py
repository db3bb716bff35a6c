"""The memory that a model needs while it goes from one plan to another (client/torchrec_reshard.py). Needs torch and torchrec.

On CPUs the new shards are made beside the old ones. On GPUs the old ones go to host memory first, and the new ones take their
place.
"""

import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.types import ParameterSharding

from neuroshard.client.torchrec_in_memory import is_elsewhere
from neuroshard.core.units import format_bytes
from neuroshard.system import available_bytes

BEYOND_HBM = ("fused_uvm", "fused_uvm_caching")


class Held(NamedTuple):
    """What a rank has before, and where."""

    host: str
    available: int  # bytes of host memory
    free: int | None  # bytes of the device's memory, with what the old shards leave; None on CPUs
    old: int  # bytes of the old shards that go to host memory
    tables: dict[
        str, tuple[int, int]
    ]  # bytes of a row and of an element, weight and moments together, by key of the weight


def held(device: torch.device, state: Mapping[str, Any]) -> Held:
    """What this rank has of a state {"model": …, "optimizer": {"state": …}}."""
    row, element = defaultdict[str, int](int), defaultdict[str, int](int)
    moments = [(key, value) for key, each in state["optimizer"]["state"].items() for value in each.values()]
    storages: dict[int, torch.UntypedStorage] = {}
    for key, value in [*state["model"].items(), *moments]:
        tensors = list(local_tensors(value))
        for tensor in tensors:
            if is_elsewhere(tensor.untyped_storage()):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        if tensors:
            (row if tensors[0].dim() == 1 else element)[key] += tensors[0].element_size()
    old, free = sum(each.nbytes() for each in storages.values()), None
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        left = sum(each.nbytes() for each in storages.values() if each.resizable())
        free = torch.cuda.mem_get_info(device)[0] + unused + left
    return Held(socket.gethostname(), available_bytes(), free, old, {key: (row[key], element[key]) for key in element})


def local_tensors(value: object) -> Iterator[Tensor]:
    """The tensors that this rank has of a value of a state."""
    if isinstance(value, ShardedTensor):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, Tensor):
        yield value


class NewTable(NamedTuple):
    """A table of a collection that is sharded anew."""

    parameter: ParameterSharding
    rows: int
    columns: int
    was_copied: bool  # so that nobody has moments of it


class Need(NamedTuple):
    """Bytes of a rank's new shards, by where they are made, and of the largest of them, which is received beside it."""

    device: int
    host: int
    largest: int


def needs(ranks: Sequence[Held], new: Mapping[str, NewTable]) -> list[Need]:
    """What each rank needs for the new tables, by key of the weight."""
    known = {key: each for rank in ranks for key, each in rank.tables.items()}
    most = (max(row for row, _ in known.values()), max(element for _, element in known.values()))
    found = []
    for rank, here in enumerate(ranks):
        on_device, on_host, largest = 0, 0, 0
        for key, table in new.items():
            row, element = most if table.was_copied else known[key]
            for rows, columns in _sizes(table, rank):
                size = rows * (row + columns * element)
                largest = max(largest, size)
                if table.parameter.compute_kernel in BEYOND_HBM or here.free is None:
                    on_host += size
                else:
                    on_device += size
        found.append(Need(on_device, on_host, largest))
    return found


def shortage(ranks: Sequence[Held], new: Mapping[str, NewTable]) -> str | None:
    """Which host or rank lacks memory, in words; None if none does."""
    of_hosts = defaultdict[str, int](int)
    for rank, (here, need) in enumerate(zip(ranks, needs(ranks, new), strict=True)):
        of_hosts[here.host] += here.old + need.host + need.largest
        if here.free is not None and need.device > here.free:
            return (
                f"rank {rank} needs {format_bytes(need.device)} of its device for the new shards of collections that change, and "
                f"{format_bytes(here.free)} are free without the old ones; start again by the new plan from a checkpoint"
            )
    for host, needed in of_hosts.items():
        available = min(rank.available for rank in ranks if rank.host == host)
        if needed > available:
            return (
                f"host {host} needs {format_bytes(needed)} more of host memory while its ranks go from one plan to the other, "
                f"and {format_bytes(available)} are available; start again by the new plan from a checkpoint"
            )
    return None


def _sizes(table: NewTable, rank: int) -> Iterable[Sequence[int]]:
    """Rows and columns of a rank's shards of a table; of a copy with its gradient."""
    spec: Any = table.parameter.sharding_spec
    if spec is None:
        return [(table.rows, table.columns)] * 2
    return [shard.shard_sizes for shard in spec.shards if shard.placement.rank() == rank]
