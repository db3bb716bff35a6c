"""What is deleted, what never is, and what happens when a deployer and the collector meet."""

import os
import random
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from helpers.later import Later
from helpers.meetings import meet
from helpers.memory_store import MemoryStore
from helpers.plans import make_plan
from helpers.recorded import record
from helpers.refusals import refused
from helpers.releasing import live
from neuroshard.client import load_plan
from neuroshard.core.errors import Conflict, NewerFormat, NotFound, StoreError, UsageError
from neuroshard.deploy import gc as collector
from neuroshard.deploy.gate import Gate
from neuroshard.deploy.gc import gc
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy, promote, publish
from neuroshard.store.folder import FolderStore
from neuroshard.store.lease import leased
from neuroshard.store.measuring import write_over
from neuroshard.store.open import open_store
from neuroshard.store.patience import PatientStore
from neuroshard.store.releases import plan_key, plans_of, size_keys
from neuroshard.store.traces import pointer_key, read_trace_pointer, trace_key
from neuroshard.store.track import all_releases

NOW = datetime.now(UTC).replace(microsecond=0)
PLANS = [make_plan(str(number)) for number in range(8)]
DAY = 86_400.0


@pytest.fixture
def store(tmp_path) -> FolderStore:
    """Eight releases, one a day, the last now; and a plan that was published, and one that was refused, seven days ago."""
    store = FolderStore(tmp_path / "store")
    for number, plan in enumerate(PLANS):
        deploy(plan, store, "m", now=NOW)
        age(store, DAY * (7 - number))
    publish(make_plan("orphan"), store, "m")
    deploy(make_plan("refused"), store, "m", now=NOW - timedelta(days=7), gate=Gate(min_gain=0.5))
    age(store, DAY * 7)
    return store


def age(store: FolderStore, seconds: float) -> None:
    """Make what was written just now that old."""
    at = NOW.timestamp() - seconds
    for path in store.root.rglob("*.*"):
        if path.stat().st_mtime >= NOW.timestamp():
            os.utime(path, (at, at))


def keys(store: FolderStore) -> set[str]:
    return {entry.key for entry in store.list("m/")}


def collect(store: FolderStore, keep: int = 3, days: float = 1, apply: bool = True) -> set[str]:
    return {e.key for e in gc(store, plans_of("m"), keep=keep, age_seconds=days * DAY, apply=apply).entries}


def test_a_dry_run_deletes_nothing_and_lists_what_a_real_one_deletes(store):
    before = keys(store)
    found = collect(store, apply=False)
    assert keys(store) == before

    assert collect(store) == found
    assert keys(store) == before - found
    assert collect(store) == set()


def test_only_the_last_releases_and_their_plans_are_kept(store):
    collect(store)

    assert [r.number for r in all_releases(store, plans_of("m"))] == [8, 7, 6, 5]
    plans = {key for key in keys(store) if "/plans/" in key}
    assert plans == {plan_key("m", plan.digest()) for plan in PLANS[4:]}
    assert not [key for key in keys(store) if "/decisions/" in key]
    assert load_plan(store.url, "m") == PLANS[7]


def test_what_is_not_ours_is_neither_counted_nor_deleted(store):
    strange = {
        "m/releases/99999999999999999999.txt",
        "m/releases/9.json",
        "m/releases/backup/00000099.json",
        "m/releases/00000099",
        "m/releases/000000099.json",
        "m/decisions/README",
        "m/plans/notes.json",
        "m/condemned/notes.json",
    }
    for key in strange:
        store.create(key, b"somebody's")
        os.utime(store.root / key, (0, 0))
    for name in (
        "releases/\u0664\u0664\u0664\u0664\u0664\u0664\u0664\u0664.json",
        "decisions/a\\b.json",
        "plans/\udcff.json",
        "plans/a\nb.json",
    ):
        (store.root / "m" / name).write_bytes(b"")
    collect(store)

    assert strange <= keys(store)
    assert [r.number for r in all_releases(store, plans_of("m"))] == [8, 7, 6, 5]
    assert deploy(make_plan("next"), store, "m", now=NOW).number == 9


def damage(store: FolderStore, number: int, data: bytes) -> None:
    """Cut a release's file off or replace it; it stays as old as it was."""
    path = store.root / plans_of("m").release_key(number)
    before = path.stat().st_mtime
    path.write_bytes(data)
    os.utime(path, (before, before))


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]


