"""Fixtures that several rooms' tests share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def neuroshard() -> CommandLine:
    """Runs the real command in a process of its own: `neuroshard("show", plan)`."""

    def run(*arguments: object, cwd: Path | None = None, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "neuroshard.cli", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
