"""Host memory in a search: what tables beyond HBM take of it, and a price for more than a device's share.

The devices of a host share its memory. A search counts bytes by device, so where a first search wants more of a host than there
is, a second one pays for what a device has beyond an even share of its host. Plans are compared by what hosts really hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.core.part import Part
from neuroshard.core.plan import Shard, host_memory
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, Floats
from neuroshard.costmodel.tiers import MoreTerms

DEAR = 10.0  # a tenth more than its share costs a device as much as a whole step does: a guess


class InShares(MoreTerms):
    """A cost model in whose ms each byte of host memory beyond a device's share takes some more, one term. `task` says where."""

    def __init__(self, inner: CostModel, task: ShardingTask, prices: "HostPrices") -> None:
        super().__init__(inner, 1)
        self.task, self.prices = task, prices

    def of_parts(self, parts: Sequence[Part]) -> Floats:
        return np.array([[float(memory.host)] for memory in self.task.memories(parts)]).reshape(-1, 1)

    def terms_ms(self, terms: Floats) -> Floats:
        ms: Floats = np.maximum(terms[..., 0] - self.prices.share_bytes, 0.0) * self.prices.ms
        return ms

    def terms_slope(self, terms: Floats) -> Floats:
        return np.where(terms > self.prices.share_bytes, self.prices.ms, 0.0)


@dataclass(frozen=True)
class HostPrices:
    """What a device has of its host's memory, in bytes, and the ms of a byte more."""

    share_bytes: float
    ms: float

    @classmethod
    def of(cls, task: ShardingTask, cost_ms: float) -> "HostPrices":
        """For plans that cost about so many ms."""
        share = (task.host_memory_bytes or 0) / task.devices_of_host
        if task.devices_of_host == task.devices:  # of one host: what all hold is what counts, not where
            return cls(share, 0.0)
        return cls(share, DEAR * cost_ms / max(share, 1.0))


def bytes_over(task: ShardingTask, shards: Sequence[Shard]) -> int:
    """Bytes that these shards need of hosts beyond what each has."""
    limit = task.host_memory_bytes or 0
    return sum(max(used - limit, 0) for used in host_memory(task, shards))
