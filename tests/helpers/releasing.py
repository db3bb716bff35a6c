"""The commands that change a store, each with the store it starts from and the plan that is live after it."""

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from helpers.later import Later
from helpers.plans import NOW, make_plan
from neuroshard.core.errors import NotFound
from neuroshard.core.plan import Plan
from neuroshard.deploy.gate import Gate
from neuroshard.deploy.gc import gc
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy, promote, publish
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of, read_live, read_plan
from neuroshard.store.track import all_releases

A, B, C, NEXT = (make_plan(note) for note in ("A", "B", "C", "next"))


class Command(NamedTuple):
    """`act`, in a store where `deployed` were deployed and `published` were published; then `after` is live."""

    deployed: tuple[Plan, ...]
    published: tuple[Plan, ...]
    act: Callable[[Store], object]
    after: Plan


def _gc(store: Store) -> object:
    return gc(Later(store, timedelta(days=7)), plans_of("m"), keep=1, age_seconds=86_400, apply=True)


COMMANDS = {
    "first deploy": Command((), (), lambda store: deploy(A, store, "m", now=NOW), A),
    "deploy": Command((A,), (), lambda store: deploy(B, store, "m", now=NOW), B),
    "publish": Command((A,), (), lambda store: publish(B, store, "m"), A),
    "kept by the gate": Command((A,), (), lambda store: deploy(B, store, "m", now=NOW, gate=Gate(min_gain=0.5)), A),
    "promote": Command((A,), (B,), lambda store: promote(store, "m", B.digest(), now=NOW), B),
    "rollback": Command((A, B), (), lambda store: roll_back(store, plans_of("m"), now=NOW), A),
    "gc": Command((A, B, C), (NEXT,), _gc, C),
}


def prepare(command: Command, store: Store) -> None:
    for plan in command.published:
        publish(plan, store, "m")
    for plan in command.deployed:
        deploy(plan, store, "m", now=NOW)


def live(store: Store) -> Plan | None:
    try:
        return read_plan(store, "m", read_live(store, "m").release.plan_digest)
    except NotFound as error:
        if "live.json" not in str(error):  # a release is live whose plan is gone
            raise
        return None


def check_works_on(store: Store, seen: Plan | None) -> None:
    """The next deploy works, leaves a history without a gap, and can be rolled back to the plan that was live before."""
    fresh = make_plan("one that nobody deployed")
    deploy(fresh, store, "m", now=NOW)
    assert live(store) == fresh
    numbers = [release.number for release in all_releases(store, plans_of("m"))]
    assert numbers == list(range(numbers[0], numbers[-1] - 1, -1))
    if seen is not None:
        assert roll_back(store, plans_of("m"), now=NOW).plan_digest == seen.digest()
        assert live(store) == seen
