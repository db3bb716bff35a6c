"""How the ranks of a trainer are divided, against a plan: into hosts, as its launcher says and as TorchRec takes them to be, and
into groups with TorchRec's DMPCollection. Needs torch and torchrec.

TorchRec (1.8, 1.9) reads the first of `READ_BY_TORCHREC` that is there, and takes 8 without a word where none is, as under srun.
Where that number does not divide the ranks, it takes all ranks to be on one host.

DMPCollection (seen with torchrec 1.8) takes the plan of one group and replaces its ranks by those of the rank's own group.
`sync()` averages the weights of all fused operators as they are in their memory, and of their state what Adagrad keeps: rows
that a cache holds are not written back before, and with other optimizers it ends with a KeyError. DistributedModelParallel takes
the plan of a group too, and leaves all ranks but the first without tables.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_local_size, get_topology_group_world_size

from neuroshard.client.model.warn import warn
from neuroshard.client.torchrec.priced import Priced
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan, check_plan
from neuroshard.core.text import counted
from neuroshard.core.value import shown

PROCESSES = {"MPI_LOCALNRANKS": "PMI_SIZE"}  # all of them, where TorchRec reads those of a host
PROCESSES |= {f"{one}_COMM_WORLD_LOCAL_SIZE": f"{one}_COMM_WORLD_SIZE" for one in ("OMPI", "MV2")}
READ_BY_TORCHREC = ("LOCAL_WORLD_SIZE", *PROCESSES)
UNSAID = 8  # what TorchRec takes then
# What else TorchRec gives to int(), and the least that it can be; -1 is as if it were not set.
_IDS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
PARSED_BY_TORCHREC = {"TORCHREC_RESOLVED_POD_SIZE": 1, **dict.fromkeys((*_IDS, "TOPOLOGY_DOMAIN_MULTIPLE"), -1)}
# Of launchers that TorchRec does not ask: variables of all their processes, which must be the ranks (they may be a process for
# each host, which starts the ranks), and of those of a host.
LAUNCHERS = (
    (
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    ),
    (("PMI_SIZE",), ("PMI_LOCAL_SIZE",)),  # MPICH and what is made of it
    (("MVP_COMM_WORLD_SIZE",), ("MVP_COMM_WORLD_LOCAL_SIZE",)),  # MVAPICH 3
    (("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_SIZE",)),  # jsrun
)


class Hosts(NamedTuple):
    """The ranks of a host, and the variable that says so; none where nothing does."""

    ranks: int
    said_by: str

    @property
    def unread(self) -> str:
        """Why TorchRec takes another number, and the way out, for the end of a message; empty where it reads this one."""
        if self.said_by in READ_BY_TORCHREC:
            return ""
        if not self.said_by:
            if read := _read():
                return f" ({read}, which TorchRec reads, is of the {os.environ[PROCESSES[read]]} processes of {PROCESSES[read]})"
            return f" ({READ_BY_TORCHREC[0]} is not set, so TorchRec takes {UNSAID}, or all where that does not divide them)"
        return (
            f" ({self.said_by} says {self.ranks}, but TorchRec reads {READ_BY_TORCHREC[0]}, which is not set: set "
            f"{READ_BY_TORCHREC[0]}={self.ranks} on every rank)"
        )


def hosts_of(ranks: int) -> Hosts:
    """What this trainer's launcher says of `ranks`; where it says nothing, what TorchRec takes.

    Raises InvalidInput for a variable that is no number of ranks, or that does not divide `ranks`.
    """
    check_read()
    for name, text in _said(ranks):
        slurms = re.fullmatch(r"(\d+)(?:\(x\d+\))?", text.strip())  # SLURM's `4(x2)`: two hosts of 4
        if slurms is None or not (local := int(slurms[1])):
            raise InvalidInput(
                f"{name} is {shown(text)}, which is not one number of ranks for all hosts; start the same number on each host, "
                f"and set {READ_BY_TORCHREC[0]} to it on every rank"
            )
        if local >= ranks:
            return Hosts(ranks, name)
        if ranks % local:
            raise InvalidInput(
                f"{name} is {local}, which does not divide the {ranks} ranks of this trainer, and TorchRec then takes all to be "
                "on one host; start as many ranks on each host"
            )
        return Hosts(local, name)
    return Hosts(get_local_size(ranks), "")


def check_read() -> None:
    """Raise InvalidInput for a variable that TorchRec reads and that is no number, as SLURM's `4(x2)` is none."""
    for name, least in {_read(): 1, **PARSED_BY_TORCHREC}.items():
        text = os.environ.get(name, str(least)).strip()
        if not re.fullmatch(r"-?[0-9]+", text) or int(text) < least:
            number = re.fullmatch(r"([1-9][0-9]*)\(x[0-9]+\)", text) if name in READ_BY_TORCHREC else None
            way = f"={number[1]}" if number else f" to a whole number of {max(least, 0)} or more"
            way += ", the ranks of a host" if name in READ_BY_TORCHREC else ""
            raise InvalidInput(f"{name} is {shown(text)}, which TorchRec cannot read: set {name}{way}, on every rank")


