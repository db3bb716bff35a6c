"""Peaks of allocated memory that TorchRec's own benchmark measured (pull requests #3580 and #3770; its yaml files: 2 GPUs, 32,768
samples a rank), beside what a plan counts. The dense part of those models is not counted, and is small."""

import pytest

from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

OFF = 0.15
RANKS, SAMPLES = 2, 32_768
WIDE = (1_000_000, 2_048)  # cut column-wise


def tables(prefix: str, count: int, rows: int, dim: int, lookups: int, module: str, **more: object) -> list[Table]:
    given = {"rows": rows, "dim": dim, "pooling_factor": lookups, "module": module, "optimizer_bytes_per_row": 0}
    return [Table.model_validate({**given, "name": f"{prefix}{n}", **more}) for n in range(count)]


def pooled(unweighted: int, weighted: int, lookups: int) -> list[Table]:
    """Tables of 100,000 x 256, one of 512 columns in fp16, and a wide one."""
    return [
        *tables("u", unweighted, 100_000, 256, lookups, "bags"),
        *tables("half", 1, 100_000, 512, lookups, "bags", element_bytes=2),
        *tables("wide", 1, *WIDE, lookups, "bags"),
        *tables("w", weighted, 100_000, 256, lookups, "weighted", weighted=True),
    ]


LIGHT, LARGE = pooled(20, 20, 10), pooled(90, 80, 30)
SEQUENCES = [
    *tables("u", 71, 100_000, 256, 30, "bags"),
    *tables("last", 1, 200_000, 256, 30, "bags"),
    *tables("s", 1, 1_000_000, 1_024, 30, "sequences", pooling="none"),
    *tables("t", 1, 2_000_000, 1_024, 30, "sequences", pooling="none"),
]


def fullest(of: list[Table], pipeline: Pipeline) -> float:
    """GiB of the fullest device, if tables are dealt out in turn, and the wide one is halved."""
    shards = list[Shard]()
    for place, table in enumerate(of):
        cuts = 2 if (table.rows, table.dim) == WIDE else 1
        dim = table.dim // cuts
        shards += [
            Shard(table=table.name, rows=table.rows, column_offset=cut * dim, dim=dim, device=(place + cut) % RANKS)
            for cut in range(cuts)
        ]
    task = ShardingTask(
        tables=tuple(of),
        device_memory_bytes=(2**40,) * RANKS,
        batch_size=RANKS * SAMPLES,
        pipeline=pipeline,
        step_ledger=1,
    )
    made = Provenance(neuroshard_version="0", algorithm="by hand")
    return max(Plan(task=task, shards=tuple(shards), provenance=made).memory_bytes()) / 2**30


@pytest.mark.parametrize(
    ("of", "pipeline", "measured_gib"),
    [
        (LIGHT, "none", 11.6),
        (LIGHT, "sparse-dist", 12.2),
        (LARGE, "sparse-dist", 35.1),
        (SEQUENCES, "sparse-dist", 46.3),
    ],
    ids=["light, plain loop", "light", "large", "sequences"],
)
def test_a_plans_memory_is_near_the_peak_that_others_measured(
    of: list[Table], pipeline: Pipeline, measured_gib: float
) -> None:
    assert fullest(of, pipeline) == pytest.approx(measured_gib, rel=OFF)


def test_a_pipeline_needs_more_than_a_plain_loop_as_measured() -> None:
    assert fullest(LIGHT, "sparse-dist") > fullest(LIGHT, "none")
