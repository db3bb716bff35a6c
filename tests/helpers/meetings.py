"""Commands that meet in one store: their calls interleaved one by one, by chance, and some of them killed on the way."""

import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from helpers.limits import HANGS
from helpers.memory_store import MemoryStore
from helpers.plans import make_plan
from helpers.releasing import live
from neuroshard.core.errors import Conflict, NotFound
from neuroshard.deploy.gc import gc
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy, promote, publish
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of

LONG_AGO = datetime(2025, 11, 1, tzinfo=UTC)
NOW = LONG_AGO + timedelta(days=9)
A, B, C, ORPHAN = (make_plan(note) for note in ("A", "B", "C", "orphan"))


def collect(store: Store) -> object:
    return gc(store, plans_of("m"), keep=1, age_seconds=86_400, apply=True)


COMMANDS: dict[str, Callable[[Store], object]] = {
    "gc": collect,
    "promote": lambda store: promote(store, "m", ORPHAN.digest(), now=NOW),
    "deploy": lambda store: deploy(ORPHAN, store, "m", now=NOW),
    "rollback": lambda store: roll_back(store, plans_of("m"), now=NOW),
}


class Killed(BaseException):
    """Nobody catches it, as nobody catches a kill."""


class Turns:
    """Who may make the next call of the store: one command at a time, chosen by `rng`, which tends to stay."""

    def __init__(self, names: tuple[str, ...], rng: random.Random) -> None:
        self.running, self.rng, self.changed = set(range(len(names))), rng, threading.Condition()
        self.turn, self.stay = rng.choice(sorted(self.running)), rng.choice((0.3, 0.8, 0.95))
        self.calls_left = {who: rng.randint(1, 25) if rng.random() < 0.5 else 1000 for who in self.running}

    def call(self, who: int, do: Callable[[], object]) -> object:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == who)
            self.calls_left[who] -= 1
            if self.calls_left[who] == 0:
                raise Killed
            try:
                return do()
            finally:
                if self.rng.random() > self.stay:
                    self._next()

    def leave(self, who: int) -> None:
        with self.changed:
            self.running.discard(who)
            self._next()

    def _next(self) -> None:
        self.turn = self.rng.choice(sorted(self.running)) if self.running else -1
        self.changed.notify_all()


class Shared:
    """The store as one command sees it."""

    def __init__(self, inner: MemoryStore, who: int, turns: Turns) -> None:
        self.inner, self.who, self.turns, self.url = inner, who, turns, inner.url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.inner, name)
        return lambda *arguments: self.turns.call(self.who, lambda: method(*arguments))


def meet(names: tuple[str, ...], rng: random.Random) -> str:
    """Let the commands meet in a store of old plans. Raises AssertionError unless what is live in the end is there, whole."""
    store = MemoryStore()
    store.now = LONG_AGO
    for plan in (A, B, C):
        deploy(plan, store, "m", now=LONG_AGO)
    publish(ORPHAN, store, "m")
    store.now = NOW
    turns, ends, failures = Turns(names, rng), {}, []

    def run(who: int, name: str) -> None:
        try:
            COMMANDS[name](cast(Store, Shared(store, who, turns)))
            ends[who] = "well"
        except (Conflict, NotFound) as error:  # somebody else was faster, or the orphan is gone
            ends[who] = type(error).__name__
        except Killed:
            ends[who] = "killed"
        except BaseException as error:
            failures.append(error)
        finally:
            turns.leave(who)

    threads = [threading.Thread(target=run, args=one) for one in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert not failures, failures
    assert len(ends) == len(names), "a command hangs"
    assert live(store) in (A, B, C, ORPHAN)
    for who, name in enumerate(names):
        if name in ("promote", "deploy") and ends[who] == "well" and "rollback" not in names:
            assert live(store) == ORPHAN
    return (
        "someone died" if "killed" in ends.values() else "all ended well" if set(ends.values()) == {"well"} else "clash"
    )
