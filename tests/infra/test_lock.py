"""requirements/: every package pinned and known by its hash, and what pyproject.toml asks for is there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path.name for path in (ROOT / "requirements").glob("*.txt") if path.name != "torch.txt")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.M))


def wanted(*extras: str) -> set[str]:
    """The packages that these extras name, and those that they name in turn."""
    names: set[str] = set()
    for line in (line for extra in extras for line in EXTRAS[extra]):
        inner = re.fullmatch(r"neuroshard\[(.*)\]", line)
        names |= wanted(*inner[1].split(",")) if inner else {re.split(r"[\[<>=!~ ]", line)[0].lower()}
    return names - {"torch"}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_a_version_and_a_hash(name: str) -> None:
    blocks = re.split(r"\n(?=[a-z])", (ROOT / "requirements" / name).read_text().split("\n\n", 1)[1])
    for block in blocks:
        assert re.match(r"[a-z0-9.-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", block), block[:80]


@pytest.mark.parametrize("name", LOCKS)
def test_no_machine_and_no_index_is_named(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text()
    assert not re.search(
        r"file:|https?:|--find-links|--index|--extra-index| /", text.replace("requirements/lock.py", "")
    )


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("run.txt", ("all",)),
        ("dev.txt", ("dev",)),
        ("image-cpu.txt", ("cli", "measure", "pretrain", "search", "report", "pipeline")),
        ("image-gpu.txt", ("cuda",)),
    ],
)
def test_what_pyproject_asks_for_is_locked(name: str, extras: tuple[str, ...]) -> None:
    assert wanted(*extras) - pins(name).keys() == set()


def test_all_locks_agree_with_run_txt() -> None:
    run = pins("run.txt")
    for name in LOCKS:
        differing = {
            package: version for package, version in pins(name).items() if run.get(package, version) != version
        }
        assert differing == {}, name


def test_cpu_and_cuda_builds_are_never_locked_together() -> None:
    both = {"fbgemm-gpu", "fbgemm-gpu-cpu"}
    assert {name: both & pins(name).keys() for name in LOCKS} == {
        "build.txt": set(),
        "dev.txt": {"fbgemm-gpu-cpu"},
        "image-cpu.txt": {"fbgemm-gpu-cpu"},
        "image-gpu.txt": {"fbgemm-gpu"},
        "run.txt": {"fbgemm-gpu-cpu"},
        "torchrec.txt": set(),
    }
    assert not [package for name in LOCKS for package in pins(name) if package == "torch" or "nvidia-c" in package]