@pytest.mark.parametrize("number", [7, 6])
def test_a_damaged_release_is_named_and_kept_and_an_older_one_in_its_place(store, capsys, number):
    whole = (store.root / plans_of("m").release_key(number)).read_bytes()
    damage(store, number, whole[:100])
    capsys.readouterr()
    collect(store)
    (note,) = notes(capsys)

    assert note.startswith(f"note: {store.url}/{plans_of('m').release_key(number)}: not JSON")
    assert "no rollback can use a damaged release" in note
    assert {key for key in keys(store) if "/releases/" in key} == {plans_of("m").release_key(n) for n in range(4, 9)}
    plans = {key for key in keys(store) if "/plans/" in key}
    assert plans == {plan_key("m", PLANS[n - 1].digest()) for n in range(4, 9) if n != number}
    assert load_plan(store.url, "m") == PLANS[7]


def test_a_damaged_release_that_rollbacks_led_to_stops_no_collection(store, capsys):
    for _ in range(4):
        roll_back(store, plans_of("m"), now=NOW)
    age(store, DAY * 2)
    damage(store, 3, b"")
    capsys.readouterr()
    collect(store, keep=2)

    assert len(notes(capsys)) == 1
    assert {key for key in keys(store) if "/releases/" in key} == {
        plans_of("m").release_key(n) for n in (3, 10, 11, 12)
    }
    assert load_plan(store.url, "m") == PLANS[3]


def test_where_a_newer_program_wrote_a_release_nothing_is_deleted(store):
    damage(store, 6, b'{"format_version": 999}')
    before = keys(store)
    with refused(NewerFormat, plans_of("m").release_key(6), "999"):
        collect(store)

    assert keys(store) == before


def test_what_is_younger_than_the_age_is_kept(store):
    collect(store, keep=1, days=3.5)

    assert [r.number for r in all_releases(store, plans_of("m"))] == [8, 7, 6, 5]
    publish(make_plan("young"), store, "m")
    collect(store, keep=1)
    assert plan_key("m", make_plan("young").digest()) in keys(store)


def test_rollbacks_still_reach_what_is_kept_and_are_reported_where_it_ends(store):
    collect(store, keep=2)
    for number in (6, 5):
        assert roll_back(store, plans_of("m"), now=NOW).plan_digest == PLANS[number].digest()
    with refused(NotFound, "m/releases/00000005.json", "`neuroshard gc`"):
        roll_back(store, plans_of("m"), now=NOW)
    assert load_plan(store.url, "m") == PLANS[5]


def test_after_rollbacks_the_way_back_is_kept(store):
    for _ in range(5):
        roll_back(store, plans_of("m"), now=NOW)
    age(store, DAY * 2)
    collect(store, keep=1)

    assert load_plan(store.url, "m") == PLANS[2]
    assert roll_back(store, plans_of("m"), now=NOW).plan_digest == PLANS[1].digest()


def test_the_numbers_go_on_after_a_collection(store):
    collect(store, keep=1)

    assert deploy(make_plan("next"), store, "m", now=NOW).number == 9


def test_other_models_are_left_alone(store):
    deploy(PLANS[0], store, "m2", now=NOW)
    age(store, DAY * 30)
    collect(store, keep=1)

    assert load_plan(store.url, "m2") == PLANS[0]


def test_without_a_live_release_nothing_is_deleted(store):
    (store.root / "m" / "live.json").unlink()
    before = keys(store)
    with refused(NotFound, "live.json"):
        collect(store)

    assert keys(store) == before


@pytest.mark.parametrize(("keep", "days", "word"), [(0, 1, "--keep"), (3, 0.01, "--older-than")])
def test_too_eager_a_collection_is_refused(store, keep, days, word):
    with refused(UsageError, word):
        collect(store, keep=keep, days=days)


def test_what_a_collection_is_deleting_cannot_go_live_until_it_is_done(store):
    orphan = make_plan("orphan")
    refusals = []

    class Collecting:
        """A store in which somebody wants an orphan just before it is deleted."""

        def __getattr__(self, name: str):
            return getattr(store, name)

        def delete(self, key: str) -> None:
            if key == plan_key("m", orphan.digest()):
                for use in (lambda: promote(store, "m", orphan.digest(), now=NOW), lambda: publish(orphan, store, "m")):
                    with refused(Conflict, orphan.digest()[:12], "'m'") as one:
                        use()
                    refusals.append(str(one.value))
            store.delete(key)

    gc(Collecting(), plans_of("m"), keep=3, age_seconds=DAY, apply=True)

    assert len(refusals) == 2
    assert load_plan(store.url, "m") == PLANS[7]
    deploy(orphan, store, "m", now=NOW)
    assert load_plan(store.url, "m") == orphan


