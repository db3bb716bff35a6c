"""The order of one search: its options, checked, as what reads them wants them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from neuroshard.core.clean import log
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.task import dense_time_fault
from neuroshard.core.topology import Topology, near_ranks, topology_of
from neuroshard.core.units import parse_memory
from neuroshard.files.constraints import ConstraintsFile, read_constraints, with_flags
from neuroshard.orders.options import AUTO, OPTIONS, Part


@dataclass(frozen=True)
class SearchOrder:
    """What a search is asked for, beside tables and cost model.

    `task` has fields of a ShardingTask (`device_memory_bytes`, and `batch_size` where it is not the cost model's), `settings` has
    fields of SearchSettings. The `previous` plan is the one to start from.
    """

    task: Mapping[str, Any]
    settings: Mapping[str, Any]
    constraints: ConstraintsFile
    previous: Plan | Path | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """The order with these options: values of any type, texts of the command line among them. Raises UsageError for an
        invalid option, InvalidInput for a fault in constraints.json."""
        if unknown := options.keys() - OPTIONS:
            raise TypeError(f"search() got an unexpected keyword argument {min(unknown)!r}")
        checked = {name: option.checked(options.get(name)) for name, option in OPTIONS.items()}

        def part(of: Part) -> dict[str, Any]:
            return {one.field or name: checked[name] for name, one in OPTIONS.items() if one.part == of}

        if fault := dense_time_fault(checked["dense_time"], checked["host_memory"], checked["pipeline"]):
            raise UsageError(fault)
        topology = topology_of(*(checked[name] for name in ("devices", "domain", "local_world_size", "network")))
        memory = parse_memory(checked["memory"], checked["devices"])
        copied = checked["data_parallel"]
        rules = part("constraints") | {"data_parallel": [pattern for pattern in copied if pattern != AUTO]}
        given = checked["constraints"]
        file = ConstraintsFile() if given is None else _read(given)
        return cls(
            task=part("task") | {"device_memory_bytes": memory, "topology": topology},
            settings=part("settings") | {"try_data_parallel": AUTO in copied},
            constraints=with_flags(file, None if topology is None else topology.local_world_size, **rules),
            previous=checked["previous"],
        )

    @property
    def devices(self) -> int:
        return len(self.task["device_memory_bytes"])

    @property
    def topology(self) -> Topology | None:
        """The hosts and domains that the order itself names; None if it names none."""
        found: Topology | None = self.task["topology"]
        return found

    @property
    def has_host_memory(self) -> bool:
        """Whether tables may lie beyond HBM."""
        return self.task["host_memory_bytes"] is not None

    def near_ranks(self, topology: Topology | None) -> int:
        """The ranks of an all-to-all that a cost model must know, with the `topology` of the nodes unless it has its own."""
        return near_ranks(self.devices, self.topology or topology)


def _read(path: Path) -> ConstraintsFile:
    constraints, notes = read_constraints(path)
    log(*(f"note: {note}" for note in notes))
    return constraints
