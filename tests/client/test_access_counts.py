"""Counters in trainers on gloo: what all ranks counted of real TorchRec collections is what their global stream holds; and what
fails ends the counting, never the training."""

import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch._C._distributed_c10d import HashStore
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from helpers.gloo import on_ranks
from helpers.limits import HANGS
from helpers.refusals import refused
from helpers.streams import zipf
from helpers.tensor_dicts import as_tensor_dict
from neuroshard.client.access import AccessCounts, AccessWarning
from neuroshard.client.access_merge import MOST_QUEUED, Background, Step, Write
from neuroshard.client.access_sample import Reading, Sampler, ends_on_device, limits_of, sample_on_device
from neuroshard.client.ranks import Channel
from neuroshard.core.counted import CountedAccess
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import Table
from neuroshard.core.value import shown
from neuroshard.costmodel.cache import miss_curve
from neuroshard.files.count_access import AccessCounter, sampled_places
from neuroshard.files.row_orders import ids_of
from neuroshard.store.counted import put_counted, read_counted
from neuroshard.store.folder import FolderStore
from neuroshard.store.row_orders import fetch_ids

ROWS = {"user": 30_000, "item": 3000, "tag": 50}
FEATURES = {"user": ("u",), "item": ("clicked", "bought"), "tag": ("t",)}
LOOKUPS = {"u": 12, "clicked": 6, "bought": 2, "t": 3}  # of a sample
SAMPLES, STEPS = 48, 200  # of a rank; a step


def model() -> torch.nn.Module:
    """Two pooled tables under a feature processor, of which two features read one; and a sequence."""
    meta = torch.device("meta")
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=ROWS[name], feature_names=list(FEATURES[name]))
        for name in ("user", "item")
    ]
    pooled = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables=configs, is_weighted=True, device=meta),
        PositionWeightedModuleCollection({"u": 12, "clicked": 6, "bought": 2}, device=meta),
    )
    tag = EmbeddingConfig(name="tag", embedding_dim=8, num_embeddings=ROWS["tag"], feature_names=["t"])
    return torch.nn.ModuleDict({"pooled": pooled, "tags": EmbeddingCollection(tables=[tag], device=meta)})


def ids(rank: int, step: int, samples: int = SAMPLES) -> dict[str, np.ndarray]:
    """What a rank looks up in a step: Zipf over an order that moves on, as news do."""
    rng = np.random.default_rng([rank, step])
    size = {name: next(ROWS[table] for table, some in FEATURES.items() if name in some) for name in LOOKUPS}
    return {
        name: (rng.zipf(1.2, samples * lookups) * 7919 + 3 * step) % size[name] for name, lookups in LOOKUPS.items()
    }


