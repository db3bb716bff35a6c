"""Which packages are there, and whether they fit together."""

import pytest

from neuroshard.core.extras import install_command, pip
from neuroshard.core.versions import Installed, installed, minor
from neuroshard.doctor.packages import check_packages, fits_together

GOOD = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"}
NEXT = {"torch": "2.14.1+cu130", "fbgemm-gpu-cpu": "1.9.0", "torchrec": "1.9.2"}
NIGHTLY = {"torch": "2.15.0.dev20261101", "fbgemm-gpu-cpu": None, "fbgemm-gpu-nightly-cpu": "2026.10.16"}


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({}, "ok", "torchrec 1.8.0 fit together, and are tested; so is torch 2.14 with FBGEMM 1.9 and TorchRec 1.9"),
        (NEXT, "ok", "torchrec 1.9.2 fit together, and are tested; so is torch 2.13 with FBGEMM 1.8 and TorchRec 1.8"),
        ({"torch": "2.14.0", "fbgemm-gpu-cpu": "1.9.0", "torchrec": None}, "ok", "fit together, and are tested"),
        ({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0", "torchrec": None}, "ok", "fbgemm-gpu 1.8.0"),
        ({"torch": "2.12.1"}, "fail", "FBGEMM 1.8 is built for torch 2.13"),
        ({"fbgemm-gpu-cpu": "1.9.0", "torchrec": "1.9.2"}, "fail", "FBGEMM 1.9 is built for torch 2.14"),
        ({**NEXT, "torch": "2.15.0"}, "fail", "FBGEMM 1.9 is built for torch 2.14"),
        ({"fbgemm-gpu": "1.8.0"}, "fail", "are both installed"),
        (
            {"torchrec": "1.9.2"},
            "warn",
            "not tested with each other; tested: torch 2.13 with FBGEMM 1.8 and TorchRec 1.8",
        ),
        ({"torch": "2.16.0", "fbgemm-gpu-cpu": "1.11.0", "torchrec": "1.11.0"}, "warn", "not tested with each other"),
        (NIGHTLY, "warn", "2.15.0.dev20261101 is no release"),
        ({**NEXT, "torch": "2.14.0a0+git1234"}, "warn", "2.14.0a0+git1234 is no release"),
        ({"torch": "built-here"}, "warn", "built-here is no release"),
        ({"fbgemm-gpu-cpu": None}, "none", "not both installed"),
    ],
)
def test_the_versions_are_a_tested_pair_or_the_way_out_is_said(change, verdict, words):
    check = fits_together({**GOOD, **change}.get)
    assert check.verdict == verdict
    assert words in check.says
    assert "\n" not in check.says
    assert bool(check.mend) == (verdict != "ok")


@pytest.mark.parametrize(
    ("found", "commands"),
    [
        # nobody who has a newer TorchRec is told to go back
        ({**GOOD, "torchrec": "1.9.2"}, ["install 'torch==2.14.*' fbgemm-gpu-cpu==1.9.0"]),
        ({**NEXT, "torch": "2.13.0"}, ["install 'torch==2.14.*'"]),
        ({**NEXT, "torch": "2.15.0.dev20261101"}, ["install 'torch==2.14.*'"]),
        ({**GOOD, "fbgemm-gpu-cpu": "1.9.0", "torchrec": None}, ["install 'torch==2.14.*'"]),
        (
            {"torch": "2.11.0", "fbgemm-gpu": "1.6.0", "torchrec": "1.6.1"},
            ["install 'torch==2.14.*' fbgemm-gpu==1.9.0", "install --no-deps torchrec==1.9.2"],
        ),
        (
            {**NIGHTLY, "torchrec-nightly": "2026.10.1"},
            [
                "uninstall -y fbgemm-gpu-nightly-cpu torchrec-nightly",
                "install 'torch==2.14.*' fbgemm-gpu-cpu==1.9.0",
                "install --no-deps torchrec==1.9.2",
            ],
        ),
    ],
)
def test_what_is_not_of_the_nearest_tested_pair_is_installed_and_nothing_else(found, commands):
    assert fits_together(found.get).mend == " && ".join(f"{pip()} {command}" for command in commands)


def test_what_is_installed_here_is_all_that_the_parts_need():
    checks = {check.name: check for check in check_packages()}
    assert {
        checks[name].verdict for name in ("python", "files", "measure", "pretrain", "search", "torchrec", "versions")
    } == {"ok"}


def test_a_missing_or_old_package_is_named_with_the_extra_that_brings_it():
    def version_of(name):
        return {"scipy": None, "pyarrow": "19.0", "torchrec": None}.get(name, installed(name))

    checks = {check.name: check for check in check_packages(version_of)}
    assert (checks["pretrain"].verdict, checks["pretrain"].mend) == ("warn", install_command("pretrain"))
    assert checks["pretrain"].says == "pretrain: pyarrow is 19.0, not >=20, scipy is not installed"
    assert "torchrec is not installed" in checks["torchrec"].says


@pytest.mark.parametrize(("has_gpu", "kept", "removed"), [(True, "", "-cpu"), (False, "-cpu", "")])
def test_of_two_builds_of_fbgemm_the_machines_own_is_kept(has_gpu, kept, removed):
    check = fits_together({**GOOD, "fbgemm-gpu": "1.8.0"}.get, has_gpu)
    assert check.mend == (
        f"{pip()} uninstall -y fbgemm-gpu{removed} && "
        f"{pip()} install --force-reinstall --no-deps fbgemm-gpu{kept}==1.8.0"
    )


def test_where_a_gpu_is_no_command_brings_the_cpu_build():
    mends = {check.name: check.mend for check in check_packages(lambda name: None, has_gpu=True)}
    assert mends["measure"] == f"{pip()} uninstall -y torch fbgemm-gpu-cpu && {install_command('cuda')}"
    pair = Installed.here().pair  # TorchRec takes any FBGEMM, and pip the newest
    torch = f"'torch=={minor(pair.torch)}.*'"
    assert mends["torchrec"] == f"{pip()} install {torch} fbgemm-gpu=={pair.fbgemm} torchrec=={pair.torchrec}"
    assert mends["versions"] == mends["measure"]
    assert mends["pretrain"] == install_command("pretrain")


@pytest.mark.slow
def test_the_gpu_build_of_fbgemm_stands_in_for_the_cpu_build():
    def version_of(name):
        return {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}.get(name, installed(name))

    checks = {check.name: check.verdict for check in check_packages(version_of)}
    assert (checks["measure"], checks["torchrec"]) == ("ok", "ok")
