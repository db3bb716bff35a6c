"""Tables with orders of their rows, from traces, from batches and from what trainers counted; by command and from Python."""

import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import torch

import neuroshard as ns
from helpers.recorded import record
from helpers.streams import independent, zipf
from neuroshard.core.row_order import LISTS_FOLDER, RowOrder
from neuroshard.core.table import Table
from neuroshard.files.access import Ints
from neuroshard.files.hot_rows import RANGES
from neuroshard.files.importers.table_access import with_traces
from neuroshard.files.row_orders import ids_of
from neuroshard.files.tables import read_tables, write_tables
from neuroshard.files.traces import Lookups, Traces, write_traces
from neuroshard.store.open import open_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

BATCH, ROWS = 500, 3000
USER = Table.parse({"name": "user", "rows": ROWS, "dim": 16, "pooling_factor": 1.0, "pooling": "none"}, "t")
ITEM = Table.parse({"name": "item", "rows": 500, "dim": 16, "pooling_factor": 1.0, "pooling": "none"}, "t")


def skewed(batches: int = 20) -> tuple[Ints, list[Ints]]:
    """Ids from the hottest on, and batches that read them by Zipf."""
    found = list(islice(independent(zipf(ROWS, 1.2), BATCH, np.random.default_rng(0)), batches))
    return np.random.default_rng(0).permutation(ROWS), found


def traced(path: Path, batches: list[Ints], name: str = "user") -> Path:
    write_traces(path, Traces({name: Lookups(np.concatenate(batches), np.ones(len(batches) * BATCH, dtype=np.int64))}))
    return path


def order_and_ids(table: Table, folder: Path) -> tuple[RowOrder, Ints]:
    assert table.row_order is not None
    return table.row_order, ids_of(folder, table.row_order)


def test_a_table_has_the_order_of_its_trace_and_one_without_stays_as_it_is(tmp_path: Path) -> None:
    hottest, batches = skewed()
    (user, item), notes = with_traces((USER, ITEM), [traced(tmp_path / "t", batches)], BATCH, row_orders=tmp_path / "r")
    order, ids = order_and_ids(user, tmp_path / "r")
    assert (order.rows, order.source) == (ROWS, "20 batches of 500 samples")
    assert set(ids[:5].tolist()) == set(hottest[:5].tolist())
    share = f"{order.lookup_share:.1%}"
    assert f"hot rows of 1 table: user ({order.hot_rows:,} rows, {share} of the lookups)" in notes
    assert item == ITEM


def test_a_pooled_table_has_its_lookups_by_id_and_no_order(tmp_path: Path) -> None:
    path, pooled = traced(tmp_path / "t", skewed(80)[1]), USER.model_copy(update={"pooling": "sum"})
    (user,), notes = with_traces((pooled,), [path], BATCH, row_orders=tmp_path / "r")
    assert (user.row_order, len(user.lookups_by_id)) == (None, RANGES)
    assert "1 pooled table without a row order: plans hold sequences alone by one" in notes


def test_without_a_folder_nothing_is_ordered_and_an_order_from_before_stays(tmp_path: Path) -> None:
    path = traced(tmp_path / "t", skewed()[1])
    (ordered,), _ = with_traces((USER,), [path], BATCH, row_orders=tmp_path / "r")
    (user,), _ = with_traces((USER,), [path], BATCH)
    (again,), _ = with_traces((ordered,), [path], BATCH)
    assert (user.row_order, again.row_order) == (None, ordered.row_order)


def test_rows_that_are_read_alike_lose_their_order_with_a_note(tmp_path: Path) -> None:
    order = RowOrder(ids_digest="", rows=500, hot_rows=5, lookup_share=0.5, time="2026-01-05T00:00:00Z")
    alike = [np.random.default_rng(n).integers(0, 500, BATCH) for n in range(20)]
    path = traced(tmp_path / "t", alike, "item")
    (item,), notes = with_traces((ITEM.model_copy(update={"row_order": order}),), [path], BATCH, row_orders=tmp_path)
    assert item.row_order is None
    said = "1 table without a row order, as rows are read alike or too few batches were counted: item"
    assert said in notes


def test_batches_in_hand_give_orders_to_a_model_s_tables(tmp_path: Path) -> None:
    hottest, batches = skewed()
    kjts = [
        KeyedJaggedTensor.from_lengths_sync(
            ["u", "v"],
            torch.from_numpy(ids),
            torch.ones(BATCH, dtype=torch.long),  # half of the lookups each
        )
        for ids in batches
    ]
    config = EmbeddingConfig(name="user", num_embeddings=ROWS, embedding_dim=16, feature_names=["u", "v"])
    model = EmbeddingCollection(device=torch.device("meta"), tables=[config])
    (user,) = ns.tables(model, batches=kjts, row_orders=tmp_path / "r", quiet=True)
    order, ids = order_and_ids(user, tmp_path / "r")
    assert set(ids[:5].tolist()) == set(hottest[:5].tolist())
    assert order.source == f"20 batches of {BATCH // 2} samples"


def test_the_command_writes_lists_beside_the_tables(neuroshard, tmp_path: Path) -> None:
    write_tables(tmp_path / "tables.json", (USER, ITEM))
    path = traced(tmp_path / "trace", skewed()[1])
    command = ("tables", "--from", tmp_path / "tables.json", "-o", tmp_path / "out.json", "--row-orders")
    refused = neuroshard(*command)
    assert refused.returncode == 2
    assert "--row-orders is for --access-from" in refused.stderr
    done = neuroshard(*command, "--access-from", path, "--batch-size", BATCH)
    assert done.returncode == 0, done.stderr
    user, item = read_tables(tmp_path / "out.json")[0]
    order, _ = order_and_ids(user, tmp_path / LISTS_FOLDER)
    assert [one.name for one in (tmp_path / LISTS_FOLDER).iterdir()] == [f"{order.ids_digest}.npy"]
    assert item.row_order is None
    assert "hot rows of 1 table: user (" in done.stderr


def test_what_a_trainer_recorded_gives_orders(neuroshard, tmp_path: Path) -> None:
    record(open_store(str(tmp_path / "store")), [USER])
    place = str(tmp_path / "store" / "ads")
    write_tables(tmp_path / "tables.json", (USER, ITEM))
    command = ("tables", "--from", tmp_path / "tables.json", "-o", tmp_path / "out.json", "--access-from", place)
    assert neuroshard(*command).returncode == 0
    assert [table.row_order for table in read_tables(tmp_path / "out.json")[0]] == [None, None]
    assert neuroshard(*command, "--row-orders").returncode == 0
    order, ids = order_and_ids(read_tables(tmp_path / "out.json")[0][0], tmp_path / LISTS_FOLDER)
    assert ids[:3].tolist() == [3, 6, 9]
    assert "100 of 300 steps" in order.source
    (same,) = ns.tables([USER], counted=place, row_orders=tmp_path / "other", quiet=True)
    assert order_and_ids(same, tmp_path / "other")[1].tolist() == ids.tolist()
