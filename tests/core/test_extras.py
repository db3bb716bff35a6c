"""The commands that messages recommend: they name this project's source tree or real packages, never the name on PyPI."""

import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from neuroshard.core.extras import install_command, pip, required

ROOT = Path(__file__).parents[2]
DECLARED = [
    "pydantic<3,>=2.10",
    'numpy>=2; extra == "files"',
    'neuroshard[files]; extra == "measure"',
    'torch==2.13.*; extra == "measure"',
    'numpy>=2; extra == "fleet"',
]


def installed(*lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: list(lines))


def test_in_a_source_tree_the_tree_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert install_command("fleet") == f"{pip()} install -e {shlex.quote(f'{ROOT}[fleet]')}"


def test_from_within_the_tree_it_is_a_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("fleet") == f"{pip()} install -e '.[fleet]'"


def test_a_path_with_spaces_and_dollars_is_one_word(tmp_path: Path) -> None:
    tree = tmp_path / "a b $(c)"
    tree.mkdir()
    (tree / "pyproject.toml").touch()
    assert shlex.split(install_command("fleet", tree))[-2:] == ["-e", f"{tree}[fleet]"]


def test_an_installed_wheel_names_the_packages_of_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(*DECLARED, monkeypatch=monkeypatch)
    assert required("measure") == ["numpy>=2", "torch==2.13.*"]
    assert install_command("measure", tmp_path) == f"{pip()} install 'numpy>=2' 'torch==2.13.*'"


def test_torchrec_is_a_second_command_without_what_it_requires(tmp_path: Path) -> None:
    for extra in ("torchrec", "all"):
        assert install_command(extra).endswith(f" && {pip()} install --no-deps torchrec==1.8.0")


def test_what_nothing_is_known_of_is_installed_from_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch=monkeypatch)
    assert install_command("fleet", tmp_path).endswith("install '.[fleet]' in a clone of NeuroShard")


def test_a_shell_whose_pip_is_another_pythons_gets_this_pythons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name))
    assert pip() == f"{shlex.quote(sys.executable)} -m pip"

    monkeypatch.setattr(shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))
    assert pip() == "pip"


def test_the_removed_working_directory_is_no_traceback(tmp_path: Path) -> None:
    code = "import os; os.rmdir(os.getcwd()); from neuroshard.core.extras import install_command as c; print(c('cli'))"
    gone = tmp_path / "gone"
    gone.mkdir()
    path = str(ROOT / "components")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        cwd=gone,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_message_names_the_project_of_that_name_on_pypi() -> None:
    said = [
        f"{path}:{number}"
        for path in (ROOT / "components").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"install '?\"?neuroshard", line) and path.name != "extras.py"
    ]
    assert said == []
