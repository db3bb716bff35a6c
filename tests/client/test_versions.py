"""What the client says of the versions of torch, FBGEMM and TorchRec that it finds."""

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.drawn_plans import model_of
from helpers.limits import HANGS
from helpers.plans import TABLES, make_plan
from neuroshard.client.torchrec import ShardingWarning, to_torchrec
from neuroshard.core.plan import Plan
from neuroshard.core.versions import PAIRS, Installed

POOLED = tuple(table.model_copy(update={"module": "pooled"}) for table in TABLES)
MIXED = Installed.here({"torch": PAIRS[0].torch, "fbgemm-gpu-cpu": PAIRS[0].fbgemm, "torchrec": PAIRS[1].torchrec}.get)


def imported(folder: Path, code: str, **versions: str) -> list[str]:
    """What is printed where the client is imported with a module torchrec of this code, and these versions installed."""
    (folder / "torchrec.py").write_text(code)
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    done = subprocess.run(
        [sys.executable, "-c", "from neuroshard.client.torchrec import to_torchrec"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


LOADER = (
    "import logging\nlogging.error('no library')\nraise OSError('Could not load this library: fbgemm.so\\n  undefined')"
)


def test_an_fbgemm_for_another_torch_is_one_line_with_the_way_out(tmp_path):
    lines = imported(tmp_path, LOADER, torch="2.13.0", fbgemm_gpu_cpu="1.9.0", torchrec="1.9.2")

    assert lines[-1].startswith(
        "ImportError: TorchRec cannot be imported with torch 2.13.0, fbgemm-gpu-cpu 1.9.0, torchrec 1.9.2: FBGEMM 1.9 is built "
        "for torch 2.14, and loads with no other; "
    )
    assert lines[-1].endswith("pip install 'torch==2.14.*'")
    assert not any("no library" in line for line in lines)


def test_what_does_not_load_for_another_reason_is_said(tmp_path):
    lines = imported(tmp_path, LOADER, torch="2.16.0", fbgemm_gpu_cpu="1.11.0", torchrec="1.11.0")

    assert "torchrec 1.11.0: Could not load this library: fbgemm.so; " in lines[-1]
    assert "pip install 'torch==2.14.*' fbgemm-gpu-cpu==1.9.0 && " in lines[-1]


@pytest.mark.parametrize("name", ["torchrec", "fbgemm_gpu"])
def test_a_missing_package_is_named_with_what_installs_it(tmp_path, name):
    lines = imported(tmp_path, f"raise ModuleNotFoundError('No module named {name}', name={name!r})")

    assert lines[-1].startswith(f"ModuleNotFoundError: the client for TorchRec needs the package {name}: ")
    assert " install --no-deps torchrec==" in lines[-1]


def test_beside_the_cuda_build_of_fbgemm_torchrec_is_installed_with_it(tmp_path):
    code = "raise ModuleNotFoundError('No module named torchrec', name='torchrec')"
    lines = imported(tmp_path, code, torch="2.14.1", fbgemm_gpu="1.9.0", torchrec="1.9.2")

    assert lines[-1].endswith("pip install 'torch==2.14.*' fbgemm-gpu==1.9.0 torchrec==1.9.2")


def said(plan: Plan) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_torchrec(plan, model_of(plan.task.tables), any_output_order=True, optimizer="sgd")
    return [str(one.message) for one in caught if one.category is ShardingWarning]


def measured_under(**versions: str) -> Plan:
    plan = make_plan(tables=POOLED)
    given = {name.replace("_", "-"): version for name, version in versions.items()}
    return plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"cost_model_versions": given})})


def test_a_tested_pair_is_not_spoken_of():
    assert said(make_plan(tables=POOLED)) == []


def test_versions_that_are_not_tested_with_each_other_are_warned_of_in_a_line(monkeypatch):
    monkeypatch.setattr("neuroshard.client.torchrec.trainer.Installed", SimpleNamespace(here=lambda: MIXED))
    (line,) = said(make_plan(tables=POOLED))

    assert line.startswith(
        "torch 2.13.0, fbgemm-gpu-cpu 1.8.0, torchrec 1.9.2: not tested with each other; tested: torch 2.13"
    )
    assert line.endswith("pip install 'torch==2.14.*' fbgemm-gpu-cpu==1.9.0")


def test_costs_measured_under_other_versions_than_the_trainers_are_warned_of_in_a_line():
    here = Installed.here()
    assert said(measured_under(torch=here.torch, **{n.replace("-", "_"): v for n, v in here.fbgemm.items()})) == []

    (line,) = said(measured_under(torch="2.11.0", fbgemm_gpu="1.6.0"))
    assert "costs measured under torch 2.11 and FBGEMM 1.6, and here are torch 2." in line
    assert "shards and memory are right" in line


def test_without_torchrec_1_9_a_planner_provider_is_refused_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec.distributed.planner.provider", None)
    monkeypatch.delitem(sys.modules, "neuroshard.client.torchrec.provider", raising=False)
    with pytest.raises(
        ModuleNotFoundError, match=r"^planner providers came with TorchRec 1\.9, .* NeuroShardPlanner as a planner"
    ):
        importlib.import_module("neuroshard.client.torchrec.provider")
