"""requirements/: every package pinned and known by its hash, and what pyproject.toml asks for is there."""

import re
import tomllib
from pathlib import Path

import pytest

from neuroshard.core.versions import PAIRS, TORCH_OF_FBGEMM, Pair

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path.name for path in (ROOT / "requirements").glob("*.txt"))
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
    pinned = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    assert not re.search(r"file:|https?:|--find-links|--index|--extra-index| /", pinned)


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


def test_all_locks_but_that_of_the_newer_pair_agree_with_run_txt() -> None:
    run = pins("run.txt")
    for name in set(LOCKS) - {"next.txt"}:
        differing = {
            package: version for package, version in pins(name).items() if run.get(package, version) != version
        }
        assert differing == {}, name


def test_cpu_and_cuda_builds_are_never_locked_together() -> None:
    both = {"fbgemm-gpu", "fbgemm-gpu-cpu"}
    assert {name: both & pins(name).keys() for name in LOCKS} == {
        "build.txt": set(),
        "dev.txt": {"fbgemm-gpu-cpu"},
        "docs.txt": set(),
        "image-cpu.txt": {"fbgemm-gpu-cpu"},
        "image-gpu.txt": {"fbgemm-gpu"},
        "next.txt": {"fbgemm-gpu-cpu"},
        "run.txt": {"fbgemm-gpu-cpu"},
        "torch-cpu.txt": set(),
        "torch-cuda.txt": set(),
        "torchrec.txt": set(),
    }
    with_torch = {name for name in LOCKS for package in pins(name) if package == "torch" or "nvidia-c" in package}
    assert with_torch == {"next.txt", "torch-cpu.txt", "torch-cuda.txt"}


def test_both_builds_of_torch_are_of_the_version_that_fbgemm_is_compiled_against() -> None:
    cpu, cuda = pins("torch-cpu.txt")["torch"], pins("torch-cuda.txt")["torch"]
    fbgemm = ".".join(pins("run.txt")["fbgemm-gpu-cpu"].split(".")[:2])

    assert cpu == f"{cuda}+cpu"
    assert cuda.startswith(TORCH_OF_FBGEMM[fbgemm] + ".")


def test_every_extra_that_names_torch_fbgemm_or_torchrec_names_versions_that_fit() -> None:
    torch = {line for lines in EXTRAS.values() for line in lines if re.match(r"torch\b", line)}
    fbgemm = {line.partition("==")[2] for lines in EXTRAS.values() for line in lines if line.startswith("fbgemm-gpu")}

    assert fbgemm == {pins("run.txt")["fbgemm-gpu-cpu"]}
    assert torch == {f"torch=={TORCH_OF_FBGEMM['.'.join(fbgemm.pop().split('.')[:2])]}.*"}


def test_the_tested_pairs_are_those_that_are_locked() -> None:
    locked = [pins("torch-cuda.txt") | pins("run.txt") | pins("torchrec.txt"), pins("next.txt")]
    assert [Pair(*(pin[name] for name in ("torch", "fbgemm-gpu-cpu", "torchrec"))) for pin in locked] == list(PAIRS)


def test_fbgemm_comes_with_torch() -> None:
    assert [extra for extra, lines in EXTRAS.items() if "fbgemm" in str(lines) and "'torch==" not in str(lines)] == []


def test_all_has_every_extra_but_those_of_gpus_and_of_developers() -> None:
    (line,) = EXTRAS["all"]

    assert set(line.removeprefix("neuroshard[").removesuffix("]").split(",")) == EXTRAS.keys() - {"all", "cuda", "dev"}
