"""What a trainer gets from `load_plan`, and what it is spared."""

from datetime import UTC, datetime
from typing import Any

import pytest

from helpers.plans import TABLES, make_plan
from helpers.refusals import refused
from neuroshard.client import Plan, load_plan, watch
from neuroshard.core.errors import InvalidInput, NotFound, UsageError
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore

NOW = datetime(2025, 11, 20, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def url(tmp_path) -> str:
    store = FolderStore(tmp_path / "store")
    deploy(make_plan("old"), store, "m", now=NOW)
    deploy(make_plan(), store, "m", now=NOW)
    return store.url


def test_the_live_plan_is_loaded_whole(url):
    plan = load_plan(url, "m", tables=TABLES, world_size=2)

    assert isinstance(plan, Plan)
    assert plan == make_plan()


def test_loading_reads_two_objects(url, monkeypatch):
    keys = []
    read = FolderStore.read
    monkeypatch.setattr(FolderStore, "read", lambda self, key, *rest: keys.append(key) or read(self, key, *rest))
    load_plan(url, "m", cache_dir=False)

    assert keys == ["m/live.json", f"m/plans/{make_plan().digest()}.json"]


def test_the_order_of_tables_and_how_they_are_read_do_not_matter(url):
    tables = [table.model_copy(update={"pooling_factor": 99.0}) for table in reversed(TABLES)]

    assert load_plan(url, "m", tables=tables) == make_plan()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (TABLES[1:], ["has table 'user'", "the model lacks"]),
        ((*TABLES, TABLES[0].model_copy(update={"name": "new"})), ["lacks table 'new'"]),
        ((TABLES[0].model_copy(update={"rows": 1001}), *TABLES[1:]), ["'user'", "1,000 rows", "1,001 rows"]),
        ((TABLES[0].with_dim(32), *TABLES[1:]), ["'user'", "dim 16", "dim 32"]),
    ],
)
def test_a_plan_for_other_tables_is_refused(url, tables, words):
    with pytest.raises(InvalidInput) as caught:
        load_plan(url, "m", tables=tables)

    for word in [*words, f"plan {make_plan().digest()[:12]} of 'm'"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_plan_for_another_world_size_is_refused(url, ranks):
    with refused(InvalidInput, "2 ranks", ranks):
        load_plan(url, "m", world_size=ranks)


def test_a_model_that_was_never_deployed_is_named(url):
    with refused(NotFound, "other/live.json", "'other'"):
        load_plan(url, "other")


def test_a_store_may_be_a_path_and_other_arguments_of_the_wrong_type_are_named(url, tmp_path):
    assert load_plan(tmp_path / "store", "m") == make_plan()
    for given, facts in (((url, None), ("None",)), ((None, "m"), ("URL", "NoneType"))):
        with refused(UsageError, *facts):
            load_plan(*given)
    how: dict[str, Any] = {"world_size": "2"}
    with refused(UsageError, "world_size", "'2'"):
        load_plan(url, "m", **how)
    with refused(UsageError, "world_size", "'2'"):  # not one warning a poll, without end
        next(watch(url, "m", **how))
