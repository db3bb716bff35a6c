"""The last plan, when the store is down; and the next one, when it comes."""

import json
import os
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from botocore.config import Config

from helpers.faults import faulty
from helpers.limits import HANGS
from helpers.plans import NOW, TABLES, make_plan
from helpers.processes import wait_until
from helpers.refusals import names, refused, warned
from helpers.servers import nobody
from neuroshard.client import StaleWarning, load, load_plan, watch
from neuroshard.core.errors import InvalidInput, NotFound, StoreError, Unreachable, UsageError
from neuroshard.core.value import sha256
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy
from neuroshard.store import s3
from neuroshard.store.deadline import THREADS, Reader
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.releases import live_key, plan_key, plans_of

A, B, C = (make_plan(note) for note in "ABC")


@pytest.fixture
def store(store: FolderStore) -> FolderStore:
    deploy(A, store, "m", now=NOW)
    return store


@pytest.fixture
def down(monkeypatch):
    """`down(error)`: from now on every reading of the store (not of a cache) raises it."""
    read = FolderStore.read

    def down(error: Exception) -> None:
        def fails(self: FolderStore, key: str, *rest: int) -> bytes:
            if self.root.name == "store":
                raise error
            return read(self, key, *rest)

        monkeypatch.setattr(FolderStore, "read", fails)

    return down


def test_a_store_that_is_down_is_answered_for_by_the_cache(store, tmp_path, down):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    down(Unreachable("s3://b/m/live.json: cannot reach the store"))
    with warned(StaleWarning, "s3://b/m/live.json", A.digest()[:12], "release 1", NOW.year):
        plan = load_plan(store.url, "m", cache_dir=tmp_path / "cache")

    assert plan == A


def test_a_plan_that_is_live_no_more_stays_in_the_cache_for_a_day(store, tmp_path):
    """Another rank of the host may be about to read it."""
    for plan in (B, C):
        load_plan(store.url, "m", cache_dir=tmp_path / "cache")
        deploy(plan, store, "m", now=NOW)
    kept = {path.stem: path for path in (tmp_path / "cache").glob("*/m/plans/*.json")}
    assert kept.keys() == {A.digest(), B.digest()}
    yesterday = kept[A.digest()].stat().st_mtime - 90_000
    os.utime(kept[A.digest()], (yesterday, yesterday))
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    assert {path.stem for path in (tmp_path / "cache").glob("*/m/plans/*.json")} == {B.digest(), C.digest()}


def test_the_cache_holds_what_was_loaded_last(store, tmp_path, down):
    for plan in (B, C):
        load_plan(store.url, "m", cache_dir=tmp_path / "cache")
        deploy(plan, store, "m", now=NOW)
    down(Unreachable("gone"))
    with warned(StaleWarning, "release 2"):
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == B


@pytest.mark.parametrize(
    ("other_url", "other_model", "cache"), [(True, "m", "cache"), (False, "m2", "cache"), (False, "m", "elsewhere")]
)
def test_a_cache_answers_only_for_its_own_store_and_model(store, tmp_path, down, other_url, other_model, cache):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    down(Unreachable("gone"))
    url = str(tmp_path / "other" / "store") if other_url else store.url
    with refused(Unreachable, "gone"):
        load_plan(url, other_model, cache_dir=tmp_path / cache)


def test_a_folder_of_the_same_name_elsewhere_is_another_store(store, tmp_path, monkeypatch, down):
    monkeypatch.chdir(tmp_path)
    load_plan("store", "m", cache_dir=tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    down(Unreachable("gone"))
    with pytest.warns(StaleWarning):
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == A
    monkeypatch.chdir(tmp_path / "elsewhere")
    with refused(Unreachable, "gone"):
        load_plan("store", "m", cache_dir=tmp_path / "cache")


def test_a_bucket_of_the_same_name_at_another_endpoint_is_another_store(aws, moto, tmp_path, monkeypatch):
    url = aws(moto)
    deploy(A, open_store(url), "m", now=NOW)
    load_plan(url, "m", cache_dir=tmp_path / "cache")
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG.merge(Config(retries={"total_max_attempts": 1, "mode": "standard"})))
    with nobody() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        with refused(Unreachable, address):
            load_plan(url, "m", cache_dir=tmp_path / "cache")


