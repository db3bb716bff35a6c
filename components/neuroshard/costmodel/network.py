"""All-to-alls that leave a domain of fast links: what goes over the network, and what stays near.

Near and far bytes travel at the same time, so an all-to-all takes as long as the slower of the two. Each rank has its own share
of the network. With D ranks in domains of L, a rank sends (L - 1) / D of its outputs near and (D - L) / D far.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.protocol import CostModel, Floats


@dataclass(frozen=True)
class Network:
    """What joins domains of `domain` ranks: `bytes_per_ms` out of and into each rank, and `latency_ms` of a small message."""

    domain: int
    bytes_per_ms: float
    latency_ms: float

    def joins(self, devices: int) -> bool:
        """Whether so many devices are more than one domain."""
        return devices > self.domain

    def far_ms(self, device_bytes: Floats) -> Floats:
        """Ms over the network, from the bytes of all samples' outputs on each device: (…, D) -> (…, 1).

        It ends on all devices when the busiest is done. No device receives more than the busiest sends.
        """
        devices = device_bytes.shape[-1]
        far = device_bytes.max(axis=-1, keepdims=True) * ((devices - self.domain) / devices)
        ms: Floats = self.latency_ms + far / self.bytes_per_ms
        return ms

    def near(self, device_bytes: Floats) -> Floats:
        """Bytes of outputs on each device with which one domain alone would exchange as much as goes near: (…, D) -> (…, D)."""
        return np.asarray(device_bytes * (self.domain / device_bytes.shape[-1]))


@runtime_checkable
class Networked(CostModel, Protocol):
    """A cost model that knows near from far."""

    def over(self, topology: Topology) -> CostModel:
        """The same model for devices that are laid out like this."""


def laid_out(model: CostModel, task: ShardingTask) -> CostModel:
    """The cost model for the topology of a task. Without one, the model's own idea of it: a datasheet's node, or fast links
    between all. Given costs have their all-to-alls in them, whatever the topology."""
    if task.topology is None or not isinstance(model, Networked):
        return model
    return model.over(task.topology)
