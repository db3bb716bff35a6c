"""The command that installs an extra of pyproject.toml, for error messages.

On PyPI the name `neuroshard` belongs to another project. So no message says `pip install 'neuroshard[…]'`: where NeuroShard
runs without being installed, pip would fetch that project. What is named instead is the source tree, or the packages themselves.
"""

import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

from neuroshard.core.versions import CPU_BUILD, GPU_BUILD, Installed, Pair, minor, released

SOURCE_TREE = Path(__file__).resolve().parents[3]


def install_command(extra: str, tree: Path = SOURCE_TREE) -> str:
    """A command line that installs `extra` into this Python's environment, whatever the working directory is.

    Where NeuroShard runs from a source tree it names the tree, else the packages that the installed distribution declares. Those
    are of the older pair of PAIRS; where the newer one's packages are here it names them, so that nothing is downgraded.

    TorchRec requires the CUDA build of FBGEMM, which pip would install over the files of the CPU build. An extra cannot say
    "without what it requires", so that is a second command. The extra `torchrec` has the rest of what it requires.
    """
    pair, packages = Installed.here().pair, required(extra)
    of_pair = [_of_pair(package, pair) for package in packages]
    if of_pair == packages and (tree / "pyproject.toml").is_file():
        what = "-e " + shlex.quote(f"{'.' if tree == _working_directory() else tree}[{extra}]")
    elif of_pair:
        what = " ".join(map(shlex.quote, of_pair))
    else:
        what = f"'.[{extra}]' in a clone of NeuroShard"
    torchrec = f" && {pip()} install --no-deps torchrec=={pair.torchrec}" if extra in ("all", "torchrec") else ""
    return f"{pip()} install {what}{torchrec}"


def install_torchrec() -> str:
    """The command that installs TorchRec beside the build of FBGEMM that is here: the extra, and on GPUs the packages by version,
    since TorchRec takes any FBGEMM, and pip would bring one for another torch."""
    here = Installed.here()
    return torchrec_on_gpus(here.pair) if GPU_BUILD in here.fbgemm else install_command("torchrec")


def torchrec_on_gpus(pair: Pair) -> str:
    return f"{pip()} install {' '.join(map(shlex.quote, [*pair.pins(GPU_BUILD), f'torchrec=={pair.torchrec}']))}"


def _of_pair(package: str, pair: Pair) -> str:
    """A requirement, of the pair's version where it is torch or FBGEMM."""
    pins = {one.partition("==")[0]: one for build in (GPU_BUILD, CPU_BUILD) for one in pair.pins(build)}
    return pins.get(re.split(r"[^\w.-]", package, maxsplit=1)[0], package)


def install_pair(here: Installed) -> str:
    """The commands that make `here.pair` of what is installed here. FBGEMM's build stays that for CPUs, or for CUDA."""
    pair, build = here.pair, GPU_BUILD if here.fbgemm and not any("cpu" in name for name in here.fbgemm) else CPU_BUILD
    other = [name for name in (*here.fbgemm, *here.torchrec) if name not in (build, "torchrec")]
    given = (here.torch, pair.torch), (here.fbgemm.get(build), pair.fbgemm)
    wanted = [pin for pin, (version, tested) in zip(pair.pins(build), given, strict=True) if not _is(version, tested)]
    commands = [f"uninstall -y {' '.join(other)}"] if other else []
    if wanted:
        commands.append(f"install {' '.join(map(shlex.quote, wanted))}")
    if here.torchrec and not _is(here.torchrec.get("torchrec"), pair.torchrec):
        commands.append(f"install --no-deps torchrec=={pair.torchrec}")
    return " && ".join(f"{pip()} {command}" for command in commands)


def _is(version: str | None, tested: str) -> bool:
    return version is not None and released(version) and minor(version) == minor(tested)


def pip() -> str:
    """`pip` where the shell's pip is that of this Python, else `/path/to/python -m pip`."""
    found = shutil.which("pip")
    if found and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def required(extra: str) -> list[str]:
    """What an extra of the installed distribution requires, as pip takes it, with the extras that it names. Empty if unknown."""
    try:
        declared = metadata.requires("neuroshard") or []
    except metadata.PackageNotFoundError:
        return []
    return list(dict.fromkeys(_required(declared, extra)))


def _required(declared: list[str], extra: str) -> list[str]:
    found: list[str] = []
    for line in declared:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"""extra == ["']{re.escape(extra)}["']""", marker):
            continue
        if named := re.fullmatch(r"neuroshard\[(.*)\]", requirement):
            found += [inner for name in named[1].split(",") for inner in _required(declared, name.strip())]
        else:
            found.append(requirement)
    return found


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None