def _read() -> str:
    return next((name for name in READ_BY_TORCHREC if name in os.environ), "")


def _said(ranks: int) -> Iterator[tuple[str, str]]:
    """The variables that say the ranks of a host, by their names, those first that TorchRec reads."""
    there: Mapping[str, str] = os.environ
    of_ranks = [name for name in READ_BY_TORCHREC if there.get(PROCESSES.get(name, ""), str(ranks)) == str(ranks)]
    yield from ((name, there[name]) for name in of_ranks if name in there)
    for every, local in LAUNCHERS:
        if next((there[name] for name in every if name in there), "") == str(ranks):
            yield from ((name, there[name]) for name in local if name in there)


def gpus_of_host(plan: Plan, local_world_size: int | None) -> int:
    """By how many ranks GPUs are numbered anew: rank r has GPU r modulo that many of its host."""
    if local_world_size is not None:
        return local_world_size
    hosts, ranks, topology = hosts_of(plan.task.ranks), plan.task.ranks, plan.task.topology_of_all
    if hosts.said_by or ranks == 1:
        return hosts.ranks
    if topology is not None and topology.domains(ranks) > 1:  # else it may be of any hosts
        return topology.local_world_size
    trains = dist.is_available() and dist.is_initialized()
    seen = torch.cuda.device_count() if trains else 0
    if seen and not ranks % min(seen, ranks):
        return min(seen, ranks)
    if not trains and hosts.ranks == ranks:  # a plan that is only looked at, on one host
        return ranks
    warn(
        f"nothing says how many ranks a host has{hosts.unread}: TorchRec takes {hosts.ranks} of these {ranks}, so rank "
        f"{ranks - 1} is on GPU {(ranks - 1) % hosts.ranks} of its host; set {READ_BY_TORCHREC[0]} (torchrun does), or give "
        "local_world_size="
    )
    return hosts.ranks


def check_hosts(priced: Priced) -> None:
    """Raise InvalidInput where a table is split over the ranks of a host, and TorchRec will assume another size of hosts."""
    devices = priced.plan.task.devices
    split = [name for name, kind in priced.kinds.items() if kind.over_domains]
    parts = [shard for shard in priced.shards[split[0]] if shard.column_offset == 0] if split else []
    if split and len(parts) != (hosts := get_topology_group_world_size(devices)):
        raise InvalidInput(
            f"table {split[0]!r} is split row-wise over the {len(parts)} ranks of a host (rank {parts[0].device} on), but here "
            f"TorchRec takes a host to have {hosts}{hosts_of(devices).unread}: LOCAL_WORLD_SIZE must be what local_world_size is "
            "(torchrun sets it)"
        )


