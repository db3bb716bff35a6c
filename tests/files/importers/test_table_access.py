"""Access curves of tables as options say: words, traces files of any length, and batches of TorchRec."""

import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import neuroshard as ns
from helpers.recorded import record, recorded_trace
from helpers.refusals import refused
from helpers.streams import independent, sessions, zipf
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import Table
from neuroshard.files.count_access import AccessCounter
from neuroshard.files.importers.imported import Imported
from neuroshard.files.importers.table_access import access_options, with_access, with_traces, with_words
from neuroshard.files.tables import read_tables, write_tables
from neuroshard.files.traces import Lookups, Traces, write_traces
from neuroshard.store.open import open_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
    )

    from helpers.tensor_dicts import as_tensor_dict

BATCH = 200
USER = Table.parse({"name": "user", "rows": 3000, "dim": 16, "pooling_factor": 1.0}, "t")
ITEM = Table.parse({"name": "item", "rows": 500, "dim": 16, "pooling_factor": 1.0}, "t")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def traced(path: Path, batches: list[np.ndarray], name: str = "user") -> Path:
    ids = np.concatenate(batches)
    write_traces(path, Traces({name: Lookups(ids, np.full(len(batches) * BATCH, len(ids) // len(batches) // BATCH))}))
    return path


def test_words_hold_for_tables_that_say_none_and_patterns_for_all() -> None:
    assert access_options(["zipf:1.05", "user*=zipf:1.2"]) == ("zipf:1.05", {"user*": "zipf:1.2"})
    assert access_options([]) == ("uniform", {})
    said = Imported((USER, ITEM, USER.model_copy(update={"name": "user_2"})))
    found = with_access(said, ["user*=zipf:1.2", "user_2=uniform"])
    assert [table.access and table.access.source for table in found.tables] == ["zipf:1.2", None, "uniform"]
    assert found.tables[0].reuse_bins != USER.reuse_bins
    assert found.notes == ()
    for before in (said, Imported(with_words(said.tables, {"*": "zipf:1.2"}))):
        assert "changes nothing: every table says" in with_access(before, ["zipf:1.1"]).notes[0]
    assert with_access(Imported(with_words(said.tables, {"user": "zipf:1.1"})), ["zipf:1.1"]).notes == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["zipf:1", "zipf:2"], "is given as 'zipf:1' and 'zipf:2'; name tables"),
        (["user=zipf"], "'zipf' is not an access distribution"),
        (["nobody*=zipf:1"], "no table has such a name; there are user"),
    ],
)
def test_words_that_say_nothing_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        with_access(Imported((USER,)), given)


def test_traces_are_counted_file_after_file_in_batches_in_order(tmp_path: Path) -> None:
    batches = list(islice(sessions(3000, 2 * BATCH, rng(), active=80, stay=10), 40))
    files = [traced(tmp_path / "1", batches[:25]), traced(tmp_path / "2", batches[25:])]
    (user, item), notes = with_traces((USER, ITEM), files, BATCH)
    counter = AccessCounter(3000)
    for batch in batches:
        counter.add(batch, BATCH)
    assert user.access == counter.curve("time", f"40 batches of {BATCH} samples")
    assert (user.pooling_factor, user.reuse_batch_size) == (2.0, BATCH)
    assert item == ITEM
    assert "1 table without a trace: item" in notes


@pytest.mark.slow
def test_counting_takes_the_memory_of_a_batch_not_of_the_file(tmp_path: Path) -> None:
    path = traced(tmp_path / "long", list(islice(independent(zipf(3000, 1.0), 5 * BATCH, rng()), 4000)))  # 32 MB
    tracemalloc.start()
    (user,), _ = with_traces((USER,), [path], BATCH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert user.access.stream.batches == 4000
    assert peak < 4e6 < path.stat().st_size / 5


def test_features_keep_their_shares_of_the_lookups_that_traces_count(tmp_path: Path) -> None:
    fields = {"pooling_factor": 4.0, "features": [{"name": n, "pooling_factor": p} for n, p in (("a", 1), ("b", 3))]}
    table = Table.parse(USER.model_dump() | fields, "t")
    path = traced(tmp_path / "1", list(islice(independent(zipf(3000, 1.0), 2 * BATCH, rng()), 4)))
    (user,), _ = with_traces((table,), [path], BATCH)
    assert [feature.pooling_factor for feature in user.features] == [0.5, 1.5]


def test_traces_that_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    path = traced(tmp_path / "1", list(islice(independent(zipf(3000, 1.0), BATCH, rng()), 4)))
    with pytest.raises(InvalidInput, match="has lookups of none of the tables; it has user"):
        with_traces((ITEM,), [path], BATCH)
    with pytest.raises(InvalidInput, match="'user' has fewer than 1,000 samples; give a smaller --batch-size"):
        with_traces((USER,), [path], 1000)
    small = USER.model_copy(update={"rows": 10})
    with pytest.raises(InvalidInput, match=r"table 'user': row [\d,]+ is looked up, but the table has rows 0 to 9"):
        with_traces((small,), [path], BATCH)
    (tmp_path / "2").write_bytes(b"no")
    with pytest.raises(InvalidInput, match="safetensors"):
        with_traces((USER,), [tmp_path / "2"], BATCH)
    with pytest.raises(UsageError, match="needs --batch-size"):
        with_access(Imported((USER,)), [], [path])
    with pytest.raises(UsageError, match="order is time"):
        with_access(Imported((USER,)), [], [path], BATCH, "random")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.bags = EmbeddingBagCollection(
            device=meta,
            tables=[
                EmbeddingBagConfig(name="user", embedding_dim=16, num_embeddings=1000, feature_names=["a", "b"]),
                EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=300, feature_names=["c"]),
            ],
        )
        config = EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=300, feature_names=["c"])
        self.history = EmbeddingCollection(device=meta, tables=[config])


def kjts(count: int, samples: int = BATCH, keys: str = "abc") -> Iterator[KeyedJaggedTensor]:
    draw = rng(4)
    for _ in range(count):
        ids = [draw.integers(300, size=samples * (n + 1)) for n in range(len(keys))]
        lengths = [np.full(samples, n + 1) for n in range(len(keys))]
        yield KeyedJaggedTensor(
            keys=[*keys], values=torch.tensor(np.concatenate(ids)), lengths=torch.tensor(np.concatenate(lengths))
        )


def test_batches_in_hand_give_pooling_factors_of_features_and_access() -> None:
    tables = ns.tables(Model(), batches=kjts(8), quiet=True)
    by_name = {table.name: table for table in tables}
    user = by_name["user"]
    assert [(one.name, one.pooling_factor) for one in user.features] == [("a", 1.0), ("b", 2.0)]
    assert {name: table.pooling_factor for name, table in by_name.items()} == {
        "user": 3.0, "bags.item": 3.0, "history.item": 3.0,
    }  # fmt: skip
    assert user.access.source == f"8 batches of {BATCH} samples"
    assert (user.access.stream.order, user.access.stream.distinct_rows) == ("time", pytest.approx(259, abs=3))
    assert by_name["history.item"].access == by_name["bags.item"].access
    assert not any("no pooling factor" in note for note in tables.notes)
    listed = ns.tables(Model(), batches=[[one] for one in kjts(8)], quiet=True, order="shuffled")
    assert listed[0].access.stream.order == "shuffled"


def test_the_last_smaller_batch_of_each_epoch_is_left_out_and_said() -> None:
    tables = ns.tables(Model(), batches=2 * [*kjts(5), *kjts(1, samples=7)], quiet=True)
    assert tables[0].access.stream.batches == 10
    assert [note for note in tables.notes if "left out" in note] == [
        f"2 of the batches left out, of fewer than {BATCH} samples"
    ]


def odd(change: Callable[[torch.Tensor], torch.Tensor]) -> KeyedJaggedTensor:
    one = next(kjts(1))
    return KeyedJaggedTensor(keys=one.keys(), values=change(one.values()), lengths=one.lengths())


def test_row_numbers_of_any_type_and_features_that_come_twice_alike_are_counted() -> None:
    plain = ns.tables(Model(), batches=[next(kjts(1))] * 4, quiet=True)
    dicts = [as_tensor_dict(next(kjts(1))), {"bags": as_tensor_dict(next(kjts(1)))}]
    for batch in (odd(torch.Tensor.int), odd(torch.Tensor.float), [next(kjts(1)), next(kjts(1))], *dicts):
        assert ns.tables(Model(), batches=[batch] * 4, quiet=True) == plain


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([], "there are no batches to count"),
        ([3], "batch 0 is 'int', not a KeyedJaggedTensor"),
        (list(kjts(1, keys="ab")), "batch 0 has no feature 'c' of table"),
        (next(kjts(1)), "batches is a list of KeyedJaggedTensors"),
        (as_tensor_dict(next(kjts(1))), "batches is a list of KeyedJaggedTensors"),
        ([[next(kjts(1, keys="ab")), next(kjts(1, 3, keys="c"))]], "of 200 and 3 samples"),
        ([odd(lambda ids: ids / 0.0)], "batch 0 looks up a row that is no number"),
        ([odd(lambda ids: ids.to("meta"))], "batch 0 is on the meta device"),
        ([odd(lambda ids: ids - 1)], "row -1 is looked up, but the table has rows 0 to"),
        ([[*kjts(2)]], "batch 0 has feature 'a' twice, with other lookups"),
    ],
)
def test_batches_that_cannot_be_counted_are_refused(batches: object, said: str) -> None:
    with pytest.raises(ns.NeuroshardError, match=said):
        ns.tables(Model(), batches=batches, quiet=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": [USER], "batches": []}, "batches are for a model"),
        ({"source": Model(), "batches": [], "pooling_factors": {"a": 3}}, "batches are for a model"),
        ({"source": [USER], "row_orders": "rows"}, "row_orders is for traces, batches or counted"),
    ],
)
def test_what_is_for_models_or_for_what_is_counted_is_refused_elsewhere(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ns.tables(**given, quiet=True)


def test_the_command_counts_traces_and_takes_words_by_table(neuroshard, tmp_path: Path) -> None:
    write_tables(tmp_path / "tables.json", (USER, ITEM))
    path = traced(tmp_path / "trace", list(islice(sessions(3000, BATCH, rng(), active=80, stay=10), 20)))
    command = ("tables", "--from", tmp_path / "tables.json", "-o", tmp_path / "out.json")
    counting = ("--access-from", path, "--batch-size", BATCH, "--order", "shuffled")
    done = neuroshard(*command, "--access", "item=zipf:1.2", *counting)
    assert done.returncode == 0, done.stderr
    (user, item), _ = read_tables(tmp_path / "out.json")
    assert (user.access.stream.batches, user.access.stream.order) == (20, "shuffled")
    assert item.access.source == "zipf:1.2"
    assert "note: 1 table without a trace: item" in done.stderr
    for wrong, said in (
        (("--order", "time"), "--order is for --access-from"),
        (("--access", "x"), "'x' is not an access"),
    ):
        refused = neuroshard(*command, *wrong)
        assert refused.returncode == 2
        assert said in refused.stderr


def recorded_file(folder: Path, *tables: Table, **more: Any) -> Path:
    path = folder / f"{len([*folder.iterdir()])}.safetensors"
    path.write_bytes(recorded_trace(tables, **more)[0])
    return path


def test_what_a_trainer_recorded_gives_curves_without_an_order_in_time_to_tables_of_its_rows(tmp_path: Path) -> None:
    path = recorded_file(tmp_path, USER, ITEM.model_copy(update={"rows": ITEM.rows + 1}))
    own = Table(name="own", rows=10, dim=8, pooling_factor=1.0, access="zipf:1.3")
    (item, kept, user), notes = with_traces([ITEM, own, USER], [path])
    assert (item, kept) == (ITEM, own)
    assert user.pooling_factor == 4.0
    assert user.reuse_batch_size == USER.reuse_batch_size
    assert user.access is not None
    assert user.access.stream is None
    assert user.reuse_bins == user.access.reuse_bins(USER.reuse_batch_size)
    assert [note for note in notes if "4 batches" in note] == []
    for fact in ("1 table is read: 100 of 300 steps", "2026-01-05", "1 table without a trace: own", "other rows: item"):
        assert any(fact in note for note in notes), fact
    with refused(InvalidInput, "none of the tables", "other rows", "item"):
        with_traces([ITEM], [path])


def test_recorded_traces_are_joined_with_their_like_alone(tmp_path: Path) -> None:
    one, other = (recorded_file(tmp_path, USER, seed=seed) for seed in (0, 1))
    (user,), _ = with_traces([USER], [one, other], 32)
    assert user.pooling_factor == 4.0
    stream = traced(tmp_path / "stream", [np.arange(3)])
    for paths, size, facts in (
        ([one], 64, (str(one), 32, 64)),
        ([one, stream], None, (str(one), str(stream))),
        ([stream, recorded_file(tmp_path, USER, batch_size=16)], None, ("not at all",)),
        ([stream], None, ("--batch-size",)),
    ):
        with refused(UsageError, *facts):
            with_traces([USER], paths, size)


@pytest.mark.parametrize("field", ["batch_size", "rows", "time"])
def test_a_trace_that_says_nonsense_of_itself_is_refused_by_name(tmp_path: Path, field: str) -> None:
    data, _ = recorded_trace([USER])
    path = tmp_path / "trace"
    path.write_bytes(data.replace(f'\\"{field}\\":'.encode(), f'\\"{field[::-1]}\\":'.encode()))
    with refused(InvalidInput, str(path), field):
        with_traces([USER], [path])


def test_the_command_and_python_take_what_a_trainer_recorded(neuroshard, tmp_path: Path) -> None:
    write_tables(tmp_path / "tables.json", (USER, ITEM))
    record(open_store(str(tmp_path / "store")), [USER])
    command = ("tables", "--from", tmp_path / "tables.json", "-o", tmp_path / "out.json")
    place = str(tmp_path / "store" / "ads")
    done = neuroshard(*command, "--access-from", place)
    assert done.returncode == 0, done.stderr
    (user, item), _ = read_tables(tmp_path / "out.json")
    assert "100 of 300 steps" in user.access.source
    assert item == ITEM
    assert "note: how 1 table is read: 100 of 300 steps of a trainer" in " ".join(done.stderr.split())
    assert tuple(ns.tables(tmp_path / "tables.json", counted=place, quiet=True)) == (user, item)
    for wrong, said in (
        (("--access-from", place, "--batch-size", 3), "--batch-size is for --access-from FILE"),
        (("--access-from", place, "--access-from", "x"), "neither a traces file"),
        (
            ("--access-from", tmp_path / "store" / "x"),
            "neither a traces file nor the folder of a model in a store is there",
        ),
    ):
        refused = neuroshard(*command, *wrong)
        assert refused.returncode
        assert said in " ".join(refused.stderr.split())
    with pytest.raises(UsageError, match="leave out traces and batches"):
        ns.tables(tmp_path / "tables.json", counted=place, traces="x", quiet=True)
