"""The order of one search: its options, checked, as what reads them wants them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from neuroshard.core.clean import log
from neuroshard.core.errors import UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.plan import Plan
from neuroshard.core.step_memory import pipeline_options_fault
from neuroshard.core.task import dense_time_fault
from neuroshard.core.topology import Topology, near_ranks, topology_of
from neuroshard.core.units import parse_memory
from neuroshard.core.value import decode_json, shown
from neuroshard.files.constraints import ConstraintsFile, constraints_of, read_constraints, with_flags
from neuroshard.orders.options import AUTO, OPTIONS, Part


@dataclass(frozen=True)
class GroupsAsked:
    """Ranks shall train in groups of `size` (None: of the size that is cheapest, or all in one), averaged every so many steps."""

    size: int | None
    sync_every: int


@dataclass(frozen=True)
class SearchOrder:
    """What a search is asked for, beside tables and cost model.

    `task` has fields of a ShardingTask of all ranks (`device_memory_bytes`, and `batch_size` where it is not the cost model's),
    `settings` has fields of SearchSettings. The `previous` plan is the one to start from.
    """

    task: Mapping[str, Any]
    settings: Mapping[str, Any]
    constraints: ConstraintsFile
    previous: Plan | Path | None = None
    groups: GroupsAsked | None = None

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
        if fault := pipeline_options_fault(checked["pipeline_options"], checked["pipeline"]):
            raise UsageError(fault)
        topology = topology_of(*(checked[name] for name in ("devices", "domain", "local_world_size", "network")))
        groups = _groups(checked, topology)
        memory = parse_memory(checked["memory"], checked["devices"])
        copied, dedup = checked["data_parallel"], checked["index_dedup"]
        once = {"index_dedup": True} if dedup == "on" else {}
        rules = part("constraints") | {"data_parallel": [pattern for pattern in copied if pattern != AUTO]}
        file = ConstraintsFile() if (given := checked["constraints"]) is None else _read(given)
        return cls(
            task=part("task") | {"device_memory_bytes": memory, "topology": topology, "step_ledger": 1} | once,
            settings=part("settings") | {"try_data_parallel": AUTO in copied, "try_index_dedup": dedup == AUTO},
            constraints=with_flags(file, None if topology is None else topology.local_world_size, **rules),
            previous=checked["previous"],
            groups=groups,
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


def _groups(checked: Mapping[str, Any], topology: Topology | None) -> GroupsAsked | None:
    """The groups that options ask for. Raises UsageError for what groups contradict."""
    size, sync_every = checked["group_size"], checked["sync_every"]
    if size is None:
        if sync_every is not None:
            raise UsageError("--sync-every is of replicas of groups of ranks: give --group-size too, or leave it out")
        return None
    if topology is None:
        raise UsageError("groups are priced by how ranks are joined: say how many share fast links (--domain 8)")
    if checked["batch_size"] is None:
        raise UsageError("each group sees its part of the batch: give --batch-size, samples a step over all ranks")
    if size == AUTO and checked["previous"] is not None:
        raise UsageError("--group-size auto places all tables anew; give the size of the plan's groups with --from")
    for name, why in _NOT_IN_GROUPS.items():
        if checked[name]:
            flag = OPTIONS[name].flags[0]
            raise UsageError(f"groups of ranks cannot have {flag}: {why}; leave it out, or --group-size")
    if host := next((text for text in checked["pin"] if "host:" in text), None):
        raise UsageError(
            f"--pin {host!r} names a host, of which groups have parts: name devices of a group's plan instead"
        )
    if size != AUTO and (fault := groups_fault(checked["devices"], size, topology)):
        raise UsageError(fault)
    return GroupsAsked(None if size == AUTO else size, 1 if sync_every is None else sync_every)


def groups_fault(ranks: int, size: int, topology: Topology) -> str:
    """Why ranks make no groups of this size, by either numbering; empty if they do."""
    joined = {"ranks": ranks, "domain": topology.domain, "local_world_size": topology.local_world_size}
    if ranks < 2:
        return "1 rank makes no groups; leave out --group-size"
    faults = [Groups.model_validate({**joined, "contiguous": way}).fault(size) for way in (False, True)]
    return faults[0] if all(faults) else ""


def _as_json(given: Mapping[str, Any]) -> object:
    """What a file with this would hold. Raises UsageError where none can."""
    try:
        return decode_json(json.dumps(dict(given)).encode(), "constraints")
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"constraints is a mapping as is in a constraints.json ({error}), not {shown(given)}"
        ) from None


# options that groups of ranks cannot have, and why
_NOT_IN_GROUPS = {
    "host_memory": "TorchRec averages what lies in host memory, not what caches hold",
    "rows_by_access": "all ranks would have to train the hot rows alike",
}


def _read(given: Path | Mapping[str, Any]) -> ConstraintsFile:
    if isinstance(given, Path):
        constraints, notes = read_constraints(given)
    else:
        constraints, notes = constraints_of(_as_json(given), "constraints")
    log(*(f"note: {note}" for note in notes))
    return constraints
