"""The lists of hot ids of a plan, from the store to all ranks."""

from pathlib import Path

import numpy as np
import pytest

from helpers.gloo import on_ranks
from neuroshard.client.rows import lists
from neuroshard.client.rows.lists import hot_ids
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput, NeuroshardError, NotFound
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import sha256
from neuroshard.files.row_orders import bytes_of_ids
from neuroshard.store.folder import FolderStore
from neuroshard.store.row_orders import put_ids


@pytest.fixture
def published(tmp_path: Path) -> tuple[Plan, FolderStore]:
    """A plan that holds a table by access, and a store that has its list."""
    store, data = FolderStore(tmp_path / "store"), bytes_of_ids(np.array([7, 3, 5]))
    put_ids(store, "m", data)
    order = RowOrder(ids_digest=sha256(data), rows=90, hot_rows=3, lookup_share=0.5, time="2026-01-05T00:00:00Z")
    table = Table(name="t", rows=90, dim=4, pooling_factor=1.0, row_order=order)
    rule = TableRule(table="t", rows_by_access=RowsByAccess(hot_rows=2))
    task = ShardingTask(
        tables=(table,), device_memory_bytes=(2**20,), batch_size=4, constraints=Constraints(tables=(rule,))
    )
    shards = (Shard(table="t/hot", rows=2, dim=4, device=0), Shard(table="t/cold", rows=88, dim=4, device=0))
    return Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand")), store


def test_lists_are_kept_for_when_the_store_is_down(published: tuple[Plan, FolderStore], tmp_path: Path) -> None:
    plan, store = published
    assert hot_ids(plan, store.url, "m", cache_dir=tmp_path / "cache")["t"].tolist() == [7, 3, 5]
    (kept,) = (tmp_path / "cache").rglob("*.npy")
    kept.write_bytes(b"damaged")
    assert hot_ids(plan, store.url, "m", cache_dir=tmp_path / "cache")["t"].tolist() == [7, 3, 5]
    (of_store,) = store.root.rglob("*.npy")
    of_store.unlink()
    assert hot_ids(plan, store.url, "m", cache_dir=tmp_path / "cache")["t"].tolist() == [7, 3, 5]
    with pytest.raises(NotFound, match=r"no list [0-9a-f]{12} of hot rows of 'm'.*; deploy the plan again"):
        hot_ids(plan, store.url, "m", cache_dir=False)


def test_a_damaged_list_is_refused(published: tuple[Plan, FolderStore]) -> None:
    plan, store = published
    (of_store,) = store.root.rglob("*.npy")
    of_store.write_bytes(of_store.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match="it is not the list of hot rows that was deployed"):
        hot_ids(plan, store.url, "m", cache_dir=False)


def missing(rank: int, plan: Plan, folder: str) -> str:
    with pytest.raises(NotFound) as raised:
        hot_ids(plan, folder, "m", cache_dir=False)
    return str(raised.value)


def test_a_list_that_is_missing_is_one_error_on_all_ranks(published: tuple[Plan, FolderStore], tmp_path: Path) -> None:
    said = set(on_ranks(2, tmp_path, missing, published[0], str(tmp_path / "nowhere")))
    assert len(said) == 1
    assert said.pop().startswith(f"rank 0: {tmp_path / 'nowhere'}: there is no list")


def fails(rank: int, plan: Plan, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patched:

        def load(*args: object) -> None:
            assert rank == 0
            raise MemoryError("no room for lists")

        patched.setattr(lists, "_load", load)
        with pytest.raises((MemoryError, NeuroshardError)) as raised:
            hot_ids(plan, folder, "m", cache_dir=False)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_any_error_of_rank_0_ends_all_ranks(published: tuple[Plan, FolderStore], tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, fails, published[0], str(tmp_path))
    assert found == ["MemoryError: no room for lists", "NeuroshardError: rank 0: MemoryError: no room for lists"]
