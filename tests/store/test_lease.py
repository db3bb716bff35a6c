"""Who holds a lease where the store's answers are lost, or do not come for a while."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from helpers.memory_store import MemoryStore
from helpers.refusals import refused
from neuroshard.core.errors import Conflict, Unreachable
from neuroshard.store import lease, patience
from neuroshard.store.lease import LEASE_SECONDS, LeaseHeld, leased
from neuroshard.store.patience import PatientStore

KEY = "w/lease"
OLD = b'{"owner": "dead", "nonce": "1"}'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "WAIT_SECONDS", 0.01)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def expired(store: MemoryStore) -> MemoryStore:
    """A store with a lease that nobody renews."""
    store.create(KEY, OLD)
    store.now += timedelta(seconds=2 * LEASE_SECONDS)
    return store


def owner(store: MemoryStore) -> str:
    return str(json.loads(store.read(KEY))["owner"])


def tried_twice(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a store whose first answer is lost, so that the client under it tries again."""

    def call(*given: Any) -> Any:
        method(*given)
        return method(*given)

    return call


def away_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a store that does not answer the first time it is asked."""
    answers: Iterator[bool] = iter([False])

    def call(*given: Any) -> Any:
        if not next(answers, True):
            raise Unreachable("no answer")
        return method(*given)

    return call


def test_a_lease_whose_creation_was_not_answered_is_held(store: MemoryStore) -> None:
    store.create = tried_twice(store.create)
    with leased(PatientStore(store), KEY, "one"):
        assert owner(store) == "one"
    assert store.list("w/") == ()


def test_an_expired_lease_whose_takeover_was_not_answered_is_held(expired: MemoryStore) -> None:
    expired.swap = tried_twice(expired.swap)
    with leased(PatientStore(expired), KEY, "one"):
        assert owner(expired) == "one"
    assert expired.list("w/") == ()


def test_an_expired_lease_that_another_run_took_over_first_is_left_to_it(expired: MemoryStore) -> None:
    swap = expired.swap

    def overtaken(key: str, data: bytes, expected: str | None) -> None:
        swap(key, b'{"owner": "faster", "nonce": "2"}', expected)
        raise Conflict("somebody else changed it in between")

    expired.swap = overtaken
    with refused(LeaseHeld, "nightly run faster"), leased(PatientStore(expired), KEY, "one"):
        pass
    assert owner(expired) == "faster"


@pytest.mark.parametrize("method", ["create", "read_versioned", "list", "swap"])
def test_a_store_that_is_away_when_a_lease_is_asked_for_is_waited_for(expired: MemoryStore, method: str) -> None:
    setattr(expired, method, away_once(getattr(expired, method)))
    with leased(PatientStore(expired), KEY, "one"):
        assert owner(expired) == "one"
    assert expired.list("w/") == ()


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[]", b"{", b'{"owner": "", "nonce": "1"}'])
def test_a_lease_that_names_nobody_is_another_runs(store: MemoryStore, data: bytes) -> None:
    store.create(KEY, data)
    with refused(LeaseHeld, "another nightly run is working on it"), leased(PatientStore(store), KEY, "two"):
        pass


def test_a_lease_that_was_overwritten_is_not_deleted(store: MemoryStore) -> None:
    deep = b"[" * 100_000
    with leased(PatientStore(store), KEY, "one"):
        store.objects[KEY] = deep
    assert store.read(KEY) == deep


def test_a_lease_outlives_its_term_while_its_holder_works(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """For three terms, another run asks just before each renewal."""
    given: list[tuple[float, Callable[[], None]]] = []

    @contextmanager
    def by_hand(every_seconds: float, do: Callable[[], None]) -> Iterator[None]:
        given.append((every_seconds, do))
        yield

    monkeypatch.setattr(lease, "repeating", by_hand)
    with leased(PatientStore(store), KEY, "one"):
        [(every_seconds, renew)] = given
        for _ in range(int(3 * LEASE_SECONDS / every_seconds) + 1):
            store.now += timedelta(seconds=every_seconds)
            with refused(LeaseHeld, "nightly run one"), leased(PatientStore(store), KEY, "two"):
                pass
            renew()
    assert store.list("w/") == ()
