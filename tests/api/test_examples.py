"""The examples in the docstrings of the public names run."""

import doctest
import os
from pathlib import Path

import pytest

import neuroshard as ns
from neuroshard import api

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
