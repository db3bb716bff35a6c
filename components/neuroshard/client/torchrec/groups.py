"""A plan for groups of ranks with TorchRec's DMPCollection: its arguments, and what it would train wrongly.

DMPCollection (seen with torchrec 1.8) takes the plan of one group and replaces its ranks by those of the rank's own group.
`sync()` averages the weights of all fused operators as they are in their memory, and of their state what Adagrad keeps: rows
that a cache holds are not written back before, and with other optimizers it ends with a KeyError. DistributedModelParallel takes
the plan of a group too, and leaves all ranks but the first without tables.
"""

from typing import Any

from neuroshard.client.torchrec.priced import Priced
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan, check_plan
from neuroshard.core.text import counted

AVERAGED = ("sgd", "adagrad", "rowwise_adagrad")  # optimizers that DMPCollection can average


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


def check_averaged(priced: Priced) -> None:
    """Raise InvalidInput for a table whose replicas DMPCollection cannot average."""
    optimizers = priced.optimizers
    other = next((name for name, one in optimizers.items() if one not in AVERAGED), None)
    if priced.plan.task.groups is not None and other is not None:
        raise InvalidInput(
            f"table {other!r} is trained by {optimizers[other]}, whose state DMPCollection cannot average (a KeyError: 'sum'), "
            f"and {priced.whose} is for groups of ranks; train with {', '.join(AVERAGED)}, or search a plan without groups"
        )
