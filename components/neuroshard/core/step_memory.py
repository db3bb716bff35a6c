"""What pipelines keep of their batches, and what a training step needs at least for the shards of a device, besides weights and
optimizer state.

The whole of a step is a ledger (core/step_ledger.py). Plans of formats 1 to 5 count what TorchRec 1.8 estimates instead
(planner/shard_estimators.py, `calculate_pipeline_io_cost`), a half to a quarter of what real steps need: with a pipeline no
outputs and gradients, and no copies inside the all-to-alls.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from neuroshard.core.errors import UsageError
from neuroshard.core.table import Table
from neuroshard.core.value import shown

Pipeline = Literal[
    "none", "base", "sparse-dist", "sparse-dist-lite", "fused-sparse-dist", "semi-sync", "prefetch"
]  # a plain loop, and TorchRec's TrainPipelineBase, SparseDist, SparseDistLite, FusedSparseDist, SemiSync and PrefetchSparseDist
PipelineOption = Literal["free_features_storage_early", "clear_data_dist_inputs", "enqueue_batch_after_forward"]
DEFAULT_PIPELINE: Pipeline = "sparse-dist"  # TorchRec's TrainPipelineSparseDist, which most trainers run
# Reserved less allocated, over what a step allocates: 0.92, 0.88, 0.89 and 0.61 by the peaks that TorchRec's own benchmarks
# measured without expandable segments (tests/truth/test_step_peaks.py).
ALLOCATOR_SHARE = "90%"
MOST_ALLOCATOR_SHARE = 10.0
WITH_EXPANDABLE_SEGMENTS = 0.1  # a guess: nobody published one
EXPANDABLE_SEGMENTS = "train with PYTORCH_ALLOC_CONF=expandable_segments:True, and say --allocator-share 10%"

LOOKUP_BYTES = 8  # of an id: the operator's row indices are int64, whatever the batch holds
LENGTH_BYTES = 4  # of the number of lookups of a sample and feature: int32, as TorchRec's batches have it
OFFSET_BYTES = 8  # what FBGEMM makes of it: int64
WEIGHT_BYTES = 4
OUTPUT_BYTES = 4  # of an element: outputs are fp32, also of tables in fp16
# Where lookups reach the ranks that hold their rows within the step that needs them, not in one before.
WAIT_FOR_INPUT: frozenset[Pipeline] = frozenset({"none", "base", "sparse-dist-lite"})
# of lookups on the device, as TorchRec estimates
BATCHES: Mapping[str, int] = {"none": 1, "sparse-dist": 2, "prefetch": 3}


class Batches(NamedTuple):
    """Batches of which a rank has its own input, the input as it is sent, and as it is received and not yet in order."""

    own: int
    sent: int
    received: int


class InFlight(NamedTuple):
    """What a pipeline keeps while ids are exchanged, while a collection runs forward, when all have, and in the backward pass."""

    input: Batches
    forward: Batches
    outputs: Batches
    backward: Batches
    ahead: bool = False  # whether the next batch's outputs are there too, and its ids in order
    freed: int = 0  # of how many batches the own input is freed once it is in the order in which it is sent
    clears_sent: bool = False  # whether what was sent of this batch is freed before the next is sent
    fetches: bool = False  # whether the next batch's ids come, and are put in order, between forward and backward pass


# Counted in real steps of TorchRec 1.8 and 1.9 (tests/bench/memory.py).
IN_FLIGHT: Mapping[Pipeline, InFlight] = {
    "none": InFlight(Batches(1, 1, 1), Batches(1, 0, 0), Batches(1, 0, 0), Batches(1, 0, 0)),
    "base": InFlight(Batches(2, 1, 1), Batches(2, 0, 0), Batches(2, 0, 0), Batches(1, 0, 0)),
    "sparse-dist": InFlight(Batches(3, 2, 1), Batches(3, 2, 1), Batches(3, 1, 0), Batches(3, 1, 1)),
    "sparse-dist-lite": InFlight(Batches(1, 1, 1), Batches(1, 1, 1), Batches(1, 0, 0), Batches(1, 0, 0)),
    "fused-sparse-dist": InFlight(Batches(2, 1, 1), Batches(2, 1, 1), Batches(3, 2, 1), Batches(3, 2, 2)),
    "semi-sync": InFlight(Batches(3, 3, 2), Batches(3, 3, 2), Batches(3, 3, 2), Batches(3, 3, 3), ahead=True),
    "prefetch": InFlight(
        Batches(3, 1, 1), Batches(3, 1, 1), Batches(3, 1, 1), Batches(3, 0, 1), clears_sent=True, fetches=True
    ),
}


def in_flight(pipeline: Pipeline, options: Collection[PipelineOption]) -> InFlight:
    """The same of a pipeline with these options. Raises KeyError for one that is not in IN_FLIGHT."""
    flight, freed = IN_FLIGHT[pipeline], 2 * ("free_features_storage_early" in options)
    later, clears = "enqueue_batch_after_forward" in options, "clear_data_dist_inputs" in options

    def fewer(batches: Batches, sent: int) -> Batches:
        return Batches(batches.own - later, batches.sent - sent, batches.received)

    before, outputs = [fewer(one, clears) for one in (flight.input, flight.forward)], fewer(flight.outputs, 0)
    return flight._replace(
        input=before[0], forward=before[1], outputs=outputs, freed=freed, clears_sent=clears or flight.clears_sent
    )


def parse_pipeline_options(text: str) -> tuple[PipelineOption, ...]:
    """Options of a pipeline, separated by commas. Raises UsageError for other words, and for one twice."""
    known, given = get_args(PipelineOption), [word.strip() for word in text.split(",")]
    if wrong := next((word for word in given if word not in known or given.count(word) > 1), None):
        why = "is there twice" if wrong in known else f"is none of {', '.join(known)}"
        raise UsageError(f"--pipeline-options {shown(wrong)} {why}")
    if "" in given:
        raise UsageError(f"--pipeline-options {shown(text)} names none of {', '.join(known)}; leave it out")
    return tuple(option for option in known if option in given)


def pipeline_options_fault(options: Collection[str] | None, pipeline: str | None) -> str | None:
    """Why memory would not count what these options free; None where it does, or there are none."""
    if options and pipeline != "sparse-dist":
        return (
            f"--pipeline-options {','.join(options)}: memory counts what they free of TorchRec's TrainPipelineSparseDist only, "
            f"and the pipeline is {pipeline or 'not said'}; say --pipeline sparse-dist, or leave them out"
        )
    return None


def check_allocator_share(share: float) -> float:
    """What the allocator holds beyond tensors, as a share of them. Raises UsageError for an invalid one."""
    if not 0 <= share <= MOST_ALLOCATOR_SHARE:
        raise UsageError(
            f"--allocator-share must be from 0% to {MOST_ALLOCATOR_SHARE:.0%} of a step's bytes, not {100 * share:.6g}%; 0 where "
            "nothing is held beyond tensors"
        )
    return share


def own_input_bytes(tables: Iterable[Table], samples: float, *, in_parts: bool = False) -> dict[str, float]:
    """Of a rank's own batch, what is of each of these tables: ids, lengths and weights. What several tables of a collection read
    is there once, and the first one's; parts of a table read its features, but each has ids of its own."""
    read, found = set[tuple[object, ...]](), dict[str, float]()
    for table in tables:
        key = table.module, table.weighted, table.pooling == "none"
        of_id = LOOKUP_BYTES + WEIGHT_BYTES * table.weighted
        again = [one.pooling_factor for one in table.features if (*key, one.name) in read and not in_parts]
        read |= {(*key, one.name) for one in table.features}
        lookups = table.every_lookup * (1 - sum(again) / (table.pooling_factor or 1.0))
        found[table.name] = samples * (of_id * lookups + LENGTH_BYTES * (max(len(table.features), 1) - len(again)))
    return found


