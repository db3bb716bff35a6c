"""What lives on a rank in a step, beside numbers worked out by hand; tests/client/test_step_ledger.py has real steps."""

import random
from typing import Any, get_args

import pytest

from helpers.refusals import refused
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Provenance, Shard, parts_of, peaks_of
from neuroshard.core.skew import largest_block
from neuroshard.core.step_memory import Pipeline, PipelineOption, own_input_bytes
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.search.copies import may_be_copied

SAMPLES, RANKS, LOOKUPS, ROWS, DIM = 8, 2, 2, 100, 16  # samples of a rank
X = 4 * DIM * SAMPLES  # outputs of a table for a rank's samples
FREES = get_args(PipelineOption)
INPUT = (8 * LOOKUPS + 4) * SAMPLES  # of a rank's batch
RECEIVED_IDS, LENGTHS = 8 * LOOKUPS * SAMPLES * RANKS, SAMPLES * RANKS


def table(name: str = "t", **more: object) -> Table:
    given = {"name": name, "rows": ROWS, "dim": DIM, "pooling_factor": LOOKUPS, "module": "m"}
    return Table.model_validate({**given, "optimizer_bytes_per_row": 0, "optimizer_bytes_per_element": 0, **more})


def whole(of: Table, device: int) -> Shard:
    return Shard(table=of.name, rows=of.rows, dim=of.dim, device=device)


def blocks(of: Table, first: int = 0) -> list[Shard]:
    half = of.rows // 2
    return [Shard(table=of.name, row_offset=n * half, rows=half, dim=of.dim, device=first + n) for n in range(RANKS)]


def task(*tables: Table, memory: int = 2**30, **more: Any) -> ShardingTask:
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
def test_semi_sync_keeps_the_gradients_of_outputs_beside_those_out_of_order(names: str, gradients: int) -> None:
    some = [table(name) for name in names]
    peak = peaks_of(task(*some, pipeline="semi-sync"), [shard for one in some for shard in halves(one)], gloo=True)[0]
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


def test_gloo_gathers_two_at_a_time_and_starts_another() -> None:
    some = [table(f"t{n}", module=f"m{n}", pooling_factor=1) for n in range(5)]
    for count in (3, 4, 5):
        shards = [shard for one in some[:count] for shard in blocks(one)]
        peak = peaks_of(task(*some[:count]), shards, gloo=True)[0]
        assert peak.moment == "backward exchange"  # as the last starts
        assert peak.causes["exchange"] == ((count - 1) * (1 + RANKS) + RANKS + 3 * RANKS) * X


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


@pytest.mark.parametrize(("pooling", "kept"), [("sum", 0), ("none", 2)])  # of copies, as outputs are exchanged
def test_a_feature_that_two_tables_read_is_once_in_a_batch_and_copied_for_each(pooling: str, kept: int) -> None:
    inputs = []
    for names in ("xy", "xx"):
        some = [table(f"t{n}", pooling=pooling, features=[{"name": names[n], "pooling_factor": 2}]) for n in range(2)]
        inputs.append(peaks_of(task(*some), [whole(one, 0) for one in some], gloo=True)[0].causes["inputs"])
    assert inputs[1] == inputs[0] - INPUT + kept * INPUT
    assert own_input_bytes([table(pooling_factor=0.0)], SAMPLES) == {"t": 4 * SAMPLES}


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


def test_what_the_allocator_holds_is_a_share_of_what_a_step_allocates() -> None:
    one = table()
    without, held = (peaks_of(task(one, allocator_share=share), [whole(one, 0)])[0] for share in (None, 0.5))
    assert held.causes == {**without.causes, "allocator": round(without.nbytes / 2)}
    on_gloo = [peaks_of(task(one, allocator_share=share), [whole(one, 0)], gloo=True) for share in (None, 0.5)]
    assert on_gloo[0] == on_gloo[1]


