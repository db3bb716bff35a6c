"""What takes .ci/run minutes and seldom finds anything: tried where its inputs are not those with which it last passed.

    python tests/infra/tried.py             as .ci/run: a small form of what has other inputs; of the rest it says that it passed
    make nightly                            all of it, whole; what passes is noted in .ci/tried.json, which is to be committed
    make nightly ARGS="--quick test-next"   one of it, noted, in its small form

Inputs are what differs between versions of torch, FBGEMM and TorchRec, or asks what this machine is: the files below the paths of
STEPS, by their digest.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NOTED = ROOT / ".ci" / "tried.json"


class Step(NamedTuple):
    """The ARGS of a make target in its small form, and the paths of its inputs."""

    small: str
    inputs: tuple[str, ...]


def package(*paths: str) -> tuple[str, ...]:
    return tuple(f"components/neuroshard/{path}" for path in paths)


# What differs most between versions: two minutes, half of them pip's.
OF_VERSIONS = (
    *("tests/doctor", "tests/measure/test_cpu.py", "tests/examples/test_ads_model.py"),
    *(
        f"tests/client/test_{part}.py"
        for part in (
            "fused",
            "planner",
            "provider",
            "qcomms",
            "settings",
            "step_memory",
            "tiers",
            "to_torchrec",
            "versions",
        )
    ),
    "tests/client/test_whole_model_training.py",
)
STEPS = {
    "bench-machines": Step(
        "--quick",
        (
            *("requirements", "examples", "pipelines", "tests/bench/machines.py", "tests/bench/simulating"),
            *package("measure", "system.py", "devices.py"),
        ),
    ),
    "test-next": Step(
        " ".join(OF_VERSIONS),
        ("requirements", "examples", *OF_VERSIONS, *package("client", "measure", "doctor", "core/versions.py")),
    ),
}


def digest(name: str) -> str:
    """Of the names and bytes of a step's inputs."""
    paths = [path for named in STEPS[name].inputs for path in (ROOT / named, *(ROOT / named).rglob("*"))]
    whole = hashlib.sha256()
    for path in sorted({path for path in paths if path.is_file() and path.parent.name != "__pycache__"}):
        whole.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def noted() -> dict[str, str]:
    """The digests with which steps last passed."""
    found: dict[str, str] = json.loads(NOTED.read_text()) if NOTED.exists() else {}
    return found


def all_pass(names: list[str], *, small: bool, note: bool) -> bool:
    """Whether all steps pass, or did with these inputs. With `note` each is tried, and what passes is noted."""
    failed = False
    for name in names:
        before = digest(name)
        if not note and noted().get(name) == before:
            print(f"make {name}: not tried; it passed with what it tests as it is now (make nightly)", flush=True)
            continue
        arguments = STEPS[name].small if small else ""
        passed = subprocess.run(["make", name, f"ARGS={arguments}"], cwd=ROOT).returncode == 0
        failed |= not passed
        print(f"make {name}: {'passed' if passed else 'FAILED'}", flush=True)
        if note and passed:
            NOTED.write_text(json.dumps({**noted(), name: before}, indent=1, sort_keys=True) + "\n")
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--note", action="store_true", help="try whatever the inputs are, whole, and note what passes")
    parser.add_argument("--quick", action="store_true", help="with --note: in the small form")
    asked = parser.parse_args()
    if unknown := set(asked.name) - STEPS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(STEPS)}")
    names = asked.name or list(STEPS)
    sys.exit(not all_pass(names, small=asked.quick or not asked.note, note=asked.note))


if __name__ == "__main__":
    main()
