"""The ledger of a step's memory beside live bytes of real steps of TorchRec on gloo ranks, for plans drawn by seed; many more are
in `make bench-memory`."""

import random
from pathlib import Path
from typing import get_args

import pytest

from helpers.refusals import names, refused
from helpers.step_cases import PIPELINES, StepCase, drawn_case, held, peaks_of, shares_by_id, skewed_case
from neuroshard.client.peak_memory import Peak, _most_live, against_plan, peak_memory
from neuroshard.core.errors import UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.plan import peaks_of as peaks_said
from neuroshard.core.step_memory import Pipeline, PipelineOption
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import format_bytes

torch = pytest.importorskip("torch")

OFF = 0.1  # gloo's own thread may let go of a copy sooner or later


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "seed"), [("none", 5), *((pipeline, 21) for pipeline in ("none", *PIPELINES))])
def test_a_step_takes_what_the_ledger_says(pipeline: Pipeline, seed: int, tmp_path: Path) -> None:
    """Drawn are sequences, means and sums, on 2 ranks or (5) on 4, held in every way that stays within a host."""
    case = drawn_case(random.Random(seed), [pipeline], [None, "fp16"], [0.0, 1.1])
    said = [peak.nbytes for peak in peaks_said(case.plan.task, case.plan.shards, pipeline, gloo=True)]
    assert peaks_of(case, tmp_path) == [pytest.approx(nbytes, rel=OFF) for nbytes in said]


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["none", "sparse-dist", "prefetch"])
def test_row_wise_sequences_keep_their_input_in_the_order_of_operators(pipeline: Pipeline, tmp_path: Path) -> None:
    given, nbytes = {"module": "m", "rows": 1000, "dim": 4, "pooling": "none"}, [4, 2, 4]  # t1's operator is the last
    named = [{"name": f"t{n}", "features": [{"name": f"f{n}", "pooling_factor": 20}]} for n in range(3)]
    each = zip(nbytes, named, strict=True)
    tables = tuple(Table.model_validate({**given, **one, "element_bytes": size}) for size, one in each)
    task = ShardingTask(
        tables=tables, device_memory_bytes=(2**30,) * 2, batch_size=1024, pipeline=pipeline, step_ledger=1
    )
    shards = tuple(shard for table in tables for shard in held(table, "rows", 0, 2, 2))
    plan = Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    said = [peak.nbytes for peak in peaks_said(task, shards, gloo=True)]
    assert peaks_of(StepCase(plan, pipeline, 2), tmp_path) == [pytest.approx(nbytes, rel=0.03) for nbytes in said]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "pooling", "precision"),
    [("none", "none", None), ("sparse-dist", "none", "fp16"), ("sparse-dist", "sum", None)],
)
def test_the_rank_with_the_hot_block_takes_no_more_than_was_promised_for_any(
    pipeline: Pipeline, pooling: str, precision: str | None, tmp_path: Path
) -> None:
    case = skewed_case(pipeline, pooling, precision)
    task, shards = case.plan.task, case.plan.shards
    by_id = [table.model_copy(update={"lookups_by_id": tuple(shares_by_id(table).tolist())}) for table in task.tables]
    known = task.model_copy(update={"tables": tuple(by_id)})
    said, exactly = ([peak.nbytes for peak in peaks_said(of, shards, pipeline, gloo=True)] for of in (task, known))
    measured = peaks_of(case, tmp_path)
    assert measured == [pytest.approx(nbytes, rel=OFF) for nbytes in exactly]
    assert len(set(said)) == 1
    assert 0.75 * said[0] < max(measured) < 1.02 * said[0]


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_step_that_frees_inputs_early_takes_what_the_ledger_says(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    options = rng.sample(get_args(PipelineOption), rng.randint(1, 3))
    case = drawn_case(rng, ["sparse-dist"], options=options)
    said = [peak.nbytes for peak in peaks_said(case.plan.task, case.plan.shards, gloo=True)]
    assert peaks_of(case, tmp_path) == [pytest.approx(nbytes, rel=OFF) for nbytes in said]


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "seed"), list(zip(("none", *PIPELINES), (7, 21, 4, 35, 2, 29, 7), strict=True)))
def test_a_step_whose_ids_are_sent_once_takes_what_the_ledger_says(
    pipeline: Pipeline, seed: int, tmp_path: Path
) -> None:
    case = drawn_case(random.Random(seed), [pipeline], [None, "fp16"], dedup=True)
    said = [peak.nbytes for peak in peaks_said(case.plan.task, case.plan.shards, gloo=True)]
    assert peaks_of(case, tmp_path) == [pytest.approx(nbytes, rel=OFF) for nbytes in said]


