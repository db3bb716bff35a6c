"""Which packages are there, and whether they fit together."""

import pytest

from neuroshard.core.extras import install_command, pip
from neuroshard.doctor.packages import check_packages, fits_together, installed

GOOD = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"}


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({}, "ok", "fit together"),
        ({"torch": "2.12.1"}, "fail", "FBGEMM 1.8 is built for torch 2.13"),
        ({"torchrec": "1.7.0"}, "fail", "torchrec must have FBGEMM's version"),
        ({"fbgemm-gpu": "1.8.0"}, "fail", "are both installed"),
        ({"fbgemm-gpu-cpu": "1.9.0"}, "warn", "not a tested pair"),
        ({"fbgemm-gpu-cpu": None}, "none", "not both installed"),
        ({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0", "torchrec": None}, "ok", "fbgemm-gpu 1.8.0"),
    ],
)
def test_versions_that_do_not_fit_fail_with_the_way_out(change, verdict, words):
    check = fits_together({**GOOD, **change}.get)
    assert check.verdict == verdict
    assert words in check.says
    assert bool(check.mend) == (verdict in ("fail", "none"))


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
    assert mends["torchrec"] == f"{pip()} install torchrec==1.8.0"
    assert mends["versions"] == mends["measure"]
    assert mends["pretrain"] == install_command("pretrain")


@pytest.mark.slow
def test_the_gpu_build_of_fbgemm_stands_in_for_the_cpu_build():
    def version_of(name):
        return {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}.get(name, installed(name))

    checks = {check.name: check.verdict for check in check_packages(version_of)}
    assert (checks["measure"], checks["torchrec"]) == ("ok", "ok")
