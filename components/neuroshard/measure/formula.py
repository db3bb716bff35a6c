"""The cost of table sets and all-to-alls on a GPU, as a formula: no clock, no noise.

The formula has what makes a real GPU hard to predict. Tables fused into one kernel share it, so their costs do not add up: a
small set cannot fill the device; memory traffic of one table overlaps with instructions of another; the rows of all tables
compete for the cache. Narrow rows waste memory sectors and instructions, so columns cost more when split. Tables of another
element type, pooling or weighting need another kernel. In an all-to-all, all devices wait for the last one to start and for the
largest share. Magnitudes are those of an H100 (SXM, 80 GB, NVLink), but nothing was fitted to one.

The terms of a set are the sum of its tables' terms, so many sets are evaluated at once: `forward_ms(part_terms(…).sum(axis=0))`.
"""

import statistics
from collections.abc import Sequence
from itertools import product

import numpy as np

from neuroshard import __version__
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase, TierCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, Hardware, TierCost
from neuroshard.core.errors import MeasureError, UsageError
from neuroshard.core.part import Part
from neuroshard.core.plan import DeviceCost
from neuroshard.core.table import ELEMENT_BYTES, Table
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.features import distinct_rows, facts_of, rounded_up, widths_of
from neuroshard.costmodel.protocol import Floats, Unlearned, slope_by_differences
from neuroshard.measure.backends import MeasureSettings, of_bench
from neuroshard.measure.timing.harness import Timing, collective_cost, compute_cost, timing

DEVICE_NAME = "formula of an H100"
MEMORY_BYTES = 80 * 2**30

# Rates are per millisecond.
HBM_BYTES = 2.4e9  # 3.35 TB/s at the peak; rows at random reach about 70 %
CACHE_BYTES = 5.5e9  # L2
CACHE_SIZE = 50e6
SECTOR_BYTES = 32  # the smallest unit that memory moves
VECTOR_COLUMNS = 128  # a warp moves 32 lanes x 4 columns in one instruction, also for narrower rows
FORWARD_VECTORS = 25e6  # 132 multiprocessors, 1.7 GHz, about 9 cycles each
BACKWARD_VECTORS = 12e6
BAGS_IN_FLIGHT = 4224  # 132 multiprocessors x 32 warps, one bag each: so many bags use half of the device
LOOKUP_MS = 150e-6  # from one lookup of a bag to the next, a memory access of 600 ns with 4 in flight
FORWARD_LAUNCH_MS = 0.008
BACKWARD_LAUNCH_MS = 0.045  # about ten kernels: linearise, sort, group, update
FORWARD_TABLE_MS = 0.0004
BACKWARD_TABLE_MS = 0.0015
SORT_BYTES = 48  # read and written for each lookup in each pass of the radix sort, which takes 8 bits of the row number
OVERLAP = 4.0  # resources used at once take the 4-norm of their times: at most 2^(1/4) times the longer one

LINK_BYTES = 0.35e9  # NVLink: 450 GB/s each way at the peak
BACKWARD_LINK_BYTES = 0.31e9  # all peers send to one device at the same moment
BASE_LATENCY_MS = 0.015
PEER_LATENCY_MS = 0.002
SHARED_WAIT = 0.7  # share of a transfer that is the slowest device's; the rest is the device's own

# Table.operator_key, whatever the width: one launch each
OPERATORS = tuple(product(ELEMENT_BYTES.values(), ("sum", "mean", "none"), (False, True)))

TERMS = (
    "tables",
    "bags",
    "lookups",
    "distinct_bytes",  # of rows at their first lookup, in whole sectors
    "repeated_bytes",  # of rows at every further lookup
    "output_bytes",
    "gradient_bytes",  # read once for every lookup
    "state_bytes",  # of the optimizer
    "vectors",  # instructions that move one row of up to 128 columns
    "rows",
    "pooling_to_the_8th",  # its 8th root is nearly the longest bag
    "sample_weight_bytes",  # of the lookups of weighted tables
    "mean_bytes",  # of gradients that are divided by the lookups of their bag
    *(f"tables_of_operator_{index}" for index in range(len(OPERATORS))),
)
LONGEST = 8


def part_terms(parts: Sequence[Part], batch_size: int) -> Floats:
    """Terms of N parts of tables: (N, len(TERMS)). A set has the sum of its parts' terms."""
    (rows, pooling, vectors, element_bytes, counted_on), bins = facts_of(parts)
    tables, dims = [part.table for part in parts], widths_of(parts)
    distinct = distinct_rows(rows, pooling, bins, counted_on, batch_size)
    lookups = pooling * batch_size
    row_bytes = rounded_up(dims * element_bytes, SECTOR_BYTES)
    weighted, mean = (
        np.array(flags, dtype=float) for flags in ([t.weighted for t in tables], [t.pooling == "mean" for t in tables])
    )
    terms = {
        "tables": np.ones(len(tables)),
        "bags": batch_size * vectors,
        "lookups": lookups,
        "distinct_bytes": distinct * row_bytes,
        "repeated_bytes": (lookups - distinct) * row_bytes,
        "output_bytes": batch_size * vectors * dims * 4.0,
        "gradient_bytes": lookups * dims * 4.0,
        "state_bytes": distinct * 2.0 * SECTOR_BYTES,
        "vectors": lookups * rounded_up(dims, VECTOR_COLUMNS) / VECTOR_COLUMNS,
        "rows": rows,
        "pooling_to_the_8th": (pooling / vectors) ** LONGEST,
        "sample_weight_bytes": weighted * lookups * 4.0,
        "mean_bytes": mean * batch_size * vectors * dims * 2 * 4.0,
    }
    operators = np.array([OPERATORS.index(table.operator_key[:3]) for table in tables], dtype=np.int64)
    return np.column_stack([*terms.values(), np.eye(len(OPERATORS))[operators]])


