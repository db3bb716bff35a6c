"""`make findings` says which hold and which changed; every script is listed, parses, and needs nothing of ours."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "findings").glob("*.sh"))


def tried(folder: Path, **endings: int) -> "subprocess.CompletedProcess[str]":
    """`make findings` where each script ends so."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "findings").mkdir()
    for name, ending in endings.items():
        (folder / "findings" / f"{name}.sh").write_text(f"exit {ending}\n")
    command = "env -u MAKEFLAGS -u ARGS make --no-print-directory --assume-old=.venv/bin/python findings"
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return subprocess.run(command.split(), cwd=folder, capture_output=True, text=True)


def test_what_changed_or_could_not_be_tried_fails_after_all_were_run(tmp_path: Path) -> None:
    ended = tried(tmp_path, a=1, b=2, c=0)
    assert ended.returncode == 2
    assert ended.stdout.splitlines()[-3:] == [
        "findings/a.sh: changed",
        "findings/b.sh: could not be tried",
        "findings/c.sh: holds",
    ]


def test_where_all_hold_it_ends_well(tmp_path: Path) -> None:
    assert tried(tmp_path, a=0, b=0).returncode == 0


def test_the_readme_lists_every_script() -> None:
    listed = re.findall(r"^\| `(\S+\.sh)` \|", (ROOT / "findings" / "README.md").read_text(), re.M)
    assert listed == [script.name for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_parses_says_what_it_shows_and_imports_nothing_of_ours(script: Path) -> None:
    text = script.read_text()
    check = re.findall(r"<<'END'\n(.*?)^END$", text, re.M | re.S)
    assert len(check) == 1
    compile(check[0], script.name, "exec")
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    assert re.findall(r"^# (One would guess|What happens|Seen with|Why it matters): ", text, re.M) == [
        "One would guess",
        "What happens",
        "Seen with",
        "Why it matters",
    ]
    installed = " ".join(re.findall(r"^install (?:--no-deps )?([^#\n]*)", text, re.M)).split()
    assert installed
    assert [package for package in installed if "==" not in package] == []
    assert "neuroshard" not in text
