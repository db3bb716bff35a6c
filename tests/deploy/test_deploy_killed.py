"""kill -9 before every single touch of the disk: the old or the new plan is live, and the next command works."""

from typing import Any

import pytest

from helpers.kills import killed_everywhere
from helpers.releasing import COMMANDS, check_works_on, live, prepare
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store

pytestmark = pytest.mark.slow


SWAPS = {"first deploy", "deploy", "promote", "rollback"}  # commands after which another plan is live


@pytest.mark.parametrize("name", COMMANDS)
def test_a_kill_leaves_the_old_or_the_new_plan_and_a_store_that_works(tmp_path, name):
    command = COMMANDS[name]
    start = tmp_path / "start"
    start.mkdir()
    prepare(command, FolderStore(start))
    old = command.deployed[-1] if command.deployed else None

    seen = []
    for root in killed_everywhere(start, tmp_path, command.act):
        store = FolderStore(root)
        seen.append(live(store))
        if name == "gc":
            command.act(store)
            assert [e.key for e in store.list("m/")] == [
                "m/live.json",
                *sorted(f"m/plans/{plan.digest()}.json" for plan in command.deployed[1:]),
                "m/releases/00000002.json",
                "m/releases/00000003.json",
            ]
        check_works_on(store, seen[-1])

    if name in SWAPS:
        switch = seen.index(command.after)
        assert seen == [old] * switch + [command.after] * (len(seen) - switch)
        assert 5 < switch < len(seen) - 2, "kills before and after the swap were tried"
    else:
        assert seen == [command.after] * len(seen)
        assert len(seen) > 5


class Stopped(BaseException):
    """Nobody catches it, as nobody catches a kill."""


class Stopping:
    """A store whose user is gone before its `calls`-th call."""

    def __init__(self, store: Store, calls: int) -> None:
        self.inner, self.left = store, calls

    def __getattr__(self, name: str) -> object:
        if callable(getattr(self.inner, name)):
            self.left -= 1
            if self.left == 0:
                raise Stopped
        return getattr(self.inner, name)


@pytest.mark.parametrize(("server", "name"), [("moto", "promote"), ("rclone", "rollback")])
def test_on_s3_too_every_step_leaves_the_old_or_the_new_plan(aws, request, server, name):
    command = COMMANDS[name]
    store: Any = open_store(aws(request.getfixturevalue(server)), single_writer=server == "rclone")
    seen, calls, stopped = [], 0, True
    while stopped:
        calls += 1
        store.prefix = f"stopped-{calls}"
        prepare(command, store)
        try:
            command.act(Stopping(store, calls))
            stopped = False
        except Stopped:
            pass
        seen.append(live(store))
        check_works_on(store, seen[-1])

    switch = seen.index(command.after)
    assert seen == [command.deployed[-1]] * switch + [command.after] * (len(seen) - switch)
    assert 3 < switch < len(seen) - 1
