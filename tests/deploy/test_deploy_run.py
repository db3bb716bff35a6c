"""Deploying, rolling back, listing: what is live, what is remembered, what is refused."""

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from helpers.plans import NOW, make_plan
from helpers.refusals import refused
from neuroshard.client import load_plan
from neuroshard.core.errors import Conflict, InvalidInput, NewerFormat, NotFound, StoreError, UsageError
from neuroshard.core.release import SEAL, Decision, Release
from neuroshard.core.value import canonical_json, sha256
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy, run, run_rollback
from neuroshard.files.plan import write_plan
from neuroshard.store.folder import FolderStore
from neuroshard.store.releases import live_key, plan_key, plans_of
from neuroshard.store.track import all_releases

A, B, C, D = (make_plan(note) for note in "ABCD")


def at(hour: int) -> datetime:
    return NOW + timedelta(hours=hour)


def live_plans(store: FolderStore) -> list[str]:
    """Digests that were live, oldest first."""
    return [release.plan_digest for release in reversed(all_releases(store, plans_of("m")))]


def test_a_first_deploy_is_release_1_with_nothing_before_it(store):
    release = deploy(A, store, "m", now=NOW)

    assert release == Release(
        model="m",
        number=1,
        plan_digest=A.digest(),
        time="2025-11-20T12:00:00Z",
        action="deploy",
        cost_ms=1.5,
        decision=Decision(
            verdict="passed",
            comparison="nothing was live before",
            cost_ms=1.5,
            memory_left=1 - 50_800 / 2**20,
            memory_margin=0,
        ),
    )
    assert store.read(live_key("m")) == store.read(plans_of("m").release_key(1)) == release.canonical_json()
    assert store.read(plan_key("m", A.digest())) == A.canonical_json()


def test_a_later_deploy_says_what_it_replaced(store):
    deploy(A, store, "m", now=NOW)
    release = deploy(B, store, "m", now=at(1))

    assert (release.number, release.previous_digest, release.rollback_number) == (2, A.digest(), 1)
    assert load_plan(store.url, "m") == B


def test_the_clock_of_another_zone_gives_utc(store):
    from zoneinfo import ZoneInfo

    assert deploy(A, store, "m", now=NOW.astimezone(ZoneInfo("Asia/Tokyo"))).time == "2025-11-20T12:00:00Z"


def test_deploying_what_is_live_changes_nothing(store):
    first = deploy(A, store, "m", now=NOW)

    assert deploy(A, store, "m", now=at(1)) == first
    assert all_releases(store, plans_of("m")) == (first,)


def test_run_says_that_the_plan_is_live_already(store, tmp_path, capsys):
    write_plan(tmp_path / "plan.json", A)
    first = run(tmp_path / "plan.json", store.url, "m").release
    assert capsys.readouterr().err == f"note: {tmp_path / 'plan.json'}: A\n"

    assert run(tmp_path / "plan.json", store.url, "m") == (first, None)
    assert capsys.readouterr().err == f"{store.url}: this plan is live already, since {first.time}; nothing to do\n"


def test_a_rollback_goes_back_and_another_further_back(store):
    for hour, plan in enumerate((A, B, C)):
        deploy(plan, store, "m", now=at(hour))

    back = roll_back(store, plans_of("m"), now=at(3))
    assert (back.number, back.plan_digest, back.previous_digest) == (4, B.digest(), C.digest())
    assert (back.action, back.cost_ms) == ("rollback", 1.5)
    assert roll_back(store, plans_of("m"), now=at(4)).plan_digest == A.digest()
    with refused(NotFound, "release 5", "'m'", "cannot roll back", "the first plan", "promote"):
        roll_back(store, plans_of("m"), now=at(5))
    assert live_plans(store) == [p.digest() for p in (A, B, C, B, A)]


def test_a_deploy_after_a_rollback_rolls_back_to_what_it_replaced(store):
    for hour, plan in enumerate((A, B, C)):
        deploy(plan, store, "m", now=at(hour))
    roll_back(store, plans_of("m"), now=at(3))
    deploy(D, store, "m", now=at(4))

    assert [roll_back(store, plans_of("m"), now=at(5 + i)).plan_digest for i in range(2)] == [B.digest(), A.digest()]


