"""The versions of torch, FBGEMM and TorchRec that NeuroShard is tested with, and how those installed here differ.

FBGEMM is compiled for one torch and loads with no other. TorchRec is released with FBGEMM, under the same number; with the
FBGEMM before its own it was seen to work, but only PAIRS are tested: the older by `make test`, the newer by `make test-next`.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from typing import NamedTuple

VersionOf = Callable[[str], str | None]  # the version of a distribution, None where it is not installed


def minor(version: str) -> str:
    """`2.13.0+cpu` -> `2.13`. A version of another form stays as it is."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def released(version: str) -> bool:
    """Whether it is a release, and no nightly or release candidate: `2.14.1+cu130`, not `2.15.0.dev20261101` or `2026.10.16`."""
    return re.fullmatch(r"\d{1,3}(\.\d+)+(\.post\d+)?(\+.*)?", version) is not None


class Pair(NamedTuple):
    """Versions that are tested with each other. Any patch release of them is taken to do."""

    torch: str
    fbgemm: str
    torchrec: str

    def __str__(self) -> str:
        return f"torch {minor(self.torch)} with FBGEMM {minor(self.fbgemm)} and TorchRec {minor(self.torchrec)}"

    def pins(self, build: str) -> list[str]:
        """What pip installs of it, TorchRec apart, with this build of FBGEMM (fbgemm-gpu-cpu, fbgemm-gpu)."""
        return [f"torch=={minor(self.torch)}.*", f"{build}=={self.fbgemm}"]


# The window, oldest first. requirements/ and the extras of pyproject.toml have the first; requirements/next.txt has the last.
PAIRS = (Pair("2.13.0", "1.8.0", "1.8.0"), Pair("2.14.1", "1.9.0", "1.9.2"))
WINDOW = ", or ".join(map(str, PAIRS))
# 1.8 was tried with torch 2.14, 1.9 with 2.13 and 2.15: their libraries do not load
TORCH_OF_FBGEMM = {"1.5": "2.10", "1.6": "2.11", **{minor(pair.fbgemm): minor(pair.torch) for pair in PAIRS}}
GPU_BUILD, CPU_BUILD = "fbgemm-gpu", "fbgemm-gpu-cpu"
# builds of one package under several names, released ones first
FBGEMM = (GPU_BUILD, CPU_BUILD, "fbgemm-gpu-genai", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
TORCHREC = ("torchrec", "torchrec-nightly", "torchrec-nightly-cpu")


@cache
def installed(name: str) -> str | None:
    """The version of a distribution, or None. Read once, since trainers ask at every plan."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class Installed(NamedTuple):
    """The versions of torch, of each build of FBGEMM and of TorchRec that are installed, by name of distribution."""

    torch: str | None
    fbgemm: dict[str, str]
    torchrec: dict[str, str]

    @classmethod
    def here(cls, version_of: VersionOf = installed) -> "Installed":
        builds = ({name: version for name in names if (version := version_of(name))} for names in (FBGEMM, TORCHREC))
        return cls(version_of("torch"), *builds)

    def __str__(self) -> str:
        torch = {} if self.torch is None else {"torch": self.torch}
        return ", ".join(f"{name} {version}" for name, version in (torch | self.fbgemm | self.torchrec).items())

    @property
    def pair(self) -> Pair:
        """The pair to go on with: that of the TorchRec that a trainer is written for, else that of FBGEMM or torch. The newest
        where they are of none, and the oldest, which the extras have, where nothing is installed."""
        for field, version in reversed(self._versions):
            for pair in PAIRS:
                if minor(version) == minor(getattr(pair, field)):
                    return pair
        return PAIRS[-1] if self._versions else PAIRS[0]

    @property
    def unloadable(self) -> str:
        """Why FBGEMM, as it is released, cannot be loaded with this torch; empty if it can, or if nothing is known of them."""
        for version in self.fbgemm.values():
            wanted = TORCH_OF_FBGEMM.get(minor(version))
            if wanted is not None and self.torch is not None and minor(self.torch) not in (wanted, self.torch):
                return f"FBGEMM {minor(version)} is built for torch {wanted}, and loads with no other"
        return ""

    @property
    def untested(self) -> str:
        """Why these versions are none of the PAIRS; empty if they are one, in so far as they are installed."""
        if early := next((version for _, version in self._versions if not released(version)), None):
            return f"{early} is no release; tested: {WINDOW}"
        if any(
            all(minor(version) == minor(getattr(pair, field)) for field, version in self._versions) for pair in PAIRS
        ):
            return ""
        return f"not tested with each other; tested: {WINDOW}"

    @property
    def _versions(self) -> list[tuple[str, str]]:
        """Fields of a Pair and versions, in the order of its fields."""
        torch = [] if self.torch is None else [("torch", self.torch)]
        builds = ("fbgemm", self.fbgemm), ("torchrec", self.torchrec)
        return torch + [(field, version) for field, found in builds for version in found.values()]


def of_pair(versions: Mapping[str, str]) -> dict[str, str]:
    """Those of torch and of builds of FBGEMM."""
    return {name: version for name, version in versions.items() if name in ("torch", *FBGEMM)}


def measured_elsewhere(versions: Mapping[str, str], here: Installed) -> str:
    """How the `versions` that costs were measured under differ from those here; empty if not, or if one is unknown."""
    then = Installed.here(versions.get)
    if not (then.torch and then.fbgemm and here.torch and here.fbgemm):
        return ""
    was, now = ((minor(one.torch or ""), minor(next(iter(one.fbgemm.values())))) for one in (then, here))
    if was == now:
        return ""
    return f"torch {was[0]} and FBGEMM {was[1]}, and here are torch {now[0]} and FBGEMM {now[1]}"
