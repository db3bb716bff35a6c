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

SOURCE_TREE = Path(__file__).resolve().parents[3]
# TorchRec requires the CUDA build of FBGEMM, which pip would install over the files of the CPU build. An extra cannot say
# "without what it requires", so this is a command of its own. The extra `torchrec` has the rest of what it requires.
TORCHREC = "torchrec==1.8.0"


def install_command(extra: str, tree: Path = SOURCE_TREE) -> str:
    """A command line that installs `extra` into this Python's environment, whatever the working directory is.

    Where NeuroShard runs from a source tree it names the tree, else the packages that the installed distribution declares.
    """
    if (tree / "pyproject.toml").is_file():
        what = "-e " + shlex.quote(f"{'.' if tree == _working_directory() else tree}[{extra}]")
    elif packages := required(extra):
        what = " ".join(map(shlex.quote, packages))
    else:
        what = f"'.[{extra}]' in a clone of NeuroShard"
    if extra in ("all", "torchrec"):
        return f"{pip()} install {what} && {pip()} install --no-deps {TORCHREC}"
    return f"{pip()} install {what}"


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
        named = re.fullmatch(r"neuroshard\[(.*)\]", requirement)
        if named:
            found += [inner for name in named[1].split(",") for inner in _required(declared, name.strip())]
        else:
            found.append(requirement)
    return found


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None
