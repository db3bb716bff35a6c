"""What must hold of any damaged pointer, history or plan file. Each check returns whether the file was still taken."""

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.memory_store import MemoryStore
from helpers.mutations import NOTHING, mutated
from helpers.plans import NOW, make_plan
from helpers.releasing import A, B, live
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.deploy.gate import Gate, decide
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy
from neuroshard.report.text import plan_text
from neuroshard.store.releases import live_key, plan_key, plans_of, read_live, read_plan
from neuroshard.store.track import all_releases, read_past

T = TypeVar("T")


def or_clear_error(use: Callable[[], T]) -> T | None:
    """What `use` returns, or None where it ends in an error of one line that is not endless."""
    try:
        return use()
    except InvalidInput as error:
        message = str(error)
    assert "\n" not in message
    assert 0 < len(message) < 2000
    return None


def two_releases() -> MemoryStore:
    store = MemoryStore()
    deploy(A, store, "m", now=NOW)
    deploy(B, store, "m", now=NOW)
    return store


def check_pointer(store: MemoryStore, rng: random.Random, value: Any = NOTHING) -> bool:
    """A damaged live.json is the release that it was, or an error to everybody who reads it."""
    good, before = dict(store.objects), read_live(store, "m").release
    store.objects[live_key("m")] = mutated(store.objects[live_key("m")], rng, value)
    damaged = dict(store.objects)
    read = or_clear_error(lambda: read_live(store, "m").release)
    if read is None:
        for use in (
            lambda: roll_back(store, plans_of("m"), now=NOW),
            lambda: deploy(make_plan("c"), store, "m", now=NOW),
        ):
            assert or_clear_error(use) is None
            assert store.objects == damaged, "a damaged pointer was written over"
    else:
        assert read == before
    store.objects = good
    return read is not None


def check_history(store: MemoryStore, rng: random.Random, value: Any = NOTHING) -> bool:
    """A damaged file of the history is the release that it was, or an error; what is live stays live, or goes back to it."""
    good, before = dict(store.objects), read_past(store, plans_of("m"), 1)
    store.objects[plans_of("m").release_key(1)] = mutated(store.objects[plans_of("m").release_key(1)], rng, value)
    read = or_clear_error(lambda: read_past(store, plans_of("m"), 1))
    assert read in (None, before)
    assert [one.number for one in all_releases(store, plans_of("m"))] == ([2] if read is None else [2, 1])
    assert (or_clear_error(lambda: roll_back(store, plans_of("m"), now=NOW)) is None) == (read is None)
    assert live(store) == (B if read is None else A)
    store.objects = good
    return read is not None


def check_plan(store: MemoryStore, rng: random.Random, value: Any = NOTHING) -> bool:
    """A damaged plan is never loaded from a store; as a file it is a valid plan that comes back equal, or an error."""
    key = plan_key("m", B.digest())
    good = store.objects[key]
    damaged = store.objects[key] = mutated(good, rng, value)
    assert or_clear_error(lambda: read_plan(store, "m", B.digest())) == (B if damaged == good else None)
    store.objects[key] = good

    plan = or_clear_error(lambda: Plan.from_json(damaged, "plan.json"))
    if plan is None:
        return False
    assert Plan.from_json(plan.canonical_json(), "again") == plan
    assert plan_text(plan)
    assert decide(plan, Gate(), read_live(store, "m").release, B).verdict in ("passed", "kept")
    return True


CHECKS = {"pointer": check_pointer, "history": check_history, "plan": check_plan}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: st.lists(part) | st.dictionaries(st.text(), part),
)


def fuzz(kind: str, examples: int) -> tuple[int, int, float]:
    """Let Hypothesis damage files of a kind; how many were tried, were still taken, and the seconds of the slowest.

    It chooses every fault, so what fails is shrunk to the least damage that does; the same ones every time.
    """
    store = two_releases()
    tried, taken, slowest = 0, 0, 0.0

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(rng=st.randoms(use_true_random=False), value=st.just(NOTHING) | ANY_JSON)
    def check(rng: random.Random, value: Any) -> None:
        nonlocal tried, taken, slowest
        began = time.monotonic()
        taken += CHECKS[kind](store, rng, value)
        slowest = max(slowest, time.monotonic() - began)
        tried += 1

    check()
    return tried, taken, slowest
