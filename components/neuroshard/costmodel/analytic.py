"""A cost model from datasheets alone, for a cold start: `neuroshard search --model analytic:h100`. Nothing was measured.

A pass (forward or backward) over a device's tables takes as long as the busier of two resources: memory and the cache (L2).
Memory takes bytes over bandwidth, and on top of that loads over what the device has in flight: a warp loads one row and waits
for it, so a device finishes (multiprocessors x warps) loads in each latency. Faster memory does not shorten that part.
Every lookup moves through the cache. The first one of a row in a batch comes from memory, and so do those later ones whose row
was pushed out in between: FBGEMM goes through the bags table by table, so a table has the cache to itself, and a row comes
back after as many bytes as its table has rows, with the outputs written meanwhile. In backward the gradients of a table's bags
stay in the cache as far as they fit. An all-to-all takes a latency plus the bytes of the busiest device over its busier link.

Every term is a sum over tables, and a cost is a maximum of such sums. So the cost of a device is convex in the sums and never
falls when a table is added.

A table beyond HBM (core/tiers.py) takes more (`Analytic.beyond_hbm`). Through a cache, each lookup is sorted and looked for,
and a missed row is fetched from host memory while another is written back. Rows in host memory, and state of elements there, are
read and written in place.

Rates are published peaks times the share of them that is achieved. How far that is from what others measured: docs/benchmarks.md.
Not covered: table sets too small to fill the device.
"""

import copy
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from neuroshard.core.cost import Hardware
from neuroshard.core.errors import UsageError
from neuroshard.core.hardware_names import words
from neuroshard.core.part import Part
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.features import but_for_widths, distinct_rows, facts_of, rounded_up, widths_of
from neuroshard.costmodel.network import BACKWARD, FORWARD, Codec, MoreColumns, input_ms_per_column
from neuroshard.costmodel.protocol import CostModel, Floats, Unlearned
from neuroshard.costmodel.report import STAND_IN_ERROR
from neuroshard.costmodel.tiers import BeyondHbm

OUTPUT_BYTES = 4  # pooled outputs and their gradients are fp32
INDEX_BYTES = 8
SORT_BYTES = 24  # a lookup and pass of the radix sort by row number: 8 B key and 4 B value, read and written
# Narrow rows leave lanes of a warp idle. Factors as in TorchRec's planner (QUARTER_ and HALF_BLOCK_PENALTY in its
# constants.py): (columns below, factor of the cost).
NARROW: tuple[tuple[int, float], ...] = ((64, 1.75), (128, 1.15))
WARP_COLUMNS = 128  # that a warp loads at once: 32 lanes x 4 columns. Narrower rows share a warp
STATE_ELEMENT_BYTES = 4  # an optimizer's state is fp32, and each of its tensors a load
UNKNOWN_GPU = "h100"  # the datasheet for GPUs without one
SPREAD = STAND_IN_ERROR  # of a device's predicted total, with NVLink


