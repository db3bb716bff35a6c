"""What `make check` asks bandit: nothing in the package unpickles, evaluates, or opens a .pt file for more than plain data."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]


def bandit(path: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bandit", "--quiet", "-c", str(ROOT / "pyproject.toml"), "-r", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_make_check_asks_it_of_the_package():
    assert "bandit --quiet -c pyproject.toml -r components" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("import pickle", "B403"),
        ("eval(input())", "B307"),
        ("exec(input())", "B102"),
        ("import torch; torch.load('a')", "B614"),
        ("import torch; torch.load('a', weights_only=False)", "B614"),
        ("import yaml; yaml.load('a')", "B506"),
    ],
)
def test_an_unsafe_call_would_be_found(tmp_path, line, rule):
    (tmp_path / "new.py").write_text(f"{line}\n")
    ended = bandit(tmp_path)

    assert ended.returncode == 1
    assert rule in ended.stdout
