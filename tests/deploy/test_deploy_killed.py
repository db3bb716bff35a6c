"""kill -9 before every single touch of the disk: the old or the new plan is live, and the next command works."""

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from helpers.plans import make_plan
from neuroshard.client import load_plan
from neuroshard.core.errors import NotFound
from neuroshard.core.plan import Plan
from neuroshard.deploy.run import deploy, releases, rollback
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import read_live, read_plan

NOW = datetime(2025, 11, 20, 12, 0, 0, tzinfo=UTC)
A, B, C = (make_plan(note) for note in "ABC")
TOUCHES = {"open", "os.mkdir", "os.link", "os.rename", "os.remove"}


def killed_at(touch: int, root: Path, act: Callable[[FolderStore], object]) -> bool:
    """Do `act` in a process of its own that kills itself before its `touch`-th touch of files under `root`."""

    def child() -> None:
        touches = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal touches
            if event in TOUCHES and str(arguments[0]).startswith(str(root)):
                touches += 1
                if touches == touch:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        act(FolderStore(root))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def live(root: Path) -> Plan | None:
    try:
        return load_plan(str(root), "m")
    except NotFound:
        return None


@pytest.mark.parametrize(
    ("before", "act", "after"),
    [
        ([], lambda store: deploy(A, store, "m", now=NOW), A),
        ([A], lambda store: deploy(B, store, "m", now=NOW), B),
        ([A, B], lambda store: rollback(store, "m", now=NOW), A),
    ],
    ids=["first deploy", "deploy", "rollback"],
)
def test_a_kill_leaves_the_old_or_the_new_plan_and_a_store_that_works(tmp_path, before, act, after):
    start = tmp_path / "start"
    start.mkdir()
    for plan in before:
        deploy(plan, FolderStore(start), "m", now=NOW)
    old = before[-1] if before else None

    seen, touch, killed = [], 0, True
    while killed:
        touch += 1
        root = tmp_path / f"kill-{touch}"
        shutil.copytree(start, root)
        killed = killed_at(touch, root, act)
        seen.append(live(root))

        store = FolderStore(root)
        deploy(C, store, "m", now=NOW)
        history = releases(store, "m")
        assert [r.number for r in history] == list(range(len(history), 0, -1))
        assert len(history) == len(before) + 1 + (seen[-1] == after)
        if seen[-1] is not None:
            assert rollback(store, "m", now=NOW).plan_digest == seen[-1].digest()

    switch = seen.index(after)
    assert seen == [old] * switch + [after] * (len(seen) - switch)
    assert 5 < switch < len(seen) - 2, "kills before and after the swap were tried"


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


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_on_s3_too_every_step_leaves_the_old_or_the_new_plan(aws, request, server):
    store = open_store(aws(request.getfixturevalue(server)), single_writer=server == "rclone")
    seen, calls, stopped = [], 0, True
    while stopped:
        calls += 1
        model = f"stopped-{calls}"
        deploy(A, store, model, now=NOW)
        try:
            deploy(B, Stopping(store, calls), model, now=NOW)
            stopped = False
        except Stopped:
            pass
        seen.append(read_plan(store, model, read_live(store, model).release.plan_digest))

        deploy(C, store, model, now=NOW)
        assert [r.number for r in releases(store, model)] == [3, 2, 1][-2 - (seen[-1] == B) :]
        assert rollback(store, model, now=NOW).plan_digest == seen[-1].digest()

    switch = seen.index(B)
    assert seen == [A] * switch + [B] * (len(seen) - switch)
    assert 3 < switch < len(seen) - 1
