"""What trainers recorded, in a folder, in memory and on S3: which trace readers take, and what damage does."""

from pathlib import Path
from typing import Any

import pytest

from helpers.memory_store import MemoryStore
from helpers.plans import NOW, make_plan
from helpers.recorded import BATCHES, TIME, record, recorded_trace
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, NewerFormat, NotFound, UsageError
from neuroshard.core.table import Table
from neuroshard.deploy.run import deploy
from neuroshard.files.traces import recorded_in
from neuroshard.store.open import open_store
from neuroshard.store.traces import (
    fetch_trace,
    fetch_trace_of,
    pointer_key,
    put_trace,
    read_trace_pointer,
    trace_key,
)

TABLES = [Table(name="user", rows=5000, dim=8, pooling_factor=2.0)]


@pytest.fixture(params=["folder", "memory", "moto"])
def store(request: Any, tmp_path: Path, aws: Any) -> Any:
    if request.param == "memory":
        return MemoryStore()
    return open_store(str(tmp_path / "store") if request.param == "folder" else aws(request.getfixturevalue("moto")))


def test_what_was_put_is_read(store: Any, tmp_path: Path) -> None:
    with refused(NotFound, "'ads'", "docs/cache.md"):
        fetch_trace(store, "ads", tmp_path / "trace")
    data, recorded = recorded_trace(TABLES)
    for _ in range(2):  # and a retry
        assert put_trace(store, "ads", data, recorded) == ""
    pointer = fetch_trace(store, "ads", tmp_path / "trace")
    assert (tmp_path / "trace").read_bytes() == data
    assert recorded_in(tmp_path / "trace") == recorded
    assert (pointer.batches, pointer.steps, pointer.time) == (BATCHES, 3 * BATCHES, TIME)


@pytest.mark.parametrize(
    ("batches", "time", "taken"),
    [(BATCHES - 1, TIME, False), (BATCHES, TIME, True), (1, "2026-01-06T01:00:00Z", True)],
)
def test_a_run_that_has_just_begun_does_not_hide_a_longer_trace_of_the_last_day(
    store: Any, batches: int, time: str, taken: bool
) -> None:
    record(store, TABLES)
    data, recorded = recorded_trace(TABLES, seed=1, batches=batches, time=time)
    why = put_trace(store, "ads", data, recorded, keep_longer=True)
    assert bool(why) != taken
    assert taken or (f"{BATCHES}" in why and f"{batches}" in why)
    assert read_trace_pointer(store, "ads").batches == (batches if taken else BATCHES)


def test_damage_is_refused_by_name_and_a_trainer_mends_it(tmp_path: Path) -> None:
    store, out = MemoryStore(), tmp_path / "trace"
    record(store, TABLES)
    key = trace_key("ads", read_trace_pointer(store, "ads").trace_digest)
    whole = store.read(key)
    store.delete(key)
    store.create(key, whole[:-1])
    with refused(InvalidInput, key, "digest"):
        fetch_trace(store, "ads", out)
    store.swap(pointer_key("ads"), b'{"format_version": 1}', store.read_versioned(pointer_key("ads"))[1])
    with refused(InvalidInput, pointer_key("ads")):
        fetch_trace(store, "ads", out)
    assert record(store, TABLES, seed=1) == ""
    assert fetch_trace(store, "ads", out).batches == BATCHES
    store.swap(pointer_key("ads"), b'{"format_version": 2}', store.read_versioned(pointer_key("ads"))[1])
    with refused(NewerFormat, pointer_key("ads")):
        fetch_trace(store, "ads", out)
    with refused(NewerFormat, pointer_key("ads")):
        record(store, TABLES)


def test_a_place_is_a_model_in_a_store(tmp_path: Path) -> None:
    record(open_store(str(tmp_path / "store")), TABLES)
    assert recorded_in(fetch_trace_of(str(tmp_path / "store" / "ads"), tmp_path)) is not None
    for place in ("ads", "s3://ads"):
        with refused(UsageError, repr(place), "s3://bucket/prefix/ads-ranker"):
            fetch_trace_of(place, tmp_path)


def test_the_list_of_releases_says_what_a_trainer_recorded(neuroshard: Any, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    deploy(make_plan(), store, "ads", now=NOW)
    command = ("releases", "--store", tmp_path / "store", "--name", "ads")
    assert "recorded" not in neuroshard(*command).stdout
    record(store, TABLES)
    assert f"100 of 300 steps of a trainer, up to {TIME}" in " ".join(neuroshard(*command).stdout.split())
