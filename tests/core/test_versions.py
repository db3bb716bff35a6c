"""The versions of torch, FBGEMM and TorchRec: tested pairs, and costs that were measured under others."""

from types import SimpleNamespace

import pytest

from neuroshard.core.extras import install_command, pip
from neuroshard.core.versions import PAIRS, Installed, measured_elsewhere, minor, released

OLD, NEW = ({"torch": f"{pair.torch}+cpu", "fbgemm-gpu-cpu": pair.fbgemm, "torchrec": pair.torchrec} for pair in PAIRS)


def test_every_tested_pair_is_known_to_load_and_to_be_tested() -> None:
    for pair, found in zip(PAIRS, (OLD, NEW), strict=True):
        here = Installed.here(found.get)
        assert (here.unloadable, here.untested, here.pair) == ("", "", pair)


@pytest.mark.parametrize(
    ("version", "short", "is_one"),
    [
        ("2.13.0+cpu", "2.13", True),
        ("1.9.0", "1.9", True),
        ("1.9.0.post1", "1.9", True),
        ("2.15.0.dev20261101+cu130", "2.15", False),
        ("2.14.0rc2", "2.14", False),
        ("2.14.0a0+gitc0ffee", "2.14", False),
        ("2026.10.16", "2026.10", False),
        ("built-here", "built-here", False),
    ],
)
def test_versions_of_all_forms_are_read(version: str, short: str, is_one: bool) -> None:
    assert (minor(version), released(version)) == (short, is_one)


def test_costs_measured_under_another_torch_or_fbgemm_are_said_to_be() -> None:
    here = Installed.here(NEW.get)

    said = measured_elsewhere(OLD, here)
    assert said == "torch 2.13 and FBGEMM 1.8, and here are torch 2.14 and FBGEMM 1.9"
    # the build, the patch release and TorchRec do not change what was timed
    assert measured_elsewhere({"torch": "2.14.0", "fbgemm-gpu": "1.9.1", "torchrec": "1.8.0"}, here) == ""
    assert measured_elsewhere({}, here) == ""
    assert measured_elsewhere(OLD, Installed.here(lambda name: None)) == ""


def test_beside_the_newer_pair_a_command_installs_nothing_of_the_older(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Installed.here(NEW.get)
    monkeypatch.setattr("neuroshard.core.extras.Installed", SimpleNamespace(here=lambda: here))
    monkeypatch.setattr(
        "neuroshard.core.extras.required",
        {"measure": ["numpy>=2", "torch==2.13.*", "fbgemm-gpu-cpu==1.8.0"], "torchrec": ["tqdm"]}.get,
    )
    assert install_command("measure") == f"{pip()} install 'numpy>=2' 'torch==2.14.*' fbgemm-gpu-cpu==1.9.0"
    assert install_command("torchrec").endswith(f"&& {pip()} install --no-deps torchrec==1.9.2")