def test_an_s3_store_that_stops_answering_is_answered_for_by_the_cache(aws, moto, tmp_path, monkeypatch):
    url = aws(moto)
    answers: list[Any] = []
    deploy(A, open_store(url), "m", now=NOW)
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG.merge(Config(retries={"total_max_attempts": 1, "mode": "standard"})))
    with faulty(moto, lambda _: answers.pop() if answers else None, random.Random(0)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        load_plan(url, "m", cache_dir=tmp_path / "cache")
        for answer in ("503", "500", "reset"):
            answers.append(answer)
            with warned(StaleWarning, A.digest()[:12]):
                assert load_plan(url, "m", cache_dir=tmp_path / "cache") == A


def test_without_a_cache_nothing_is_kept(store, tmp_path, down, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    load_plan(store.url, "m", cache_dir=False)
    assert not (tmp_path / "home").exists()

    load_plan(store.url, "m")
    assert (tmp_path / "home" / "neuroshard").exists()
    down(Unreachable("gone"))
    with refused(Unreachable, "gone"):
        load_plan(store.url, "m", cache_dir=False)


@pytest.mark.parametrize(
    "broken",
    [
        lambda store: (store.root / plan_key("m", A.digest())).write_bytes(b"{}"),
        lambda store: (store.root / live_key("m")).write_bytes(b"{}"),
        lambda store: (store.root / live_key("m")).unlink(),
        lambda store: (store.root / plan_key("m", A.digest())).unlink(),
    ],
)
def test_a_store_that_answers_with_a_bad_plan_is_believed(store, tmp_path, broken):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    broken(store)
    with pytest.raises((InvalidInput, NotFound)):
        load_plan(store.url, "m", cache_dir=tmp_path / "cache")


def test_a_store_that_denies_is_believed(store, tmp_path, down):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    down(StoreError("access denied"))
    with refused(StoreError, "access denied"):
        load_plan(store.url, "m", cache_dir=tmp_path / "cache")


def test_what_comes_from_the_cache_is_checked_like_any_plan(store, tmp_path, down):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    down(Unreachable("gone"))
    with pytest.warns(StaleWarning), refused(InvalidInput, "8"):
        load_plan(store.url, "m", cache_dir=tmp_path / "cache", world_size=8)
    (plan,) = (tmp_path / "cache").rglob("plans/*.json")
    plan.write_bytes(plan.read_bytes().replace(b"1000", b"1001"))
    with refused(Unreachable, "gone"):
        load_plan(store.url, "m", cache_dir=tmp_path / "cache")


def test_a_broken_cache_is_mended_by_the_next_reading(store, tmp_path, down):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    (pointer,) = (tmp_path / "cache").rglob("live.json")
    pointer.write_bytes(b"{")
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    down(Unreachable("gone"))
    with pytest.warns(StaleWarning):
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == A


def test_a_cache_that_cannot_be_written_stops_nobody(store, tmp_path):
    (tmp_path / "cache").write_bytes(b"a file")

    assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == A


def test_many_ranks_may_fill_one_cache_at_once(store, tmp_path, down):
    threads = [
        threading.Thread(target=load_plan, args=(store.url, "m"), kwargs={"cache_dir": tmp_path / "cache"})
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    down(Unreachable("gone"))
    with pytest.warns(StaleWarning):
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == A


def test_a_plan_that_is_broken_in_the_cache_is_mended_by_the_next_reading(store, tmp_path, down):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    (plan,) = (tmp_path / "cache").rglob("plans/*.json")
    plan.write_bytes(plan.read_bytes()[:-9])
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    down(Unreachable("gone"))
    with pytest.warns(StaleWarning):
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == A


def test_an_answer_older_than_what_was_loaded_is_believed_with_a_warning_and_not_kept(store, tmp_path, down):
    """A copy in front of the store that lags; or a rank that reads early and keeps late."""
    old = (store.root / live_key("m")).read_bytes()
    deploy(B, store, "m", now=NOW)
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    (store.root / live_key("m")).write_bytes(old)
    with warned(StaleWarning, "release 1", "release 2"):
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == A
    down(Unreachable("gone"))
    with warned(StaleWarning, "release 2"):
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == B


def test_a_rank_that_was_overtaken_looks_again(store, tmp_path, monkeypatch):
    """Another rank of the host read and kept a release that came just after ours was read."""
    old = store.read(live_key("m"))
    deploy(B, store, "m", now=NOW)
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    first, read = [old], FolderStore.read_versioned

    def overtaken(self: FolderStore, key: str, *rest: int) -> tuple[bytes, str]:
        if self.root.name == "store" and first:
            return first.pop(), ""
        return read(self, key, *rest)

    monkeypatch.setattr(FolderStore, "read_versioned", overtaken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == B
    assert not first


def test_a_store_begun_anew_is_no_old_copy(store, tmp_path):
    for plan in (B, C):
        deploy(plan, store, "m", now=NOW)
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    shutil.rmtree(store.root)
    deploy(A, store, "m", now=NOW + timedelta(days=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == A
    (pointer,) = (tmp_path / "cache").rglob("live.json")
    assert pointer.read_bytes() == store.read(live_key("m"))


def waits_for(freed: threading.Event) -> None:
    """Hang until the test is over; a caller that does not give up fails."""
    assert freed.wait(HANGS), "it was not given up"


def test_a_cache_whose_disk_is_gone_keeps_no_trainer_from_starting(store, tmp_path, monkeypatch):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    freed, read = threading.Event(), FolderStore.read

    def hangs(self: FolderStore, key: str, *rest: int) -> bytes:
        if self.root.parent.name == "cache":
            waits_for(freed)
        return read(self, key, *rest)

    monkeypatch.setattr(FolderStore, "read", hangs)
    monkeypatch.setattr(load, "CACHE_SECONDS", 0.1)
    assert load_plan(store.url, "m", cache_dir=tmp_path / "cache") == A
    freed.set()


def test_setting_up_a_store_counts_towards_the_deadline(monkeypatch):
    """boto3 runs a credential_process as soon as it is set up, and that may hang."""
    freed = threading.Event()
    monkeypatch.setattr(load, "open_store", lambda _: waits_for(freed))
    with refused(Unreachable, "0.1 s"):
        load_plan("s3://bucket/prefix", "m", cache_dir=False, deadline_seconds=0.1)
    freed.set()


def test_a_store_that_hangs_is_given_up_at_the_deadline(store, monkeypatch, tmp_path):
    load_plan(store.url, "m", cache_dir=tmp_path / "cache")
    freed, read = threading.Event(), FolderStore.read

    def hangs(self: FolderStore, key: str, *rest: int) -> bytes:
        if self.root.name == "store":
            waits_for(freed)
        return read(self, key, *rest)

    monkeypatch.setattr(FolderStore, "read", hangs)
    with refused(Unreachable, store.url, "0.2 s"):
        load_plan(store.url, "m", cache_dir=False, deadline_seconds=0.2)
    with warned(StaleWarning, "0.2 s", A.digest()[:12]):
        assert load_plan(store.url, "m", cache_dir=tmp_path / "cache", deadline_seconds=0.2) == A
    freed.set()


def watching(store: FolderStore, **options: Any):
    return watch(store.url, "m", every_seconds=0.001, cache_dir=False, **options)


@contextmanager
def once_warned(do: Callable[[], object]) -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of the block, while a thread waits for the first of them and then does this."""
    left = threading.Event()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")

        def wait_and_do() -> None:
            assert wait_until(lambda: bool(seen) or left.is_set(), HANGS)
            do()

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(wait_and_do)
            try:
                yield seen
            finally:
                left.set()
            done.result()


def test_watching_begins_with_the_live_plan_and_follows_it(store):
    plans = watching(store)
    assert next(plans) == A
    deploy(B, store, "m", now=NOW)
    assert next(plans) == B
    roll_back(store, plans_of("m"), now=NOW)
    assert next(plans) == A


def test_a_plan_that_the_trainer_has_is_not_yielded_again(store):
    plans = watching(store, seen=A.digest())
    threading.Timer(0.1, deploy, args=(B, store, "m"), kwargs={"now": NOW}).start()

    assert next(plans) == B


def test_watching_ends_when_stop_is_set(store):
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()

    assert list(watching(store, seen=A.digest(), stop=stop)) == []


def test_a_plan_for_another_trainer_is_warned_of_once_and_passed_over(store):
    plans = watching(store, seen=A.digest(), world_size=2, tables=TABLES)
    deploy(make_plan("wide", devices=4), store, "m", now=NOW)
    with once_warned(lambda: deploy(B, store, "m", now=NOW)) as seen:
        assert next(plans) == B

    assert ["is for 4 ranks, but the trainer has 2" in str(w.message) for w in seen] == [True]


def test_a_store_that_breaks_is_warned_of_and_watched_on(store):
    plans = watching(store, seen=A.digest())
    good = store.read(live_key("m"))
    (store.root / live_key("m")).write_bytes(json.dumps({"model": "m"}).encode())

    def mend() -> None:
        (store.root / live_key("m")).write_bytes(good)
        deploy(B, store, "m", now=NOW)

    with once_warned(mend) as seen:
        assert next(plans) == B

    assert {(w.category, store.url in str(w.message)) for w in seen} == {(StaleWarning, True)}


def test_watching_passes_over_an_old_copy_of_the_pointer(store):
    """Else a fleet would go back to a plan and forth again, with nobody having asked for it."""
    old = store.read(live_key("m"))
    deploy(B, store, "m", now=NOW)
    plans = watching(store)
    assert next(plans) == B
    newest, newest_token = store.read_versioned(live_key("m"))
    store.swap(live_key("m"), old, newest_token)

    def mend() -> None:
        store.swap(live_key("m"), newest, sha256(old))
        deploy(C, store, "m", now=NOW)

    with once_warned(mend) as seen:
        assert next(plans) == C

    assert ["answers with release 1" in str(w.message) and "after release 2" in str(w.message) for w in seen] == [True]


def test_watching_goes_on_while_the_pointer_is_gone(store):
    plans = watching(store)
    assert next(plans) == A
    (store.root / live_key("m")).unlink()
    with once_warned(lambda: deploy(B, store, "m", now=NOW)) as seen:
        assert next(plans) == B

    assert [(w.category, "live.json: does not exist" in str(w.message)) for w in seen] == [(StaleWarning, True)]


def test_watching_a_store_that_hangs_keeps_one_thread_and_warns_once(store, monkeypatch):
    freed, read, asked, given_up = threading.Event(), FolderStore.read, [], []
    within = Reader.within

    def hangs(self: FolderStore, key: str, *rest: int) -> bytes:
        asked.append(key)
        waits_for(freed)
        return read(self, key, *rest)

    def counted(self: Reader, *given: Any) -> object:
        try:
            return within(self, *given)
        except Unreachable as error:
            given_up.append(error)
            raise

    monkeypatch.setattr(FolderStore, "read", hangs)
    monkeypatch.setattr(Reader, "within", counted)
    stop, seen_meanwhile, before = threading.Event(), [], set(threading.enumerate())

    def end() -> None:
        assert wait_until(lambda: bool(asked) and len(given_up) > 5, HANGS)
        seen_meanwhile.append((len(set(threading.enumerate()) - before), len(asked)))
        stop.set()

    thread = threading.Thread(target=end)
    thread.start()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert list(watching(store, seen=A.digest(), deadline_seconds=0.1, stop=stop)) == []
    freed.set()
    thread.join()

    assert seen_meanwhile == [(2, 1)]  # `end`, and the one that hangs
    assert [(w.category, names(str(w.message), "0.1 s")) for w in seen] == [(StaleWarning, True)]


def test_loading_again_and_again_from_a_store_that_hangs_keeps_a_bounded_number_of_threads(store, monkeypatch):
    freed = threading.Event()
    monkeypatch.setattr(FolderStore, "read", lambda *_: waits_for(freed))
    before = set(threading.enumerate())
    for _ in range(3 * THREADS):
        with refused(Unreachable, store.url):
            load_plan(store.url, "m", cache_dir=False, deadline_seconds=0.002)
    hanging = len(set(threading.enumerate()) - before)
    freed.set()

    assert 0 < hanging <= THREADS


def test_watching_a_store_that_cannot_be_is_an_error():
    with pytest.raises(UsageError):
        next(watch("gopher://x", "m"))
    with pytest.raises(UsageError):
        next(watch("store", "../m"))