def test_the_mark_of_a_collection_that_died_counts_for_an_hour(store):
    orphan = make_plan("orphan")

    class Dying:
        def __getattr__(self, name: str):
            return getattr(store, name)

        def delete(self, key: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gc(Dying(), plans_of("m"), keep=3, age_seconds=DAY, apply=True)
    with refused(Conflict, "hour"):
        deploy(orphan, store, "m", now=NOW)
    (mark,) = (store.root / "m" / "condemned").iterdir()
    os.utime(mark, (mark.stat().st_mtime - 3700,) * 2)
    deploy(orphan, store, "m", now=NOW)

    assert load_plan(store.url, "m") == orphan
    os.utime(mark, (NOW.timestamp() - 2 * DAY,) * 2)
    collect(store)
    assert not [key for key in keys(store) if "condemned" in key]


def test_a_collection_that_takes_too_long_deletes_no_more(store, monkeypatch):
    clock, before = iter(range(0, 100_000, 700)), keys(store)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(clock))
        with refused(StoreError, "30 min"):
            collect(store)

    assert load_plan(store.url, "m") == PLANS[7]
    assert len(before - keys(store)) <= 2  # at 700 s and at 1,400 s


def test_ages_are_by_the_stores_clock_and_not_by_this_machines(monkeypatch):
    """A collector whose clock is a year fast comes between a deployer's claim and its swap."""
    store = MemoryStore()
    store.now = datetime.now(UTC) - timedelta(days=365)
    for plan in PLANS[:3]:
        deploy(plan, store, "m", now=NOW)
    monkeypatch.setattr(collector, "open_store", lambda *_, **__: store)
    gone = []

    class Deploying:
        """The store as a deployer sees it that is about to swap the pointer."""

        def __getattr__(self, name: str):
            return getattr(store, name)

        def swap(self, key: str, data: bytes, expected: str | None) -> None:
            if key.endswith("live.json"):
                gone.append(collector.run("memory", "m", keep=1, age_seconds=DAY, apply=True).entries)
            store.swap(key, data, expected)

    deploy(PLANS[3], Deploying(), "m", now=NOW)

    assert gone == [()]
    assert live(store) == PLANS[3]


def test_a_collection_believes_the_time_of_its_own_mark_where_the_clock_is_ahead_of_it(store):
    """A front door with a clock of its own answers for the objects' store."""

    class Ahead:
        def __getattr__(self, name: str):
            return getattr(store, name)

        def clock(self) -> datetime:
            return store.clock() + timedelta(days=30)

    publish(make_plan("young"), store, "m")
    gc(Ahead(), plans_of("m"), keep=3, age_seconds=DAY, apply=True)

    assert plan_key("m", make_plan("young").digest()) in keys(store)


@pytest.mark.slow
@pytest.mark.parametrize("others", [("gc",), ("promote",), ("gc", "promote"), ("deploy", "rollback")], ids="+".join)
def test_whoever_meets_a_collection_and_dies_what_is_live_is_there(others):
    outcomes = Counter(meet(("gc", *others), random.Random(seed)) for seed in range(150))

    assert min(outcomes["someone died"], outcomes["all ended well"]) > 10  # else the draws show little


def test_what_killed_writers_left_in_a_folder_is_deleted_once_it_is_old(store: FolderStore) -> None:
    folder = store.root / "m" / "plans"
    old, young = folder / f".a.json.{'0' * 32}", folder / f".b.json.{'1' * 32}"
    others = [folder / ".lock", folder / f".{'2' * 32}.txt"]
    for path in (old, young, *others):
        path.write_bytes(b"half")
    for path in (old, *others):
        os.utime(path, (NOW.timestamp() - 9 * DAY,) * 2)
    before = keys(store)

    found = collector.run(store.url, "m", keep=10, age_seconds=7.5 * DAY)
    assert [entry.key for entry in found.entries] == [f"m/plans/{old.name}"]
    assert old.exists()
    collector.run(store.url, "m", keep=10, age_seconds=7.5 * DAY, apply=True)
    assert [path.exists() for path in (old, young, *others)] == [False, True, True, True]
    assert keys(store) == before


def test_a_collection_on_s3_keeps_what_is_young(aws, moto):
    store = open_store(aws(moto))
    for plan in PLANS[:3]:
        deploy(plan, store, "m", now=NOW)

    in_a_week = Later(store, timedelta(days=7))
    assert gc(in_a_week, plans_of("m"), keep=1, age_seconds=8 * DAY).entries == ()
    gone = gc(in_a_week, plans_of("m"), keep=1, age_seconds=DAY, apply=True)
    assert [e.key for e in gone.entries] == [plans_of("m").release_key(1), plan_key("m", PLANS[0].digest())]
    assert load_plan(store.url, "m") == PLANS[2]


