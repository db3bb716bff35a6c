"""All-to-alls that leave a domain of fast links: what goes over the network, and what stays near.

Near and far bytes travel at the same time, so an all-to-all takes as long as the slower of the two. Each rank has its own share
of the network. With D ranks in domains of L, a rank sends (L - 1) / D of its outputs near and (D - L) / D far.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np

from neuroshard.core.errors import UsageError
from neuroshard.core.part import Part
from neuroshard.core.precision import SHARE_OF_FP32, CollectivePrecision
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, Floats
from neuroshard.costmodel.tiers import MoreTerms, in_tiers


class MoreColumns(NamedTuple):
    """Columns of each device (D,) beyond those that a cost model is asked about; fewer where negative: sent inside its domain
    (`near`), sent out of it (`far`), and encoded where all-to-alls are not in fp32."""

    near: Floats | float = 0.0
    far: Floats | float = 0.0
    encoded: Floats | float = 0.0


@dataclass(frozen=True)
class Network:
    """What joins domains of `domain` ranks: `bytes_per_ms` out of and into each rank, and `latency_ms` of a small message.

    `near_more` and `far_more` are as in `MoreColumns`, but bytes. `given` means that no datasheet had a part in it.
    """

    domain: int
    bytes_per_ms: float
    latency_ms: float
    given: bool = False
    near_more: Floats | float = field(default=0.0, compare=False)
    far_more: Floats | float = field(default=0.0, compare=False)

    def joins(self, devices: int) -> bool:
        """Whether so many devices are more than one domain."""
        return devices > self.domain

    def far_ms(self, device_bytes: Floats) -> Floats:
        """Ms over the network, from the bytes of all samples' outputs on each device: (…, D) -> (…, 1).

        It ends on all devices when the busiest is done. No device receives more than the busiest sends.
        """
        devices = device_bytes.shape[-1]
        far = (device_bytes + self.far_more).max(axis=-1, keepdims=True) * ((devices - self.domain) / devices)
        ms: Floats = self.latency_ms + far / self.bytes_per_ms
        return ms

    def near(self, device_bytes: Floats) -> Floats:
        """Bytes of outputs on each device for which an all-to-all of one domain alone sends the near bytes: (…, D) -> (…, D)."""
        return np.asarray((device_bytes + self.near_more) * (self.domain / device_bytes.shape[-1]))


class ForTasks(CostModel, Protocol):
    """A cost model that knows near from far, and what a device waits for its input."""

    @property
    def precision(self) -> CollectivePrecision | None:
        """Of the collectives that it predicts."""

    @property
    def network_bytes_per_ms(self) -> float:
        """What it takes a device to send to other domains; 0 where it joins none."""

    def for_task(self, task: ShardingTask, *, waiting: bool) -> "ForTasks":
        """The same model for the topology and the precision of a task, and with `waiting` for input, if its steps wait for it."""

    def sending_more(self, more: MoreColumns) -> CostModel:
        """The same model for devices that send more than the `device_dims` that it is asked about."""

    def waiting_ms(self, vector_sums: Floats) -> Floats:
        """Of what `compute_ms` predicts, the ms that devices wait for their input: (…, K) -> (…)."""


def knows_tasks(model: CostModel) -> TypeGuard[ForTasks]:
    """Whether it is a `ForTasks`. Asked for every plan priced; isinstance would look through all members of the protocol."""
    return hasattr(type(model), "for_task")


def for_task(model: CostModel, task: ShardingTask, *, waiting: bool = True) -> CostModel:
    """The cost model for a task's topology, pipeline and tiers.

    Without a topology it has its own idea of it: a datasheet's node, or fast links between all. Given costs have all-to-alls in
    them, whatever the topology; raises UsageError where the task says in which precision these are.
    """
    if isinstance(model, MoreTerms):
        return model.for_task(task, waiting=waiting)
    if knows_tasks(model):
        return in_tiers(model.for_task(task, waiting=waiting), task)
    if task.collective_precision is not None:
        raise UsageError(
            f"given costs have all-to-alls in them, so they do not say what "
            f"{task.collective_precision.text} saves; leave out --collective-precision"
        )
    return in_tiers(model, task)


def sending_more(model: CostModel, more: MoreColumns) -> CostModel:
    """As `ForTasks.sending_more`; other models know no domains, and price all columns alike."""
    return model.sending_more(more) if knows_tasks(model) else model


# Encoding and decoding 25 M elements took 0.24 ms on an H100 (torchrec#4696): as long as 32 bytes an element take through its
# memory. Other devices are taken to move as many bytes.
CODEC_BYTES = 32.0


FORWARD, BACKWARD = 0, 1  # places of a way in the fields of Codec


class Codec(NamedTuple):
    """What a precision makes of all-to-alls: bytes, as shares of fp32's, and ms that a column of all samples takes to encode and
    decode; forward and backward."""

    shares: tuple[float, float] = (1.0, 1.0)
    column_ms: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, precision: CollectivePrecision | None, batch_size: int, memory_bytes_per_ms: float) -> "Codec":
        """The codec of a precision (None: fp32, as it is) on a device whose memory has this rate."""
        if precision is None:
            return cls()
        ways, ms = (precision.forward, precision.backward), batch_size * CODEC_BYTES / memory_bytes_per_ms
        forward, backward = ((SHARE_OF_FP32[way], ms * (way != "fp32")) for way in ways)
        return cls((forward[0], backward[0]), (forward[1], backward[1]))


class DomainMs(NamedTuple):
    """Ms that one column more on every device adds to both all-to-alls, if only what stays in a domain counts (`near`), and if
    only what leaves it does (`far`). All tables are assumed whole, and evenly spread."""

    near: float
    far: float

    @classmethod
    def of(cls, model: CostModel, task: ShardingTask) -> "DomainMs":
        """For all tables of the task, copies too: so the rates do not depend on which are copied."""
        sent = sum(Part.of(table).sent_columns for table in task.tables)
        columns, devices = max(sent, 1.0) / task.devices, task.devices
        nothing = np.zeros(devices)

        def ms(near: float, far: float) -> float:
            """Both all-to-alls where every device sends so many columns in its domain, and out of it."""
            some = sending_more(model, MoreColumns(np.full(devices, near), np.full(devices, far), nothing))
            return float((some.forward_collective_ms(nothing, nothing) + some.backward_collective_ms(nothing)).max())

        more, step = 1.01 * columns, 0.01 * columns
        return cls(
            max(ms(more, 0.0) - ms(columns, 0.0), 0.0) / step,
            max(ms(0.0, more) - ms(0.0, columns), 0.0) / step,
        )


def waiting_ms(model: CostModel, vector_sums: Floats) -> Floats:
    """What devices wait for their input, as far as the model knows: (…, K) -> (…)."""
    return model.waiting_ms(vector_sums) if knows_tasks(model) else np.zeros(vector_sums.shape[:-1])


def input_ms_per_column(model: CostModel, task: ShardingTask) -> float:
    """Ms for each column of input (`Part.input_columns`) that a device receives; 0 where a step waits for none.

    Input comes in as gradients do: by an all-to-all that the receiver's links limit. A device can begin once its own is there.
    The rate is that of an all-to-all of all lookups, spread evenly, whichever tables are copied.
    """
    if not task.waits_for_input or task.devices == 1:
        return 0.0
    columns = sum(Part.of(table).input_columns for table in task.tables) / task.devices
    if not columns:
        return 0.0
    even, nothing = (model.backward_collective_ms(np.full(task.devices, each)) for each in (columns, 0.0))
    return max(float(even.max() - nothing.max()), 0.0) / columns