def forward_ms(terms: Floats) -> Floats:
    """Forward of sets, from the sums of their tables' terms: (…, len(TERMS)) -> (…). 0 for a set without tables."""
    of = _by_name(terms)
    hit = CACHE_SIZE / (CACHE_SIZE + of["distinct_bytes"])
    moved = of["distinct_bytes"] + (1 - hit) * of["repeated_bytes"] + of["output_bytes"] + 8 * of["lookups"]
    moved = moved + of["sample_weight_bytes"]
    memory = moved / HBM_BYTES + hit * of["repeated_bytes"] / CACHE_BYTES
    busy = _overlapped(memory * _idle(of), of["vectors"] / FORWARD_VECTORS * _idle(of), _longest_bag_ms(of))
    return _if_any(of, FORWARD_LAUNCH_MS * _launches(of) + FORWARD_TABLE_MS * of["tables"] + busy)


def backward_ms(terms: Floats) -> Floats:
    """Backward and optimizer of sets: (…, len(TERMS)) -> (…). 0 for a set without tables."""
    of = _by_name(terms)
    hit = CACHE_SIZE / (CACHE_SIZE + of["output_bytes"])
    passes = np.ceil(np.log2(np.maximum(of["rows"], 2)) / 8)
    moved = (1 - hit) * of["gradient_bytes"] + 2 * of["distinct_bytes"] + of["state_bytes"]
    moved = moved + of["sample_weight_bytes"] + of["mean_bytes"]
    sort = SORT_BYTES * passes * of["lookups"] / HBM_BYTES
    memory = moved / HBM_BYTES + hit * of["gradient_bytes"] / CACHE_BYTES
    busy = _overlapped(memory * _idle(of), of["vectors"] / BACKWARD_VECTORS * _idle(of), _longest_bag_ms(of))
    return _if_any(of, BACKWARD_LAUNCH_MS * _launches(of) + BACKWARD_TABLE_MS * of["tables"] + sort + busy)


def compute_ms(tables: Sequence[Table], batch_size: int) -> float:
    """Forward and backward of a device with these tables."""
    terms = part_terms(list(map(Part.of, tables)), batch_size).sum(axis=0)
    return float(forward_ms(terms) + backward_ms(terms))


def forward_collective_ms(device_dims: Floats, start_delays_ms: Floats, batch_size: int) -> Floats:
    """Forward all-to-all from each device's own start: two (…, D) -> (…, D). No device ends before the last one starts."""
    own = _transfer_ms(device_dims, batch_size, LINK_BYTES)
    return start_delays_ms.max(axis=-1, keepdims=True) - start_delays_ms + own


def backward_collective_ms(device_dims: Floats, batch_size: int) -> Floats:
    """Backward all-to-all with all devices starting together: (…, D) -> (…, D)."""
    return _transfer_ms(device_dims, batch_size, BACKWARD_LINK_BYTES)


def _transfer_ms(device_dims: Floats, batch_size: int, link_bytes: float) -> Floats:
    """Latencies, and the larger of what a device sends and receives over its link; in part the slowest device's."""
    dims = np.asarray(device_dims, dtype=np.float64)
    devices = dims.shape[-1]
    sent = (devices - 1) * dims
    received = dims.sum(axis=-1, keepdims=True) - dims
    own = np.maximum(sent, received) * (batch_size / devices * 4) / link_bytes
    slowest = own.max(axis=-1, keepdims=True)
    return BASE_LATENCY_MS + PEER_LATENCY_MS * (devices - 1) + SHARED_WAIT * slowest + (1 - SHARED_WAIT) * own


def _by_name(terms: Floats) -> dict[str, Floats]:
    return {name: terms[..., index] for index, name in enumerate(TERMS)}


def _idle(of: dict[str, Floats]) -> Floats:
    """By what factor work takes longer than on a fully used device."""
    return 1 + BAGS_IN_FLIGHT / np.maximum(of["bags"], 1)


def _launches(of: dict[str, Floats]) -> Floats:
    """One operator for each kind of table in the set."""
    return np.sum([of[f"tables_of_operator_{index}"] > 0 for index in range(len(OPERATORS))], axis=0, dtype=np.float64)


def _longest_bag_ms(of: dict[str, Floats]) -> Floats:
    # sums from which tables were subtracted again can be a little below 0
    return np.asarray(LOOKUP_MS * np.maximum(of["pooling_to_the_8th"], 0.0) ** (1 / LONGEST), dtype=np.float64)


