"""The examples of the public names run: those in their docstrings, and those in the README and docs/python.md."""

import doctest
import os
import re
from pathlib import Path

import pytest

import neuroshard as ns
from neuroshard import api

ROOT = Path(__file__).resolve().parents[2]
VERBS = [name for name in ns.__all__ if name[0].islower() and name != "__version__"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VERBS, "Tables"])
def test_the_example_of_a_public_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder(recurse=False).find(getattr(api, name), name, globs={})
    (example,) = found
    assert example.examples, f"{name} has no example"

    said: list[str] = []
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append).failed

    assert failed == 0, "".join(said)
    assert os.getcwd() == str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_tour_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(import neuroshard as ns\n.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks

    for block in blocks:
        exec(block, {})

    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "store"}
