"""A releasing day at an S3 store whose answers are spoiled now and then, looked at from outside after every command."""

import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from helpers.faults import Fault, faulty
from helpers.later import Later
from helpers.plans import NOW, make_plan
from helpers.releasing import live
from neuroshard.client import load_plan
from neuroshard.core.errors import NeuroshardError
from neuroshard.deploy.gc import gc
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy, promote
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of
from neuroshard.store.track import all_releases

PLANS = [make_plan(str(number)) for number in range(6)]


class Day(NamedTuple):
    """How often commands ended well or in a clear error, and the seconds of the longest one."""

    well: int
    errors: Counter[str]
    longest_seconds: float


def spoiled_day(
    direct: Store,
    server: str,
    fault: Fault,
    share: float,
    commands: int,
    rng: random.Random,
    aim: Callable[[str], Store],
) -> Day:
    """`commands` random ones through a proxy that spoils a `share` of all answers with `fault`.

    `aim(endpoint)` gives a store of the same bucket that talks to that endpoint, and its URL with the environment so set.
    Raises AssertionError where a wrong plan was loaded or is live, and whatever is not a NeuroshardError of one line.
    """
    deploy(PLANS[0], direct, "m", now=NOW)
    well, errors, longest = 0, Counter[str](), 0.0
    with faulty(server, lambda _: fault if rng.random() < share else None, rng) as endpoint:
        store = aim(endpoint)
        for _ in range(commands):
            before, plan = live(direct), rng.choice(PLANS)
            digest = plan.digest()
            uses: dict[str, Callable[[], object]] = {
                "load": lambda: load_plan(store.url, "m", cache_dir=False),
                "deploy": partial(deploy, plan, store, "m", now=NOW),
                "promote": partial(promote, store, "m", digest, now=NOW),
                "rollback": lambda: roll_back(store, plans_of("m"), now=NOW),
                "releases": lambda: all_releases(store, plans_of("m")),
                "gc": lambda: gc(
                    Later(store, timedelta(days=2)), plans_of("m"), keep=2, age_seconds=86_400, apply=True
                ),
            }
            name = rng.choice(["load", "load", *uses])
            began = time.monotonic()
            result: object = None
            try:
                result = uses[name]()
                well += 1
            except NeuroshardError as error:
                if "\n" in str(error):
                    raise
                errors[type(error).__name__] += 1
            longest = max(longest, time.monotonic() - began)
            after = live(direct)
            if name == "load" and result is not None:
                assert result == before, "a wrong plan was loaded"
            if name in ("deploy", "promote"):
                assert after in (before, plan), "a wrong plan is live"
                assert result is None or after == plan, "a command that ended well did nothing"
            elif name != "rollback":
                assert after == before, "a command that only reads changed what is live"
            else:
                assert after in PLANS
    return Day(well, errors, longest)