@pytest.mark.parametrize("element_bytes", [4, 2])
def test_a_copy_keeps_its_gradient_in_a_bucket_that_leaves_nothing_unused_and_makes_another(element_bytes: int) -> None:
    """In fp16 it is made in fp32 first."""
    one, other = table(rows=10_000, element_bytes=element_bytes), table("o")
    gradient = element_bytes * 10_000 * DIM
    more = gradient * (1 if element_bytes == 4 else 3)
    both = task(one, other, allocator_share=0.5).with_copies(["t"])
    causes = peaks_of(both, [whole(one, 0), whole(one, 1), whole(other, 0)])[1].causes
    assert causes["gradient buckets"] == gradient
    assert more <= causes["gradients"] < more + 4 * X
    assert causes["allocator"] == pytest.approx((sum(causes.values()) - causes["allocator"] - gradient) / 2, abs=2)


@pytest.mark.parametrize(
    "more", [{}, {"index_dedup": True}, {"pipeline": "sparse-dist", "pipeline_options": FREES[:1] + FREES[2:]}]
)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_a_search_counts_of_a_step_is_no_more_than_its_peak(share: float, more: dict[str, Any]) -> None:
    one, other = table(), table("o", pooling="none", module="n")
    both, shards = task(one, other, allocator_share=share, **more), [whole(one, 0), *blocks(other)]
    counted = [both.least_step_bytes] * RANKS
    for shard, memory in zip(shards, both.memories(parts_of(both, shards)), strict=True):
        counted[shard.device] += memory.step
    assert all(least <= peak.nbytes for least, peak in zip(counted, peaks_of(both, shards), strict=True))
    assert share == 0 or both.least_step_bytes > task(one, other, **more).least_step_bytes


@pytest.mark.parametrize(("pooling", "nbytes"), [("sum", 40), ("none", 48)])
def test_a_gpu_sorts_the_ids_that_it_received_in_the_backward_pass(pooling: str, nbytes: int) -> None:
    one = table(pooling=pooling, dim=4, pooling_factor=200)
    peak = peaks_of(task(one), [whole(one, 0)])[0]
    if pooling == "sum":
        assert (peak.moment, peak.causes["sorted ids"]) == ("backward exchange", nbytes * 200 * SAMPLES * RANKS)
    on_gloo = peaks_of(task(one), [whole(one, 0)], gloo=True)[0]
    assert "sorted ids" not in on_gloo.causes
    assert on_gloo.nbytes <= peak.nbytes


def test_ids_that_repeat_are_looked_up_and_sent_once_with_dedup() -> None:
    one = table(pooling="none", rows=4, pooling_factor=16)
    every, once = (peaks_of(task(one, index_dedup=how), [whole(one, 0)])[0] for how in (None, True))
    assert once.nbytes < every.nbytes
    outputs = 4 * DIM * 16 * SAMPLES
    assert once.causes["outputs" if "outputs" in once.causes else "gradients"] >= outputs  # all of its own lookups


def test_dedup_of_ids_that_are_all_distinct_keeps_what_puts_them_back() -> None:
    one = table(pooling="none", rows=10**8)
    every, once = (peaks_of(task(one, index_dedup=how), [whole(one, 0)])[0] for how in (None, True))
    assert once.causes["inputs"] >= every.causes["inputs"] + 8 * LOOKUPS * SAMPLES


@pytest.mark.parametrize("option", FREES)
def test_an_option_that_frees_inputs_takes_no_more(option: str) -> None:
    one, other = table(pooling_factor=200), table("o", pooling_factor=200)

    def most(*options: str) -> int:
        both = task(other, one, pipeline="sparse-dist", pipeline_options=options or None)
        return peaks_of(both, [whole(one, 0), whole(other, 1)], gloo=True)[0].nbytes

    assert most(option) == most() - (2 if option.startswith("free") else 1) * 2 * (8 * 200 + 4) * SAMPLES