@dataclass(frozen=True)
class Datasheet:
    """Peak rates of a device in bytes a millisecond, one way, and latencies; `node` devices share the fast link.

    Defaults are a GPU's. The shares are of the peaks, and are taken to be the same on all GPUs.
    """

    device_name: str
    memory: float
    cache: float  # rate of L2
    cache_bytes: float
    link: float
    network: float
    sector_bytes: int = 32  # the least that memory moves (CUDA C++ Best Practices Guide, coalesced access)
    narrow: tuple[tuple[int, float], ...] = NARROW
    forward_launch_ms: float = 0.010  # two kernels of 5 us, about what CUDA takes to launch one
    backward_launch_ms: float = 0.050  # ten: linearise, sort in passes, group, update
    memory_share: float = 0.90  # where enough loads are in flight: FBGEMM's regroup of rows on an H100 (torchrec#4634)
    # Loads in flight: the warps of FBGEMM's kernels on a multiprocessor, by their launch bounds (pytorch/FBGEMM). Forward of
    # pooled tables is built for 2,048 threads (embedding_forward_split_kernel_v2_template.cu); that of sequences states no bound,
    # and is taken to have as many. Backward is built for one block of 512 (embedding_backward_split_kernel_warp_template.cu)
    multiprocessors: int = 1
    forward_warps: int = 64
    backward_warps: int = 16
    memory_wait_ms: float = 0.0  # of a load that memory answers
    cache_wait_ms: float = 0.0  # and one that the cache answers
    spread: float | None = None  # of a predicted total; None: not known
    link_share: float = 0.78  # H100 SXM: 335 of 450 GB/s on 4 GPUs (NVIDIA/nccl#2169), 370 on 8 (NVIDIA/nccl-tests#212)
    network_share: float = 0.95  # H100: 46 to 49 of 50 GB/s a port (NVIDIA/nccl-tests#130)
    node: int = 8  # DGX and HGX
    bus: float = 0.0  # to the host's memory; 0 where a device has no other memory
    # What nvidia-smi reports, a little less than the name of the card says; 0 where a device has no memory of its own
    memory_mib: int = 0
    # Of the bus: rows fetched into a cache while as many are written back, and rows read or written in place. And what every
    # lookup through a cache takes: sort, find, insert. From the two rows of an H100 with Adam and a cache (0.8 and 1.0 of the
    # rows read) of NVIDIA/recsys-examples@43465aea, whose misses were simulated; a counter of misses ran beside them. Their rows
    # had 512 B: narrower ones are taken to move at the same rate
    fetch_share: float = 0.89
    in_place_share: float = 0.72
    lookup_ms: float = 2.2e-6
    latency_ms: float = 0.020  # of a small NCCL message inside a node
    network_latency_ms: float = 0.040  # and how much more beyond

    @property
    def network_rate(self) -> float:
        """Bytes a millisecond that a device sends over the network, one way."""
        return self.network * self.network_share

    def reorder_ms(self, batch_size: int) -> float:
        """As in the protocol: outputs and gradients are read and written once."""
        return 4 * OUTPUT_BYTES * batch_size / (self.memory * self.memory_share)


def _datasheets() -> dict[str, Datasheet]:
    """Those of datasheets.toml, where each number has its source."""
    raw = tomllib.loads(Path(__file__).with_name("datasheets.toml").read_text())

    def said(name: str) -> dict[str, Any]:
        own = raw[name]
        return {**said(own["like"]), **own} if "like" in own else own

    found = {}
    for name in raw:
        facts = {key: value for key, value in said(name).items() if key != "like"}
        cycles, gigahertz = facts.pop("cycles", (0, 0)), facts.pop("gigahertz", 1.0)
        memory_wait_ms, cache_wait_ms = (each / gigahertz / 1e6 for each in cycles)
        narrow = tuple(map(tuple, facts.pop("narrow", NARROW)))
        found[name] = Datasheet(**facts, narrow=narrow, memory_wait_ms=memory_wait_ms, cache_wait_ms=cache_wait_ms)
    return found


DATASHEETS = _datasheets()


