"""`make` alone lists the targets, and what CI calls is there."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def make(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "KFP"))}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True
    )


def test_make_alone_lists_every_target_with_a_line() -> None:
    listed = dict(line.split(maxsplit=1) for line in make().stdout.splitlines())
    assert [" ".join(listed)] == re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.M)


def test_submit_without_an_address_says_how_to_give_one() -> None:
    ended = make("submit", "--assume-old=.venv/run.done")
    assert ended.returncode == 2
    assert "KFP_ENDPOINT=http://localhost:8888 make submit" in ended.stderr


def test_no_python_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name in ("build.txt", "run.txt", "torch-cpu.txt", "torch-cuda.txt", "torchrec.txt"):
        (tmp_path / "requirements").mkdir(exist_ok=True)
        (tmp_path / "requirements" / name).touch()
    (tmp_path / "pyproject.toml").touch()
    ended = make("-C", str(tmp_path), "setup", "PYTHON=/no/such/python3")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0].startswith("NeuroShard needs Python 3.11 to 3.13")
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_tests_of_every_kind_under_the_newer_versions_and_names_files_that_are_there() -> None:
    code = (ROOT / ".ci" / "run").read_text()
    begin, end = code.index("next="), code.index("# The tests run")
    named = subprocess.run(
        ["bash", "-c", f'{code[begin:end]}\necho "$next"'], capture_output=True, text=True
    ).stdout.split()

    assert [name for name in named if not (ROOT / name).exists()] == []
    assert {Path(name).parts[1] for name in named} == {"client", "doctor", "examples", "measure"}


def test_ci_checks_tries_the_simulated_machines_and_runs_all_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert [line for line in script.read_text().splitlines() if line.startswith("make ")] == [
        "make check",
        "make bench-machines ARGS=--quick || failed=$?",
        'make test-next ARGS="$next" || failed=$?',
        "make test",
    ]
