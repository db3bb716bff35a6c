"""What lives on each rank in a training step of TorchRec, beside weights and optimizer state: a ledger, by moment and by cause.

A step's peak is the largest of its moments, and a moment is a sum of terms that follow from tables, plan, batch and pipeline.
Nothing is fitted but how many batches a pipeline has in flight (core/step_memory.py). The terms are those of TorchRec 1.8, read
in its source and seen in the memory events of real steps (tests/bench/memory.py; docs/benchmarks.md has how well they fit).

Sizes are bytes on one rank. `lookup` is the output of a group's lookup, for the samples of all ranks; `output` is what the rank
gets of it after the exchange, for its own samples. Not covered: what the dense layers keep (`dense_bytes`), other temporaries of
FBGEMM's CUDA kernels than sorted ids, caches, and batches of which the samples differ from rank to rank.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from neuroshard.core.part import Part
from neuroshard.core.precision import ADDED_UP_AS, SHARE_OF_FP32, CollectivePrecision, Precision
from neuroshard.core.sharding import DATA_PARALLEL, ROW_WISE, TABLE_WISE, Group, Sharding
from neuroshard.core.skew import Loads, largest_block
from neuroshard.core.step_memory import (
    LENGTH_BYTES,
    LOOKUP_BYTES,
    OFFSET_BYTES,
    OUTPUT_BYTES,
    WEIGHT_BYTES,
    Batches,
    InFlight,
    Pipeline,
    in_flight,
    output_bytes,
    own_input_bytes,
)
from neuroshard.core.task import ShardingTask

GLOO_THREADS = 2  # of a process group, by default: so many collectives run at once

Cause = (
    Literal["inputs", "lookup outputs", "exchange", "codec", "outputs", "gradients"]
    | Literal["sorted ids", "gradient buckets", "dense layers", "allocator"]
)
# FBGEMM's backward pass on a GPU sorts the ids that it looks up (`transpose_embedding_input`): of a lookup row number (int64) and
# info (int32; int64 of sequences), both also sorted, and of equal ones the row (int64), how many (int32) and how many before
# (int32). The sort's own buffers are gone when the last are made, and take no more.
POOLED_SORTED_BYTES, SEQUENCE_SORTED_BYTES = 2 * (8 + 4) + 16, 2 * (8 + 8) + 16
Moment = (
    Literal["input exchange", "lookup", "forward encode", "forward exchange", "outputs put together", "dense layers"]
    | Literal["backward encode", "backward exchange", "backward order"]
)


@dataclass
class Traffic:
    """Bytes of a group of tables that run together (a collection's of one sharding type), on one rank."""

    group: Group
    own: float = 0.0  # its share of the rank's own batch
    sent: float = 0.0
    received: float = 0.0
    kept: float = 0.0  # the ids and offsets that FBGEMM keeps until its next lookup
    weights: float = 0.0  # of the ids that it received, which the backward pass reads
    sorted_ids: float = 0.0  # what FBGEMM's backward pass on a GPU makes of them
    lengths: float = 0.0  # how many lengths it receives
    order: float = 0.0  # where ids of a row-wise sequence, or of an id map, lay before they were sent
    unmapped: float = 0.0  # ids that it received, beside the rows that their tables gave them
    lookup: float = 0.0
    middle: float = 0.0  # what a domain's ranks have after they added their rows up
    output: float = 0.0
    brought: float = 0.0  # what its exchange brings: the output, or once for each distinct id
    # Where ids are sent once, what a batch's context keeps: ids and lengths as they are sent, and the inverse
    once: float = 0.0
    inverse: float = 0.0  # of that, what the backward pass reads
    means: bool = False  # whether its collection divides its sums, and with them those of its other groups
    buckets: float = 0.0  # gradients of data-parallel tables, which DistributedDataParallel keeps
    copies: dict[Hashable, float] = field(default_factory=dict)  # gradients of data-parallel tables, by operator
    one_sender: bool = True  # whether all its outputs come from one rank, or one domain
    reordered: bool = False  # whether cuts bring its outputs out of order
    operators: dict[Hashable, float] = field(default_factory=dict)  # the lookup of each, which TorchRec joins

    @property
    def sequences(self) -> bool:
        return self.group.sequences

    @property
    def apart(self) -> float:
        """The gradient of an operator's outputs, which is copied out of those of several."""
        return max(self.operators.values()) if len(self.operators) > 1 and not self.sequences else 0.0

    @property
    def lengths_in_order(self) -> float:
        """Lengths of sequences times their columns, as received and in the order of outputs, which the backward pass reads."""
        return 16 * self.lengths * self.sequences


@dataclass
class Collection:
    """The groups of a collection, in the order in which they run, and the copy of its own input in the order in which features
    are sent, if that is not the order of the batch."""

    groups: list[Traffic] = field(default_factory=list)
    permuted: float = 0.0

    @property
    def copied(self) -> bool:
        """Whether some of its tables are data-parallel, whose lookups read the permuted input."""
        return any(group.group.sharding.copied for group in self.groups)

    @property
    def sent(self) -> float:
        """Its input as it is sent: row blocks' has an order of its own, others' is the permuted one, which sequences keep in any
        case."""
        blocks = sum(group.sent for group in self.groups if group.group.sharding.splits_rows)
        return blocks + self._permuted_for(len(self.groups) > self._of_blocks)

    @property
    def context(self) -> float:
        """What the context of a batch keeps where ids are sent once: the permuted input too."""
        once = self.sum("once")
        return once + self.permuted if once else 0.0

    @property
    def divisor(self) -> float:
        """By which its sums are divided, where it makes means of them."""
        return self.sum("output") if any(group.means for group in self.groups) else 0.0

    @property
    def sent_as_it_is(self) -> float:
        """Its input, if that is what is sent."""
        return self.sum("own") if not self.permuted and len(self.groups) > self._of_blocks else 0.0

    @property
    def kept_for_lookups(self) -> float:
        """What the forward pass keeps of the permuted input: that of sequences, and what copies look up."""
        return self.permuted if self.copied else self._permuted_for(False)

    def _permuted_for(self, sent: bool) -> float:
        """The permuted input, if it is sent, or of sequences. Where ids are sent once, it is in what the context keeps."""
        kept = (sent or self.groups[0].sequences) and not self.sum("once")
        return self.permuted if kept else 0.0

    @property
    def _of_blocks(self) -> int:
        return sum(group.group.sharding.splits_rows for group in self.groups)

    def sum(self, name: str) -> float:
        return sum((getattr(group, name) for group in self.groups), 0.0)


class StepPeak(NamedTuple):
    """The most that lives at once on a rank in a step: its bytes, when, and what they are."""

    nbytes: int
    moment: Moment
    causes: dict[Cause, int]


class Piece(NamedTuple):
    """A shard of a plan: the part of its table, which is held with this `sharding`, its first column and its device."""

    part: Part
    sharding: Sharding
    column_offset: int
    device: int


def step_peaks(
    task: ShardingTask, pieces: Sequence[Piece], pipeline: Pipeline | None = None, *, gloo: bool = False
) -> tuple[StepPeak, ...]:
    """The peak of each rank that holds these pieces of the tables of a (parted) task, by the task's pipeline unless one is given.
    With `gloo` it is what is measured of a step on a CPU: collectives copy what they add up, as NCCL's do not, the buckets of
    gradients, which were there before, do not count, and nothing is held beyond what tensors take. Raises KeyError for a pipeline
    that is not in IN_FLIGHT."""
    flight = in_flight(pipeline or task.pipeline or "none", task.pipeline_options or ())
    precision = task.collective_precision or CollectivePrecision()
    found = []
    for collections in traffic(task, pieces):
        buckets = 0.0 if gloo else sum(one.sum("buckets") for one in collections)
        step = _Step(collections, flight, precision, gloo, task.dense_memory_bytes or 0)
        moment, causes = max(step.moments(), key=lambda one: sum(one[1].values()))
        held = 0.0 if gloo else (task.with_allocator - 1) * sum(causes.values())
        causes += Counter[Cause]({"gradient buckets": buckets, "allocator": held})
        whole: dict[Cause, int] = {cause: round(nbytes) for cause, nbytes in causes.items() if nbytes >= 1}
        found.append(StepPeak(sum(whole.values()), moment, whole))
    return tuple(found)


class _Sent(NamedTuple):
    """A feature's share of a rank's input that goes to a rank, of these columns of its table."""

    rank: int
    operator: int
    table: int
    column: int
    feature: int
    nbytes: float


def traffic(task: ShardingTask, pieces: Sequence[Piece]) -> list[list[Collection]]:
    """The collections of each rank, in the order of the model, with what their groups send, look up and get."""
    ranks, samples, own_samples = task.devices, task.batch_size, task.batch_size / task.devices
    domain = ranks if task.topology is None else task.topology.domain
    of_table: dict[str, list[Piece]] = {table.name: [] for table in task.tables}
    for piece in pieces:
        of_table[piece.part.table.name].append(piece)
    hot, own = _hot_shares(task, of_table), own_input_bytes(task.tables, own_samples, in_parts=bool(task.by_access.hot))
    found: list[dict[Group, Traffic]] = [{} for _ in range(ranks)]  # of their own shards
    shared: dict[tuple[str, bool, bool], dict[Group, Traffic]] = {}
    sent_as: dict[tuple[str, bool, bool], dict[Group, list[_Sent]]] = {}
    operators: dict[tuple[Group, int], dict[Hashable, int]] = {}  # of a rank, by their first tables
    cached = {name for name, rule in task.constraints.beyond_hbm.items() if rule.in_tier.cached}
    for position, held in enumerate(filter(None, of_table.values())):
        table, sharding = held[0].part.table, held[0].sharding
        once = table.sent_once
        alone = ranks == 1 and not once and not sharding.splits_rows  # TorchRec then exchanges nothing, as of copies
        group = Group.of(table, DATA_PARALLEL if alone else sharding)
        key = (table.module, table.weighted, group.sequences)
        features, of_id = max(len(table.features), 1), LOOKUP_BYTES + WEIGHT_BYTES * table.weighted
        ids, distinct = table.every_lookup * own_samples, table.pooling_factor * own_samples
        brought, of_feature = output_bytes(table, own_samples), of_id * ids / features + LENGTH_BYTES * own_samples
        offsets = {piece.column_offset: piece.device for piece in reversed(held)}  # a column shard is sent all ids
        blocks = len(held) // len(offsets) if sharding.splits_rows else 1
        sorted_bytes = SEQUENCE_SORTED_BYTES if group.sequences else POOLED_SORTED_BYTES
        length = OFFSET_BYTES if once else LENGTH_BYTES
        sent = len(offsets) * (of_id * distinct + length * features * own_samples * blocks)
        as_sent = sent_as.setdefault(key, {}).setdefault(group, [])
        on_all = group.sharding is ROW_WISE or group.sharding.copied
        for offset, device in offsets.items():
            rank = 0 if on_all else device
            place = operators.setdefault((group, rank), {}).setdefault(table.operator_key, position)
            as_sent += [_Sent(rank, place, position, offset, n, of_feature) for n in range(features)]
        of_all = shared.setdefault(key, {}).setdefault(group, Traffic(group))
        of_all.own += own[table.name]
        of_all.output += brought * ids / distinct if once and distinct else brought
        of_all.brought += brought
        if once:
            of_all.inverse += len(offsets) * LOOKUP_BYTES * ids
            lengths = (2 * OFFSET_BYTES + LENGTH_BYTES) * features * own_samples
            of_all.once += len(offsets) * (LOOKUP_BYTES * (ids + distinct) + lengths)
        of_all.means |= sharding.divides_means and table.pooling == "mean"
        of_all.sent += sent * (not group.sharding.copied)
        mapped = table.id_map is not None
        of_all.order += LOOKUP_BYTES * distinct * (mapped or (sharding.splits_rows and group.sequences))
        for part, _, column_offset, device in held:
            here = found[device].setdefault(group, Traffic(group))
            share = hot.get((table.name, column_offset))
            looked_up = (part.pooling_factor if share is None else table.pooling_factor * share) * samples
            vectors = looked_up if group.sequences else features * (own_samples if sharding.copied else samples)
            looked = OUTPUT_BYTES * part.dim * vectors
            operator = table.operator_key, table.name * (table.name in cached)
            here.operators[operator] = here.operators.get(operator, 0.0) + looked
            here.lookup += looked
            here.sorted_ids += sorted_bytes * looked_up * (not sharding.copied)
            if group.sharding.copied:
                here.kept += OFFSET_BYTES * features * own_samples  # its ids are the batch's
                if sharding.copied:
                    weights, fp32 = part.memory().weights, OUTPUT_BYTES * part.rows * part.dim
                    # a gradient in fp32, and as the weights are
                    here.copies[operator] = here.copies.get(operator, 0.0) + fp32 + weights * (weights < fp32)
                    here.buckets += weights * (table.name not in task.by_access.hot)
                continue
            here.lengths += features * samples
            here.received += of_id * looked_up + length * features * samples
            here.kept += LOOKUP_BYTES * looked_up + OFFSET_BYTES * features * samples
            here.unmapped += (LOOKUP_BYTES * looked_up + length * features * samples) * mapped
            here.weights += (of_id - LOOKUP_BYTES) * looked_up
            if sharding.over_domains:
                here.middle += looked / domain
    permuted = {}
    for key, by_group in shared.items():
        order = [one for of_group in sent_as[key].values() for one in sorted(of_group)]
        features_of = [(one.table, one.feature) for one in order]
        needed, given = sum(one.nbytes for one in order), sum(group.own for group in by_group.values())
        several = needed > given + 1  # tables read some feature, or column shards
        permuted[key] = needed * (several or features_of != sorted(features_of))
        for group, of_all in by_group.items():
            as_sent, of_sender = sorted(sent_as[key][group]), domain if group.sharding.over_domains else 1
            of_all.one_sender = len({one.rank // of_sender for one in as_sent}) == 1
            first = {(one.table, one.feature): place for place, one in reversed(list(enumerate(as_sent)))}
            as_put = sorted(as_sent, key=lambda one: (first[one.table, one.feature], one.column))
            of_all.reordered = as_put != as_sent and not group.sequences
    return [
        [
            Collection([_of_rank(of_all, here.get(group)) for group, of_all in by_group.items()], permuted[key])
            for key, by_group in shared.items()
        ]
        for here in found
    ]


def _hot_shares(task: ShardingTask, of_table: Mapping[str, Sequence[Piece]]) -> dict[tuple[str, int], float]:
    """The share of a table's lookups that any of its row blocks may have, by its first column, where only the shape of access is
    known. Hot rows of several tables rarely come together: the bytes of all sequences, or of all pooled tables, with blocks on
    the same ranks are thrown together, and each block has so many times an even one as the fullest rank has (`skew.HIGH`)."""
    together: dict[tuple[bool, tuple[int, ...]], dict[tuple[str, int], Loads]] = {}
    for held in filter(None, of_table.values()):
        table, devices = held[0].part.table, dict[int, list[int]]()
        loads, sequence = task.skewed(table), table.pooling == "none"
        if loads is None or not held[0].sharding.splits_rows:
            continue
        of_id = LOOKUP_BYTES + (OUTPUT_BYTES * table.dim if sequence else WEIGHT_BYTES * table.weighted)
        for piece in held:
            devices.setdefault(piece.column_offset, []).append(piece.device)
        for column_offset, on in devices.items():
            some = together.setdefault((sequence, tuple(on)), {})
            some[table.name, column_offset] = loads.times(table.pooling_factor * of_id)
    found = dict[tuple[str, int], float]()
    for (_, ranks), some in together.items():
        even = sum(load.total for load in some.values()) / len(ranks)
        times = largest_block(tuple(some.values()), len(ranks)).high / (even or 1.0)
        found |= dict.fromkeys(some, min(times / len(ranks), 1.0))
    return found


def _of_rank(of_all: Traffic, own: Traffic | None) -> Traffic:
    """What is the same on all ranks, and what a rank has of its own shards."""
    return of_all if own is None else replace(own, **{name: getattr(of_all, name) for name in _OF_ALL})


_OF_ALL = ("own", "output", "brought", "once", "inverse", "means", "sent", "order", "one_sender", "reordered")


@dataclass
class _Step:
    """The moments of a rank's step: collections run forward one after another, and backward in the reverse order."""

    collections: Sequence[Collection]
    flight: InFlight
    precision: CollectivePrecision
    gloo: bool
    dense_bytes: float

    def __post_init__(self) -> None:
        of_all = {of: sum(one.sum(of) for one in self.collections) for of in ("own", "kept", "output")}
        self.own, self.kept, self.outputs = of_all.values()
        self.pipelined = self.flight.forward.sent > 0

    @property
    def _keeps_batch(self) -> bool:
        """Whether the pipeline keeps what a batch's lookups were sent by until its backward pass is done."""
        return self.flight.backward.sent > 1

    def moments(self) -> Iterator[tuple[Moment, Counter[Cause]]]:
        if not self.collections:
            yield "dense layers", Counter({"dense layers": self.dense_bytes})
            return
        yield from self._forward()
        outputs = Counter[Cause]({"outputs": self.outputs})
        late = self._inputs("backward") + self._ahead()
        dense = outputs + Counter[Cause]({"dense layers": self.dense_bytes})
        yield "dense layers", late + dense
        for position in range(len(self.collections) if self.flight.fetches else 0):
            yield "input exchange", self._inputs("input", position) + self._kept() + dense
        yield from self._backward(late)

    def _inputs(self, when: Literal["input", "forward", "outputs", "backward"], position: int = 0) -> Counter[Cause]:
        """Batches while the collection at that position runs; a pipeline has those of all collections."""
        batches: Batches = getattr(self.flight, when)
        nbytes, fetched = batches.own * self.own + self.kept, self.flight.fetches
        # what is sent in the order of the batch are the batch's own tensors
        nbytes -= self.flight.freed * sum(one.sum("own") for one in self.collections if one.permuted)
        for number, one in enumerate(self.collections):
            there = Batches(*map(min, batches, self.flight.outputs)) if number < position else batches
            nbytes += self._contexts(when) * one.context
            if self.pipelined or number == position:
                nbytes += there.sent * one.sent * (not (fetched and when == "input" and number < position))
                nbytes += (there.received + (fetched and when == "forward" and number > position)) * one.sum("received")
            if self.pipelined or (number <= position and when != "backward"):
                nbytes += max(there.sent + self.flight.clears_sent, 1) * one.sum("order")
            if self.pipelined or number <= position or when == "backward":  # made with the input that is sent
                sent = max(batches.sent, self.flight.forward.sent) + self.flight.clears_sent
                nbytes += max(sent, 1) * one.divisor
            if when != "backward" and number < position + (when != "input"):  # its input is in order
                nbytes += LENGTH_BYTES * one.sum("lengths") + one.sum("weights") + one.sum("unmapped")
                nbytes += one.kept_for_lookups * (not self.pipelined or fetched)
            elif when == "backward":  # of the next batch, in order already
                nbytes += one.kept_for_lookups * fetched
        now = self.collections[position]
        if when == "input":
            nbytes += now.sum("received") + max((8 * group.lengths for group in now.groups), default=0.0)
        elif when == "forward":
            nbytes += LENGTH_BYTES * now.sum("lengths")
        if self.flight.ahead and when != "outputs":  # the next batch's ids, beside those of this one
            nbytes += sum(one.sum("kept") for one in self.collections[: None if when == "backward" else position])
        return Counter({"inputs": nbytes})

    def _contexts(self, when: str) -> int:
        """Of how many batches there are contexts."""
        if when in ("outputs", "backward"):
            return self.flight.backward.sent + (when == "outputs" and not self._keeps_batch) + self.flight.fetches
        return max(self.flight.forward.sent + self.flight.clears_sent, 1)

    def _held(self) -> Counter[Cause]:
        """What is kept of a batch while the next one's lookups run, where they do before its backward pass."""
        if not self.flight.ahead:
            return Counter()
        inputs = sum(one.sent_as_it_is + one.sum("lengths_in_order") + one.sum("weights") for one in self.collections)
        return Counter[Cause]({"outputs": self.outputs, "inputs": inputs})

    def _ahead(self) -> Counter[Cause]:
        """The same, and what flies of the next batch when its lookups have run."""
        groups = [group for one in self.collections for group in one.groups] if self.flight.ahead else []
        return sum(map(self._flying, groups), self._held())

    def _forward(self) -> Iterator[tuple[Moment, Counter[Cause]]]:
        """All collections send their outputs before the first is waited for."""
        before = self._held()
        for position, now in enumerate(self.collections):
            arriving, inputs, last = self._inputs("input", position) + before, self._inputs("forward", position), 0.0
            if not self.flight.fetches:
                yield "input exchange", arriving
            if any(group.group.sharding.over_domains for group in now.groups):
                yield "input exchange", arriving + self._dealt(now)
            for place, group in enumerate(now.groups):
                # the last group's output is still there; FBGEMM keeps the ids of the last batch until it has those of this one
                ids = sum(other.kept - OFFSET_BYTES * other.lengths for other in now.groups[place + 1 :])
                ids += self.flight.ahead * sum(other.kept for other in now.groups[: place + 1])
                base = inputs + before + Counter[Cause]({"inputs": ids})
                joined = group.lookup * (len(group.operators) > 1)
                yield "lookup", base + Counter[Cause]({"lookup outputs": last + group.lookup + joined})
                last = group.lookup
                for moment, more in self._sent(group):
                    yield moment, base + more
                before += self._flying(group) + Counter[Cause]({"inputs": group.lengths_in_order})
        before -= self._held()
        base = self._inputs("outputs", len(self.collections) - 1)
        for now in self.collections:
            for group in now.groups:
                before -= self._flying(group)
                for more in self._got(group):
                    yield "outputs put together", base + before + more
                before += Counter[Cause]({"outputs": group.output})

    def _dealt(self, now: Collection) -> Counter[Cause]:
        """What is there more, before ids come, while those of a domain's row blocks are dealt out by row, and again by host."""
        twice = max(group.sent for group in now.groups if group.group.sharding.over_domains)
        order = now.permuted * (len(now.groups) == now._of_blocks)  # else among what is sent
        freed = (self.flight.freed > 0) * sum(one.sum("own") for one in self.collections if one.permuted)
        return Counter({"inputs": twice + order + freed - now.sum("received") * (1 if self.pipelined else 2)})

    def _share(self, group: Traffic, way: Precision) -> float:
        """Bytes on the way, as a share of fp32's."""
        added_up = "reduce-scatter" in group.group.sharding.collectives and not group.sequences
        return SHARE_OF_FP32[ADDED_UP_AS[way] if added_up else way]

    def _sent(self, group: Traffic) -> Iterator[tuple[Moment, Counter[Cause]]]:
        """What the lookup and the start of its exchange add."""
        looked_up = Counter[Cause]({"lookup outputs": group.lookup})
        if group.group.sharding.copied:
            yield "forward exchange", looked_up
            return
        share, sent = self._share(group, self.precision.forward), group.lookup
        encodes = share < 1
        if group.sequences:  # in the order in which it is sent
            looked_up += Counter[Cause]({"exchange": group.lookup, "inputs": group.lengths_in_order})
        if encodes:
            yield "forward encode", looked_up + Counter[Cause]({"codec": sent * (1 + share)})
        encoded = Counter[Cause]({"codec": sent * share}) if encodes else Counter[Cause]()
        if group.sequences:
            if encodes:
                looked_up -= Counter[Cause]({"exchange": group.lookup})
            yield "forward exchange", looked_up + encoded + Counter[Cause]({"exchange": group.brought * share})
        elif "reduce-scatter" in group.group.sharding.collectives:
            copied = sent * share if self.gloo else 0.0
            got = group.middle if group.group.sharding.over_domains else group.output
            yield "forward exchange", looked_up + encoded + Counter[Cause]({"exchange": copied + got * share})
            if group.group.sharding.over_domains:
                across = SHARE_OF_FP32[self.precision.forward]
                more = group.middle * (1 + across) + group.output * across
                yield "forward exchange", looked_up + Counter[Cause]({"exchange": more})
        else:
            yield "forward exchange", looked_up + encoded + Counter[Cause]({"exchange": (sent + group.output) * share})

    def _flying(self, group: Traffic) -> Counter[Cause]:
        """What an exchange of outputs keeps until it is waited for."""
        if group.group.sharding.copied:
            return Counter[Cause]({"exchange": group.output})
        share = self._share(group, self.precision.forward)
        sent = group.middle if group.group.sharding.over_domains else group.lookup
        return Counter[Cause]({"exchange": (sent + group.brought) * share})

    def _got(self, group: Traffic) -> Iterator[Counter[Cause]]:
        """What is there while what came is decoded and put in order."""
        if group.group.sharding.copied:
            return
        share = self._share(group, self.precision.forward)
        if share < 1:
            yield Counter[Cause]({"exchange": group.brought * share, "outputs": group.brought})
        sharding = group.group.sharding
        in_order = sharding is (TABLE_WISE if group.sequences else ROW_WISE)
        yield Counter[Cause]({"exchange": group.brought * (not in_order), "outputs": group.brought})
        if group.once:
            copied = group.output * sharding.splits_columns
            yield Counter[Cause]({"exchange": group.brought, "outputs": group.output + copied})

    def _backward(self, late: Counter[Cause]) -> Iterator[tuple[Moment, Counter[Cause]]]:
        """Collections send their gradients, the last first, before what the last gets goes to its operators."""
        base = late + self._kept() + Counter[Cause]({"gradients": self.outputs})
        # Where the forward pass runs ahead, each collection has a backward pass of its own, in their order, and gradients of
        # outputs stay to the end.
        ahead = self.flight.ahead
        for at_once in [[one] for one in self.collections] if ahead else [self.collections]:
            copies: list[float] = []  # gloo's, of what it gathers
            for now in reversed(at_once):
                own, several = now.sum("output"), len(now.groups) > 1
                if now.divisor:
                    base += Counter[Cause]({"gradients": own * ahead, "inputs": -now.divisor * (not self._keeps_batch)})
                for group in reversed(now.groups):
                    copies.append(self._gathered(group))
                    running = self._running(copies[:-1], starts=copies[-1])
                    if group.reordered and group is now.groups[0] and not ahead and not now.copied:
                        # all other groups have sent theirs, so what is in order takes the place of what came
                        base -= Counter[Cause]({"gradients": own})
                        own = 0.0
                    for moment, more in self._returned(group, several):
                        yield moment, base + running + more
                        if group.sequences and moment == "backward order" and not ahead:
                            # each output's went into one of the group
                            base -= Counter[Cause]({"gradients": group.output})
                            own -= group.output
                    base += self._returning(group)
                if not now.copied and (not ahead or now.divisor or self._sent_back_as_it_is(now)):
                    base -= Counter[Cause]({"gradients": own})
            for now in reversed(at_once):
                for group in reversed(now.groups):
                    if not group.group.sharding.copied:
                        yield "backward exchange", base + self._running(copies)
                    base -= self._returning(group)
                    copies.pop(0)
                    for more in self._arrived(group):
                        yield "backward exchange", base + self._running(copies) + more
                if now.copied:
                    base -= Counter[Cause]({"gradients": now.sum("output")})

    def _kept(self) -> Counter[Cause]:
        """What the backward pass reads, beside gradients."""
        nbytes = sum(
            one.sum("order") * (not self.pipelined)
            + one.sum("inverse") * (not self._keeps_batch)
            + sum(map(one.sum, ("weights", "lengths_in_order")))
            + self._looked_up(one)
            for one in self.collections
        )
        return Counter[Cause]({"inputs": nbytes})

    def _sent_back_as_it_is(self, now: Collection) -> bool:
        """Whether the gradient of a collection's outputs is what is sent: that of row blocks alone, in fp32."""
        only = now.groups[0]
        in_place = only.group.sharding is ROW_WISE and not only.sequences and len(now.groups) == 1
        return in_place and self._share(only, self.precision.backward) == 1

    def _gathered(self, group: Traffic) -> float:
        """gloo's copy of the gradients that it gathers, while it does."""
        gathers = self.gloo and group.group.sharding is ROW_WISE and not group.sequences
        return group.lookup * self._share(group, self.precision.backward) * gathers

    def _running(self, copies: Sequence[float], starts: float = 0.0) -> Counter[Cause]:
        """The most of these copies of gloo's that are there at once, beside one that it makes as it starts to gather."""
        return Counter[Cause]({"exchange": sum(sorted(copies)[-GLOO_THREADS:]) + starts})

    def _looked_up(self, one: Collection) -> float:
        """What copies looked up, which their backward pass reads: where it is not there still, as sent or as this batch's own."""
        if not one.copied or self._keeps_batch:
            return 0.0
        return one.permuted or one.sum("own") * (self.flight.backward.own < self.flight.outputs.own)

    def _returned(self, group: Traffic, several: bool) -> Iterator[tuple[Moment, Counter[Cause]]]:
        """What the start of the exchange of gradients adds to the gradients of all outputs."""
        sharding, output, brought = group.group.sharding, group.output, group.brought
        encodes = (share := self._share(group, self.precision.backward)) < 1
        if group.sequences:
            yield "backward order", Counter[Cause]({"gradients": output})
        if sharding.copied:
            return
        if group.sequences:
            if group.once or sharding.splits_rows:  # in the order in which it came, or added up by distinct id
                yield "backward exchange", Counter[Cause]({"gradients": output, "exchange": brought})
            if encodes:
                yield "backward encode", Counter[Cause]({"exchange": brought, "codec": brought * (1 + share)})
            sent = brought * (1 + share * encodes)
            yield "backward exchange", Counter[Cause]({"exchange": sent + group.lookup * share})
            return
        if sharding is ROW_WISE:
            contiguous = output * several
            if encodes:
                yield "backward encode", Counter[Cause]({"codec": output * (1 + share)})
                contiguous = output * share
            yield "backward exchange", Counter[Cause]({"gradients": contiguous, "exchange": group.lookup * share})
            return
        across = SHARE_OF_FP32[self.precision.backward]
        held = output * group.reordered  # in order
        contiguous = output * (several and not group.reordered)
        ordered = output * (1 + (not group.one_sender))
        yield "backward order", Counter[Cause]({"gradients": held + contiguous + ordered})
        if across < 1:
            yield "backward encode", Counter[Cause]({"gradients": held + output, "codec": output * (1 + across)})
        got = group.middle if sharding.over_domains else group.lookup
        yield "backward exchange", Counter[Cause]({"gradients": held, "exchange": (output + got) * across})

    def _returning(self, group: Traffic) -> Counter[Cause]:
        """What an exchange of gradients keeps until it is waited for."""
        sharding, way = group.group.sharding, self.precision.backward
        if sharding.copied:
            return Counter()
        share = SHARE_OF_FP32[way] if sharding.over_domains else self._share(group, way)
        got = group.middle if sharding.over_domains else group.lookup
        return Counter[Cause]({"exchange": (group.brought + got) * share})

    def _arrived(self, group: Traffic) -> Iterator[Counter[Cause]]:
        """What is there while what came is decoded, put in order and given to the operator."""
        sharding = group.group.sharding
        if sharding.copied:
            of_weights = WEIGHT_BYTES / (LOOKUP_BYTES + WEIGHT_BYTES) * group.own * group.group.weighted
            gradients = max(max(group.copies.values(), default=0.0) + of_weights, group.apart)
            yield Counter[Cause]({"gradients": gradients, "sorted ids": group.sorted_ids * (not self.gloo)})
            return
        share = self._share(group, self.precision.backward)
        if sharding.over_domains:
            yield Counter[Cause]({"exchange": group.middle + group.lookup * share * (1 + self.gloo)})
        if share < 1:
            yield Counter[Cause]({"exchange": group.lookup * share, "gradients": group.lookup})
        yield Counter[Cause]({"gradients": group.lookup * (1 + group.sequences) + group.apart})
        if not self.gloo:
            yield Counter[Cause]({"gradients": group.lookup, "sorted ids": group.sorted_ids})