def test_a_trainer_hears_how_far_its_peak_is_from_the_plan() -> None:
    table = Table(name="t", rows=100, dim=16, pooling_factor=2.0)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**30,), batch_size=8, pipeline="none", step_ledger=1)
    shard = Shard(table="t", rows=100, dim=16, device=0)
    plan = Plan(task=task, shards=(shard,), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    step = peaks_said(task, plan.shards, gloo=True)[0]
    line = against_plan(plan, Peak(nbytes=2 * step.nbytes))
    assert all(names(line, fact) for fact in (plan.digest()[:12], "rank 0 of 1", "+100%", step.moment))


def test_on_a_gpu_allocated_is_compared_with_allocated_and_reserved_is_said() -> None:
    table = Table(name="t", rows=100, dim=16, pooling_factor=2.0)
    how = {"batch_size": 2**16, "pipeline": "none", "step_ledger": 1, "allocator_share": 1.0}
    task = ShardingTask.model_validate({"tables": (table,), "device_memory_bytes": (2**30,), **how})
    shard = Shard(table="t", rows=100, dim=16, device=0)
    plan = Plan(task=task, shards=(shard,), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    planned = plan.memory_bytes()[0]
    allocated = planned - plan.step_peaks()[0].causes["allocator"]
    line = against_plan(plan, Peak(nbytes=allocated, reserved=2**30))
    assert all(
        names(line, fact) for fact in ("+0%", "1.0 GiB reserved", format_bytes(planned), format_bytes(allocated))
    )


@pytest.mark.parametrize("contiguous", [False, True])
def test_each_rank_of_groups_is_held_against_its_own_device(contiguous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(name="t", rows=100, dim=16, pooling_factor=2.0)
    groups = Groups(ranks=4, contiguous=contiguous, domain=4, local_world_size=4)
    how = {"pipeline": "none", "step_ledger": 1, "groups": groups, "topology": groups.topology(2, None)}
    task = ShardingTask.model_validate(
        {"tables": (table,), "device_memory_bytes": (2**30,) * 2, "batch_size": 8, **how}
    )
    shard = Shard(table="t", rows=100, dim=16, device=1)
    plan = Plan(task=task, shards=(shard,), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    said = [peak.nbytes for peak in peaks_said(task, plan.shards, gloo=True)]
    each = [(said[device], 0) for device in ([0, 1, 0, 1] if contiguous else [0, 0, 1, 1])]
    monkeypatch.setattr("neuroshard.client.peak_memory.gathered", lambda *_: each)
    assert all(names(against_plan(plan, Peak()), fact) for fact in ("rank 0 of 4", "+0%"))
    monkeypatch.setattr("neuroshard.client.peak_memory.gathered", lambda *_: each[:2])
    with refused(UsageError, plan.digest()[:12], 4, 2):
        against_plan(plan, Peak())


def test_a_plan_that_counts_no_steps_has_nothing_to_be_held_against() -> None:
    table = Table(name="t", rows=100, dim=16, pooling_factor=2.0)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**30,), batch_size=8)
    shard = Shard(table="t", rows=100, dim=16, device=0)
    plan = Plan(task=task, shards=(shard,), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    with refused(UsageError, plan.digest()[:12], "--pipeline"):
        against_plan(plan, Peak())


def test_gradients_of_row_wise_sequences_are_copied_into_the_order_in_which_outputs_came() -> None:
    table = Table(name="t", rows=100, dim=16, pooling_factor=2.0, pooling="none", lookups_by_id=(0.99, 0.01))
    how = {"pipeline": "semi-sync", "step_ledger": 1}
    task = ShardingTask.model_validate(
        {"tables": (table,), "device_memory_bytes": (2**30,) * 2, "batch_size": 16, **how}
    )
    cold, outputs = peaks_said(task, held(table, "rows", 0, 2, 2))[1], 4 * 16 * 2 * 8
    assert (cold.moment, cold.causes["gradients"]) == ("backward exchange", 2 * outputs)
    assert cold.causes["exchange"] == pytest.approx(2 * outputs, rel=0.05)  # of this batch, and of the next


def test_the_peak_is_of_what_lives_at_once() -> None:
    with peak_memory() as peak:
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        second, third = (torch.empty(2000, dtype=torch.uint8) for _ in range(2))
        del second, third
    assert peak.nbytes == 4000


def test_what_was_freed_without_a_word_does_not_pile_up() -> None:
    at, elsewhere = 64, 128  # addresses
    assert _most_live([(at, 100), (elsewhere, 50), (at, 100), (at, -100), (elsewhere, -50)]) == 150


def test_what_was_made_before_does_not_count_when_it_is_freed() -> None:
    before = torch.empty(1000, dtype=torch.uint8)
    with peak_memory() as peak:
        del before
        after = torch.empty(500, dtype=torch.uint8)
        del after
    assert peak.nbytes == 500
