"""What it takes to average the replicas of groups of ranks, as DMPCollection does: weights and optimizer state of all shards.

An all-reduce of n bytes over R replicas sends 2n (R - 1) / R from each rank, along rings that leave each domain once: so 1/r of
the bytes leave it, where r of the replicas are in a domain. Every rank is in one such all-reduce, all at the same time, so each
has its share of the network. It is priced as an all-to-all in which every rank sends as many bytes near and far. Then all ranks
wait for the one with the most bytes, since the next all-to-all needs all of its group.

Not covered: what overlaps with dense layers, and reading and writing the tables in HBM.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from neuroshard.core.errors import UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.part import Part
from neuroshard.core.plan import Shard, shard_memory
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import short_name
from neuroshard.core.topology import Topology
from neuroshard.costmodel.network import MoreColumns, for_task, sending_more
from neuroshard.costmodel.protocol import CostModel, predicts

GRADIENT_BYTES = 4  # of an element in an all-to-all


class Averaging(NamedTuple):
    """Of the rank that holds most: bytes of weights and optimizer state, those that it sends inside its domain and out of it, and
    the ms that all ranks take. Each time, not each step."""

    nbytes: float
    near_bytes: float
    far_bytes: float
    ms: float


def averaging(model: CostModel, task: ShardingTask, nbytes: float) -> Averaging:
    """Averaging replicas of a task in groups, where a rank holds at most so many bytes of weights and optimizer state.

    Raises UsageError where the model cannot predict all-to-alls between as many ranks.
    """
    assert task.groups is not None
    near_share, far_share = _shares(task.groups, task.devices)
    near, far = nbytes * near_share, nbytes * far_share
    together = task.of_all_ranks
    if not far:  # then all ranks of a domain take part, and no network
        devices = min(task.groups.domain, task.ranks)
        alone = Topology(domain=devices, local_world_size=min(devices, task.groups.local_world_size))
        together = together.model_copy(
            update={"device_memory_bytes": together.device_memory_bytes[:devices], "topology": alone}
        )
    return Averaging(nbytes, near, far, _all_to_all_ms(model, together, near, far))


def _shares(groups: Groups, size: int) -> tuple[float, float]:
    """Bytes that a rank sends near and far for each byte that is averaged."""
    replicas, near = groups.replicas(size), groups.replicas_near(size)
    sent = 2 * (replicas - 1) / replicas
    return (sent, 0.0) if near == replicas else (sent * (near - 1) / near, sent / near)


def _all_to_all_ms(model: CostModel, task: ShardingTask, near_bytes: float, far_bytes: float) -> float:
    """An all-to-all of all devices of a task, in which each sends so many bytes inside its domain and out of it."""
    devices = task.devices
    model = all_to_alls_of(model, task)
    to_each = model.batch_size / devices * GRADIENT_BYTES  # bytes of a column
    if not far_bytes:
        return float(model.backward_collective_ms(np.full(devices, near_bytes / (to_each * (devices - 1)))).max())
    domain, nothing = task.topology.domain if task.topology is not None else devices, np.zeros(devices)
    near = near_bytes / (to_each * max(domain - 1, 1))
    far = far_bytes / (to_each * (devices - domain))
    some = sending_more(model, MoreColumns(np.full(devices, near), np.full(devices, far), nothing))
    return float(some.backward_collective_ms(nothing).max())


def all_to_alls_of(model: CostModel, task: ShardingTask) -> CostModel:
    """The model for what is summed up over all devices of a task, in fp32. Raises UsageError where it does not predict that."""
    if not model.prices_rows:
        raise UsageError(
            "given costs have all-to-alls in them, so they do not say what averaging the replicas of groups takes; leave out "
            "--group-size"
        )
    model = for_task(model, task.model_copy(update={"collective_precision": None}), waiting=False)
    if not predicts(model, task.devices):
        known = ", ".join(map(str, model.device_counts))
        raise UsageError(
            f"cost model {short_name(model.name)} predicts all-to-alls of {known} devices, not of {task.devices}, over which "
            "groups of ranks sum up copies and replicas; say how ranks are joined (--domain), or take a cost model that does"
        )
    return model


def averaged_bytes(task: ShardingTask, shards: Sequence[Shard]) -> int:
    """Bytes of weights and optimizer state of the device that holds most in these shards, without copies, which all ranks train
    alike."""
    held, copied = [0] * task.devices, task.constraints.data_parallel
    for shard, memory in zip(shards, shard_memory(task, shards), strict=True):
        if shard.table not in copied:
            held[shard.device] += memory.weights + memory.optimizer
    return max(held)


def averaging_ms(model: CostModel, task: ShardingTask, nbytes: float) -> float:
    """What a step takes more for averaging, where a rank holds at most so many bytes; 0 without groups."""
    if task.groups is None:
        return 0.0
    return averaging(model, task, nbytes).ms / task.groups.sync_every


def least_averaging_ms(model: CostModel, task: ShardingTask) -> float:
    """What a step takes more for averaging in any plan with the same copies: cuts and row blocks only add optimizer state."""
    if task.groups is None:
        return 0.0
    nbytes = sum(memory.weights + memory.optimizer for memory in task.memories([*map(Part.of, task.placed)]))
    return averaging_ms(model, task, nbytes / task.devices)
