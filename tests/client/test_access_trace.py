"""Traces of trainers: they hold what real TorchRec batches look up, evenly over the steps and in bounded bytes; and what fails
ends the recording, never the training."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)

import neuroshard as ns
from helpers.gloo import on_ranks
from helpers.refusals import refused
from helpers.tensor_dicts import as_tensor_dict
from neuroshard.client.access import FEWEST_BATCHES, MOST_BATCHES, AccessTrace, AccessWarning
from neuroshard.core.errors import InvalidInput, StoreError, UsageError
from neuroshard.core.table import Table
from neuroshard.core.value import shown
from neuroshard.costmodel.cache import miss_curve
from neuroshard.files.traces import Lookups, read_traces, recorded_in
from neuroshard.store.folder import FolderStore
from neuroshard.store.traces import fetch_trace_of, read_trace_pointer

ROWS = {"a": 40_000, "b": 60, "y.c": 9000}
SAMPLES = 64


def model() -> torch.nn.Module:
    """Two pooled tables, of which two features read one; and a sequence in another module, which reads a feature of one name."""
    meta = torch.device("meta")
    bags = [
        EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=40_000, feature_names=["f", "g"]),
        EmbeddingBagConfig(name="b", embedding_dim=8, num_embeddings=60, feature_names=["h"]),
    ]
    one = EmbeddingConfig(name="c", embedding_dim=8, num_embeddings=9000, feature_names=["f"])
    return torch.nn.ModuleDict(
        {"x": EmbeddingBagCollection(tables=bags, device=meta), "y": EmbeddingCollection(tables=[one], device=meta)}
    )


def jagged(keys: tuple[str, ...], seed: int, samples: int = SAMPLES, most: int = 60) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, 9, size=len(keys) * samples))
    values = torch.from_numpy(rng.zipf(1.2, size=int(lengths.sum())) % most)
    return KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths)


def batch(step: int, samples: int = SAMPLES) -> dict[str, KeyedJaggedTensor]:
    return {"x": jagged(("f", "unused", "g", "h"), step, samples), "y": jagged(("f",), 1000 + step, samples)}


def trace_of(folder: Path, **more: Any) -> AccessTrace:
    return AccessTrace(model(), str(folder / "store"), "ads", **more)


def record(trace: AccessTrace, *batches: Any) -> None:
    for one in batches:
        trace.add(one)
    trace.write(wait_seconds=60)


def read(folder: Path) -> tuple[Any, dict[str, Lookups]]:
    path = fetch_trace_of(str(folder / "store" / "ads"), folder)
    return recorded_in(path), dict(read_traces(path).tables)


def test_a_trace_holds_the_first_samples_of_each_batch_with_the_lookups_of_all_features(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, most_bytes=2**18)
    for step in range(5):
        trace.add(batch(step))
    trace.write(wait_seconds=60)
    recorded, tables = read(tmp_path)
    assert (recorded.batches, recorded.steps, recorded.rows) == (5, 5, {"a": 40_000, "b": 60, "c": 9000})
    assert 1 <= recorded.batch_size < SAMPLES
    for name, path, features in (("a", "x", "fg"), ("b", "x", "h"), ("c", "y", "f")):
        wanted = [
            [batch(step)[path][feature].to_dense()[sample] for feature in features]
            for step in range(5)
            for sample in range(recorded.batch_size)
        ]
        every = [torch.cat(one) for one in wanted]
        assert tables[name].indices.tolist() == torch.cat(every).tolist()
        assert tables[name].lengths.tolist() == [len(one) for one in every]


def test_a_long_run_is_sampled_evenly_in_bounded_bytes(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, most_bytes=2**16)
    steps = 5 * MOST_BATCHES
    of_x, of_y = jagged(("f", "g", "h"), 0, samples=8), jagged(("f",), 0, samples=8)
    for step in range(steps):
        values = torch.full_like(of_x.values(), step % 60)
        trace.add({"x": KeyedJaggedTensor(of_x.keys(), values, lengths=of_x.lengths()), "y": of_y})
    trace.write(wait_seconds=60)
    recorded, tables = read(tmp_path)
    assert recorded.steps == steps
    assert MOST_BATCHES / 2 <= recorded.batches <= MOST_BATCHES
    assert sum(array.nbytes for one in tables.values() for array in one) <= 2**16
    every = steps // recorded.batches
    seen = {int(row) for row in tables["a"].indices}
    assert seen == {step % 60 for step in range(0, steps, every)}


def test_after_a_write_of_many_batches_a_new_trace_begins(tmp_path: Path) -> None:
    trace = trace_of(tmp_path)
    for step in range(FEWEST_BATCHES):
        trace.add(batch(step))
    trace.write(wait_seconds=60)
    trace.add(batch(0))
    with pytest.warns(AccessWarning, match=r"64 of 64 steps.* this trace has 1 batch"):
        trace.write(wait_seconds=60)
    for step in range(FEWEST_BATCHES):
        trace.add(batch(step))
    trace.write(wait_seconds=60)
    assert read_trace_pointer(FolderStore(tmp_path / "store"), "ads").steps == FEWEST_BATCHES + 1


def test_tables_of_a_trace_have_the_hot_rows_and_the_misses_of_the_trainer(tmp_path: Path) -> None:
    meta, rows, rng = torch.device("meta"), 20_000, np.random.default_rng(0)
    config = EmbeddingConfig(name="t", embedding_dim=8, num_embeddings=rows, feature_names=["f"])
    module = EmbeddingCollection(tables=[config], device=meta)
    trace = AccessTrace(module, str(tmp_path / "store"), "ads")
    truth = Table.parse({"name": "t", "rows": rows, "dim": 8, "pooling_factor": 10.0, "access": "zipf:1.05"}, "t")
    shares = 1 / np.arange(1, rows + 1) ** 1.05
    ends = np.cumsum(shares / shares.sum())
    for _ in range(200):
        ids = np.minimum(np.searchsorted(ends, rng.random(640)), rows - 1) * 7 % rows
        trace.add(KeyedJaggedTensor(["f"], torch.from_numpy(ids), lengths=torch.full((64,), 10)))
    trace.write(wait_seconds=60)
    place = str(tmp_path / "store" / "ads")
    (found,) = ns.tables(module, counted=place, row_orders=tmp_path / "rows", quiet=True)
    assert found.pooling_factor == 10.0
    assert found.access is not None
    assert found.access.stream is None
    assert found.reuse_batch_size == truth.reuse_batch_size
    np.testing.assert_allclose(found.reuse_bins, truth.reuse_bins, atol=0.06)
    ours, theirs = (miss_curve(table, 4096) for table in (found, truth))
    for share in (0.02, 0.1, 0.4):
        missed = [float(curve.missed(share * rows)) / curve.distinct_rows for curve in (ours, theirs)]
        assert missed[0] == pytest.approx(missed[1], abs=0.05)
    assert found.row_order is not None
    hottest = np.load(tmp_path / "rows" / f"{found.row_order.ids_digest}.npy")
    assert set(hottest[:5].tolist()) == {number * 7 % rows for number in range(5)}


def _record_on_ranks(rank: int, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = trace_of(folder)
        for step in range(3 + rank):  # ranks need not take as many steps
            trace.add(batch(100 * rank + step))
        trace.write(wait_seconds=60)


@pytest.mark.slow
def test_of_several_ranks_the_first_records_its_own_batches(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _record_on_ranks, tmp_path)
    recorded, tables = read(tmp_path)
    assert recorded.batches == 3
    assert tables["b"].indices[:1].tolist() == batch(0)["x"]["h"].values()[:1].tolist()


@pytest.mark.parametrize("by_path", [False, True])
def test_a_tensor_dict_is_recorded_as_the_batch_that_torchrec_makes_of_it(tmp_path: Path, by_path: bool) -> None:
    module = model() if by_path else model()["x"]  # type: ignore[index]
    found = []
    for number, dicts in enumerate((False, True)):
        trace = AccessTrace(module, str(tmp_path / str(number)), "ads")
        of = {path: as_tensor_dict(one) if dicts else one for path, one in batch(3).items()}
        trace.add(of if by_path else of["x"])
        trace.write(wait_seconds=60)
        found.append(read_traces(fetch_trace_of(str(tmp_path / str(number) / "ads"), tmp_path)).tables)
    for name, lookups in found[0].items():
        assert lookups.indices.tolist() == found[1][name].indices.tolist()
        assert lookups.lengths.tolist() == found[1][name].lengths.tolist()


def floats(value: float) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g", "h"], torch.full((3,), value), lengths=torch.ones(3).long())


WRONG: dict[str, tuple[Callable[[], Any], tuple[object, ...]]] = {
    "a feature is lacking": (lambda: {"x": jagged(("f", "g"), 0), "y": jagged(("f",), 0)}, ("'h'", "'b'")),
    "a feature is there twice": (lambda: [jagged(("f", "g", "h"), 0), jagged(("f",), 0)], ("'f'", "2", "paths")),
    "sizes differ": (lambda: {"x": jagged(("f", "g", "h"), 0), "y": jagged(("f",), 0, 9)}, (9, SAMPLES)),
    "no lengths": (lambda: TensorDict({"h": torch.zeros(4, 2)}), ("'h'", "TensorDict", "'Tensor'")),
    "unequal features": (
        lambda: TensorDict(
            {name: JaggedTensor(torch.arange(4), lengths=torch.ones(n).long()) for name, n in (("f", 4), ("h", 2))}
        ),
        ("'f'", "'h'", 2, 4),
    ),
    "nothing": (list, ("no KeyedJaggedTensor",)),
    "None": (lambda: None, ("'NoneType'",)),
    "nan": (lambda: {"x": floats(np.nan), "y": jagged(("f",), 0, 1)}, ("nan",)),
    "a size for each feature": (
        lambda: KeyedJaggedTensor(
            ["f", "g", "h"], torch.arange(4), lengths=torch.ones(4).long(), stride_per_key_per_rank=[[2], [1], [1]]
        ),
        ("batch size for each feature",),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_batch_of_the_tables_ends_the_recording_with_one_warning(tmp_path: Path, wrong: str) -> None:
    given, facts = WRONG[wrong]
    trace = trace_of(tmp_path)
    with pytest.warns(AccessWarning) as caught:
        record(trace, given(), given())
    (said,) = {str(one.message) for one in caught}
    assert all(str(fact) in said for fact in (*facts, "step 0", "training goes on"))


def test_warnings_that_are_errors_do_not_stop_training(tmp_path: Path, capfd: Any) -> None:
    trace = trace_of(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace.add(None)
    assert "no longer recorded" in capfd.readouterr().err


def test_rows_that_a_table_lacks_are_left_out_and_said_once(tmp_path: Path) -> None:
    values, lengths = torch.tensor([1, 2, -1, 60, 5, 5]), torch.tensor([1, 1, 4])
    given = {"x": KeyedJaggedTensor(["f", "g", "h"], values, lengths=lengths), "y": jagged(("f",), 0, 1)}
    trace = trace_of(tmp_path)
    with pytest.warns(AccessWarning, match=r"table 'b' is asked for row -1") as caught:
        record(trace, given, given)
    assert len(caught) == 1
    assert read(tmp_path)[1]["b"] == (pytest.approx([5, 5, 5, 5]), pytest.approx([2, 2]))


def test_batches_of_fewer_samples_are_left_out_and_a_trace_of_none_is_said(tmp_path: Path) -> None:
    trace = trace_of(tmp_path)
    trace.add(batch(0, samples=0))
    with pytest.warns(AccessWarning, match="no batch was recorded; 1 had fewer"):
        trace.write()
    trace.add(batch(1, samples=8))
    trace.add(batch(2, samples=7))
    trace.write(wait_seconds=60)
    assert read(tmp_path)[0].batches == 1


def test_a_store_that_fails_costs_a_warning_and_a_later_write_succeeds(tmp_path: Path, monkeypatch: Any) -> None:
    trace = trace_of(tmp_path)
    trace.add(batch(0))
    with monkeypatch.context() as broken:
        broken.setattr(FolderStore, "create", lambda *_: (_ for _ in ()).throw(StoreError("the disk is full")))
        with pytest.warns(AccessWarning, match="not in the store: the disk is full"):
            trace.write(wait_seconds=60)
    trace.write(wait_seconds=60)
    assert read(tmp_path)[0].batches == 1


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_row_numbers_in_floating_point_are_those_that_torchrec_reads(tmp_path: Path, kind: torch.dtype) -> None:
    given = jagged(("f", "g", "h"), 4)  # rows below 60, which all of these hold exactly
    values = given.values().to(kind) + 0.25 * (kind != torch.bfloat16)
    trace = AccessTrace(model()["x"], str(tmp_path / "store"), "ads")  # type: ignore[index]
    trace.add(KeyedJaggedTensor(given.keys(), values, lengths=given.lengths()))
    trace.write(wait_seconds=60)
    assert read(tmp_path)[1]["b"].indices.tolist() == given["h"].values().tolist()


@pytest.mark.parametrize("module", ["ads-ranker", None, torch.nn.Linear, [torch.nn.Linear(2, 2)]])
def test_what_is_no_module_is_refused_in_a_line(tmp_path: Path, module: Any) -> None:
    with refused(UsageError, shown(module), "torch.nn.Module"):
        AccessTrace(module, str(tmp_path), "ads")


def test_a_module_without_tables_a_bad_name_or_size_is_refused_before_training(tmp_path: Path) -> None:
    with refused(InvalidInput, "EmbeddingBagCollection"):
        AccessTrace(torch.nn.Linear(2, 2), str(tmp_path), "ads")
    with refused(UsageError, "a/b"):
        AccessTrace(model(), str(tmp_path), "a/b")
    for size in (True, 3, "1GiB", 2**40):
        with refused(UsageError, "most_bytes", shown(size)):
            AccessTrace(model(), str(tmp_path), "ads", most_bytes=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), "soon", 1e30])
def test_a_time_that_is_none_is_warned_of(tmp_path: Path, seconds: Any) -> None:
    trace = trace_of(tmp_path)
    trace.add(batch(0))
    with pytest.warns(AccessWarning, match="wait_seconds"):
        trace.write(wait_seconds=seconds)
    trace._writing.join(60)
    assert read(tmp_path)[0].batches == 1
