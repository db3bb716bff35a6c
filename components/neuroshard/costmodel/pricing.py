"""The predicted cost of given shards on given devices: for a plan, a live plan, and each shard by itself."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.launches import launches, operators_of
from neuroshard.core.operator_limits import Device
from neuroshard.core.part import Part
from neuroshard.core.parts import ByAccess
from neuroshard.core.plan import DeviceCost, Plan, Shard, parts_of, sharding_of
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import short_name
from neuroshard.costmodel.averaging import all_to_alls_of, averaged_bytes, averaging_ms
from neuroshard.costmodel.network import DomainMs, MoreColumns, for_task, knows_tasks, sending_more, waiting_ms
from neuroshard.costmodel.protocol import CostModel, Floats, device_costs, trains_on

# gloo has no reduce-scatter: it runs an all-reduce, which sends twice as much (bytes counted on four ranks, torch 2.13). With the
# all-gather that is three times the bytes of one all-to-all instead of two. NCCL has both.
GLOO_BLOCKS = 1.5


class MapMs(NamedTuple):
    """Ids to rows by access: ms of a kernel, of a lookup that one passes over, and of a lookup compared with an id of a list, as
    a binary search does; and with one of a long list, after the first NEAR_IDS."""

    kernel: float
    passed: float
    compared: float
    far: float

    def a_sample(self, by_access: ByAccess) -> float:
        """Ms of the lookups of a sample, without those of the kernels' launches."""
        return by_access.passed * self.passed + by_access.compared * self.compared + by_access.far * self.far


# On a CPU as measured with torch on one core (`make bench-rows`), idle, and with the other cores busy: ns a lookup, dealt and
# in two parts: 5 to 9 and 14 to 25 where ids are in order; with 2^10 listed ids 50 to 66 and 66 to 78, with 2^14 67 to 79 and 79
# to 93, with 2^17 92 to 114 and 102 to 130, with 2^19 124 to 156 and 134 to 166. On a GPU guesses, of passes that read and write
# 20 bytes at 3 TB/s, and reads of 32 bytes at 1.6 TB/s, half of what its memory does in order
MAP_MS: Mapping[Device, MapMs] = {
    "cuda": MapMs(5e-3, 0.007e-6, 0.02e-6, 0.02e-6),
    "cpu": MapMs(5e-3, 0.7e-6, 4e-6, 14e-6),
}


# Of a lookup of a sequence whose ids are sent once: FBGEMM's jagged_unique_indices calls at::_unique, whose radix sort moves keys
# and values of 8 bytes in 8 passes, and passes over them some ten times: 360 bytes at 3 TB/s. On a CPU, where FBGEMM has no such
# kernel, what torch.unique with its inverse took on one core: 16 to 40 ns
UNIQUE_MS: Mapping[Device, float] = {"cuda": 0.12e-6, "cpu": 25e-6}


def check_searched_with(plan: Plan, model: CostModel, begins: str) -> None:
    """Raise InvalidInput, whose message begins with `begins`, unless the plan was searched with this cost model."""
    by = plan.provenance.cost_model
    if by != model.name:
        had = f"cost model {short_name(by)}" if by else "no cost model"
        way_out = "give that one, give none" if by else "give none"
        raise InvalidInput(
            f"{begins} {short_name(model.name)}, but the plan was searched with {had}; {way_out}, or search again with this one"
        )


def map_ms(model: CostModel, task: ShardingTask) -> float:
    """What each device takes a step to find, of the ids of its own samples, their rows by access, and the distinct ones where
    these are sent once. Both come with the rest of the input (client/rows/sharded.py): on a GPU a pipeline hides their launches,
    as those of input all-to-alls, but not their work."""
    device, by_access = trains_on(model), task.by_access
    price, once = MAP_MS[device], math.fsum(table.every_lookup for table in task.tables if table.sent_once)
    is_hidden = device == "cuda" and not task.exchanges_input
    a_sample = price.a_sample(by_access) + once * UNIQUE_MS[device]
    return a_sample * task.batch_size / task.devices + (0.0 if is_hidden else by_access.kernels * price.kernel)


