"""What trainers counted, in a folder, in memory and on S3: which run's counts readers take, and what damage does."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.counted import counted_access
from helpers.memory_store import MemoryStore
from helpers.plans import NOW, make_plan
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, NewerFormat, NotFound, UsageError
from neuroshard.core.table import Table
from neuroshard.deploy.run import deploy
from neuroshard.store.counted import counted_key, pointer_key, put_counted, read_counted, read_counted_at
from neuroshard.store.open import open_store

TABLES = [Table(name="user", rows=5000, dim=8, pooling_factor=2.0)]
FIRST = counted_access(TABLES)


@pytest.fixture(params=["folder", "memory", "moto"])
def store(request, tmp_path, aws):
    if request.param == "memory":
        return MemoryStore()
    return open_store(str(tmp_path / "store") if request.param == "folder" else aws(request.getfixturevalue("moto")))


def test_what_was_put_is_read(store) -> None:
    with refused(NotFound, "no trainer of 'ads' has counted"):
        read_counted(store, "ads")
    assert put_counted(store, FIRST) == ""
    assert read_counted(store, "ads") == FIRST
    assert put_counted(store, FIRST) == ""  # a retry


@pytest.mark.parametrize(
    ("run", "steps", "time", "taken"),
    [
        ("0" * 16, 400, "2026-01-05T01:00:00Z", True),  # the same run, whatever it says
        ("1" * 16, 499, "2026-01-05T01:00:00Z", False),
        ("1" * 16, 500, "2026-01-05T01:00:00Z", True),
        ("1" * 16, 1, "2026-01-06T01:00:00Z", True),  # a day later
    ],
)
def test_a_run_takes_the_place_of_its_own_counts_of_as_long_and_of_old_ones(store, run, steps, time, taken) -> None:
    put_counted(store, FIRST)
    other = counted_access(TABLES, run=run, steps=steps, time=time)
    why = put_counted(store, other)
    assert bool(why) != taken
    assert taken or "has counted 500 steps up to 2026-01-05T00:00:00Z, this one 499" in why
    assert read_counted(store, "ads") == (other if taken else FIRST)


def test_runs_that_write_at_once_leave_one_of_them_whole(store) -> None:
    runs = [counted_access(TABLES, run=f"{number:016x}", steps=500 + number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda one: put_counted(store, one), runs))[-1] == ""
    assert read_counted(store, "ads") == runs[-1]


def test_damage_is_refused_by_name_and_a_trainer_mends_it() -> None:
    store = MemoryStore()
    put_counted(store, FIRST)
    key = pointer_key("ads")
    pointer, token = store.read_versioned(key)
    store.swap(key, pointer.replace(b'"steps":500', b'"steps":501'), token)
    with refused(InvalidInput, key, "changed or damaged"):
        read_counted(store, "ads")
    again = counted_access(TABLES, steps=1, run="2" * 16)
    assert put_counted(store, again) == ""
    assert read_counted(store, "ads") == again
    object_key = counted_key("ads", again.digest())
    data, token = store.read_versioned(object_key)
    store.swap(object_key, data[:-9], token)
    with refused(InvalidInput, object_key, "cut off or changed"):
        read_counted(store, "ads")
    _, token = store.read_versioned(key)
    store.swap(key, b'{"format_version": 2}', token)
    with refused(NewerFormat, "newer neuroshard"):
        put_counted(store, again)


def test_a_place_is_a_model_in_a_store(tmp_path) -> None:
    put_counted(open_store(str(tmp_path / "store")), FIRST)
    for place in (tmp_path / "store" / "ads", f"file://{tmp_path}/store/ads/"):
        assert read_counted_at(str(place)) == FIRST
    for wrong in ("ads", "s3://ads"):
        with refused(UsageError, f"{wrong!r} is not a model in a store"):
            read_counted_at(wrong)


def test_the_list_of_releases_says_what_trainers_counted(neuroshard, tmp_path) -> None:
    store = open_store(str(tmp_path / "store"))
    deploy(make_plan(), store, "ads", now=NOW)
    listing = ("releases", "--store", tmp_path / "store", "--name", "ads")
    assert "trainers counted" not in neuroshard(*listing).stdout
    put_counted(store, FIRST)
    said = "how its tables are read: trainers counted 500 steps up to 2026-01-05T00:00:00Z, run 0000000000000000"
    assert said in neuroshard(*listing).stdout
    (tmp_path / "store" / pointer_key("ads")).write_bytes(b"{")
    assert "how its tables are read: " in neuroshard(*listing).stdout
