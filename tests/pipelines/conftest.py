"""The pipeline run on the synthetic backend."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.limits import HANGS

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_local() -> Run:
    """`make run` with these options, on a formula and few cases, without the trainer."""
    small = ["--backend", "synthetic", "--compute-cases", "60", "--collective-cases", "40", "--steps", "0"]

    def run(out: Path, *options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "pipelines.run_local", "--out", out, *small, *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANGS,
        )

    return run