class LaunchMs(NamedTuple):
    """Ms of launches on every device: operators, forward and backward together, and collectives each way."""

    compute_ms: float
    forward_ms: float
    backward_ms: float

    @property
    def total_ms(self) -> float:
        return sum(self)


class LaunchPrices(NamedTuple):
    """What one launch of each kind takes, in ms, without any data: an operator, a collective forward and one backward; and a
    reordered column of all samples."""

    operator_ms: float
    forward_ms: float
    backward_ms: float
    reorder_ms: float

    @classmethod
    def of(cls, model: CostModel, devices: int) -> "LaunchPrices":
        if devices == 1:
            return cls(model.operator_ms, 0.0, 0.0, 0.0)
        nothing = np.zeros(devices)
        each = (model.forward_collective_ms(nothing, nothing), model.backward_collective_ms(nothing))
        forward, backward = (max(float(ms.max()), 0.0) for ms in each)
        return cls(model.operator_ms, forward, backward, model.reorder_ms / devices)

    def ms(self, operators: int, outputs: int, inputs: int = 0, reordered: float = 0.0) -> LaunchMs:
        """As `launch_ms`."""
        copied = reordered * self.reorder_ms / 2
        return LaunchMs(
            operators * self.operator_ms,
            (outputs + inputs) * self.forward_ms + copied,
            outputs * self.backward_ms + copied,
        )


def launch_ms(
    model: CostModel, devices: int, operators: int, outputs: int, inputs: int = 0, reordered: float = 0.0
) -> LaunchMs:
    """The latency of this many operators, collectives of outputs each way, and all-to-alls of inputs, without any data; and what
    each device takes to copy this many `reordered` columns of its own samples once more, half of it each way.

    A cost model predicts one all-to-all each way, and the operators of the element types and poolings that a device holds.
    TorchRec launches more (core/launches.py), since it runs each collection and sharding type by itself; this prices the rest.
    Their bytes are part of the one all-to-all. Every device is assumed to run every operator of the plan.
    """
    return LaunchPrices.of(model, devices).ms(operators, outputs, inputs, reordered)


class CopyPrices:
    """What N data-parallel tables take on every device, some of them at a time: operators of their own, and the all-reduce of
    their dense gradients.

    A ring all-reduce of n elements sends 2n (D - 1) / D from each device, as many as an all-to-all of 2n / batch columns. What
    DDP overlaps with the backward pass of dense layers is not taken off. Where ranks train in groups, D is all of them.
    """

    def __init__(self, model: CostModel, tables: Sequence[Table], task: ShardingTask) -> None:
        task = task.model_copy(update={"collective_precision": None})  # DDP sums gradients up as they are
        self.tables, self.devices, self.ranks = tables, task.devices, task.ranks
        self.model = for_task(model, task, waiting=False)  # their lookups stay on the device
        self.summing = self.model if task.groups is None else all_to_alls_of(model, task.of_all_ranks)
        self.vectors = self.model.part_vectors([Part.of(table, copies=self.devices) for table in tables])
        self.columns = np.array([2 * table.rows * table.dim / self.model.batch_size for table in tables])

    def ms(self, copied: Sequence[int]) -> LaunchMs:
        """Of the tables with these numbers."""
        if not len(copied):
            return LaunchMs(0.0, 0.0, 0.0)
        chosen, tables = np.asarray(copied), [self.tables[table] for table in copied]
        more = _operators(tables) - operators_of(tables)
        compute = float(self.model.compute_ms(self.vectors[chosen].sum(axis=0)))
        compute += launch_ms(self.model, self.devices, more, 0).compute_ms
        if self.ranks == 1:
            return LaunchMs(compute, 0.0, 0.0)
        backward = self.summing.backward_collective_ms(np.full(self.ranks, self.columns[chosen].sum()))
        return LaunchMs(compute, 0.0, float(backward.max()))


def copies_ms(model: CostModel, copied: Sequence[Table], task: ShardingTask) -> LaunchMs:
    """What data-parallel tables take on every device (`CopyPrices`)."""
    return CopyPrices(model, copied, task).ms(range(len(copied))) if copied else LaunchMs(0.0, 0.0, 0.0)


def _operators(copied: Sequence[Table]) -> int:
    """The operators that a device runs for data-parallel tables."""
    return len({(table.element_bytes, table.pooling, table.weighted, table.module) for table in copied})


