"""Which processes of a run are alive: found by a mark in their environment, so whoever started them and wherever they went."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

MARK = "NEUROSHARD_TEST_MARK"
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc, as Linux has")


def new_mark() -> dict[str, str]:
    """An environment variable that every process of one run inherits."""
    return {MARK: uuid4().hex}


def alive(mark: dict[str, str]) -> list[str]:
    """The command lines of the processes with this mark; none of those that have ended."""
    wanted = f"{MARK}={mark[MARK]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # ended while we looked
            continue
    return [line for line in found if line]


def wait_until(happened: Callable[[], bool], seconds: float) -> bool:
    """Whether it happened within so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
