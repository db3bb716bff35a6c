"""Whether the installed packages are what each part of NeuroShard needs, and fit together."""

import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from neuroshard.core.extras import TORCHREC, install_command, pip
from neuroshard.doctor.checks import Check, Verdict

# What each extra of pyproject.toml is for. `cuda` is for images.
PARTS = {
    "files": "tables, augment",
    "measure": "measure on a CPU",
    "pretrain": "pretrain",
    "search": "search with trained cost models",
    "report": "report",
    "torchrec": "trainers, tables --from-torchrec",
    "pipeline": "the pipeline, submit and schedule (kfp)",
    "fleet": "fleet on a cluster",
}
OPTIONAL = {"fleet", "pipeline"}
# FBGEMM is compiled for one torch; with others its operators crash or do not load
TORCH_OF_FBGEMM = {"1.5": "2.10", "1.6": "2.11", "1.8": "2.13"}
FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")

VersionOf = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def install(extra: str, has_gpu: bool) -> str:
    """The command that installs an extra. Where there is a GPU it brings the CUDA build of FBGEMM, and never the CPU build."""
    if not has_gpu:
        return install_command(extra)
    if extra == "torchrec":  # which requires the CUDA build
        return f"{pip()} install {TORCHREC}"
    if extra in ("all", "cuda", "measure"):  # pip would keep the CPU build of torch
        return f"{pip()} uninstall -y torch fbgemm-gpu-cpu && {install_command('cuda')}"
    return install_command(extra)


def check_packages(version_of: VersionOf = installed, has_gpu: bool = False) -> Iterator[Check]:
    """Checks Python, then each extra of NeuroShard, then whether torch, FBGEMM and TorchRec fit together."""
    yield Check("python", "ok", f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    try:
        declared = [Requirement(line) for line in metadata.requires("neuroshard") or ()]
    except (metadata.PackageNotFoundError, InvalidRequirement):
        yield Check(
            "packages",
            "warn",
            "neuroshard is not installed as a package, so its requirements are unknown",
            install("all", has_gpu),
        )
        declared = []
    for extra, part in PARTS.items() if declared else ():
        wrong = [text for one in _needed(declared, extra) if (text := _fault(one, version_of))]
        if version_of("fbgemm-gpu"):  # the GPU build also has the CPU's operators
            wrong = [text for text in wrong if not text.startswith("fbgemm-gpu-cpu is not")]
        if extra == "torchrec" and version_of("torchrec") is None:  # its own requirements are not installed with it
            yield Check(extra, "warn", f"{part}: torchrec is not installed", install(extra, has_gpu))
        elif wrong:
            verdict: Verdict = "none" if extra in OPTIONAL else "warn"
            yield Check(extra, verdict, f"{part}: {', '.join(wrong)}", install(extra, has_gpu))
        else:
            yield Check(extra, "ok", part)
    yield fits_together(version_of, has_gpu)


def fits_together(version_of: VersionOf = installed, has_gpu: bool = False) -> Check:
    """Whether FBGEMM is built for this torch and installed once, and TorchRec has FBGEMM's version."""
    builds = {name: found for name in FBGEMM if (found := version_of(name))}
    torch, torchrec = version_of("torch"), version_of("torchrec")
    if len(builds) > 1:
        kept, other = FBGEMM if has_gpu else FBGEMM[::-1]
        return Check(
            "versions",
            "fail",
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other's files (torchrec pulls in the first)",
            f"{pip()} uninstall -y {other} && {pip()} install --force-reinstall --no-deps {kept}=={builds[kept]}",
        )
    if not builds or torch is None:
        return Check("versions", "none", "torch and FBGEMM are not both installed", install("measure", has_gpu))
    ((name, fbgemm),) = builds.items()
    found = f"torch {torch}, {name} {fbgemm}" + (f", torchrec {torchrec}" if torchrec else "")
    wanted = TORCH_OF_FBGEMM.get(_minor(fbgemm))
    if wanted is None:
        known = ", ".join(f"{one} with torch {other}" for one, other in TORCH_OF_FBGEMM.items())
        return Check("versions", "warn", f"{found}: not a tested pair; tested: FBGEMM {known}")
    if _minor(torch) != wanted:
        return Check(
            "versions",
            "fail",
            f"{found}: FBGEMM {_minor(fbgemm)} is built for torch {wanted}",
            f"{pip()} install 'torch=={wanted}.*'",
        )
    if torchrec and _minor(torchrec) != _minor(fbgemm):
        return Check(
            "versions",
            "fail",
            f"{found}: torchrec must have FBGEMM's version",
            f"{pip()} install --no-deps 'torchrec=={_minor(fbgemm)}.*'",
        )
    return Check("versions", "ok", f"{found} fit together")


def _needed(declared: list[Requirement], extra: str) -> list[Requirement]:
    """The requirements of an extra and of the extras that it includes, without those that are always installed."""
    found = []
    for one in declared:
        if one.marker is None or not one.marker.evaluate({"extra": extra}):
            continue
        if one.name == "neuroshard":
            found += [inner for name in sorted(one.extras) for inner in _needed(declared, name)]
        else:
            found.append(one)
    return found


def _fault(needed: Requirement, version_of: VersionOf) -> str:
    """What is wrong with a requirement; empty if nothing is."""
    version = version_of(needed.name)
    if version is None:
        return f"{needed.name} is not installed"
    if not needed.specifier.contains(Version(version), prereleases=True):
        return f"{needed.name} is {version}, not {needed.specifier}"
    return ""


def _minor(version: str) -> str:
    """`2.13.0+cpu` -> `2.13`."""
    return ".".join(map(str, Version(version).release[:2]))
