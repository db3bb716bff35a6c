"""What is deleted, what never is, and what happens when a deployer and the collector meet."""

import os
from datetime import UTC, datetime, timedelta

import pytest

from helpers.plans import make_plan
from neuroshard.client import load_plan
from neuroshard.core.errors import NotFound, UsageError
from neuroshard.deploy.gate import Gate
from neuroshard.deploy.gc import find_garbage, gc
from neuroshard.deploy.run import deploy, promote, publish, releases, rollback
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.releases import plan_key, release_key

NOW = datetime(2025, 11, 20, 12, 0, 0, tzinfo=UTC)
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
    for path in store.root.rglob("*.json"):
        if path.stat().st_mtime > NOW.timestamp():
            os.utime(path, (at, at))


def keys(store: FolderStore) -> set[str]:
    return {entry.key for entry in store.list("m/")}


def collect(store: FolderStore, keep: int = 3, days: float = 1, apply: bool = True) -> set[str]:
    return {e.key for e in gc(store, "m", keep=keep, age_seconds=days * DAY, now=NOW, apply=apply).entries}


def test_a_dry_run_deletes_nothing_and_lists_what_a_real_one_deletes(store):
    before = keys(store)
    found = collect(store, apply=False)
    assert keys(store) == before

    assert collect(store) == found
    assert keys(store) == before - found
    assert collect(store) == set()


def test_only_the_last_releases_and_their_plans_are_kept(store):
    collect(store)

    assert [r.number for r in releases(store, "m")] == [8, 7, 6, 5]
    plans = {key for key in keys(store) if "/plans/" in key}
    assert plans == {plan_key("m", plan.digest()) for plan in PLANS[4:]}
    assert not [key for key in keys(store) if "/decisions/" in key]
    assert load_plan(store.url, "m") == PLANS[7]


def test_what_is_younger_than_the_age_is_kept(store):
    collect(store, keep=1, days=3.5)

    assert [r.number for r in releases(store, "m")] == [8, 7, 6, 5]
    publish(make_plan("young"), store, "m")
    collect(store, keep=1)
    assert plan_key("m", make_plan("young").digest()) in keys(store)


def test_rollbacks_still_reach_what_is_kept_and_are_told_where_it_ends(store):
    collect(store, keep=2)
    for number in (6, 5):
        assert rollback(store, "m", now=NOW).plan_digest == PLANS[number].digest()
    with pytest.raises(NotFound, match=r"releases/00000005\.json: does not exist; `neuroshard gc` may have taken it"):
        rollback(store, "m", now=NOW)
    assert load_plan(store.url, "m") == PLANS[5]


def test_after_rollbacks_the_way_back_is_kept(store):
    for _ in range(5):
        rollback(store, "m", now=NOW)
    age(store, DAY * 2)
    collect(store, keep=1)

    assert load_plan(store.url, "m") == PLANS[2]
    assert rollback(store, "m", now=NOW).plan_digest == PLANS[1].digest()


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
    with pytest.raises(NotFound, match=r"live\.json"):
        collect(store)

    assert keys(store) == before


@pytest.mark.parametrize(("keep", "days", "word"), [(0, 1, "--keep"), (3, 0.01, "--older-than")])
def test_too_eager_a_collection_is_refused(store, keep, days, word):
    with pytest.raises(UsageError, match=word):
        collect(store, keep=keep, days=days)


class Meeting:
    """A store in which somebody does something just before one object is deleted, or just after."""

    def __init__(self, store: FolderStore, key: str, before=None, after=None) -> None:
        self.inner, self.key, self.before, self.after = store, key, before, after

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def delete(self, key: str) -> None:
        if key == self.key and self.before:
            self.before()
        self.inner.delete(key)
        if key == self.key and self.after:
            self.after()


def test_a_plan_that_goes_live_while_it_is_deleted_is_put_back(store):
    orphan = make_plan("orphan")
    key = plan_key("m", orphan.digest())
    meeting = Meeting(store, key, before=lambda: promote(store, "m", orphan.digest(), now=NOW))
    gc(meeting, "m", keep=3, age_seconds=DAY, now=NOW, apply=True)

    assert load_plan(store.url, "m") == orphan


def test_a_plan_that_is_deleted_while_it_goes_live_is_put_back(store):
    orphan = make_plan("orphan")

    class Swapping(Meeting):
        def swap(self, *arguments: object) -> None:
            collect(store)
            assert plan_key("m", orphan.digest()) not in keys(store)
            self.inner.swap(*arguments)

    deploy(orphan, Swapping(store, ""), "m", now=NOW)

    assert load_plan(store.url, "m") == orphan


def test_a_collection_on_s3_keeps_what_is_young(aws, moto):
    store = open_store(aws(moto))
    for plan in PLANS[:3]:
        deploy(plan, store, "m", now=NOW)

    in_a_week = datetime.now(UTC) + timedelta(days=7)
    assert find_garbage(store, "m", keep=1, age_seconds=8 * DAY, now=in_a_week).entries == ()
    gone = gc(store, "m", keep=1, age_seconds=DAY, now=in_a_week, apply=True)
    assert [e.key for e in gone.entries] == [release_key("m", 1), plan_key("m", PLANS[0].digest())]
    assert load_plan(store.url, "m") == PLANS[2]
