"""What every store does, whichever it is: also the one that waits for another, and that of the tests in memory. rclone ignores
conditions, so it is opened for a single writer."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from threading import Barrier

import pytest

from helpers.memory_store import MemoryStore
from helpers.plans import NOW, make_plan
from helpers.refusals import refused
from neuroshard.client import load_plan
from neuroshard.core.errors import Conflict, InvalidInput, NotFound, UsageError
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy
from neuroshard.store.open import open_store
from neuroshard.store.patience import open_patiently
from neuroshard.store.protocol import MAX_BYTES
from neuroshard.store.releases import plans_of
from neuroshard.store.track import all_releases

WITH_URL = ("folder", "patient", "moto", "rclone")  # so that trainers can open it


@pytest.fixture(params=[*WITH_URL, "memory"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def url(kind, request, tmp_path, aws) -> str:
    return str(tmp_path / "store") if kind in ("folder", "patient") else aws(request.getfixturevalue(kind))


@pytest.fixture
def store(kind, request):
    if kind == "memory":
        return MemoryStore()
    open_it = open_patiently if kind == "patient" else open_store
    return open_it(request.getfixturevalue("url"), single_writer=kind == "rclone")


class TestStore:
    @pytest.mark.parametrize("data", [b"", b"{}", bytes(range(256)) * 5000])
    def test_what_was_created_is_read(self, store, data):
        store.create("m/plans/a.json", data)

        assert store.read("m/plans/a.json") == data
        assert store.read_versioned("m/plans/a.json")[0] == data

    def test_creating_the_same_again_is_fine_and_reported(self, store):
        assert store.create("m/a", b"one") is True
        assert store.create("m/a", b"one") is False

        assert store.read("m/a") == b"one"

    def test_creating_the_same_again_is_fine_however_large_it_is(self, store):
        large = bytes(MAX_BYTES + 1)
        assert [store.create("m/a", large) for _ in range(2)] == [True, False]
        with refused(Conflict, "m/a"):
            store.create("m/a", large[1:] + b"x")

    def test_what_was_created_is_never_overwritten(self, store):
        store.create("m/a", b"one")
        with refused(Conflict, "m/a"):
            store.create("m/a", b"two")

        assert store.read("m/a") == b"one"

    def test_a_missing_key_is_named(self, store):
        store.create("m/a", b"one")
        for read in (store.read, store.read_versioned):
            with refused(NotFound, "m/b"):
                read("m/b")

    def test_a_swap_from_nothing_creates_once(self, store):
        store.swap("m/live.json", b"one", None)
        with refused(Conflict, "m/live.json"):
            store.swap("m/live.json", b"two", None)

        assert store.read("m/live.json") == b"one"

    def test_a_swap_replaces_what_the_token_is_of(self, store):
        store.swap("m/live.json", b"one", None)
        token = store.read_versioned("m/live.json")[1]
        store.swap("m/live.json", b"two", token)

        assert store.read("m/live.json") == b"two"
        assert store.read_versioned("m/live.json")[1] != token

    def test_a_swap_with_an_old_token_changes_nothing(self, store):
        store.swap("m/live.json", b"one", None)
        old = store.read_versioned("m/live.json")[1]
        store.swap("m/live.json", b"two", old)
        with refused(Conflict, "m/live.json"):
            store.swap("m/live.json", b"three", old)

        assert store.read("m/live.json") == b"two"

    def test_a_swap_of_what_is_not_there_is_a_conflict(self, store):
        store.swap("m/live.json", b"one", None)
        token = store.read_versioned("m/live.json")[1]
        with refused(Conflict, "n/live.json"):
            store.swap("n/live.json", b"two", token)

        with pytest.raises(NotFound):
            store.read("n/live.json")

    def test_a_listing_holds_the_keys_under_a_prefix_sorted(self, store):
        second, began = timedelta(seconds=1), datetime.now(UTC)
        assert store.list("m/releases/") == ()
        for key in ("m/releases/2", "m/releases/1", "m/live.json", "mm/releases/3"):
            store.create(key, b"")
        store.swap("m/releases/3", b"swapped", None)

        entries = store.list("m/releases/")
        assert [(e.key, e.size) for e in entries] == [("m/releases/1", 0), ("m/releases/2", 0), ("m/releases/3", 7)]
        ended = datetime.now(UTC)
        assert all(began - second <= entry.modified <= ended + second for entry in entries)

    def test_what_was_deleted_is_gone_and_may_be_deleted_again(self, store):
        store.create("m/a", b"one")
        store.create("m/b", b"two")
        for _ in range(2):
            store.delete("m/a")

        assert [entry.key for entry in store.list("m/") if entry.key != "m/probe"] == ["m/b"]
        with refused(NotFound, "m/a"):
            store.read("m/a")

    def test_an_object_larger_than_allowed_is_not_read(self, store):
        store.create("m/a", b"x" * 1001)

        assert store.read("m/a", max_bytes=1001) == b"x" * 1001
        with refused(InvalidInput, "m/a", "1,000"):
            store.read("m/a", max_bytes=1000)

    @pytest.mark.slow
    @pytest.mark.parametrize("key", ["", "/etc/passwd", "../a", "m/../../a", "m//a", "m/", "m/.lock", "m/a\n", "m\\a"])
    def test_a_key_that_leads_elsewhere_is_refused(self, store, key):
        for use in (store.read, lambda k: store.create(k, b""), lambda k: store.swap(k, b"", None)):
            with refused(UsageError, "usable key"):
                use(key)

    @pytest.mark.parametrize("kind", WITH_URL)
    def test_deploys_and_rollbacks_are_what_trainers_load(self, store, url):
        a, b, c = (make_plan(note) for note in "abc")
        deployed = [deploy(plan, store, "m", now=NOW + timedelta(hours=i)) for i, plan in enumerate((a, b, c))]
        assert load_plan(url, "m") == c
        back = [roll_back(store, plans_of("m"), now=NOW + timedelta(days=1 + i)) for i in range(2)]

        assert load_plan(url, "m") == a
        assert all_releases(store, plans_of("m")) == (*reversed(back), *reversed(deployed))


def test_the_clock_is_that_of_the_times_in_listings(store):
    store.create("m/before", b"")
    now = store.clock()
    store.create("m/after", b"")
    modified = {entry.key: entry.modified for entry in store.list("")}

    second = timedelta(seconds=1)  # as fine as the times of S3 are
    assert modified["m/before"] - second <= now <= modified["m/after"] + second
    assert modified.keys() <= {"m/before", "m/after", "m/probe"}


@pytest.fixture(params=["folder", "moto"])
def shared(request, tmp_path, aws):
    """A store that many may write at once."""
    return open_store(str(tmp_path / "store") if request.param == "folder" else aws(request.getfixturevalue("moto")))


def at_once(count: int, do) -> list:
    """The results of do(0) … do(count - 1), begun together on a thread each; a Conflict is a result."""
    barrier = Barrier(count)

    def one(index: int):
        barrier.wait()
        try:
            return do(index)
        except Conflict as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class TestRaces:
    def test_one_of_many_swaps_wins(self, shared):
        shared.swap("m/live.json", b"start", None)
        for _ in range(10):
            token = shared.read_versioned("m/live.json")[1]
            seen = at_once(
                8, lambda i, token=token: shared.swap("m/live.json", b"%d from %b" % (i, token.encode()), token)
            )

            winners = [i for i, result in enumerate(seen) if result is None]
            assert len(winners) == 1
            assert shared.read("m/live.json") == b"%d from %b" % (winners[0], token.encode())

    def test_one_of_many_creations_wins(self, shared):
        for round_ in range(10):
            seen = at_once(8, lambda i, r=round_: shared.create(f"m/{r}", b"by %d" % i))

            winners = [i for i, result in enumerate(seen) if result is True]
            assert len(winners) == 1
            assert shared.read(f"m/{round_}") == b"by %d" % winners[0]

    def test_no_increment_of_a_shared_counter_is_lost(self, shared):
        shared.swap("m/count", b"0", None)

        def increment(_: int) -> None:
            done = 0
            while done < 5:
                data, token = shared.read_versioned("m/count")
                try:
                    shared.swap("m/count", b"%d" % (int(data) + 1), token)
                    done += 1
                except Conflict:
                    pass

        at_once(6, increment)
        assert shared.read("m/count") == b"30"

    @pytest.mark.slow
    def test_deployers_racing_leave_one_history_without_gaps(self, shared):
        plans = [make_plan(str(i)) for i in range(6)]
        seen = [r for _ in range(3) for r in at_once(6, lambda i: deploy(plans[i], shared, "m", now=NOW))]

        history = all_releases(shared, plans_of("m"))
        assert [r.number for r in history] == list(range(len(history), 0, -1))
        for newer, older in pairwise(history):
            assert (newer.previous_digest, newer.rollback_number) == (older.plan_digest, older.number)
        assert {r for r in seen if not isinstance(r, Conflict)} == set(history)
