"""What lives on a rank in a step, beside numbers worked out by hand; tests/client/test_step_ledger.py has real steps."""

import pytest

from helpers.refusals import refused
from neuroshard.core.plan import Plan, Provenance, Shard, peaks_of
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

SAMPLES, RANKS, LOOKUPS, ROWS, DIM = 8, 2, 2, 100, 16  # samples of a rank
X = 4 * DIM * SAMPLES  # outputs of a table for a rank's samples
INPUT = (8 * LOOKUPS + 4) * SAMPLES  # of a rank's batch
RECEIVED_IDS, LENGTHS = 8 * LOOKUPS * SAMPLES * RANKS, SAMPLES * RANKS


def table(name: str = "t", **more: object) -> Table:
    given = {"name": name, "rows": ROWS, "dim": DIM, "pooling_factor": LOOKUPS, "module": "m"}
    return Table.model_validate({**given, "optimizer_bytes_per_row": 0, "optimizer_bytes_per_element": 0, **more})


def whole(of: Table, device: int) -> Shard:
    return Shard(table=of.name, rows=of.rows, dim=of.dim, device=device)


def blocks(of: Table) -> list[Shard]:
    half = of.rows // 2
    return [Shard(table=of.name, row_offset=n * half, rows=half, dim=of.dim, device=n) for n in range(RANKS)]


def task(*tables: Table, memory: int = 2**30, **more: object) -> ShardingTask:
    given = {"tables": tables, "device_memory_bytes": (memory,) * RANKS, "batch_size": RANKS * SAMPLES}
    return ShardingTask.model_validate({**given, "pipeline": "none", "step_ledger": 1, **more})


def test_an_all_to_all_of_pooled_outputs_needs_the_lookup_its_copy_and_what_comes() -> None:
    one = table()
    peak = peaks_of(task(one), [whole(one, 0)])[0]
    inputs = INPUT + RECEIVED_IDS + 8 * LENGTHS + (4 + 4) * LENGTHS
    assert peak.moment == "forward exchange"
    assert peak.causes == {"inputs": inputs, "lookup outputs": RANKS * X, "exchange": RANKS * X + X}


def test_a_rank_that_holds_nothing_needs_its_outputs_and_their_gradients() -> None:
    one = table()
    peak = peaks_of(task(one), [whole(one, 0)])[1]
    assert (peak.moment, peak.causes) == ("outputs put together", {"inputs": INPUT, "exchange": X, "outputs": X})


def test_a_row_wise_table_has_outputs_of_all_samples_on_every_rank() -> None:
    one = table()
    for peak in peaks_of(task(one), blocks(one)):
        assert peak.causes["lookup outputs"] == RANKS * X
        assert peak.causes["exchange"] == X  # NCCL adds up without a copy of its own


def halves(of: Table) -> list[Shard]:
    half = of.dim // 2
    return [Shard(table=of.name, rows=of.rows, column_offset=n * half, dim=half, device=n) for n in range(RANKS)]


def test_semi_sync_keeps_a_batch_that_is_sent_as_it_is() -> None:
    one = table()
    peak = peaks_of(task(one, pipeline="semi-sync"), [whole(one, 0)])[0]
    received, kept = RECEIVED_IDS + 4 * LENGTHS, RECEIVED_IDS + 8 * LENGTHS
    assert peak.causes["inputs"] == (3 + 1) * INPUT + 3 * received + 2 * kept


@pytest.mark.parametrize(("names", "gradients"), [("t", 3), ("to", 4)], ids=["in order", "out of order"])
def test_semi_sync_keeps_the_gradients_of_outputs_beside_those_that_cuts_brought_out_of_order(
    names: str, gradients: int
) -> None:
    some = [table(name) for name in names]
    peak = peaks_of(task(*some, pipeline="semi-sync"), [shard for one in some for shard in halves(one)])[0]
    assert peak.causes["gradients"] == gradients * len(some) * X


def test_copies_keep_the_ids_of_a_batch_that_trainpipelinebase_has_given_up() -> None:
    one, copied = table("t"), table("c", rows=10_000)
    shards = [whole(one, 0), *(whole(copied, device) for device in range(RANKS))]
    plain, base = (peaks_of(task(one, copied).with_copies(["c"]), shards, pipeline)[0] for pipeline in ("none", "base"))
    assert (plain.moment, base.moment) == ("backward exchange",) * 2
    assert base.causes["inputs"] == plain.causes["inputs"] + 2 * INPUT


