"""A clone may be anywhere: no shell takes its path apart or executes it; no temporary folder, home or UTF-8 is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.limits import HANGS
from neuroshard.client import load_plan

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]
# a terminal that shows ASCII alone: Python would take UTF-8 in the locale C, if it were let
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_clone_under_an_odd_path_without_home_temporary_folder_and_utf8_ends_in_a_trained_model(
    tmp_path: Path,
) -> None:
    clone = tmp_path / 'we ird "quoted" it\'s $(touch executed) `touch executed` ; &' / "neuroshard"
    for name in ("components", "pipelines", "examples"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (clone / ".venv").symlink_to(sys.prefix)
    small = [
        "--backend",
        "synthetic",
        "--compute-cases",
        "60",
        "--collective-cases",
        "40",
        "--devices",
        "2",
        "--memory",
        "64GiB",
        "--steps",
        "2",
    ]
    done = subprocess.run(
        [clone / ".venv" / "bin" / "python", "-m", "pipelines.run_local", *small],
        cwd=clone,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(clone / "components"),
            "HOME": "/proc/none",
            "TMPDIR": "/proc/none/tmp",
            **ASCII,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    assert load_plan(str(clone / "run" / "store"), "mlperf-dlrm-dcnv2").task.devices == 2
    assert "measured on 2 ranks (cpu, gloo)" in done.stdout
    assert list(tmp_path.rglob("executed")) == []
    assert list(clone.glob("run/*/.*")) == []
