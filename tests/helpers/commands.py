"""`neuroshard ...` as typed: in this process, or, where the test is about the process, in one of its own."""

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from helpers.limits import HANGS

Done = subprocess.CompletedProcess  # of text: its exit code, and what it printed


def in_this_process(*arguments: object, cwd: Path | None = None, **env: str) -> "Done[str]":
    """The command without a new interpreter that would import torch again. An error that `main` does not catch is raised."""
    from neuroshard.cli import main

    typed = ["neuroshard", *map(str, arguments)]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: object = None
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.resetwarnings()  # those that Python has outside pytest
        for quiet in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", quiet)
        for name, value in {"COLUMNS": "80", **env}.items():
            patch.setenv(name, value)
        for name, stream in {"stdin": io.StringIO(), "stdout": out, "stderr": err, "argv": typed}.items():
            patch.setattr(sys, name, stream)
        if cwd:
            patch.chdir(cwd)
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    printed, said = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert isinstance(code, int | None), f"an exit code that is a text: {code}"
    return Done(typed, code or 0, printed, said)


def in_its_own_process(*arguments: object, cwd: Path | None = None, **env: str) -> "Done[str]":
    return subprocess.run(
        [sys.executable, "-m", "neuroshard", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