@pytest.mark.parametrize(("pipeline", "batches"), [("none", 1), ("sparse-dist", 2)])
def test_means_of_row_blocks_keep_a_divisor_for_each_batch_that_is_sent(pipeline: Pipeline, batches: int) -> None:
    sums, means = table(), table(pooling="mean")
    summed, divided = (peaks_of(task(one, pipeline=pipeline), blocks(one))[0] for one in (sums, means))
    assert summed.moment == divided.moment == "forward exchange"
    assert divided.causes["inputs"] - summed.causes["inputs"] == batches * X


def test_gloo_gathers_two_at_a_time() -> None:
    some, more = [table(f"t{n}", module=f"m{n}", pooling_factor=1) for n in range(5)], []
    for count in (4, 5):
        shards = [shard for one in some[:count] for shard in blocks(one)]
        nccl, gloo = (peaks_of(task(*some[:count]), shards, gloo=on)[0] for on in (False, True))
        assert gloo.moment == "backward exchange"
        more.append(gloo.nbytes - nccl.nbytes)
    assert 0 < max(more) <= 2 * RANKS * X


def test_gloo_copies_what_it_adds_up() -> None:
    one = table()
    nccl, gloo = (peaks_of(task(one), blocks(one), gloo=on)[0].nbytes for on in (False, True))
    assert gloo > nccl


def test_a_sequence_is_copied_into_the_order_in_which_it_is_sent() -> None:
    one = table(pooling="none")
    peak = peaks_of(task(one), [whole(one, 0)])[0]
    assert peak.causes["lookup outputs"] == LOOKUPS * RANKS * X
    assert peak.causes["exchange"] == LOOKUPS * RANKS * X + LOOKUPS * X


def test_half_precision_needs_more_at_its_peak_than_fp32() -> None:
    one = table(pooling="none")
    half = {"forward": "fp16", "backward": "fp16"}
    fp32, fp16 = (peaks_of(task(one, collective_precision=how), [whole(one, 0)])[0] for how in (None, half))
    assert fp16.moment == "forward encode"
    assert fp16.nbytes - fp32.nbytes == 1.5 * LOOKUPS * RANKS * X - LOOKUPS * X


@pytest.mark.parametrize(
    "pipeline", ["base", "sparse-dist", "sparse-dist-lite", "fused-sparse-dist", "semi-sync", "prefetch"]
)
def test_no_pipeline_needs_less_than_a_plain_loop(pipeline: Pipeline) -> None:
    one, other = table(), table("o", pooling="none", module="n")
    shards = [whole(one, 0), *blocks(other)]
    plain, ahead = peaks_of(task(one, other), shards), peaks_of(task(one, other), shards, pipeline)
    assert all(after.nbytes >= before.nbytes for before, after in zip(plain, ahead, strict=True))


def test_a_copy_keeps_its_gradient_in_a_bucket_and_makes_another() -> None:
    one, other = table(rows=10_000), table("o")
    both = task(one, other).with_copies(["t"])
    peak = peaks_of(both, [whole(one, 0), whole(one, 1), whole(other, 0)])[1]
    gradient = 4 * 10_000 * DIM
    assert peak.causes["gradient buckets"] == gradient
    assert gradient <= peak.causes["gradients"] < gradient + 4 * X


def test_what_dense_layers_keep_counts_with_outputs() -> None:
    one = table()
    peak = peaks_of(task(one, dense_memory_bytes=2**20), [whole(one, 0)])[0]
    assert (peak.moment, peak.causes["dense layers"], peak.causes["outputs"]) == ("dense layers", 2**20, X)


def test_a_plan_whose_step_does_not_fit_is_none() -> None:
    one = table()
    weights, step = 4 * ROWS * DIM, peaks_of(task(one), [whole(one, 0)])[0].nbytes
    made = Provenance(neuroshard_version="0", algorithm="by hand")
    fits = Plan(task=task(one, memory=weights + step), shards=(whole(one, 0),), provenance=made)
    assert fits.memory_bytes()[0] == weights + step
    with pytest.raises(ValueError, match="1 bytes too many"):
        Plan(task=task(one, memory=weights + step - 1), shards=(whole(one, 0),), provenance=made)


def test_plans_with_a_ledger_are_of_a_format_of_their_own() -> None:
    assert task(table()).plan_format == 6


@pytest.mark.parametrize(("key", "value"), [("pipeline", "semi-sync"), ("dense_memory_bytes", 1)])
def test_what_only_the_ledger_knows_is_refused_without_it(key: str, value: object) -> None:
    with refused(ValueError, "step_ledger", str(value) if key == "pipeline" else key):
        task(table(), step_ledger=None, **{key: value})  # type: ignore[arg-type]
