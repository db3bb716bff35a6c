"""Whether the installed packages are what each part of NeuroShard needs, and fit together."""

import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from neuroshard.core.extras import install_command, install_pair, pip, torchrec_on_gpus
from neuroshard.core.versions import CPU_BUILD, FBGEMM, GPU_BUILD, PAIRS, Installed, VersionOf, installed
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
OF_PAIRS = ("torch", *FBGEMM)  # the last check says whether their versions fit


def install(extra: str, has_gpu: bool) -> str:
    """The command that installs an extra. Where there is a GPU it brings the CUDA build of FBGEMM, and never the CPU build."""
    if not has_gpu:
        return install_command(extra)
    if extra == "torchrec":  # which requires the CUDA build
        return torchrec_on_gpus(Installed.here().pair)
    if extra in ("all", "cuda", "measure"):  # pip would keep the CPU build of torch
        return f"{pip()} uninstall -y torch {CPU_BUILD} && {install_command('cuda')}"
    return install_command(extra)


def check_packages(version_of: VersionOf = installed, has_gpu: bool = False) -> Iterator[Check]:
    """Checks Python, then each extra of NeuroShard, then whether torch, FBGEMM and TorchRec fit together."""
    here = Installed.here(version_of)
    yield Check("python", "ok", f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    try:
        declared = [Requirement(line) for line in metadata.requires("neuroshard") or ()]
    except (metadata.PackageNotFoundError, InvalidRequirement):
        says = "neuroshard is not installed as a package, so its requirements are unknown"
        yield Check("packages", "warn", says, install("all", has_gpu))
        declared = []
    for extra, part in PARTS.items() if declared else ():
        wrong = [text for one in _needed(declared, extra) if (text := _fault(one, version_of))]
        if here.fbgemm:  # each build also has the CPU's operators
            wrong = [text for text in wrong if not text.startswith(FBGEMM)]
        if extra == "torchrec" and not here.torchrec:  # its own requirements are not installed with it
            yield Check(extra, "warn", f"{part}: torchrec is not installed", install(extra, has_gpu))
        elif wrong:
            verdict: Verdict = "none" if extra in OPTIONAL else "warn"
            yield Check(extra, verdict, f"{part}: {', '.join(wrong)}", install(extra, has_gpu))
        else:
            yield Check(extra, "ok", part)
    yield fits_together(version_of, has_gpu)


def fits_together(version_of: VersionOf = installed, has_gpu: bool = False) -> Check:
    """Whether FBGEMM is built for this torch and installed once, and they are one of the tested pairs, with its TorchRec."""
    here = Installed.here(version_of)
    if {GPU_BUILD, CPU_BUILD} <= here.fbgemm.keys():
        kept, other = (GPU_BUILD, CPU_BUILD) if has_gpu else (CPU_BUILD, GPU_BUILD)
        return Check(
            "versions",
            "fail",
            f"{GPU_BUILD} and {CPU_BUILD} are both installed and overwrite each other's files (torchrec pulls in the first)",
            f"{pip()} uninstall -y {other} && {pip()} install --force-reinstall --no-deps {kept}=={here.fbgemm[kept]}",
        )
    if not here.fbgemm or here.torch is None:
        return Check("versions", "none", "torch and FBGEMM are not both installed", install("measure", has_gpu))
    if why := here.unloadable:
        return Check("versions", "fail", f"{here}: {why}", install_pair(here))
    if why := here.untested:
        return Check("versions", "warn", f"{here}: {why}", install_pair(here))
    others = " or ".join(str(pair) for pair in PAIRS if pair != here.pair)
    return Check("versions", "ok", f"{here} fit together, and are tested; so is {others}")


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
    try:
        fits = needed.name in OF_PAIRS or needed.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        fits = False
    return "" if fits else f"{needed.name} is {version}, not {needed.specifier}"