@pytest.mark.parametrize("rows", [50, 5_000])
def test_distinct_rows_are_as_many_as_are_drawn(rows: int) -> None:
    lookups, drawn = 1_000, random.Random(1)
    one = table(rows=rows, pooling_factor=lookups / SAMPLES)
    seen = sum(len({drawn.randrange(rows) for _ in range(lookups)}) for _ in range(20)) / 20
    assert Part.of(one).distinct_rows(SAMPLES) == pytest.approx(seen, rel=0.03)


def test_rows_that_an_access_curve_says_are_hot_are_looked_up_once() -> None:
    spread, hot = (table(rows=10**6, pooling_factor=100, access=how) for how in ("uniform", "zipf:1.2"))
    assert Part.of(hot).distinct_rows(SAMPLES) < Part.of(spread).distinct_rows(SAMPLES) / 2


def test_inputs_that_sequences_read_again_cannot_be_cleared() -> None:
    how: dict[str, Any] = {"pipeline": "sparse-dist", "pipeline_options": ("clear_data_dist_inputs",)}
    with refused(ValueError, "'t'", "clear_data_dist_inputs", "--index-dedup"):
        task(table(pooling="none"), **how)
    assert task(table(pooling="none"), index_dedup=True, **how).pipeline_options


@pytest.mark.parametrize(
    ("pipeline", "options", "why"),
    [("semi-sync", None, "--pipeline"), ("sparse-dist", ("clear_data_dist_inputs",), "--pipeline-options")],
)
def test_pipelines_that_cannot_train_copies_have_none(pipeline: Pipeline, options: Any, why: str) -> None:
    both = task(table(), table("o"), pipeline=pipeline, pipeline_options=options)
    with refused(ValueError, "'o'", "data-parallel", why):
        ShardingTask.model_validate(dict(both.with_copies(["o"])))
    assert not may_be_copied(both, [], "cuda")
    assert may_be_copied(task(table(), table("o"), pipeline="sparse-dist"), [], "cuda") == {"t", "o"}


@pytest.mark.parametrize("pipeline", ["none", "base", "sparse-dist-lite", "fused-sparse-dist", "semi-sync", "prefetch"])
def test_options_of_other_pipelines_are_refused(pipeline: Pipeline) -> None:
    with refused(ValueError, "--pipeline-options", "clear_data_dist_inputs", pipeline):
        task(table(), pipeline=pipeline, pipeline_options=("clear_data_dist_inputs",))


@pytest.mark.parametrize(
    ("key", "value"),
    [("pipeline", "semi-sync"), ("dense_memory_bytes", 1), ("allocator_share", 0.5), ("index_dedup", True)],
)
def test_what_only_the_ledger_knows_is_refused_without_it(key: str, value: Any) -> None:
    with refused(ValueError, "step_ledger", str(value) if key == "pipeline" else key):
        task(table(), step_ledger=None, **{key: value})


def test_the_ids_of_a_domains_row_blocks_are_dealt_out_twice() -> None:
    one = table(pooling_factor=500, features=[{"name": name, "pooling_factor": 250} for name in "ab"])
    hosts: dict[str, Any] = {"device_memory_bytes": (2**30,) * 4, "topology": {"domain": 2, "local_world_size": 2}}
    idle = peaks_of(task(one, batch_size=4 * SAMPLES, **hosts), blocks(one), gloo=True)[2]  # it only sends
    sent = (8 * 500 + 4 * 2 * 2) * SAMPLES
    assert (idle.moment, idle.causes) == ("input exchange", {"inputs": (8 * 500 + 4 * 2) * SAMPLES + 2 * sent})


def test_ids_of_the_last_batch_are_there_until_those_of_this_one_are_looked_up() -> None:
    one, other, many = table(dim=1024), table("o", pooling_factor=100), 100
    half = {"forward": "fp16", "backward": "fp32"}
    peak = peaks_of(task(one, other, collective_precision=half), [*blocks(one), whole(other, 0)])[0]
    of_block, of_other = (8 * lookups * SAMPLES * RANKS for lookups in (LOOKUPS / RANKS, many))
    own = (8 * (LOOKUPS + many) + 4 * 2) * SAMPLES
    kept = of_block + of_other + 8 * 2 * LENGTHS
    assert (peak.moment, peak.causes["lookup outputs"]) == ("forward encode", 64 * RANKS * X)  # of row blocks
    assert peak.causes["inputs"] == own + kept + (4 + 4) * 2 * LENGTHS + of_other