def test_run_rollback_rolls_back(store):
    deploy(A, store, "m", now=NOW)
    deploy(B, store, "m", now=NOW)

    assert run_rollback(store.url, "m").artifact == A.digest()


def test_there_is_nothing_to_roll_back_or_list_before_the_first_deploy(store):
    for use in (lambda: roll_back(store, plans_of("m"), now=NOW), lambda: all_releases(store, plans_of("m"))):
        with refused(NotFound, "store/m/live.json", "'m'"):
            use()


@pytest.mark.parametrize("data", [b"{", b'{"format_version": 999}'])
def test_a_damaged_release_is_named_and_the_others_are_listed(store, capsys, data):
    for plan in (A, B, C):
        deploy(plan, store, "m", now=NOW)
    change(store, plans_of("m").release_key(2), data)

    assert [r.number for r in all_releases(store, plans_of("m"))] == [3, 1]
    assert plans_of("m").release_key(2) in capsys.readouterr().err


def test_models_in_one_store_do_not_meet(store):
    deploy(A, store, "m", now=NOW)
    deploy(B, store, "m2", now=NOW)

    assert (load_plan(store.url, "m"), load_plan(store.url, "m2")) == (A, B)
    assert [r.number for r in all_releases(store, plans_of("m"))] == [1]


@pytest.mark.parametrize("model", ["", "../evil", "a/b", ".hidden", "-x", "a" * 101, "a\n", "ä", "hardware"])
def test_a_bad_model_name_is_refused_before_anything_is_written(store, model):
    uses = (
        lambda: deploy(A, store, model, now=NOW),
        lambda: roll_back(store, plans_of(model), now=NOW),
        lambda: all_releases(store, plans_of(model)),
        lambda: load_plan(store.url, model),
    )
    for use in uses:
        with refused(UsageError, "model name"):
            use()
    assert not store.root.exists()


def change(store: FolderStore, key: str, data: bytes) -> None:
    (store.root / key).write_bytes(data)


def resealed(data: bytes, **fields: object) -> bytes:
    """A release with other fields, as somebody would write it who knows the format."""
    raw = {key: value for key, value in (json.loads(data) | fields).items() if key != SEAL}
    return canonical_json({**raw, SEAL: sha256(canonical_json(raw))})


BROKEN_POINTERS = [
    (lambda data: b"", InvalidInput, ["JSON"]),
    (lambda data: data[:-20], InvalidInput, ["JSON", "m/releases/"]),
    (lambda data: b"[]", InvalidInput, ["JSON object"]),
    (lambda data: b"\xff" + data, InvalidInput, ["UTF-8"]),
    (lambda data: json.dumps({**json.loads(data), "format_version": 2}).encode(), NewerFormat, ["format_version 2"]),
    (lambda data: resealed(data, model="other"), InvalidInput, ["'other'", "'m'"]),
    (lambda data: data.replace(b'"number":1', b'"number":2'), InvalidInput, ["damaged"]),
    (lambda data: data.replace(b'"cost_ms":1.5', b'"cost_ms":1.4'), InvalidInput, ["damaged"]),
    (lambda data: json.dumps({**json.loads(data), "plan_digest": "../x"}).encode(), InvalidInput, ["plan_digest"]),
    (lambda data: json.dumps({**json.loads(data), "rollback_number": 9}).encode(), InvalidInput, ["rollback_number 9"]),
    (lambda data: data + b" " * 70_000, InvalidInput, ["65,536 bytes"]),
]


@pytest.mark.parametrize(("broken", "kind", "facts"), BROKEN_POINTERS)
def test_a_broken_pointer_is_named_and_nothing_is_written_over_it(store, broken, kind, facts):
    deploy(A, store, "m", now=NOW)
    bad = broken(store.read(live_key("m")))
    change(store, live_key("m"), bad)

    uses = (
        lambda: load_plan(store.url, "m"),
        lambda: deploy(B, store, "m", now=at(1)),
        lambda: roll_back(store, plans_of("m"), now=at(1)),
        lambda: all_releases(store, plans_of("m")),
    )
    for use in uses:
        with refused(kind, "store/m/live.json", *facts):
            use()
    assert store.read(live_key("m"), 10**6) == bad