class Analytic(Unlearned):
    """A protocol.CostModel of one datasheet. A vector is five times in ms: memory and cache forward, the same backward, and
    waiting for input."""

    backend = "analytic"
    bounded = True
    prices_rows = True

    def __init__(self, name: str, batch_size: int) -> None:
        self.name, self.batch_size, self.sheet = f"analytic:{name}", batch_size, DATASHEETS[name]
        self.error_on_unseen_tables = self.sheet.spread
        self.input_ms = 0.0  # a column of input, where steps wait for it
        self.precision: CollectivePrecision | None = None
        self.codec = Codec()
        self.more = MoreColumns()
        self.network_given = False

    def for_task(self, task: ShardingTask, *, waiting: bool) -> "Analytic":
        """As in network.ForTasks. The network between domains is the topology's, else the datasheet's."""
        found = copy.copy(self)
        found.more, found.network_given = MoreColumns(), False
        if task.topology is not None:
            given = task.topology.network_bytes_per_s
            network = self.sheet.network_rate if given is None else given / 1000
            found.network_given = given is not None
            found.sheet = replace(self.sheet, node=task.topology.domain, network=network, network_share=1.0)
            if task.topology.network_latency_ms is not None:
                more_ms = max(task.topology.network_latency_ms - self.sheet.latency_ms, 0.0)
                found.sheet = replace(found.sheet, network_latency_ms=more_ms)
        found.input_ms = input_ms_per_column(found, task) if waiting else 0.0
        found.precision = task.collective_precision
        found.codec = Codec.of(found.precision, self.batch_size, self.sheet.memory)
        return found

    def sending_more(self, more: MoreColumns) -> "Analytic":
        """As in network.ForTasks."""
        found = copy.copy(self)
        found.more = more
        return found

    def waiting_ms(self, vector_sums: Floats) -> Floats:
        return np.asarray(vector_sums[..., 4])

    @property
    def network_bytes_per_ms(self) -> float:
        return self.sheet.network_rate

    @property
    def device_name(self) -> str:
        return self.sheet.device_name

    @property
    def operator_ms(self) -> float:
        return self.sheet.forward_launch_ms + self.sheet.backward_launch_ms

    @property
    def reorder_ms(self) -> float:
        return self.sheet.reorder_ms(self.batch_size)

    def part_vectors(self, parts: Sequence[Part]) -> Floats:
        """N parts of tables -> (N, 5) ms."""
        some, index = but_for_widths(parts)
        facts, bins = facts_of(some.values())
        rows, pooling, vectors, element, counted_on = facts[:, index]
        more = [
            (part.table.optimizer_bytes_per_element, part.table.optimizer_bytes_per_row, part.input_columns)
            for part in some.values()
        ]
        state, row_state, inputs = np.array(more, dtype=np.float64).reshape(-1, 3)[index].T
        bins, columns, sheet = bins[index], widths_of(parts), self.sheet
        distinct, lookups = distinct_rows(rows, pooling, bins, counted_on, self.batch_size), pooling * self.batch_size
        row = rounded_up(columns * element, sheet.sector_bytes) * self._narrow(columns)
        gradient = rounded_up(columns * OUTPUT_BYTES, sheet.sector_bytes) * self._narrow(columns)
        state_row = rounded_up(columns * state, sheet.sector_bytes) + rounded_up(row_state, sheet.sector_bytes)
        output = self.batch_size * vectors * columns * OUTPUT_BYTES
        passes = np.ceil(np.log2(np.maximum(rows, 2)) / 8)
        again, row_missed = lookups - distinct, rows_lost(distinct, lookups, row, output, sheet.cache_bytes)
        bags = np.minimum(self.batch_size * vectors, lookups)
        gradient_missed = _missed(output, sheet.cache_bytes)
        forward = distinct * row + again * row * row_missed + output + lookups * INDEX_BYTES
        gradients_again = np.maximum(lookups * gradient - output, 0.0) * gradient_missed
        backward = 2 * distinct * (row + state_row) + gradients_again + output + lookups * passes * SORT_BYTES
        reading = self._waits_ms(distinct + again * row_missed, again * (1 - row_missed), sheet.forward_warps)
        updating = self._waits_ms(
            distinct * (1 + state / STATE_ELEMENT_BYTES + (row_state > 0)) + bags + (lookups - bags) * gradient_missed,
            (lookups - bags) * (1 - gradient_missed),
            sheet.backward_warps,
        )
        warps = self._narrow(columns) * np.minimum(columns / WARP_COLUMNS, 1.0)  # that a row takes
        rate = sheet.memory * sheet.memory_share
        cached = (lookups * gradient + 2 * distinct * row) / sheet.cache
        waiting = self.input_ms * inputs
        terms = (
            forward / rate + reading * warps,
            lookups * row / sheet.cache,
            backward / rate + updating * warps,
            cached,
            waiting,
        )
        return np.stack(terms, axis=-1)

    @property
    def has_tiers(self) -> bool:
        """Whether the device has memory beyond its own."""
        return self.sheet.bus > 0

    @property
    def tiers_from(self) -> str:
        """As in tiers.KnowsTiers."""
        return "by the rates of a datasheet's bus, not measured"

    def beyond_hbm(self, parts: Sequence[Part]) -> BeyondHbm:
        """What (N,) parts of tables take more beyond HBM.

        As in HBM, a table is read row by row; a row that L2 has lost comes over the bus again. Where a row lies in a cache is a
        load more before its own.
        """
        sheet = self.sheet
        (rows, pooling, vectors, element, counted_on), bins = facts_of(parts)
        state = np.array([part.table.optimizer_bytes_per_element for part in parts], dtype=np.float64)
        distinct, lookups = distinct_rows(rows, pooling, bins, counted_on, self.batch_size), pooling * self.batch_size
        columns = widths_of(parts)
        row = rounded_up(columns * element, sheet.sector_bytes)
        output = self.batch_size * vectors * columns * OUTPUT_BYTES
        lost = rows_lost(distinct, lookups, row, output, sheet.cache_bytes)
        in_place = sheet.bus * sheet.in_place_share
        updated, places = distinct * columns * state / in_place, np.zeros_like(lookups)
        populated = lookups * sheet.lookup_ms
        return BeyondHbm(
            populated + self._waits_ms(lookups, places, sheet.forward_warps),
            row / (sheet.bus * sheet.fetch_share),
            (distinct + (lookups - distinct) * lost) * row / in_place,
            updated + self._waits_ms(lookups, places, sheet.backward_warps),
            updated + distinct * row / in_place,
            populated,
            updated,
        )

    def compute_ms(self, vector_sums: Floats) -> Floats:
        forward, backward = self.parts_ms(vector_sums)
        ms: Floats = forward + backward + vector_sums[..., 4]
        return ms

    def parts_ms(self, vector_sums: Floats) -> tuple[Floats, Floats]:
        """Forward and backward ms, without waiting: (…, 5) -> two (…)."""
        forward, backward = vector_sums[..., :2].max(axis=-1), vector_sums[..., 2:4].max(axis=-1)
        return forward + self.sheet.forward_launch_ms, backward + self.sheet.backward_launch_ms

    def compute_slope(self, vector_sums: Floats) -> Floats:
        """1 for the busier resource of each pass and for waiting, 0 for the others."""
        memory = vector_sums[..., 0:4:2] >= vector_sums[..., 1:4:2]
        slope = np.ones_like(vector_sums)
        slope[..., 0:4:2], slope[..., 1:4:2] = memory, ~memory
        return slope

    def forward_collective_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        waiting: Floats = start_delays_ms.max(axis=-1, keepdims=True) - start_delays_ms
        return waiting + self._transfer_ms(device_dims, FORWARD)

    def backward_collective_ms(self, device_dims: Floats) -> Floats:
        return self._transfer_ms(device_dims, BACKWARD)

    def caveats(self, devices: int, parts: Sequence[Part] = ()) -> tuple[str, ...]:
        """As in the protocol."""
        if devices <= self.sheet.node or self.network_given:
            return ()
        return (
            f"devices send {self.sheet.network_rate * 1000 / 1e9:.3g} GB/s to other domains by their datasheet; measure yours "
            "(`neuroshard network`) and say --network",
        )

    def _waits_ms(self, from_memory: Floats, from_cache: Floats, warps: int) -> Floats:
        """Ms that loads take, if each occupies a warp for its latency, and all warps of the device are busy (Little's law)."""
        in_flight = self.sheet.multiprocessors * warps
        ms: Floats = (from_memory * self.sheet.memory_wait_ms + from_cache * self.sheet.cache_wait_ms) / in_flight
        return ms

    def _narrow(self, dims: Floats) -> Floats:
        """The factor of narrow rows: (N,) dims -> (N,)."""
        factors = np.ones_like(dims)
        for below, factor in reversed(self.sheet.narrow):
            factors[dims < below] = factor
        return factors

    def _transfer_ms(self, device_dims: Floats, way: int) -> Floats:
        """Ms of the all-to-all of outputs (FORWARD), or of their gradients (BACKWARD): (…, D) -> (…, D).

        It ends on all devices when the busiest is done; a device also encodes its own.
        A device sends its columns to D - 1 peers, and receives theirs. Of its traffic, the share of its peers in the node takes
        the fast link, the rest the network, at the same time.
        """
        dims = np.asarray(device_dims, dtype=np.float64)
        devices = dims.shape[-1]
        if devices == 1:
            return np.zeros_like(dims)
        near = (min(devices, self.sheet.node) - 1) / (devices - 1)
        # of a column that goes to one device
        byte_count = self.batch_size / devices * OUTPUT_BYTES * self.codec.shares[way]

        def most(sent: Floats) -> Floats:  # bytes of the busiest device
            received = sent.sum(axis=-1, keepdims=True) - sent
            busiest: Floats = np.maximum((devices - 1) * sent, received).max(axis=-1, keepdims=True) * byte_count
            return busiest

        ms = self.sheet.latency_ms + most(dims + self.more.near) * (near / (self.sheet.link * self.sheet.link_share))
        if near < 1:
            far = most(dims + self.more.far) * ((1 - near) / self.sheet.network_rate)
            ms = np.maximum(ms, self.sheet.latency_ms + far) + self.sheet.network_latency_ms
        transfer: Floats = ms + self.codec.column_ms[way] * (dims + self.more.encoded)
        return transfer


