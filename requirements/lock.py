"""pyproject.toml -> requirements/*.txt: what to install, every file of it known by its hash.

    make lock        (or: .venv/bin/python requirements/lock.py)

build.txt      pip, and what builds this project and the few packages that come as source
run.txt        what `make run` needs, without torch and torchrec
dev.txt        that, and what `make test` and `make check` need
docs.txt       what `make docs` builds the site with
torchrec.txt   torchrec alone: it names the CUDA fbgemm-gpu as its need, and pip would lay that over fbgemm-gpu-cpu
image-cpu.txt  what the pipeline's steps and its submitter need; image-gpu.txt what measuring on GPUs needs
torch-cuda.txt PyPI's torch, which is the CUDA build, and what it needs of CUDA
torch-cpu.txt  the CPU build: written by hand, see there, since it is not on PyPI
next.txt       the newer pair of torch, FBGEMM and TorchRec (core/versions.py), with PyPI's torch, and what that needs of CUDA:
               `make test-next` lays it over what the other files install

All are installed with `--require-hashes --no-deps --no-build-isolation`. Of the two files of torch one is installed: the CPU
build where pip finds it, else the CUDA build. They are two, since pip prefers a file whose hash its index names, and would take
PyPI's CUDA build even where a folder (find-links) holds the CPU build. The resolver ignores this machine's
pip configuration (PIP_INDEX_URL is heard), so that a lock says the same wherever it is made.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

from neuroshard.core.versions import CPU_BUILD, GPU_BUILD, PAIRS, Pair

ROOT = Path(__file__).resolve().parent.parent
HEADER = (
    "# Made by `make lock` (requirements/lock.py) with Python 3.11 on Linux. Do not edit: change pyproject.toml.\n\n"
)
FROM_TORCH = re.compile(r"(torch|triton|cuda-.*|nvidia-(?!ml-py).*)")

PIP_COMPILE = (
    *("--quiet", "--no-config", "--no-header", "--no-annotate", "--no-emit-options"),
    *("--generate-hashes", "--strip-extras", "--allow-unsafe"),
)


class Lock(NamedTuple):
    """What goes into one file."""

    extras: tuple[str, ...] = ()  # of pyproject.toml
    added: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()  # in the version of run.txt, without what it needs in turn
    # torch and what comes with its CUDA build, and nothing else but `also`; the other locks have none of these
    torch: bool = False
    also: tuple[str, ...] = ()
    pair: Pair = PAIRS[0]  # torch-cpu.txt has its torch too


def of_torch(pair: Pair) -> str:
    return f"torch=={pair.torch}"


WITH_TORCHREC = Lock(added=(f"torchrec=={PAIRS[0].torchrec}",), left_out=(GPU_BUILD, "torchrec"))
NEXT = PAIRS[-1]

LOCKS = {
    "run.txt": WITH_TORCHREC._replace(extras=("all",)),  # first: the others take its versions
    "build.txt": Lock(added=("pip", "setuptools", "wheel")),
    "dev.txt": WITH_TORCHREC._replace(extras=("dev",)),
    "docs.txt": Lock(added=("mkdocs-material", "mkdocstrings[python]")),
    "torchrec.txt": Lock(alone=("torchrec",)),
    "image-cpu.txt": Lock(("cli", "measure", "pretrain", "search", "report", "pipeline")),
    # a step that runs needs kfp alone; the rest of its packages serve the client that submits
    "image-gpu.txt": Lock(("cuda",), alone=("kfp",)),
    "torch-cuda.txt": Lock(added=(of_torch(PAIRS[0]),), torch=True),
    "next.txt": Lock(
        added=(of_torch(NEXT), f"{CPU_BUILD}=={NEXT.fbgemm}", f"torchrec=={NEXT.torchrec}"),
        left_out=(GPU_BUILD,),
        torch=True,
        also=(CPU_BUILD, "torchrec"),
        pair=NEXT,
    ),
}


def main() -> None:
    known: dict[str, str] = {}
    for name, lock in LOCKS.items():
        path = ROOT / "requirements" / name
        print(path.relative_to(ROOT), file=sys.stderr, flush=True)
        wanted = [*expand(lock.extras), *lock.added]
        pins = resolve(wanted, known, lock.pair) if wanted else {}
        pins |= {package: known[package] for package in lock.alone}
        kept = sorted(
            package
            for package in pins.keys() - set(lock.left_out)
            if package in lock.also or bool(FROM_TORCH.fullmatch(package)) == lock.torch
        )
        path.write_text(HEADER + "".join(pins[package] for package in kept))
        known = {**pins, **known}


def project() -> dict[str, dict[str, list[str]]]:
    table: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def expand(extras: tuple[str, ...]) -> list[str]:
    """The requirements of these extras and of those that they name in turn, and the project's own."""
    lines: list[str] = list(project()["dependencies"]) if extras else []
    for extra in extras:
        for line in project()["optional-dependencies"][extra]:
            inner = re.fullmatch(r"neuroshard\[(.*)\]", line)
            lines += expand(tuple(inner[1].split(","))) if inner else [line]
    return list(dict.fromkeys(lines))


def resolve(wanted: list[str], known: dict[str, str], pair: Pair) -> dict[str, str]:
    """What pip-compile makes of `wanted`: package -> its lines, version and hashes. It takes those of `known` where it can."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "wanted.in"), Path(folder, "out.txt")
        constraints = Path(folder, "constraints.txt")
        constraints.write_text(f"{of_torch(pair)}\n")
        source.write_text("\n".join([*wanted, f"-c {constraints}"]))
        out.write_text("".join(known.values()))
        environment = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
        subprocess.run(
            [sys.executable, "-m", "piptools", "compile", *PIP_COMPILE, "--output-file", out, source],
            env={**environment, "PIP_CONFIG_FILE": os.devnull},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return {pin[1]: pin[0] for pin in re.finditer(r"^([a-z0-9.-]+)==(?:.*\\\n)*.*\n", out.read_text(), re.M)}


if __name__ == "__main__":
    main()
