"""The pipeline run on the synthetic backend."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.limits import HANGS
from helpers.shared import made_once

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


@pytest.fixture(scope="session")
def ran(run_local, tmp_path_factory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """The folder of a run of model `ads` that went well, for reading only, and how it ended."""

    def make(folder: Path) -> None:
        ended = run_local(folder / "out", "--model", "ads")
        assert ended.returncode == 0, ended.stderr
        (folder / "ended.json").write_text(json.dumps([0, ended.stdout, ended.stderr]))

    folder = made_once(tmp_path_factory, "ran", make)
    return folder / "out", subprocess.CompletedProcess([], *json.loads((folder / "ended.json").read_text()))