def check_topology(plan: Plan, local_world_size: int | None, whose: str) -> None:
    """Raise InvalidInput unless TorchRec takes hosts and domains of this trainer to be those that the plan was searched for.

    For a plan of one domain, or without a topology, it does not matter. Where no process group is up, only `local_world_size`
    is known.
    """
    check_read()
    topology, devices = plan.task.topology_of_all, plan.task.ranks
    if topology is None or topology.domains(devices) == 1:
        return
    known, local, said = dist.is_available() and dist.is_initialized(), local_world_size, ""
    if local is None and known:
        local, said = (hosts := hosts_of(devices)).ranks, hosts.unread
    local = local or topology.local_world_size
    if local != topology.local_world_size:
        raise InvalidInput(
            f"{whose} is for hosts of {counted(topology.local_world_size, 'rank')}, but here a host has {local}{said}: start "
            "that many ranks a host (torchrun --nproc-per-node sets LOCAL_WORLD_SIZE), or search a plan with --local-world-size "
            f"{local}"
        )
    if not known or plan.task.groups is not None:  # in groups, `node_group_size` says what a domain is
        return
    if (taken := get_local_size(devices)) != local:
        raise InvalidInput(
            f"{whose} is for hosts of {counted(local, 'rank')}, but here TorchRec takes them to have {taken}"
            f"{hosts_of(devices).unread or f': set LOCAL_WORLD_SIZE={local} on every rank'}"
        )
    try:
        domain = get_topology_group_world_size(devices)
    except ValueError as error:
        raise InvalidInput(f"TORCHREC_RESOLVED_POD_SIZE does not fit this trainer: {error}") from None
    if domain != topology.domain:
        raise InvalidInput(
            f"{whose} is for domains of {counted(topology.domain, 'rank')} that share fast links, but here TorchRec takes "
            f"them to have {domain}: set TORCHREC_RESOLVED_POD_SIZE={topology.domain // local}, or search a plan with "
            f"--domain {domain}"
        )


def dmp_collection(plan: Plan) -> dict[str, Any]:
    """The arguments of DMPCollection that a plan for groups of ranks decides. Raises InvalidInput for a plan without groups.

    >>> given = to_torchrec(plan, model, sharders=sharders, sharding_group_size=8)  # doctest: +SKIP
    >>> model = DMPCollection(model, device, given, global_pg=dist.group.WORLD, sharders=sharders,
    ...     **dmp_collection(plan))  # doctest: +SKIP

    `model.sync()` is then to be called after every `plan.task.groups.sync_every` steps, and once before the first: the replicas
    of a table begin alike only if they were initialised alike.
    """
    check_plan(plan)
    groups, size, topology = plan.task.groups, plan.task.devices, plan.task.topology
    if groups is None or topology is None:
        raise InvalidInput(
            f"plan {plan.digest()[:12]} is for {counted(size, 'rank')} without groups; search one with --group-size"
        )
    return {
        "world_size": groups.ranks,
        "sharding_group_size": size,
        "use_inter_host_allreduce": groups.contiguous,
        # what table-row-wise tables and grids take for a host
        "node_group_size": topology.domain if 1 < topology.domain < size else None,
    }


def check_groups(plan: Plan, size: int | None, whose: str) -> None:
    """Raise InvalidInput unless the trainer's groups are of the plan's size; `size` is None for a trainer without groups."""
    groups, planned = plan.task.groups, plan.task.devices
    if groups is None and size is not None:
        raise InvalidInput(
            f"{whose} is for {counted(planned, 'rank')} without groups, and the trainer has groups of {size}: search a plan "
            f"with --group-size {size}, or leave out sharding_group_size"
        )
    if groups is not None and size is None:
        raise InvalidInput(
            f"{whose} is for {groups.text(planned)}: DistributedModelParallel would leave all ranks but {planned} without "
            f"tables; train with DMPCollection(…, **dmp_collection(plan)), and say sharding_group_size={planned}"
        )
    if groups is not None and size != planned:
        raise InvalidInput(
            f"{whose} is for {groups.text(planned)}, and the trainer has groups of {size}: search a plan with "
            f"--group-size {size}"
        )
