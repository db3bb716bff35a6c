"""What takes seconds to make and nobody changes: made once for all workers of one run of the tests, as pytest-xdist advises."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` that `make` filled. The first worker that asks makes it, and the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of one run: its workers have a folder each in it
    folder, made = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def copy_of_made(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A copy of that folder, for tests that write into it."""
    copy = tmp_path_factory.mktemp("copy") / name
    shutil.copytree(made_once(tmp_path_factory, name, make), copy)
    return copy