def _overlapped(*times: Floats) -> Floats:
    return np.asarray(sum(time**OVERLAP for time in times) ** (1 / OVERLAP), dtype=np.float64)


def _if_any(of: dict[str, Floats], time: Floats) -> Floats:
    return np.where(of["tables"] > 0, time, 0.0)


def reorder_ms(batch_size: int) -> float:
    """As in costmodel/protocol.py: fp32 outputs and gradients are read and written once."""
    return 16 * batch_size / HBM_BYTES


class Formula(Unlearned):
    """The formula as a cost model (costmodel/protocol.py): the predictions of a perfectly trained one."""

    name = "formula"
    backend = "synthetic"
    device_name = DEVICE_NAME
    bounded = False  # what the cache saves falls as sets grow
    prices_rows = True
    operator_ms = FORWARD_LAUNCH_MS + BACKWARD_LAUNCH_MS

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    @property
    def reorder_ms(self) -> float:
        return reorder_ms(self.batch_size)

    def part_vectors(self, parts: Sequence[Part]) -> Floats:
        return part_terms(parts, self.batch_size)

    def compute_ms(self, vector_sums: Floats) -> Floats:
        return forward_ms(vector_sums) + backward_ms(vector_sums)

    def compute_slope(self, vector_sums: Floats) -> Floats:
        return slope_by_differences(self.compute_ms, vector_sums)

    def forward_collective_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        return forward_collective_ms(device_dims, start_delays_ms, self.batch_size)

    def backward_collective_ms(self, device_dims: Floats) -> Floats:
        return backward_collective_ms(device_dims, self.batch_size)


NOISE = 0.03  # standard deviation of the logarithm of one repeat: GPU kernels repeat to a few per cent


class Synthetic:
    """Costs by the formula. The same seed, case and round give the same cost, in any order."""

    most_devices: int | None = None
    no_tiers = "the formula of backend synthetic has no tiers"
    concurrency = 1
    apart = False

    def __init__(self, cases: Cases, settings: MeasureSettings, begun: Bench | None) -> None:
        self.settings, self.repeats = settings, settings.repeats
        memory_bytes = settings.memory_limit_bytes or MEMORY_BYTES
        if settings.traces is not None:
            raise UsageError(f"the formula uses no lookups: leave out --traces {settings.traces}")
        nameless = Hardware(kind="synthetic", name=DEVICE_NAME, memory_bytes=memory_bytes)
        if settings.hardware is not None and settings.hardware.kind != "synthetic":
            raise MeasureError(
                f"the formula cannot measure a {settings.hardware.kind} device: {settings.hardware.name}"
            )
        self.bench = Bench(
            backend="synthetic",
            hardware=settings.hardware or nameless,
            **of_bench(settings),
            versions={"neuroshard": __version__},
            reorder_ms=reorder_ms(settings.batch_size),
            notes=(f"a formula, not measured: measure/formula.py with {NOISE:.0%} noise a repeat",),
        )

    def compute(self, case: ComputeCase, round_: int) -> ComputeCost:
        needed, memory = sum(table.memory_bytes for table in case.tables), self.bench.hardware.memory_bytes
        if needed > memory:
            error = f"out of memory: the tables need {format_bytes(needed)} of {format_bytes(memory)}"
            return ComputeCost(case_id=case.case_id, round=round_, error=error)
        parts, batch_size = [Part.of(table) for table in case.tables], case.batch_size or self.settings.batch_size
        terms = part_terms(parts, batch_size).sum(axis=0)
        truth = np.array([forward_ms(terms), backward_ms(terms)])
        forward, backward = self._measured(case.case_id, round_, truth)
        return compute_cost(case, round_, forward, backward)

    def compute_many(self, cases: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        return [self.compute(case, round_) for case, round_ in cases]

    def all_to_all(self, case: CollectiveCase, round_: int) -> CollectiveCost:
        dims, delays = np.array(case.device_dims, dtype=float), np.array(case.start_delays_ms)
        truth = np.concatenate(
            [
                forward_collective_ms(dims, delays, self.settings.batch_size),
                backward_collective_ms(dims, self.settings.batch_size),
            ]
        )
        timings = self._measured(case.case_id, round_, truth)
        return collective_cost(case, round_, timings[: len(dims)], timings[len(dims) :])

    def beyond_hbm(self, case: TierCase, round_: int) -> TierCost:
        raise MeasureError(self.no_tiers)

    def steps(self, sets: Sequence[ComputeCase | None], all_to_all: CollectiveCase) -> list[DeviceCost] | None:
        return None

    def close(self) -> None:
        """Nothing to end."""

    def _measured(self, case_id: str, round_: int, truth: Floats) -> list[Timing]:
        """Each true time with noise, as the median of `repeats`, since the noise goes both ways: (N,) -> N timings."""
        rng = np.random.default_rng([self.settings.seed, int(case_id, 16), round_])
        noise = rng.lognormal(0.0, NOISE, (self.repeats, len(truth)))
        return [timing(column, statistics.median) for column in (truth * noise).T.tolist()]