def batch(of: dict[str, np.ndarray], names: tuple[str, ...]) -> KeyedJaggedTensor:
    values = np.concatenate([of[name] for name in names])
    lengths = [torch.full((len(of[name]) // LOOKUPS[name],), LOOKUPS[name]) for name in names]
    return KeyedJaggedTensor(keys=list(names), values=torch.from_numpy(values), lengths=torch.cat(lengths))


def features(rank: int, step: int, samples: int = SAMPLES) -> list[KeyedJaggedTensor]:
    of = ids(rank, step, samples)
    return [batch(of, ("clicked", "u", "bought")), batch(of, ("t",))]


def train(counts: AccessCounts, rank: int, steps: range, samples: int = SAMPLES) -> None:
    """Steps no faster than the background counts them: real ones take longer."""
    for step in steps:
        counts.add(features(rank, step, samples))
        until(lambda: counts._background.steps.qsize() < 64 or counts._background.ended.is_set())


def until(done: Any) -> None:
    ends = time.monotonic() + HANGS
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.002)


def exactly(ranks: int, steps: range) -> dict[str, AccessCounter]:
    counters = {name: AccessCounter(rows) for name, rows in ROWS.items()}
    for step in steps:
        every = [ids(rank, step) for rank in range(ranks)]
        for name, counter in counters.items():
            counter.add(np.concatenate([one[feature] for one in every for feature in FEATURES[name]]), ranks * SAMPLES)
    return counters


def check(found: CountedAccess, ranks: int, steps: range) -> None:
    """The counts are those of the global stream, within the error that they state."""
    assert (found.ranks, found.steps, found.batch_size) == (ranks, len(steps), ranks * SAMPLES)
    assert (found.left_out_steps, found.notes) == (0, ())
    by_name = {table.name: table for table in found.tables}
    assert {name: table.rows for name, table in by_name.items()} == ROWS
    for name, counter in exactly(ranks, steps).items():
        table = by_name[name]
        assert table.access is not None
        assert table.access.stream is not None
        assert table.access.source.startswith(f"counted by trainers: {len(steps)} steps of")
        fields = counter.fields("time")
        exact = Table.parse({"name": name, "rows": counter.rows, "dim": 8, **fields}, name)
        assert table.pooling_factor == sum(LOOKUPS[feature] for feature in FEATURES[name])
        assert table.reuse_batch_size == ranks * SAMPLES
        ours, truth = (miss_curve(one, ranks * SAMPLES) for one in (table, exact))
        cached = np.linspace(truth.distinct_rows, counter.rows, 9)
        off = np.abs(ours.missed(cached) / ours.distinct_rows - truth.missed(cached) / truth.distinct_rows)
        assert off.max() <= 3 * table.access.stream.error + 1e-3
    sampled = by_name["user"].access.stream
    assert sampled.sampled < 1
    assert 0 < sampled.error < 0.04
    assert [one.pooling_factor for one in by_name["item"].features] == [6.0, 2.0]
    assert by_name["tag"].pooling == "none"
    assert by_name["tag"].module == "tags"


def counting(rank: int, store: str, work: Any) -> Any:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        counts = AccessCounts(model(), store, "ads", patience_seconds=HANGS)
        result = work(counts, rank)
        return result, [str(one.message) for one in said if one.category is AccessWarning]


@pytest.mark.slow
def test_one_process_counts_alone(tmp_path: Path) -> None:
    counts = AccessCounts(model(), str(tmp_path / "store"), "ads")
    train(counts, 0, range(STEPS))
    counts.write(wait_seconds=HANGS)
    check(read_counted(FolderStore(tmp_path / "store"), "ads"), 1, range(STEPS))


def whole_run(rank: int, store: str) -> Any:
    def work(counts: AccessCounts, rank: int) -> None:
        train(counts, rank, range(50))
        counts.write()  # in the middle of a block, in the background
        train(counts, rank, range(50, STEPS))
        counts.write(wait_seconds=HANGS)

    return counting(rank, store, work)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_steps_are_counted_as_global_batches(ranks: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert (
        on_ranks(ranks, tmp_path, whole_run, str(store)) == [(None, [])] * ranks
    )  # 4 ranks, of which one counts no table
    check(read_counted(FolderStore(store), "ads"), ranks, range(STEPS))
    assert len(list((store / "ads" / "access").glob("*.json"))) == 3


def restarted(rank: int, store: str) -> Any:
    """Two runs in one world, as torchrun starts ranks again with the key-value store of the ranks before."""

    def short(counts: AccessCounts, rank: int) -> None:
        train(counts, rank, range(100, 120))
        counts.write(wait_seconds=HANGS)

    first = whole_run(rank, store)
    seen = read_counted(FolderStore(Path(store)), "ads") if rank == 0 else None
    second = counting(rank, store, short)
    kept = read_counted(FolderStore(Path(store)), "ads") if rank == 0 else None
    return first[1], second[1], seen == kept


@pytest.mark.slow
def test_a_run_that_has_just_begun_again_does_not_hide_a_long_one(tmp_path: Path) -> None:
    (of_0, of_1) = on_ranks(2, tmp_path, restarted, str(tmp_path / "store"))
    assert of_1 == ([], [], True)
    first, (second,), same = of_0
    assert first == []
    assert "has counted 200 steps" in second
    assert "this one 20" in second
    assert same


def with_a_gap(rank: int, store: str) -> Any:
    def work(counts: AccessCounts, rank: int) -> None:
        train(counts, rank, range(64))
        if rank == 1:
            counts._step += 3  # as if the background had been too slow for three steps, which rank 0 counts
            train(counts, rank, range(67, 128))
        else:
            train(counts, rank, range(64, 128))
        train(counts, rank, range(128, 140), samples=SAMPLES // 2)
        train(counts, rank, range(140, 160))
        counts.write(wait_seconds=HANGS)

    return counting(rank, store, work)


@pytest.mark.slow
def test_steps_that_some_rank_did_not_count_and_other_batch_sizes_are_left_out_and_said(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, with_a_gap, str(tmp_path / "store")) == [(None, [])] * 2
    found = read_counted(FolderStore(tmp_path / "store"), "ads")
    assert (found.steps, found.left_out_steps) == (84, 76)
    behind, size = found.notes
    assert behind == "64 steps left out: rank 1 was behind, or its sample was too large"
    assert size == "12 steps left out: the batch did not have 96 samples over all ranks"


def failing(rank: int, store: str, how: str) -> Any:
    """Trains on after a fault of counting; the steps that it trained."""

    def work(counts: AccessCounts, rank: int) -> int:
        train(counts, rank, range(10))
        counts.write(wait_seconds=HANGS)
        if how == "a batch without a feature" and rank == 1:
            counts.add(batch(ids(rank, 10), ("t",)))
        elif how == "one step more":
            train(counts, rank, range(10, 10 + rank))
        elif how == "ends" and rank == 1:
            counts._background.stop("killed")
        if how != "a batch without a feature" or rank == 0:
            train(counts, rank, range(10, 80))
        counts.write(wait_seconds=1.0)
        until(counts._is_over)
        counts.add(features(rank, 80))
        dist.barrier()  # training's own collectives work
        return 80

    return counting(rank, store, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "of_0", "of_1"),
    [
        (
            "a batch without a feature",
            "rank 1: step 10: feature 'u' of table 'user' is not in the batch",
            "step 10: feature 'u'",
        ),
        ("one step more", "ranks 0 and 1 differ in their steps", ""),
        ("ends", "rank 1: killed", "rank 1: killed"),
    ],
)
def test_a_fault_of_a_rank_ends_the_counting_with_one_warning_and_not_the_training(
    tmp_path: Path, how: str, of_0: str, of_1: str
) -> None:
    store = tmp_path / "store"
    for (done, said), expected in zip(on_ranks(2, tmp_path, failing, str(store), how), (of_0, of_1), strict=True):
        assert done == 80
        assert len(said) == (1 if expected else 0), said
        assert all(f"tables are no longer counted: {expected}" in one for one in said)
    assert read_counted(FolderStore(store), "ads").steps == 10  # what was written stays


def in_threads(
    key_value: HashStore | None,
    ranks: int,
    write: Callable[[CountedAccess, Sequence[bytes]], str],
    patience_seconds: float = HANGS,
) -> list[Background]:
    """The background of each rank, in one process, over a key-value store that may hold what runs before have left."""
    tables = [Table(name=name, rows=rows, dim=8, pooling_factor=1.0) for name, rows in ROWS.items()]
    readings = [Reading(table, "m", FEATURES[table.name]) for table in tables]
    return [
        Background(
            Sampler(readings, ranks),
            None if key_value is None else Channel(key_value, "same", rank),
            rank,
            ranks,
            "ads",
            write,
            patience_seconds,
        )
        for rank in range(ranks)
    ]


def step_of_all(ranks: list[Background], steps: range) -> None:
    for step in steps:
        for rank, one in enumerate(ranks):
            one.put(Step(step, one.sampler.draw(features(rank, step))))
        until(lambda: all(one.steps.qsize() < 64 or one.ended.is_set() for one in ranks))


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_ranks_that_start_again_in_another_number_count_anew() -> None:
    key_value, written = HashStore(), list[CountedAccess]()

    def write(found: CountedAccess, lists: Sequence[bytes]) -> str:
        written.append(found)
        return ""

    first = in_threads(key_value, 3, write, patience_seconds=2.0)
    step_of_all(first, range(70))
    until(lambda: first[2]._sent == 1)
    first[2].steps.put(None)  # without a word
    for step in range(70, 200):
        for rank, one in enumerate(first[:2]):
            one.put(Step(step, one.sampler.draw(features(rank, step))))
    until(lambda: all(one.ended.is_set() for one in first))
    assert [one.fault for one in first] == ["rank 2 sent nothing for 2 s", "", ""]
    assert first[0].steps.qsize() <= MOST_QUEUED  # later steps were left out

    again = in_threads(key_value, 2, write)
    step_of_all(again, range(STEPS))
    for one in again:
        one.put(Write(1, STEPS, HANGS))
    assert [one.wait(1, HANGS) for one in again] == ["", ""]
    assert not any(one.ended.is_set() for one in again)
    for one in again:
        one.stop()
    (found,) = written
    assert (found.ranks, found.steps, found.left_out_steps, found.notes) == (2, STEPS, 0, ())
    assert {table.name: table.rows for table in found.tables} == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_hot_rows_of_all_ranks_lookups_are_listed_in_the_store(ranks: int, tmp_path: Path) -> None:
    store, written = FolderStore(tmp_path), list[CountedAccess]()
    hottest = np.random.default_rng(0).permutation(ROWS["user"])
    shares = zipf(ROWS["user"], 1.1)
    below = np.cumsum(shares)

    def write(found: CountedAccess, lists: Sequence[bytes]) -> str:
        written.append(found)
        return put_counted(store, found, lists)

    several = in_threads(HashStore() if ranks > 1 else None, ranks, write)
    for step in range(200):
        for rank, one in enumerate(several):
            rng = np.random.default_rng([rank, step])
            of = {name: 50 * rng.integers(0, 50, 48 * lookups) for name, lookups in LOOKUPS.items()}
            of["t"] //= 50
            of["u"] = hottest[np.searchsorted(below, rng.random(48 * LOOKUPS["u"]) * below[-1])]
            one.put(Step(step, one.sampler.draw([batch(of, ("clicked", "u", "bought")), batch(of, ("t",))])))
        until(lambda: all(one.steps.qsize() < 64 or one.ended.is_set() for one in several))
    for one in several:
        one.put(Write(1, 200, HANGS))
    assert [one.wait(1, HANGS) for one in several] == [""] * ranks
    for one in several:
        one.stop()
    (found,) = written
    tables = {table.name: table for table in found.tables}
    fetch_ids(store, "ads", found.tables, tmp_path / "rows")
    order = tables["user"].row_order
    assert order is not None
    assert order.time == found.time
    ids = ids_of(tmp_path / "rows", order)
    assert set(ids[:4].tolist()) <= set(hottest[:8].tolist())
    place = np.argsort(hottest)
    for rows in (16, 128, order.hot_rows):
        have = shares[place[ids[:rows]]].sum()
        assert have > shares[:rows].sum() - 0.08
        assert have - 0.12 < order.share_of(rows) < have + 0.03
    of_items = tables["item"].row_order  # counted by another rank, if there is one
    assert of_items is not None
    assert sorted(ids_of(tmp_path / "rows", of_items).tolist()) == [*range(0, 2500, 50)]
    assert of_items.lookup_share == 1
    assert tables["tag"].row_order is None  # its rows are read alike


def nowhere(found: CountedAccess, lists: Sequence[bytes]) -> str:
    return ""


def test_ranks_that_do_not_count_are_named() -> None:
    (rank_0,) = in_threads(HashStore(), 1, nowhere)[:1]
    rank_0.stop()
    key_value = HashStore()
    alone = Background(
        Sampler(rank_0.sampler.readings, 2), Channel(key_value, "same", 0), 0, 2, "ads", nowhere, patience_seconds=0.2
    )
    until(alone.ended.is_set)
    assert alone.fault == "rank 1 does not count; every rank must make an AccessCounts"


@pytest.mark.slow
def test_a_store_that_fails_costs_a_warning_and_a_later_write_succeeds(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder of the store is to be")
    counts = AccessCounts(model(), str(tmp_path / "store"), "ads")
    train(counts, 0, range(10))
    with pytest.warns(AccessWarning, match=r"not in the store: cannot write: .*store.* training goes on"):
        counts.write(wait_seconds=HANGS)
    (tmp_path / "store").unlink()
    counts.write(wait_seconds=HANGS)
    assert read_counted(FolderStore(tmp_path / "store"), "ads").steps == 10


@pytest.mark.slow
def test_warnings_that_are_errors_do_not_stop_training_either(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = AccessCounts(model(), str(tmp_path / "store"), "ads")
    counts.add("no batch")
    counts.add(features(0, 0))
    counts.write()
    assert (
        "a batch is a KeyedJaggedTensor or TensorDict, or a list or dict of them, not 'str'" in capfd.readouterr().err
    )


def written_by(url: Path, batches: list[list[KeyedJaggedTensor]]) -> CountedAccess:
    counts = AccessCounts(model(), str(url), "ads")
    for one in batches:
        counts.add(one)
    counts.write(wait_seconds=HANGS)
    return read_counted(FolderStore(url), "ads")


def without_samples() -> list[KeyedJaggedTensor]:
    nothing = {name: np.empty(0, dtype=np.int64) for name in LOOKUPS}
    return [batch(nothing, ("clicked", "u", "bought")), batch(nothing, ("t",))]


def test_a_step_without_samples_is_left_out_and_counting_goes_on(tmp_path: Path) -> None:
    steps = [features(0, step) for step in range(6)]
    found = written_by(tmp_path / "store", [without_samples(), *steps[:3], without_samples(), *steps[3:]])
    assert (found.steps, found.left_out_steps, found.batch_size) == (6, 2, SAMPLES)
    assert found.notes == ("2 steps left out: rank 0 had no samples",)
    others = written_by(tmp_path / "others", steps).tables
    assert [table.access.stream for table in found.tables] == [table.access.stream for table in others]


def test_a_rank_without_samples_leaves_out_the_step_of_all_ranks() -> None:
    written = list[CountedAccess]()

    def write(found: CountedAccess, lists: Sequence[bytes]) -> str:
        written.append(found)
        return ""

    ranks = in_threads(HashStore(), 2, write)
    for step in range(8):
        for rank, one in enumerate(ranks):
            one.put(
                Step(
                    step,
                    one.sampler.draw(without_samples() if (rank, step) in ((1, 0), (1, 5)) else features(rank, step)),
                )
            )
    for one in ranks:
        one.put(Write(1, 8, HANGS))
    assert [one.wait(1, HANGS) for one in ranks] == ["", ""]
    for one in ranks:
        one.stop()
    assert (written[0].steps, written[0].left_out_steps, written[0].batch_size) == (6, 2, 2 * SAMPLES)
    assert written[0].notes == ("2 steps left out: rank 1 had no samples",)


ENDS = """
import atexit
from torch._C._distributed_c10d import HashStore
from neuroshard.client.access_merge import Background
from neuroshard.client.access_sample import Reading, Sampler
from neuroshard.client.ranks import Channel
from neuroshard.core.table import Table

atexit.register(lambda: print("counting on" if background.thread.is_alive() else f"ended {background.fault!r}"))
sampler = Sampler([Reading(Table(name="t", rows=9, dim=8, pooling_factor=1.0), "m", ("t",))], 2)
background = Background(sampler, Channel(HashStore(), "same", 0), 0, 2, "ads", str)  # waits for rank 1
"""


def test_a_trainer_that_ends_ends_the_counting_first() -> None:
    """A thread in a call of torch's as the interpreter ends aborts the process."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=HANGS, check=True)
    assert ended.stdout == "ended ''\n"


@pytest.mark.parametrize("seconds", ["10", None, float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_refused_at_first_and_later_warned_of(tmp_path: Path, seconds: Any) -> None:
    with refused(UsageError, "patience_seconds", repr(seconds)):
        AccessCounts(model(), str(tmp_path), "ads", patience_seconds=seconds)
    counts = AccessCounts(model(), str(tmp_path), "ads")
    counts.add(features(0, 0))  # or the thread may warn, before `write` returns, that there is nothing to write
    with pytest.warns(AccessWarning, match=f"not {seconds!r}; it waits for none; training goes on"):
        counts.write(wait_seconds=seconds)


@pytest.mark.parametrize("module", ["ads-ranker", None, torch.nn.Linear, [torch.nn.Linear(2, 2)]])
def test_what_is_no_module_is_refused_in_a_line(tmp_path: Path, module: Any) -> None:
    with refused(UsageError, shown(module), "torch.nn.Module"):
        AccessCounts(module, str(tmp_path), "ads")


@pytest.fixture
def sampler() -> Sampler:
    tables = [
        Table(name=name, rows=rows, dim=8, pooling_factor=1.0) for name, rows in (("a", 40_000), ("b", 60), ("c", 9000))
    ]
    readings = [Reading(tables[0], "x", ("f", "g")), Reading(tables[1], "x", ("h",)), Reading(tables[2], "y", ("f",))]
    sampler = Sampler(readings, 4)
    sampler.strides = (1, 1, 1)
    return sampler


def jagged(keys: tuple[str, ...], seed: int, samples: int = 256, **more: Any) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, 9, size=len(keys) * samples))
    values = torch.from_numpy(rng.integers(0, 60, size=int(lengths.sum())))
    return KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths, **more)


def test_a_sample_has_just_the_lookups_of_the_sampled_rows(sampler: Sampler) -> None:
    sampler.shares = (0.5, 1.0, 0.25)
    kjt = jagged(("g", "h", "other", "f"), 0)
    sample = sampler.draw(kjt).sample()
    by_key = dict(zip(kjt.keys(), np.split(kjt.values().numpy(), kjt.offset_per_key()[1:-1]), strict=True))
    for table, names in enumerate((("f", "g"), ("h",), ("f",))):
        every = np.concatenate([by_key[name] for name in names])
        rows, counts = np.unique(every[sampled_places(every, sampler.shares[table])], return_counts=True)
        assert sample.rows[table].tolist() == rows.tolist()
        assert sample.counts[table].tolist() == counts.tolist()
        assert sample.lookups[table].tolist() == [len(by_key[name]) for name in names]


def test_of_a_table_s_lookups_each_as_many_th_is_sampled_whatever_feature_reads_it(sampler: Sampler) -> None:
    sampler.shares, sampler.strides = (0.5, 1.0, 0.25), (8, 2, 32)
    lookups, sampled = np.zeros((3, 60)), np.zeros((3, 60))
    for step in range(400):
        kjt = jagged(("g", "h", "other", "f"), step, samples=16)
        sample = sampler.draw(kjt).sample()
        by_key = dict(zip(kjt.keys(), np.split(kjt.values().numpy(), kjt.offset_per_key()[1:-1]), strict=True))
        for table, names in enumerate((("f", "g"), ("h",), ("f",))):
            lookups[table] += np.bincount(np.concatenate([by_key[name] for name in names]), minlength=60)
            sampled[table] += np.bincount(sample.drawn[table], minlength=60)
    for table, stride in enumerate((8, 2, 32)):
        assert sampled[table].sum() == pytest.approx(lookups[table].sum() / stride, rel=0.05)
        expected = lookups[table] / stride
        assert (np.abs(sampled[table] - expected) < 5 * np.sqrt(expected)).all()


def test_no_more_lookups_are_sampled_where_a_later_batch_has_many_more() -> None:
    sampler = Sampler([Reading(Table(name="a", rows=1000, dim=8, pooling_factor=1.0), "x", ("f",))], 2)
    for samples in (200, 20_000):
        rows = np.arange(samples) % 1100  # some are outside
        kjt = KeyedJaggedTensor(["f"], torch.from_numpy(rows), lengths=torch.ones(samples, dtype=torch.long))
        sample = sampler.draw(kjt).sample()
        assert sample is not None
        assert 64 <= len(sample.drawn[0]) <= 512
        assert sample.drawn[0].max() < 1000


@pytest.mark.parametrize("weighted", [False, True])
def test_what_a_device_samples_is_what_the_host_samples(weighted: bool) -> None:
    kjt = jagged(("f", "g", "h"), 1)
    if weighted:
        kjt = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights=torch.rand(len(kjt.values())), lengths=kjt.lengths())
    shares = (0.25, 0.0, 1.0)
    limits, start = limits_of(shares, (4, 16, 1)), 12345
    got = sample_on_device(kjt.values(), ends_on_device(kjt), limits, start, 4096).numpy()
    total, rows, codes = int(got[0]), got[4 : 4 + 4097], got[4 + 4097 :]
    parts = np.split(kjt.values().numpy(), kjt.offset_per_key()[1:-1])
    assert got[1:4].tolist() == [len(part) for part in parts]
    expected = [part[sampled_places(part, share)] for part, share in zip(parts, shares, strict=True)]
    by_row = np.flatnonzero(codes[:total] & 1)
    assert rows[by_row].tolist() == np.concatenate(expected).tolist()
    assert (codes[by_row] // 4).tolist() == np.repeat(np.arange(3), [len(one) for one in expected]).tolist()
    places = np.arange(len(kjt.values())) + start + 1
    stride = np.repeat([4, 16, 1], [len(part) for part in parts])
    by_place = np.flatnonzero(codes[:total] & 2)
    assert rows[by_place].tolist() == kjt.values().numpy()[places % stride == 0].tolist()
    cut = sample_on_device(kjt.values(), ends_on_device(kjt), limits, start, 100).numpy()
    assert cut[0] == total > 100  # what does not fit is known
    assert cut[4:104].tolist() == rows[:100].tolist()


def test_hashes_of_rows_are_the_same_with_torch() -> None:
    rows = np.concatenate([np.arange(5000), np.random.default_rng(0).integers(0, 2**40, 5000)])
    for share in (0.5, 2.0**-4):
        # no lookup is sampled by its place, as if no table read the key
        limits = limits_of([share], [0])
        everywhere = sample_on_device(torch.from_numpy(rows), torch.tensor([len(rows)]), limits, 0, len(rows))
        assert everywhere[2 : 2 + int(everywhere[0])].tolist() == rows[sampled_places(rows, share)].tolist()


def test_batches_by_module_and_of_several_sizes(sampler: Sampler) -> None:
    of_x, of_y = jagged(("f", "g", "h"), 2), jagged(("f",), 3)
    sample = sampler.draw({"x": of_x, "y": of_y}).sample()
    assert sample.lookups[2].tolist() == [len(of_y.values())]
    assert sample.lookups[0].sum() == of_x.offset_per_key()[2]
    varied = KeyedJaggedTensor(
        keys=["f", "g", "h"],
        values=torch.arange(12),
        lengths=torch.tensor([2, 2, 3, 1, 4]),
        stride_per_key_per_rank=[[2], [1], [2]],
    )
    sample = sampler.draw(varied).sample()
    assert sample.samples == 2
    assert [some.tolist() for some in sample.lookups] == [[4, 3], [5], [4]]
    assert ends_on_device(varied).tolist() == varied.offset_per_key()[1:]


@pytest.mark.parametrize("by_path", [False, True])
def test_a_tensor_dict_is_counted_as_the_batch_that_torchrec_makes_of_it(sampler: Sampler, by_path: bool) -> None:
    sampler.shares = (0.5, 1.0, 0.25)
    batches = {"x": jagged(("h", "g", "f"), 2), "y": jagged(("f",), 3)} if by_path else {"": jagged(("h", "g", "f"), 2)}
    dicts = {path: as_tensor_dict(one) for path, one in batches.items()}
    ours, truth = (sampler.draw(one if by_path else one[""]).sample() for one in (dicts, batches))
    assert [some.tolist() for some in ours.rows] == [some.tolist() for some in truth.rows]
    assert [some.tolist() for some in ours.lookups] == [some.tolist() for some in truth.lookups]
    assert ours.samples == truth.samples == 256


def test_what_is_no_batch_of_the_tables_is_refused_by_name(sampler: Sampler) -> None:
    with pytest.raises(InvalidInput, match="feature 'h' of table 'b' is not in the batch"):
        sampler.draw(jagged(("f", "g"), 0))
    with pytest.raises(
        InvalidInput, match="feature 'f' of table 'a' is there 2 times: give a dict by the paths of modules"
    ):
        sampler.draw([jagged(("f", "g", "h"), 0), jagged(("f",), 0)])
    with refused(InvalidInput, "'h'", "TensorDict", "'Tensor'"):
        sampler.draw(TensorDict({"h": torch.zeros(4, 2)}))
    sizes = {name: JaggedTensor(torch.arange(4), lengths=torch.ones(n).long()) for name, n in (("f", 4), ("h", 2))}
    with refused(InvalidInput, "'f'", "'h'", "2 samples", 4):
        sampler.draw(TensorDict(sizes))
    with pytest.raises(InvalidInput, match="KeyedJaggedTensors of 100, 256 samples"):
        sampler.draw({"x": jagged(("f", "g", "h"), 0), "y": jagged(("f",), 0, samples=100)})


def test_rows_that_a_table_lacks_are_left_out_and_said(sampler: Sampler) -> None:
    kjt = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([1, 2, -1, 60, 5, 5]), lengths=torch.tensor([1, 1, 4]))
    sampler.shares = (1.0, 1.0, 1.0)
    sample = sampler.draw(kjt).sample()
    assert (sample.rows[1].tolist(), sample.counts[1].tolist(), sample.outside) == ([5], [2], 2)


def test_a_module_without_tables_or_a_bad_name_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no EmbeddingBagCollection"):
        AccessCounts(torch.nn.Linear(2, 2), str(tmp_path), "ads")
    with pytest.raises(UsageError, match="not a usable model name"):
        AccessCounts(model(), str(tmp_path), "a/b")


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_row_numbers_in_floating_point_are_those_that_torchrec_reads(sampler: Sampler, kind: torch.dtype) -> None:
    kjt = jagged(("f", "g", "h"), 4)  # rows below 60, which all of these hold exactly
    floating = KeyedJaggedTensor(
        kjt.keys(), kjt.values().to(kind) + 0.25 * (kind != torch.bfloat16), lengths=kjt.lengths()
    )
    sampler.shares = (0.5, 1.0, 0.25)
    ours, truth = sampler.draw(floating).sample(), sampler.draw(kjt).sample()
    assert [rows.tolist() for rows in ours.rows] == [rows.tolist() for rows in truth.rows]
    assert [counts.tolist() for counts in ours.counts] == [counts.tolist() for counts in truth.counts]


@pytest.mark.parametrize(
    ("given", "said"),
    [([], "a batch has no KeyedJaggedTensor"), ({}, "a batch has no KeyedJaggedTensor"), (None, "not 'NoneType'")],
)
def test_what_is_no_batch_is_said(sampler: Sampler, given: Any, said: str) -> None:
    with refused(InvalidInput, said):
        sampler.draw(given)