def columns_sent(model: CostModel, part: Part) -> float:
    """Columns that a device which has the part sends for a sample."""
    return part.sent_columns if part.rows == part.table.rows else block_columns(model, part)


def block_columns(model: CostModel, block: Part) -> float:
    """Columns whose all-to-alls, forward and backward, take as long as the collectives of a row block.

    A pooled table's sums are added up by a reduce-scatter, and their gradients come back by an all-gather, each of as many bytes.
    """
    if block.table.pooling == "none":
        return block.sent_columns
    over_gloo = trains_on(model) == "cpu"
    precision = model.precision if knows_tasks(model) else None
    return block.sent_columns * (GLOO_BLOCKS if over_gloo else 1.0) * (precision.rows_factor if precision else 1.0)


class HostColumns(NamedTuple):
    """Columns that each device of a table-row-wise pooled table sends inside its domain and out of it, (P,) each.

    Sums for the samples of all devices are added up inside the domain, by a reduce-scatter; then each device sends those of its
    share of the samples on. These run one after the other, but what is sent near and far is priced as sent at once: so `out` is
    `least`, the columns really sent out, and as many more as take as long as `inside` does. `encoded` are those of both
    collectives, where they are not in fp32.
    """

    inside: Floats
    out: Floats
    least: Floats
    encoded: Floats

    @classmethod
    def of(cls, model: CostModel, blocks: Sequence[Part], devices: int, domain: int, rates: DomainMs) -> "HostColumns":
        """Those of P `blocks` over `devices` in domains of `domain`, by the model's `rates` inside a domain and out of it."""
        sums = np.array([block_columns(model, block) for block in blocks], dtype=np.float64)
        inside = sums * (devices // domain)
        least = np.array([block.sent_columns for block in blocks], dtype=np.float64) / domain
        waits = inside * (rates.near / rates.far if rates.far > 0 else 0.0)
        return cls(inside, least + waits, least, sums + least)


class Prices(NamedTuple):
    """Predicted ms: three of each device (D,), two of each shard (S,), and what averaging replicas adds to all devices.

    `alone_ms` is the compute of a device that holds the shard alone; `adds_ms` is what its device would save without it,
    and of a copy what it would take more beside the shards that are no copies.
    """

    compute_ms: Floats
    forward_collective_ms: Floats
    backward_collective_ms: Floats
    alone_ms: Floats
    adds_ms: Floats
    averaging_ms: float = 0.0

    @property
    def total_ms(self) -> Floats:
        total: Floats = self.compute_ms + self.forward_collective_ms + self.backward_collective_ms + self.averaging_ms
        return total

    @property
    def of_devices(self) -> tuple[DeviceCost, ...]:
        """The costs of each device, as plans have them."""
        parts = self.compute_ms, self.forward_collective_ms, self.backward_collective_ms
        return tuple(
            DeviceCost(
                compute_ms=compute,
                forward_collective_ms=forward,
                backward_collective_ms=backward,
                averaging_ms=self.averaging_ms,
            )
            for compute, forward, backward in zip(*(part.tolist() for part in parts), strict=True)
        )


def price_shards(
    model: CostModel, task: ShardingTask, shards: Sequence[Shard], *, evenly: bool = False
) -> Prices | None:
    """Prices of shards of a task's tables; None if a shard is a row block and the model cannot price rows. With `evenly` each
    device is taken to hold as much as all do on average, but for what tables send over domains beyond `columns_sent`.

    Copies are of the tables that the task says are data-parallel. A row block is priced as a `Part`.
    It sends as many bytes as a shard with all rows, or more (`block_columns`): each device that holds rows sends its partial sums
    for all samples; over a domain (table-row-wise), as `HostColumns` says. Where a step waits for its input, the forward
    all-to-all includes that. Compute includes maps of ids to rows by access.
    """
    task, given = task.parted, model
    tables, devices, model = {table.name: table for table in task.tables}, task.devices, for_task(model, task)
    if not model.prices_rows and any(shard.rows != tables[shard.table].rows for shard in shards):
        return None
    of_table: dict[str, list[Shard]] = {}
    for shard in shards:
        of_table.setdefault(shard.table, []).append(shard)
    copied = task.constraints.data_parallel & of_table.keys()
    vectors, sent = _vectors_and_sent(model, parts_of(task, shards))
    sends = np.array([shard.table not in copied for shard in shards], dtype=bool)
    sent *= sends
    holders = np.array([shard.device for shard in shards], dtype=np.int64)
    sums, device_dims = np.zeros((devices, vectors.shape[1])), np.zeros(devices)
    np.add.at(sums, holders, vectors * sends[:, None])
    np.add.at(device_dims, holders, sent)
    if evenly:
        sums[:], device_dims[:] = sums.mean(axis=0), device_dims.mean()
    between = model
    if task.topology is not None and task.topology.domains(devices) > 1:
        between = sending_more(model, _in_domains(model, task, of_table, task.topology.domain))
    compute, forward, backward = device_costs(between, sums, device_dims)
    copied_tables = [tables[name] for name in sorted(copied)]
    copies = copies_ms(model, copied_tables, task)
    more = _more_launches_ms(model, task, shards, copied_tables)
    # the sums are without copies: one adds what it would to them
    without = np.where(sends[:, None], sums[holders] - vectors, sums[holders])
    others = np.where(device_dims[holders] > sent, model.compute_ms(without), 0.0)
    beside = np.where(sends, compute[holders], model.compute_ms(without + vectors))
    waiting = waiting_ms(model, sums)
    return Prices(
        compute_ms=compute - waiting + more.compute_ms + copies.compute_ms + map_ms(model, task),
        forward_collective_ms=forward + waiting + more.forward_ms,
        backward_collective_ms=backward + more.backward_ms + copies.backward_ms,
        alone_ms=model.compute_ms(vectors),
        adds_ms=beside - others,
        averaging_ms=0.0 if task.groups is None else averaging_ms(given, task, averaged_bytes(task, shards)),
    )


def _vectors_and_sent(model: CostModel, parts: Sequence[Part]) -> tuple[Floats, Floats]:
    """The vector of each part (S, K), and the columns that it sends if it is no copy (S,).

    Parts of one shape are priced once: hundreds of devices hold blocks of equally many rows.
    """
    shapes = {(part.table.name, *part.size): part for part in parts}
    place = {shape: index for index, shape in enumerate(shapes)}
    kinds = [place[part.table.name, *part.size] for part in parts]
    distinct = list(shapes.values())
    sent = np.array([columns_sent(model, part) for part in distinct])
    return model.part_vectors(distinct)[kinds], sent[kinds]


def _more_launches_ms(
    model: CostModel, task: ShardingTask, shards: Sequence[Shard], copied: Sequence[Table]
) -> LaunchMs:
    """What TorchRec launches for the shards beyond what the model predicts, without data; `copied` tables are priced apart."""
    tables, names = {table.name: table for table in task.tables}, {table.name for table in copied}
    counted = launches(task, shards)
    rest = (tables[name] for name in dict.fromkeys(shard.table for shard in shards) if name not in names)
    operators = counted.kinds_of_operators - _operators(copied) - operators_of(rest)
    inputs = counted.inputs if task.exchanges_input else 0
    return launch_ms(model, task.devices, operators, max(counted.outputs - 1, 0), inputs, counted.reordered)


def _in_domains(
    model: CostModel, task: ShardingTask, of_table: Mapping[str, Sequence[Shard]], domain: int
) -> MoreColumns:
    """What table-row-wise tables send beyond the columns that `columns_sent` counts."""
    near, far, encoded = np.zeros((3, task.devices))
    rates = DomainMs.of(model, task)
    for table in task.tables:
        shards = of_table.get(table.name, ())
        if len(shards) % domain or not sharding_of(task, table, shards).over_domains:
            continue
        blocks = [Part(table, shard.rows, shard.dim, domain) for shard in shards]
        columns = HostColumns.of(model, blocks, task.devices, domain, rates)
        on = [shard.device for shard in shards]
        counted = [columns_sent(model, block) for block in blocks]
        np.add.at(near, on, columns.inside - counted)
        np.add.at(far, on, columns.out - counted)
        np.add.at(encoded, on, columns.encoded - counted)
    return MoreColumns(near, far, encoded)
