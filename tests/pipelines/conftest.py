"""The pipeline run on the synthetic backend."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.limits import HANGS
from helpers.shared import made_once

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
# On a formula and few cases, without the trainer.
SMALL = [
    *("--backend", "synthetic", "--compute-cases", "60", "--collective-cases", "40"),
    *("--devices", "2", "--memory", "64GiB", "--steps", "0"),
]
# No home, no temporary folder, and a terminal that shows ASCII alone: Python would take UTF-8 in the locale C, if it were let.
BARE = {
    "HOME": "/proc/none",
    "TMPDIR": "/proc/none/tmp",
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}


def run_pipeline(
    root: Path, out: Path, *options: str, python: Path | str = sys.executable, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """`make run` with these options in the clone at `root`."""
    return subprocess.run(
        [python, "-m", "pipelines.run_local", "--out", out, *SMALL, *options],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "components"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )


@pytest.fixture(scope="session")
def run_local() -> Run:
    """`make run` with these options, in this clone."""
    return lambda out, *options: run_pipeline(ROOT, out, *options)


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """A clone whose path a shell would take apart and execute, in which model `ads` was planned and trained for two steps.

    Its cost model learns for a few epochs: no test asks how good it is. For reading only. How the run ended is in `ended.json`
    beside it, its store and its folder in `run/`.
    """

    def make(folder: Path) -> None:
        clone = folder / 'we ird "quoted" it\'s $(touch executed) `touch executed` ; &'
        for name in ("components", "pipelines", "examples"):
            shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        training = clone / "components" / "neuroshard" / "pretrain" / "train.py"
        few, found = re.subn(r"(?<=^MOST_EPOCHS: Final = )\d+$", "20", training.read_text(), flags=re.M)
        assert found == 1
        training.write_text(few)
        (clone / ".venv").symlink_to(sys.prefix)
        python = clone / ".venv" / "bin" / "python"
        ended = run_pipeline(clone, clone / "run", "--model", "ads", "--steps", "2", python=python, **BARE)
        assert ended.returncode == 0, ended.stderr
        (folder / "ended.json").write_text(json.dumps([0, ended.stdout, ended.stderr]))

    folder = made_once(tmp_path_factory, "odd", make)
    return next(path for path in folder.iterdir() if path.is_dir() and path.name != "executed")


@pytest.fixture(scope="session")
def ran(clone: Path) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """The folder of that run, for reading only, and how it ended."""
    ended = json.loads((clone.parent / "ended.json").read_text())
    return clone / "run", subprocess.CompletedProcess([], *ended)
