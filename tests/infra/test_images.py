"""The Dockerfiles: lint-clean, pinned, not root, and what they copy is there."""

import fnmatch
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.limits import HANGS
from neuroshard import __version__

ROOT = Path(__file__).parents[2]
# the digest of the tag's index of platforms, as Docker Hub has it
BASE = "python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d"
DOCKERFILES = [ROOT / "images" / kind / "Dockerfile" for kind in ("cpu", "gpu")]


@pytest.fixture(params=DOCKERFILES, ids=["cpu", "gpu"])
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    ended = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_the_base_is_fixed_by_its_digest_and_can_be_replaced(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert re.findall(r"^ARG BASE_IMAGE=(.*)", text, re.M) == [BASE]
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["${BASE_IMAGE}"] * 2


def test_it_runs_as_a_fixed_user_that_is_not_root(dockerfile: Path) -> None:
    assert dockerfile.read_text().splitlines()[-1] == "USER 10001:10001"


def test_it_says_its_version_and_revision(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert f"ARG VERSION={__version__}\n" in text
    for label in ("version", "revision", "licenses", "title"):
        assert f"org.opencontainers.image.{label}=" in text


def test_what_it_copies_is_there_and_not_ignored(dockerfile: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile.read_text(), re.M)
    for path in " ".join(copies).replace("${TORCH}", "cpu").split():
        assert (ROOT / path).exists(), path
        assert any(fnmatch.fnmatch(path, pattern) for pattern in allowed), path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_steps_that_an_image_is_checked_with_are_the_pipelines(kind: str, tmp_path: Path) -> None:
    """Here, without an image: `make images-check` runs the same in both."""
    check = runpy.run_path(str(ROOT / "images" / "check.py"))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}

    def inside(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert check["night"](inside, kind, str(tmp_path)).startswith({"cpu": "surveyed", "gpu": "measured"}[kind])
