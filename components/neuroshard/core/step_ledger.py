"""What lives on each rank in a training step of TorchRec, beside weights and optimizer state: a ledger, by moment and by cause.

A step's peak is the largest of its moments, and a moment is a sum of terms that follow from tables, plan, batch and pipeline.
Nothing is fitted but how many batches a pipeline has in flight (core/step_memory.py). The terms are those of TorchRec 1.8, read
in its source and seen in the memory events of real steps (tests/bench/memory.py; docs/benchmarks.md has how well they fit).

Sizes are bytes on one rank. `lookup` is the output of a group's lookup, for the samples of all ranks; `output` is what the rank
gets of it after the exchange, for its own samples. Not covered: what the dense layers keep (`dense_bytes`), the temporaries of
FBGEMM's CUDA kernels, caches, and batches of which the samples differ from rank to rank.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from neuroshard.core.part import Part
from neuroshard.core.precision import ADDED_UP_AS, SHARE_OF_FP32, CollectivePrecision, Precision
from neuroshard.core.sharding import ROW_WISE, TABLE_WISE, Group, Sharding
from neuroshard.core.step_memory import (
    IN_FLIGHT,
    LENGTH_BYTES,
    LOOKUP_BYTES,
    OFFSET_BYTES,
    OUTPUT_BYTES,
    WEIGHT_BYTES,
    Batches,
    InFlight,
    Pipeline,
    output_bytes,
    own_input_bytes,
)
from neuroshard.core.task import ShardingTask

Cause = Literal[
    "inputs", "lookup outputs", "exchange", "codec", "outputs", "gradients", "gradient buckets", "dense layers"
]
Moment = Literal[
    "input exchange",
    "lookup",
    "forward encode",
    "forward exchange",
    "outputs put together",
    "dense layers",
    "backward encode",
    "backward exchange",
    "backward order",
]


@dataclass
class Traffic:
    """Bytes of a group of tables that run together (a collection's of one sharding type), on one rank."""

    group: Group
    own: float = 0.0  # its share of the rank's own batch
    sent: float = 0.0
    received: float = 0.0
    kept: float = 0.0  # the ids and offsets that FBGEMM keeps until its next lookup
    weights: float = 0.0  # of the ids that it received, which the backward pass reads
    lengths: float = 0.0  # how many lengths it receives
    order: float = 0.0  # where ids of a row-wise sequence lay before they were sent
    lookup: float = 0.0
    middle: float = 0.0  # what a domain's ranks have after they added their rows up
    output: float = 0.0
    mean: float = 0.0  # the divisors of row-wise means
    buckets: float = 0.0  # gradients of data-parallel tables, which DistributedDataParallel keeps
    copies: float = 0.0  # the gradient of data-parallel tables, before it goes to a bucket
    one_sender: bool = True  # whether all its outputs come from one rank, or one domain

    @property
    def sequences(self) -> bool:
        return self.group.sequences

    @property
    def lengths_in_order(self) -> float:
        """Lengths of sequences times their columns, as received and in the order of outputs, which the backward pass reads."""
        return 16 * self.lengths * self.sequences


@dataclass
class Collection:
    """The groups of a collection, in the order in which they run; the copy of its own input in the order in which features
    are sent, if that is not the order of the batch; and whether cuts bring its outputs out of order."""

    groups: list[Traffic] = field(default_factory=list)
    permuted: float = 0.0
    reordered: bool = False

    @property
    def copied(self) -> bool:
        """Whether some of its tables are data-parallel, whose lookups read the permuted input."""
        return any(group.group.sharding.copied for group in self.groups)

    @property
    def sent(self) -> float:
        """Its input as it is sent: row blocks' has an order of its own, others' is the permuted one."""
        blocks = sum(group.sent for group in self.groups if group.group.sharding.splits_rows)
        return blocks + (self.permuted if len(self.groups) > self._of_blocks else 0.0)

    @property
    def kept_for_lookups(self) -> float:
        """What the forward pass keeps of the permuted input: that of sequences, and what copies look up."""
        sequences = any(group.sequences for group in self.groups) and len(self.groups) > self._of_blocks
        return self.permuted if self.copied or sequences else 0.0

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


def searched_bytes(task: ShardingTask, parts: Sequence[Part]) -> list[int]:
    """What a search counts for parts: what they take at least and, where the task says so, the copies of their lookups'
    outputs that are sent; of pooled row blocks, which all devices have, that is among what it keeps."""
    counted = [memory.total for memory in task.memories(parts)]
    if not task.counts_sent:
        return counted
    way, found = (task.collective_precision or CollectivePrecision()).forward, list[int]()
    for part, nbytes in zip(parts, counted, strict=True):
        sequences, share = part.table.pooling == "none", SHARE_OF_FP32[way]
        copies = (
            (sequences + (1 + share) * (share < 1) or 1.0) * (sequences or part.row_blocks == 1) * (not part.copies)
        )
        found.append(nbytes + int(copies * OUTPUT_BYTES * part.sent_columns * task.batch_size))
    return found


def step_peaks(
    task: ShardingTask, pieces: Sequence[Piece], pipeline: Pipeline | None = None, *, gloo: bool = False
) -> tuple[StepPeak, ...]:
    """The peak of each rank that holds these pieces of the tables of a (parted) task, by the task's pipeline unless one is given.
    With `gloo` it is what is measured of a step on a CPU: collectives copy what they add up, as NCCL's do not, and the buckets of
    gradients, which were there before, do not count. Raises KeyError for a pipeline that is not in IN_FLIGHT."""
    flight = IN_FLIGHT[pipeline or task.pipeline or "none"]
    precision = task.collective_precision or CollectivePrecision()
    found = []
    for collections in traffic(task, pieces):
        buckets = 0.0 if gloo else sum(one.sum("buckets") for one in collections)
        step = _Step(collections, flight, precision, gloo, task.dense_memory_bytes or 0)
        moment, causes = max(step.moments(), key=lambda one: sum(one[1].values()))
        causes += Counter[Cause]({"gradient buckets": buckets})
        whole: dict[Cause, int] = {cause: round(nbytes) for cause, nbytes in causes.items() if nbytes >= 1}
        found.append(StepPeak(sum(whole.values()), moment, whole))
    return tuple(found)


def traffic(task: ShardingTask, pieces: Sequence[Piece]) -> list[list[Collection]]:
    """The collections of each rank, in the order of the model, with what their groups send, look up and get."""
    ranks, samples = task.devices, task.batch_size
    own_samples = samples / ranks
    domain = ranks if task.topology is None else task.topology.domain
    of_table: dict[str, list[Piece]] = {table.name: [] for table in task.tables}
    for piece in pieces:
        of_table[piece.part.table.name].append(piece)
    found: list[dict[Group, Traffic]] = [{} for _ in range(ranks)]  # of their own shards
    shared: dict[tuple[str, bool, bool], dict[Group, Traffic]] = {}
    cut: set[tuple[str, bool, bool]] = set()
    sent_as: dict[tuple[str, bool, bool], dict[Group, list[tuple[int, int, float]]]] = {}  # (rank, table, bytes)
    senders: dict[Group, set[int]] = {}
    for position, held in enumerate(filter(None, of_table.values())):
        table, sharding = held[0].part.table, held[0].sharding
        group = Group.of(table, sharding)
        key = (table.module, table.weighted, group.sequences)
        if sharding.splits_columns and not group.sequences:
            cut.add(key)
        features, of_id = max(len(table.features), 1), LOOKUP_BYTES + WEIGHT_BYTES * table.weighted
        ids, own, output = (
            table.pooling_factor * own_samples,
            own_input_bytes(table, own_samples),
            output_bytes(table, own_samples),
        )
        offsets = {piece.column_offset: piece.device for piece in reversed(held)}  # a column shard is sent all ids
        blocks = len(held) // len(offsets) if sharding.splits_rows else 1
        sent = len(offsets) * (of_id * ids + LENGTH_BYTES * features * own_samples * blocks)
        as_sent = sent_as.setdefault(key, {}).setdefault(group, [])
        as_sent += [
            (0 if group.sharding is ROW_WISE or sharding.copied else d, position, own) for d in offsets.values()
        ]
        senders.setdefault(group, set()).update(d // domain if sharding.over_domains else d for d in offsets.values())
        of_all = shared.setdefault(key, {}).setdefault(group, Traffic(group))
        of_all.own += own
        of_all.output += output
        of_all.mean += output * (sharding is ROW_WISE and table.pooling == "mean")
        of_all.sent += sent * (not sharding.copied)
        of_all.order += LOOKUP_BYTES * ids * (sharding.splits_rows and group.sequences)
        for part, _, _, device in held:
            here = found[device].setdefault(group, Traffic(group))
            if sharding.copied:
                here.kept += OFFSET_BYTES * features * own_samples  # its ids are the batch's
                gradient = part.memory().weights
                here.copies += gradient
                here.buckets += gradient * (table.name not in task.by_access.hot)
                continue
            looked_up = part.pooling_factor * samples
            here.lengths += features * samples
            here.received += of_id * looked_up + LENGTH_BYTES * features * samples
            here.kept += LOOKUP_BYTES * looked_up + OFFSET_BYTES * features * samples
            here.weights += (of_id - LOOKUP_BYTES) * looked_up
            looked = OUTPUT_BYTES * part.dim * (looked_up if group.sequences else features * samples)
            here.lookup += looked
            if sharding.over_domains:
                here.middle += looked / domain
    permuted = {}
    for key, groups in sent_as.items():
        order = [one for of_group in groups.values() for one in sorted(of_group)]
        in_order = [one[1] for one in order] == sorted({one[1] for one in order})
        permuted[key] = 0.0 if in_order else sum(one[2] for one in order)
    for by_group in shared.values():
        for group, of_all in by_group.items():
            of_all.one_sender = len(senders[group]) == 1
    return [
        [
            Collection(
                [_of_rank(of_all, here.get(group)) for group, of_all in by_group.items()], permuted[key], key in cut
            )
            for key, by_group in shared.items()
        ]
        for here in found
    ]


def _of_rank(of_all: Traffic, own: Traffic | None) -> Traffic:
    """What is the same on all ranks, and what a rank has of its own shards."""
    if own is None:
        return of_all
    same = {name: getattr(of_all, name) for name in ("own", "output", "mean", "sent", "order", "one_sender")}
    return replace(own, **same)


class _Step:
    """The moments of a rank's step: collections run forward one after another, and backward in the reverse order."""

    def __init__(
        self,
        collections: Sequence[Collection],
        flight: InFlight,
        precision: CollectivePrecision,
        gloo: bool,
        dense_bytes: float,
    ) -> None:
        self.collections, self.flight, self.gloo, self.dense_bytes = collections, flight, gloo, dense_bytes
        self.precision = precision
        self.own = sum(one.sum("own") for one in collections)
        self.kept = sum(one.sum("kept") for one in collections)
        self.outputs = sum(one.sum("output") + one.sum("mean") for one in collections)
        self.pipelined = flight.forward.sent > 0

    def moments(self) -> Iterator[tuple[Moment, Counter[Cause]]]:
        if not self.collections:
            yield "dense layers", Counter({"dense layers": self.dense_bytes})
            return
        yield from self._forward()
        outputs = Counter[Cause]({"outputs": self.outputs})
        late = self._inputs("backward") + self._ahead()
        yield "dense layers", late + outputs + Counter({"dense layers": self.dense_bytes})
        yield from self._backward(late)

    def _inputs(self, when: Literal["input", "forward", "outputs", "backward"], position: int = 0) -> Counter[Cause]:
        """Batches while the collection at that position runs; a pipeline has those of all collections."""
        batches: Batches = getattr(self.flight, when)
        nbytes = batches.own * self.own + self.kept
        for number, one in enumerate(self.collections):
            there = self.flight.outputs if when == "forward" and number < position else batches
            if self.pipelined or number == position:
                nbytes += there.sent * one.sent + there.received * one.sum("received")
                nbytes += max(there.sent, 1) * one.sum("order")
                if when in ("forward", "outputs"):
                    nbytes += LENGTH_BYTES * one.sum("lengths") + one.sum("weights")
        now = self.collections[position]
        if when == "input":
            nbytes += now.sum("received") + max((8 * group.lengths for group in now.groups), default=0.0)
        elif when == "forward":
            nbytes += LENGTH_BYTES * now.sum("lengths")
        if when in ("forward", "outputs") and not self.pipelined:
            nbytes += sum(one.kept_for_lookups for one in self.collections)
        if when == "backward" and self.flight.ahead:
            nbytes += self.kept + sum(one.sum("weights") for one in self.collections)
        return Counter({"inputs": nbytes})

    def _ahead(self) -> Counter[Cause]:
        """What is kept of the next batch where its lookups run before this one's backward pass, and of this one meanwhile."""
        if not self.flight.ahead:
            return Counter()
        flying = sum((self._flying(group) for one in self.collections for group in one.groups), Counter[Cause]())
        lengths = sum(one.sum("lengths_in_order") for one in self.collections)
        return flying + Counter[Cause]({"outputs": self.outputs, "inputs": lengths})

    def _forward(self) -> Iterator[tuple[Moment, Counter[Cause]]]:
        """All collections send their outputs before the first is waited for."""
        before = Counter[Cause]()
        for position, now in enumerate(self.collections):
            yield "input exchange", self._inputs("input", position) + before
            base, last = self._inputs("forward", position), 0.0
            for group in now.groups:  # the last one's output is still there while the next one's is looked up
                yield "lookup", base + before + Counter[Cause]({"lookup outputs": last + group.lookup})
                last = group.lookup
                for moment, more in self._sent(group):
                    yield moment, base + before + more
                before += self._flying(group) + Counter[Cause]({"inputs": group.lengths_in_order})
            before += Counter[Cause]({"inputs": now.sum("weights")})
        base = self._inputs("outputs", len(self.collections) - 1)
        for now in self.collections:
            for group in now.groups:
                before -= self._flying(group)
                for more in self._got(group):
                    yield "outputs put together", base + before + more
                before += Counter[Cause]({"outputs": group.output})
            if (len(now.groups) > 1 or now.reordered) and not now.groups[0].sequences:
                yield "outputs put together", base + before + Counter({"outputs": now.sum("output")})
            before += Counter[Cause]({"outputs": now.sum("mean")})

    def _share(self, group: Traffic, way: Precision) -> float:
        """Bytes on the way, as a share of fp32's."""
        added_up = "reduce-scatter" in group.group.sharding.collectives and not group.sequences
        return SHARE_OF_FP32[ADDED_UP_AS[way] if added_up else way]

    def _sent(self, group: Traffic) -> Iterator[tuple[Moment, Counter[Cause]]]:
        """What the lookup and the start of its exchange add."""
        looked_up = Counter[Cause]({"lookup outputs": group.lookup or group.output * group.group.sharding.copied})
        if group.group.sharding.copied:
            yield "forward exchange", looked_up
            return
        share = self._share(group, self.precision.forward)
        encodes = share < 1
        sent = group.lookup
        if group.sequences:  # in the order in which it is sent
            looked_up += Counter[Cause]({"exchange": group.lookup, "inputs": group.lengths_in_order})
        if encodes:
            yield "forward encode", looked_up + Counter[Cause]({"codec": sent * (1 + share)})
        encoded = Counter[Cause]({"codec": sent * share}) if encodes else Counter[Cause]()
        if group.sequences:
            if encodes:
                looked_up -= Counter[Cause]({"exchange": group.lookup})
            yield "forward exchange", looked_up + encoded + Counter[Cause]({"exchange": group.output * share})
        elif "reduce-scatter" in group.group.sharding.collectives:
            copied = sent * share if self.gloo else 0.0
            got = group.middle if group.group.sharding.over_domains else group.output
            yield "forward exchange", looked_up + encoded + Counter[Cause]({"exchange": copied + got * share})
            if group.group.sharding.over_domains:
                across = SHARE_OF_FP32[self.precision.forward]
                yield (
                    "forward exchange",
                    looked_up + Counter[Cause]({"exchange": group.middle * (1 + across) + group.output * across}),
                )
        else:
            yield "forward exchange", looked_up + encoded + Counter[Cause]({"exchange": (sent + group.output) * share})

    def _flying(self, group: Traffic) -> Counter[Cause]:
        """What an exchange of outputs keeps until it is waited for."""
        if group.group.sharding.copied:
            return Counter[Cause]({"exchange": group.output})
        share = self._share(group, self.precision.forward)
        sent = group.middle if group.group.sharding.over_domains else group.lookup
        return Counter[Cause]({"exchange": (sent + group.output) * share})

    def _got(self, group: Traffic) -> Iterator[Counter[Cause]]:
        """What is there while what came is decoded and put in order."""
        if group.group.sharding.copied:
            return
        share = self._share(group, self.precision.forward)
        if share < 1:
            yield Counter[Cause]({"exchange": group.output * share, "outputs": group.output})
        sharding = group.group.sharding
        if sharding is TABLE_WISE if group.sequences else sharding is ROW_WISE:  # comes in the order of outputs
            yield Counter[Cause]({"outputs": group.output})
        else:
            yield Counter[Cause]({"exchange": group.output, "outputs": group.output})

    def _backward(self, late: Counter[Cause]) -> Iterator[tuple[Moment, Counter[Cause]]]:
        """Collections send their gradients, the last first, before what the last gets goes to its operators."""
        kept = sum(
            one.sum("order") * (not self.pipelined)
            + sum(map(one.sum, ("mean", "weights", "lengths_in_order")))
            + one.permuted * one.copied
            for one in self.collections
        )
        base = late + Counter[Cause]({"inputs": kept, "gradients": sum(one.sum("output") for one in self.collections)})
        # Where the forward pass runs ahead, each collection has a backward pass of its own, in their order, and gradients of
        # outputs stay to the end.
        freed = 0.0 if self.flight.ahead else 1.0
        for at_once in [[one] for one in self.collections] if self.flight.ahead else [self.collections]:
            for now in reversed(at_once):
                own, several = now.sum("output"), len(now.groups) > 1
                if now.reordered:
                    yield "backward order", base + Counter[Cause]({"gradients": own})
                for group in reversed(now.groups):
                    for moment, more in self._returned(group, several):
                        yield moment, base + more
                        if group.sequences and moment == "backward order":  # each output's went into one of the group
                            base -= Counter[Cause]({"gradients": freed * group.output})
                            own -= group.output
                    base += self._returning(group)
                if not now.copied:
                    base -= Counter[Cause]({"gradients": freed * own})
            for now in reversed(at_once):
                for group in reversed(now.groups):
                    base -= self._returning(group)
                    for more in self._arrived(group):
                        yield "backward exchange", base + more
                if now.copied:
                    base -= Counter[Cause]({"gradients": freed * now.sum("output")})

    def _returned(self, group: Traffic, several: bool) -> Iterator[tuple[Moment, Counter[Cause]]]:
        """What the start of the exchange of gradients adds to the gradients of all outputs."""
        sharding, output = group.group.sharding, group.output
        if sharding.copied:
            return
        share = self._share(group, self.precision.backward)
        encodes = share < 1
        if group.sequences:
            yield "backward order", Counter[Cause]({"gradients": output})
            if encodes:
                yield "backward encode", Counter[Cause]({"exchange": output, "codec": output * (1 + share)})
            sent = output * (1 + share * encodes)
            yield "backward exchange", Counter[Cause]({"exchange": sent + group.lookup * share})
            return
        if sharding is ROW_WISE:
            contiguous = output * several
            if encodes:
                yield "backward encode", Counter[Cause]({"gradients": contiguous, "codec": output * (1 + share)})
                contiguous = output * share
            copied = group.lookup * share * (1 + self.gloo)
            yield "backward exchange", Counter[Cause]({"gradients": contiguous, "exchange": copied})
            return
        across = SHARE_OF_FP32[self.precision.backward]
        yield "backward order", Counter[Cause]({"gradients": output * (1 + several + (not group.one_sender))})
        if across < 1:
            yield (
                "backward encode",
                Counter[Cause]({"gradients": output * (1 + several), "codec": output * (1 + across)}),
            )
        got = group.middle if sharding.over_domains else group.lookup
        yield "backward exchange", Counter[Cause]({"gradients": output * several, "exchange": (output + got) * across})

    def _returning(self, group: Traffic) -> Counter[Cause]:
        """What an exchange of gradients keeps until it is waited for."""
        sharding = group.group.sharding
        if sharding.copied:
            return Counter()
        share = (
            SHARE_OF_FP32[self.precision.backward]
            if sharding.over_domains
            else self._share(group, self.precision.backward)
        )
        got = group.middle if sharding.over_domains else group.lookup
        copied = group.lookup * share if self.gloo and sharding is ROW_WISE and not group.sequences else 0.0
        return Counter[Cause]({"exchange": (group.output + got) * share + copied})

    def _arrived(self, group: Traffic) -> Iterator[Counter[Cause]]:
        """What is there while what came is decoded, put in order and given to the operator."""
        sharding = group.group.sharding
        if sharding.copied:
            of_weights = WEIGHT_BYTES / (LOOKUP_BYTES + WEIGHT_BYTES) * group.own * group.group.weighted
            yield Counter[Cause]({"gradients": group.copies + of_weights})
            return
        share = self._share(group, self.precision.backward)
        if sharding.over_domains:
            yield Counter[Cause]({"exchange": group.middle + group.lookup * share * (1 + self.gloo)})
        if share < 1:
            yield Counter[Cause]({"exchange": group.lookup * share, "gradients": group.lookup})
        yield Counter[Cause]({"gradients": group.lookup * (1 + group.sequences)})
