"""Ranks in groups: which sizes and numberings may be, the task of a group, and plans that average fewer bytes."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from neuroshard.core.errors import Infeasible, InvalidInput, NeuroshardError, UsageError
from neuroshard.core.groups import Groups, sizes_of
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.topology import Topology
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.averaging import averaged_bytes, averaging, least_averaging_ms
from neuroshard.costmodel.protocol import CostModel, Ints
from neuroshard.orders.search import GroupsAsked
from neuroshard.search.problem.problem import Problem


def tasks_of(task: ShardingTask, asked: GroupsAsked) -> list[tuple[str, ShardingTask | InvalidInput]]:
    """The task of a group for each size and numbering that was asked for, or why there is none, each with its name; where the
    size is to be chosen, the `task` of all ranks too, as it is. Of two numberings by which ranks are joined alike only TorchRec's
    default.

    Raises UsageError where it is not known how ranks are joined.
    """
    if task.topology is None:
        raise UsageError("groups are priced by how ranks are joined: say how many share fast links (--domain 8)")
    found: list[tuple[str, ShardingTask | InvalidInput]] = []
    if asked.size is None:
        found.append((f"one group of {task.devices:,} ranks", task))
    for size in reversed(sizes_of(task.devices)) if asked.size is None else [asked.size]:
        found += _numberings(task, task.topology, size, asked.sync_every)
    return found


def _numberings(
    task: ShardingTask, topology: Topology, size: int, sync_every: int
) -> Iterator[tuple[str, ShardingTask | InvalidInput]]:
    """The same, of one size."""
    seen = set[tuple[Topology, int]]()
    for contiguous in (False, True):
        groups = Groups(
            ranks=task.devices,
            contiguous=contiguous,
            sync_every=sync_every,
            domain=topology.domain,
            local_world_size=topology.local_world_size,
        )
        what = groups.text(size)
        if fault := groups.fault(size):
            yield what, InvalidInput(fault)
            continue
        joined = groups.topology(size, topology), groups.replicas_near(size)
        if joined not in seen:
            try:
                yield what, task_of_group(task, groups, size)
            except InvalidInput as error:
                yield what, error
        seen.add(joined)


def task_of_group(task: ShardingTask, groups: Groups, size: int) -> ShardingTask:
    """The task of each of several groups of the ranks of a task: a group has its part of the batch, and a device of its plan the
    least memory of its replicas. Raises InvalidInput."""
    replicas = groups.replicas(size)
    if task.batch_size % replicas:
        raise InvalidInput(f"a batch of {task.batch_size:,} samples does not divide over {replicas} groups")
    members = [groups.members(group, size) for group in range(replicas)]
    own = {
        "device_memory_bytes": tuple(
            min(task.device_memory_bytes[ranks[device]] for ranks in members) for device in range(size)
        ),
        "batch_size": task.batch_size // replicas,
        "topology": groups.topology(size, task.topology),
        "groups": groups,
    }
    return ShardingTask.parse({**dict(task), **own}, "the task of a group")


def cheapest(plans: Mapping[str, Plan], failed: Mapping[str, NeuroshardError]) -> tuple[Plan, tuple[str, ...]]:
    """The cheapest of plans of one task in groups of several sizes, by their names, the first of equal ones; and a line on each
    of the others. Where there is none, raises why: an error that is not one of room, or Infeasible."""
    if not plans:
        errors = list(failed.values())
        if not any(isinstance(error, Infeasible) for error in errors):
            what, first = next(iter(failed.items()))
            raise type(first)(f"{what}: {first}")
        if len(errors) == 1:
            raise errors[0]
        proven = all(isinstance(error, Infeasible) and error.proven for error in errors)
        what, error = next(iter(failed.items()))  # of those with most memory
        more = counted(len(errors) - 1, "other choice")
        raise Infeasible(f"{what}: {error}; {more} of groups tried, without a plan", proven=proven)
    best, *others = sorted(plans, key=lambda what: plans[what].cost_ms or 0.0)
    lines = [f"{best} is the cheapest of {len(plans) + len(failed)} that were searched"] if others or failed else []
    lines += [f"{what} would take {plans[what].cost_ms:.3f} ms a step{_of_which(plans[what])}" for what in others]
    return plans[best], (*lines, *(f"{what} would have no plan: {error}" for what, error in failed.items()))


def _of_which(plan: Plan) -> str:
    ms = plan.predicted[0].averaging_ms if plan.predicted else 0.0
    return f", of which {ms:.3f} ms averaging" if ms else ""


def averaging_notes(plan: Plan, model: CostModel) -> tuple[str, ...]:
    """Lines on what groups cost, and do to training; none without groups."""
    task = plan.task
    if task.groups is None:
        return ()
    groups, size = task.groups, task.devices
    found = averaging(model, task, averaged_bytes(task, plan.shards))
    each = found.ms / groups.sync_every
    ways = [(found.near_bytes, "inside domains"), (found.far_bytes, "over the network between them")]
    sent = " and ".join(f"{format_bytes(nbytes)} {where}" for nbytes, where in ways if nbytes)
    notes = [
        f"{groups.text(size)}: a rank averages up to {format_bytes(found.nbytes)} of weights and optimizer state, for which it "
        f"sends {sent}; that takes {found.ms:.3f} ms, {each:.3f} ms a step in the mean, by rates of all-to-alls, not measured",
        f"{groups.replicas(size)} replicas take {format_bytes(groups.replicas(size) * sum(plan.memory_bytes()))} of memory in "
        f"all; each group trains on {task.batch_size:,} of {task.global_batch_size:,} samples a step, so only SGD that is "
        "averaged every step trains as one group does (docs/trainer.md says what becomes of row-wise Adagrad)",
    ]
    return tuple(notes)


def may_average_less(plan: Plan, model: CostModel, worth: float) -> bool:
    """Whether a plan whose devices hold equally many bytes might cost less by more than a share `worth`."""
    ms = plan.predicted[0].averaging_ms if plan.predicted else 0.0
    return plan.cost_ms is not None and ms - least_averaging_ms(model, plan.task) > worth * plan.cost_ms


def less_memory(plan: Plan, problem: Problem, share: float) -> Ints:
    """Bytes (D,) that devices must have less, so that the fullest holds above the mean only this share of what it does."""
    used = np.array(plan.memory_bytes()) - np.subtract(plan.task.usable_bytes, plan.task.placeable_bytes)
    most = used.mean() + share * (used.max() - used.mean())
    less: Ints = np.maximum(problem.root.memory - math.ceil(most), 0)
    return less