def test_semi_sync_looks_up_the_next_batch_beside_the_outputs_of_this_one() -> None:
    one, half = table(pooling="none"), {"forward": "fp16", "backward": "fp16"}
    ahead = peaks_of(task(one, pipeline="semi-sync", collective_precision=half), [whole(one, 0)])[0]
    assert (ahead.moment, ahead.causes["outputs"]) == ("forward encode", LOOKUPS * X)


@pytest.mark.parametrize("element_bytes", [4, 2])
def test_one_rank_exchanges_nothing_and_joins_the_outputs_of_its_operators(element_bytes: int) -> None:
    some = [table("t"), table("h", element_bytes=element_bytes), table("o")]  # tables of an operator come together
    alone = task(*some, device_memory_bytes=(2**30,), batch_size=SAMPLES)
    peak, times = peaks_of(alone, [whole(one, 0) for one in some], gloo=True)[0], 4 // element_bytes
    assert peak.causes == {"inputs": 3 * (times * INPUT + 8 * SAMPLES), "lookup outputs": times * 3 * X}


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_ids_stay_beside_the_rows_that_an_id_map_gave_them(pooling: str) -> None:
    plain, mapped = table(pooling=pooling), table(pooling=pooling, id_map={"kind": "mch", "bytes_per_row": 24})
    fixed, given = (peaks_of(task(one), blocks(one), "none", gloo=True)[0] for one in (plain, mapped))
    order = 8 * LOOKUPS * SAMPLES * (pooling == "sum")  # which all sequences in row blocks keep
    assert fixed.moment == given.moment == "forward exchange"
    assert given.causes["inputs"] - fixed.causes["inputs"] == order + RECEIVED_IDS / 2 + 4 * LENGTHS


def sequence(name: str = "t", **more: object) -> Table:
    return table(name, pooling="none", **more)


@pytest.mark.parametrize("access", ["zipf:1", "zipf:2"])
def test_any_rank_may_hold_the_hot_block_of_a_sequence(access: str) -> None:
    even, hot = sequence(), sequence(access=access)
    assert hot.loads is not None
    largest = largest_block((hot.loads,), RANKS)
    for peak in peaks_of(task(hot), blocks(hot)):
        assert peak.causes["lookup outputs"] == pytest.approx(largest.high * LOOKUPS * RANKS * X, abs=1)
        assert peak.nbytes > peaks_of(task(even), blocks(even))[0].nbytes


def test_hot_rows_of_two_sequences_rarely_come_together() -> None:
    some = [sequence(name, rows=10_000, access="zipf:1") for name in ("t", "o", "p", "q")]
    shards = [shard for one in some for shard in blocks(one)]
    together = peaks_of(task(*some), shards)[0].causes["lookup outputs"]
    apart = sum(peaks_of(task(one), blocks(one))[0].causes["lookup outputs"] for one in some)
    assert 1.05 * len(some) * LOOKUPS * X < together < 0.95 * apart


def test_a_block_whose_lookups_by_id_are_known_has_these() -> None:
    one = sequence(access="zipf:1", lookups_by_id=(0.9, 0.1))
    hot, cold = peaks_of(task(one), blocks(one))
    assert hot.causes["lookup outputs"] == pytest.approx(0.9 * LOOKUPS * RANKS * X, abs=1)
    assert cold.nbytes < 0.6 * hot.nbytes


def test_of_a_pooled_table_only_ids_are_skewed() -> None:
    even, hot = (peaks_of(task(one), blocks(one), gloo=True)[0] for one in (table(), table(access="zipf:2")))
    assert hot.causes["inputs"] > even.causes["inputs"]
    assert {**hot.causes, "inputs": 0} == {**even.causes, "inputs": 0}