def output_bytes(table: Table, samples: float) -> float:
    """What a rank gets of this table for so many samples of its own."""
    vectors = table.pooling_factor if table.pooling == "none" else max(len(table.features), 1)
    return OUTPUT_BYTES * table.dim * vectors * samples


def step_bytes(
    table: Table,
    dim: int,
    samples: int,
    pipeline: Pipeline | None,
    row_blocks: int = 1,
    lookup_share: float | None = None,
    sent_bytes: float = 0.0,
) -> int:
    """The bytes of a shard of `dim` columns of this table, for so many samples of all devices; 0 where no pipeline is given.

    A shard of some rows is one of `row_blocks`, and gets an equal share of the lookups, as TorchRec counts, where its
    `lookup_share` is not known. Of a pooled table it still has an output for every sample and feature, which the ranks sum up;
    of a sequence it has one for each of its lookups. With `sent_bytes` of an element of outputs as they are sent it is what a
    step needs at least for the shard by the ledger: the ids that it received, and its output.
    """
    if pipeline is None:
        return 0
    of_all = table.pooling_factor * samples
    lookups = math.ceil(of_all / row_blocks if lookup_share is None else of_all * lookup_share)
    batches = 1 + IN_FLIGHT[pipeline].forward.received if sent_bytes else BATCHES[pipeline]
    kept = batches * lookups * LOOKUP_BYTES
    if pipeline != "none" and not sent_bytes:
        return kept
    pooled = max(len(table.features), 1) if sent_bytes else _pooled(table)
    outputs = lookups if table.pooling == "none" else math.ceil(pooled * samples)
    return kept + int(outputs * dim * (sent_bytes or table.element_bytes))


def _pooled(table: Table) -> float:
    """Pooled vectors of a sample: one a feature. TorchRec assumes that a sample without lookups has none."""
    each = [feature.pooling_factor for feature in table.features] or [table.pooling_factor]
    return sum(min(lookups, 1.0) for lookups in each)
