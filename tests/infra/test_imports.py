"""Imports only look down, and each room needs only what its extra brings."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_contracts_of_pyproject_are_kept(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--cache-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("neuroshard.core.plan", {"numpy", "pandas", "pyarrow", "torch", "boto3", "kfp", "rich", "typer"}),
        ("neuroshard.search.run", {"torch", "boto3", "kfp", "rich", "typer"}),
        ("neuroshard.cli", {"numpy", "pandas", "pyarrow", "torch", "boto3", "kfp"}),
    ],
)
def test_importing_a_room_leaves_other_rooms_packages_alone(module: str, without: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({without} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stderr
