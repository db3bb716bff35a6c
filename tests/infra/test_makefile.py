"""`make` alone lists the targets, and what CI calls is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import infra.tried
from infra.tried import OF_VERSIONS, STEPS, Step, all_pass

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
    assert [name for step in STEPS.values() for name in step.inputs if not (ROOT / name).exists()] == []
    assert {Path(name).parts[1] for name in OF_VERSIONS} == {"client", "doctor", "examples", "measure"}


def test_ci_checks_tries_what_changed_and_runs_all_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    lines = [line for line in script.read_text().splitlines() if line.startswith(("make ", '"$python" '))]
    assert lines == [
        "make .venv/dev.done",
        'make check >"$checked" 2>&1 &',
        '"$python" tests/infra/tried.py || failed=$?',
        "make test || failed=$?",
    ]


@pytest.mark.parametrize("check", [0, 3])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("tests", [0, 2])
def test_ci_fails_where_any_of_them_does_and_runs_all(tmp_path: Path, check: int, steps: int, tests: int) -> None:
    """With a make and a step that only end as said."""
    script = (ROOT / ".ci" / "run").read_text()
    last = script[script.index("# What only needs the packages") :].replace(
        "tests/infra/tried.py", f"-c 'exit({steps})'"
    )
    ends = f"make() {{ case $1 in check) echo is checked; return {check};; test) echo tested; return {tests};; esac; }}"
    told = f"set -euo pipefail; python={sys.executable}; {ends}\n{last}"
    ended = subprocess.run(["bash", "-c", told], capture_output=True, text=True, cwd=tmp_path)
    assert ended.stdout == "tested\n"
    assert bool(ended.returncode) == any((check, steps, tests))
    assert ("is checked" in ended.stderr) == bool(check)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree in which `one` is a step."""
    (tmp_path / "input").write_text("1")
    (tmp_path / ".ci").mkdir()
    (tmp_path / "Makefile").write_text("one:\n\t@echo run $(ARGS) >> ran; grep -qv 3 input\n")
    monkeypatch.setattr(infra.tried, "ROOT", tmp_path)
    monkeypatch.setattr(infra.tried, "NOTED", tmp_path / ".ci" / "tried.json")
    monkeypatch.setattr(infra.tried, "STEPS", {"one": Step("small", ("input",))})
    return tmp_path


def test_a_step_that_passed_is_not_tried_again_until_its_inputs_change(steps: Path) -> None:
    ran = steps / "ran"

    def passes(*, small: bool = True, note: bool = False) -> bool:
        return all_pass(["one"], small=small, note=note)

    assert passes()
    assert passes(small=False, note=True)
    assert passes()
    assert ran.read_text().splitlines() == ["run small", "run"]
    (steps / "input").write_text("2")
    assert passes()
    assert ran.read_text().splitlines()[2:] == ["run small"]
    (steps / "input").write_text("3")
    assert not passes()
    assert not passes(note=True)
    assert not passes()
    assert len(ran.read_text().splitlines()) == 6