LEFT, STAYS = "_measuring/0123456789abcdef", "_measuring/fedcba9876543210"
FILES = ("draw-0001/cases/cases.json", "draw-0001/costs-1-of-1/costs.json", "learned.json")


@pytest.fixture
def measured(tmp_path) -> FolderStore:
    """Two kinds of hardware, measured 40 days ago."""
    store = FolderStore(tmp_path / "store")
    for hardware in (LEFT, STAYS):
        for name in FILES:
            store.create(f"{hardware}/aaaa/{name}", b"{}")
    age(store, 40 * DAY)
    return store


def test_what_was_measured_of_hardware_that_left_is_deleted_once_it_is_old(measured):
    for days, apply, gone in ((41, True, 0), (30, False, 3), (30, True, 3)):
        before = {entry.key for entry in measured.list("_measuring/")}
        found = collector.run(measured.url, LEFT, keep=1, age_seconds=days * DAY, apply=apply)
        assert (len(found.entries), found.kept) == (gone, 3 - gone)
        after = {entry.key for entry in measured.list("_measuring/")}
        assert len(before - after) == (gone if apply else 0)
    assert {entry.key for entry in measured.list("_measuring/")} == {f"{STAYS}/aaaa/{name}" for name in FILES}


def test_measuring_that_is_under_way_is_never_deleted(measured):
    with leased(PatientStore(measured), f"{LEFT}/aaaa/draw-0001/lease-1-of-1.json", "night"):
        found = collector.run(measured.url, "_measuring", keep=1, age_seconds=DAY, apply=True)
    assert {entry.key.split("/")[1] for entry in found.entries} == {STAYS.partition("/")[2]}
    assert len(measured.list(f"{LEFT}/")) == 3


def test_a_night_that_begins_between_listing_and_deleting_keeps_its_measuring(measured, monkeypatch):
    clock = FolderStore.clock

    def late(store):
        now = clock(store)
        listed = FolderStore.list
        calls: list[object] = []

        def list_then_write(store, prefix):
            found = listed(store, prefix)
            if not calls:
                calls.append(prefix)
                store.create(f"{LEFT}/aaaa/draw-0001/lease-1-of-1.json", b"{}")
            return found

        monkeypatch.setattr(FolderStore, "list", list_then_write)
        return now

    monkeypatch.setattr(FolderStore, "clock", late)
    assert collector.run(measured.url, LEFT, keep=1, age_seconds=DAY, apply=True).entries == ()
    assert len(measured.list(f"{LEFT}/")) == 4


@pytest.mark.parametrize("name", ["_measuring/", "_measuring/h200", "_measuring/../ads"])
def test_the_name_of_measuring_is_a_fingerprint(measured, name):
    with refused(UsageError, repr(name)):
        collector.run(measured.url, name, keep=1, age_seconds=DAY)
    with refused(UsageError, "--older-than", "1h"):
        collector.run(measured.url, LEFT, keep=1, age_seconds=60)


def test_of_traces_the_newest_is_kept_and_all_where_its_pointer_is_damaged(store):
    tables = PLANS[0].task.tables
    store.create("m/access/of-somebody-else", b"{}")
    traces = []
    for seed in range(4):
        record(store, tables, model="m", seed=seed)
        traces.append(trace_key("m", read_trace_pointer(store, "m").trace_digest))
        age(store, 3 * DAY)
    pointer = store.root / pointer_key("m")
    whole = pointer.read_bytes()
    pointer.write_bytes(b"{}")
    assert not {key for key in collect(store) if "/access/" in key}
    pointer.write_bytes(whole)
    age(store, 3 * DAY)
    assert {key for key in collect(store) if "/access/" in key} == {*traces[:3]}
    assert {key for key in keys(store) if "/access/" in key} == {
        traces[3],
        pointer_key("m"),
        "m/access/of-somebody-else",
    }


def test_the_page_of_sizes_of_the_newest_night_is_kept_however_old(store):
    for key in size_keys("m"):
        write_over(store, key, b"of the first night")
        write_over(store, key, b"of the second night")
        os.utime(store.root / key, (0, 0))
    assert {key.split("/")[1] for key in collect(store)} == {"plans", "releases", "decisions"}
    assert [store.read(key) for key in size_keys("m")] == 2 * [b"of the second night"]