@pytest.mark.parametrize(
    "broken", [lambda data: data[:-1], lambda data: data.replace(b"1000", b"1001"), lambda data: b""]
)
def test_a_plan_that_is_not_the_deployed_one_is_neither_loaded_nor_rolled_back_to(store, broken):
    deploy(A, store, "m", now=NOW)
    change(store, plan_key("m", A.digest()), broken(A.canonical_json()))
    with refused(InvalidInput, plan_key("m", A.digest())):
        load_plan(store.url, "m")
    with refused(InvalidInput, plan_key("m", A.digest())):
        deploy(A, store, "m", now=NOW)

    deploy(B, store, "m", now=at(1))
    with refused(InvalidInput, plan_key("m", A.digest())):
        roll_back(store, plans_of("m"), now=at(2))
    assert load_plan(store.url, "m") == B


def test_deploying_the_live_plan_again_restores_a_file_that_was_deleted(store):
    deploy(A, store, "m", now=NOW)
    (store.root / plan_key("m", A.digest())).unlink()
    with refused(NotFound, plan_key("m", A.digest()), "`neuroshard deploy`"):
        load_plan(store.url, "m")
    deploy(A, store, "m", now=NOW)

    assert load_plan(store.url, "m") == A


def test_a_lost_pointer_costs_no_history(store):
    for hour, plan in enumerate((A, B)):
        deploy(plan, store, "m", now=at(hour))
    (store.root / live_key("m")).unlink()

    assert deploy(C, store, "m", now=at(2)).number == 3
    assert live_plans(store) == [p.digest() for p in (A, B, C)]


def test_an_old_pointer_put_back_by_hand_costs_no_history(store):
    for hour, plan in enumerate((A, B)):
        deploy(plan, store, "m", now=at(hour))
    change(store, live_key("m"), store.read(plans_of("m").release_key(1)))

    release = deploy(C, store, "m", now=at(2))
    assert (release.number, release.rollback_number) == (3, 1)
    assert live_plans(store) == [p.digest() for p in (A, B, C)]


def test_a_release_in_the_place_of_another_is_refused_with_the_way_out(store):
    for hour, plan in enumerate((A, B)):
        deploy(plan, store, "m", now=at(hour))
    change(store, plans_of("m").release_key(1), store.read(plans_of("m").release_key(2)))

    with refused(InvalidInput, plans_of("m").release_key(1), "release 2", "not 1", "restore", "promote"):
        run_rollback(store.url, "m")


class MeddledStore:
    """A store whose swap is not what it seems."""

    def __init__(self, store: FolderStore, swap) -> None:
        self.inner, self.swap = store, swap

    def __getattr__(self, name: str):
        return getattr(self.inner, name)


def test_the_slower_of_two_deployers_learns_who_won(store):
    deploy(A, store, "m", now=NOW)

    def swap(key: str, data: bytes, token: str | None) -> None:
        deploy(B, store, "m", now=at(1))
        store.swap(key, data, token)

    with refused(Conflict, "release 2", B.digest()[:12], "2025-11-20T13:00:00Z", "'m'"):
        deploy(C, MeddledStore(store, swap), "m", now=at(2))
    assert live_plans(store) == [A.digest(), B.digest()]


@pytest.mark.parametrize("answer", [Conflict("k: somebody else"), StoreError("k: no answer in 20 s")])
def test_a_swap_of_which_only_the_answer_was_lost_is_a_deploy(store, answer):
    def swap(key: str, data: bytes, token: str | None) -> None:
        store.swap(key, data, token)
        raise answer

    release = deploy(A, MeddledStore(store, swap), "m", now=NOW)

    assert all_releases(store, plans_of("m")) == (release,)
    assert load_plan(store.url, "m") == A


def test_a_swap_that_never_arrived_is_an_error(store):
    deploy(A, store, "m", now=NOW)

    def swap(*_: object) -> None:
        raise StoreError("k: no answer in 20 s")

    with refused(StoreError, "20 s"):
        deploy(B, MeddledStore(store, swap), "m", now=at(1))
    assert load_plan(store.url, "m") == A


def test_a_swap_whose_outcome_cannot_be_seen_says_so(store):
    meddled: Any = MeddledStore(store, None)

    def swap(*_: object) -> None:
        meddled.read_versioned = swap
        raise StoreError("k: no answer in 20 s")

    meddled.swap = swap
    with refused(StoreError, "release 1", "'m'", "`neuroshard releases`"):
        deploy(A, meddled, "m", now=NOW)
