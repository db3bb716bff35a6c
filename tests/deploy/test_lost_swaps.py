"""The errors of a deployer whose swap got no answer, or the wrong one: what is true, as far as it is known."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from helpers.memory_store import MemoryStore
from helpers.plans import NOW, make_plan
from helpers.refusals import refused
from neuroshard.core.errors import Conflict, InvalidInput, NotFound, StoreError, Unreachable
from neuroshard.deploy import golive
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy
from neuroshard.store.releases import live_key, plans_of
from neuroshard.store.track import all_releases

A, B, C = (make_plan(note) for note in "ABC")
NO_ANSWER = Unreachable("memory/m/live.json: cannot reach the store")
LOST = Conflict("memory/m/live.json: somebody else changed it in between")


class Answering(MemoryStore):
    """A store that answers the next swap of the pointer with `error`, after doing it if `does_it`, and after `meanwhile`."""

    def __init__(self) -> None:
        super().__init__()
        self.error: StoreError | None = None
        self.does_it = False
        self.meanwhile: Callable[[], object] = lambda: None
        deploy(A, self, "m", now=NOW)

    def swap(self, key: str, data: bytes, expected: str | None) -> None:
        error, self.error = self.error, None
        if error is None or not key.endswith("live.json"):
            self.error = error
            return super().swap(key, data, expected)
        if self.does_it:
            super().swap(key, data, expected)
        self.meanwhile()
        raise error


@pytest.fixture
def store() -> Answering:
    return Answering()


def later(plan, store) -> None:
    deploy(plan, store, "m", now=NOW + timedelta(minutes=1))


@pytest.mark.parametrize("error", [NO_ANSWER, LOST])
def test_a_swap_that_came_through_is_one_whatever_was_answered(store, error):
    store.error, store.does_it = error, True

    assert deploy(B, store, "m", now=NOW).number == 2
    assert [release.plan_digest for release in all_releases(store, plans_of("m"))] == [B.digest(), A.digest()]


@pytest.mark.parametrize(
    ("error", "meanwhile", "kind", "facts"),
    [
        (NO_ANSWER, lambda store: None, Unreachable, ["'m'"]),  # it is not said to have failed for good
        (LOST, lambda store: None, Conflict, ["'m'", "ETags"]),
        (NO_ANSWER, lambda store: later(C, store), Conflict, [C.digest()[:12]]),
        (LOST, lambda store: later(C, store), Conflict, [C.digest()[:12]]),
        (LOST, lambda store: store.delete(live_key("m")), Conflict, ["m/live.json"]),
    ],
)
def test_the_loser_learns_what_is_known_of_the_winner(store, error, meanwhile, kind, facts):
    store.error, store.meanwhile = error, lambda: meanwhile(store)
    with refused(kind, "release 2", *facts):
        deploy(B, store, "m", now=NOW)


@pytest.mark.parametrize("error", [NO_ANSWER, LOST])
def test_who_won_and_was_replaced_at_once_learns_it(store, error):
    store.error, store.does_it, store.meanwhile = error, True, lambda: later(C, store)
    with refused(Conflict, "release 2", "release 3", C.digest()[:12]):
        deploy(B, store, "m", now=NOW)

    assert [release.plan_digest for release in all_releases(store, plans_of("m"))] == [
        C.digest(),
        B.digest(),
        A.digest(),
    ]


@pytest.mark.parametrize("read", [InvalidInput("memory/m/live.json: not JSON"), Unreachable("memory: no answer")])
def test_where_nobody_can_look_nothing_is_claimed(store, read, monkeypatch):
    def fails(*_: object) -> None:
        raise read

    store.error, store.does_it = NO_ANSWER, True
    store.meanwhile = lambda: monkeypatch.setattr(store, "read_versioned", fails)
    with refused(StoreError, "release 2", "'m'", "not known"):
        deploy(B, store, "m", now=NOW)


def test_a_pointer_put_there_by_hand_beside_another_history_is_reported_with_the_way_out(store):
    deploy(B, store, "m", now=NOW)
    other = MemoryStore()
    for plan in (A, C):
        deploy(plan, other, "m", now=NOW)
    for key in (live_key("m"), f"m/plans/{C.digest()}.json"):
        store.objects[key] = other.objects[key]
    for use in (lambda: deploy(make_plan("D"), store, "m", now=NOW), lambda: roll_back(store, plans_of("m"), now=NOW)):
        with refused(Conflict, "00000002.json", "m/live.json", "release 2"):
            use()

    store.delete(plans_of("m").release_key(2))
    assert roll_back(store, plans_of("m"), now=NOW).plan_digest == A.digest()


@pytest.mark.slow
def test_a_release_too_large_to_be_read_does_not_go_live(store, monkeypatch):
    monkeypatch.setattr(golive, "MAX_RELEASE_BYTES", 500)
    with refused(InvalidInput, "release 2", "'m'", 500):
        deploy(B, store, "m", now=NOW)

    assert store.objects[live_key("m")] == store.objects[plans_of("m").release_key(1)]
    with pytest.raises(NotFound):
        store.read(plans_of("m").release_key(2))