# Words in a device's name that fit its datasheet. With any other (PCIe, NVL, 40GB, MIG) a datasheet answers for another device.
_FITTING_WORDS = words("nvidia amd instinct oam sxm sxm4 sxm5 sxm6 ac 80gb hbm3 hbm3e 141gb 180gb nvl72")


def sheet_of(device_name: str) -> str | None:
    """The name of the first datasheet whose words are all in a device's name; None where there is none."""
    return next((sheet for sheet in DATASHEETS if words(sheet) <= words(device_name)), None)


def analytic_for(hardware: Hardware | None, called: str = "") -> tuple[str, bool]:
    """The name of the datasheet for a kind of hardware, and whether the datasheet is its own.

    A GPU's datasheet is found by the GPU's name, or by `called` where only a name is known. A CPU core answers for all CPUs, and
    the most common GPU for everything else that has no datasheet.
    """
    if hardware and hardware.kind == "cpu":
        return "cpu", False
    name = hardware.name if hardware else called
    sheet = sheet_of(name)
    return sheet or UNKNOWN_GPU, sheet is not None and words(name) - words(sheet) <= _FITTING_WORDS


def memory_of(model: CostModel) -> int | None:
    """Bytes of memory of the device that a model is of: where it was measured, or by its datasheet. None where neither says."""
    if model.manifest is not None:
        return model.manifest.bench.hardware.memory_bytes
    return model.sheet.memory_mib * 2**20 or None if isinstance(model, Analytic) else None


def analytic_model(name: str, batch_size: int | None) -> Analytic:
    """The analytic model called `name`. Raises UsageError that lists the known ones, or asks for the batch size."""
    if name not in DATASHEETS:
        raise UsageError(f"unknown analytic model {name!r}; known: {', '.join(f'analytic:{n}' for n in DATASHEETS)}")
    if batch_size is None:
        raise UsageError(
            f"analytic:{name} computes costs for a batch size: give --batch-size, samples a step over all devices"
        )
    return Analytic(name, batch_size)


def rows_lost(distinct_rows: Floats, lookups: Floats, row_bytes: Floats, output: Floats, cache_bytes: float) -> Floats:
    """The share (N,) of repeated lookups of rows that find them pushed out of the cache: before a row comes back, all distinct
    rows pass, and the `output` bytes of as many lookups."""
    return _missed(distinct_rows * (row_bytes + output / np.maximum(lookups, 1)), cache_bytes)


def _missed(between: Floats, cache_bytes: float) -> Floats:
    """The share of reads that find their bytes pushed out of the cache, by the bytes that passed since the last read."""
    return np.asarray(between / (between + cache_bytes))
