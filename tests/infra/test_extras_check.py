"""What `make extras-check` does around its installations: which Python it takes, what it prints, when it fails."""

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.refusals import refused
from infra import extras
from infra.extras import TRIALS, Result, Trial, candidates, find_python, last_line, line, words

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def ended(code: int, stdout: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.CompletedProcess([], code, stdout, "")


def test_every_extra_but_the_developers_is_tried_and_so_is_none() -> None:
    assert TRIALS.keys() == EXTRAS.keys() - {"dev"} | {"client"}


@pytest.mark.parametrize("extra", TRIALS)
def test_what_is_run_is_python(extra: str) -> None:
    compile(TRIALS[extra].code, extra, "exec")


def test_the_pythons_tried_are_those_that_pyproject_names() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [one.rpartition(" ")[2] for one in classifiers if one.startswith("Programming Language :: Python :: ")]
    assert tuple(named) == extras.VERSIONS


def test_a_shim_that_exists_and_does_not_run_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setattr(extras, "candidates", lambda version: [str(tmp_path / "none"), str(shim), sys.executable])
    assert find_python("3.11") == sys.executable
    monkeypatch.setattr(extras, "candidates", lambda version: [str(shim)])
    assert find_python("3.11") is None


def test_pyenvs_newest_comes_after_what_the_path_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "versions" / "3.9.18" / "bin" / "python3.9"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert candidates("3.9") == ["python3.9", str(python)]


def test_an_unknown_extra_is_refused_by_name() -> None:
    assert words(TRIALS)("client,search") == ("client", "search")
    with refused(argparse.ArgumentTypeError, "'serch'", "client", "files"):
        words(TRIALS)("client,serch")


@pytest.mark.parametrize(
    ("install", "run", "result"),
    [
        (ended(1, "ERROR: no such wheel\n"), ended(0), "FAILED to install: ERROR: no such wheel"),
        (
            ended(0),
            ended(1, "Traceback\n  …\nModuleNotFoundError: No module named 'x'\n"),
            "FAILED: ModuleNotFoundError",
        ),
        (ended(0), ended(0), "runs ("),
    ],
)
def test_the_result_is_the_last_line_of_what_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, install: object, run: object, result: str
) -> None:
    monkeypatch.setattr(extras, "pip", lambda python, *arguments: ended(0) if arguments == ("freeze",) else install)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: run if "-c" in command else ended(0))
    monkeypatch.setitem(TRIALS, "search", Trial("says", "code"))
    (tmp_path / "files").mkdir()

    got = extras.try_extra("search", "3.11", "python3.11", Path("a.whl"), tmp_path / "files", tmp_path)

    assert got.result.startswith(result)
    assert got.failed == result.startswith("FAILED")
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_a_line_has_its_columns() -> None:
    row = line(Result("search", "3.11", "16", "a plan", "runs (9 s)"))
    assert row.split() == ["search", "3.11", "16", "a", "plan", "runs", "(9", "s)"]


def test_warnings_do_not_hide_what_failed() -> None:
    assert last_line(ended(1, "ERROR: no such wheel\nWARNING: a folder is ignored\n")) == "ERROR: no such wheel"
    assert last_line(ended(1, "WARNING: a folder is ignored\n")) == "WARNING: a folder is ignored"


def test_a_command_that_said_nothing_is_named_by_its_exit_code() -> None:
    assert last_line(ended(137)) == "exit code 137"


def test_the_wheel_holds_every_file_that_is_no_code() -> None:
    """As pyproject.toml configures setuptools; `make extras-check` installs such a wheel and uses them."""
    package = ROOT / "components" / "neuroshard"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["neuroshard"]
    named = {path for pattern in patterns for path in package.glob(pattern)}
    there = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert there == named
