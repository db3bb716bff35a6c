"""manifests/base: renders, is valid Kubernetes, and its pods are as tame as `restricted` wants."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuroshard import __version__

ROOT = Path(__file__).parents[2]
BASE = ROOT / "manifests" / "base"
CRONJOB = yaml.safe_load((BASE / "cronjob.yaml").read_text())
POD = CRONJOB["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def validate(files: list[Path]) -> str:
    """What `kubernetes-validate --strict` has to say against these files."""
    command: list[str | Path] = [Path(sys.executable).with_name("kubernetes-validate"), "--strict", "--quiet"]
    ended = subprocess.run([*command, *files], capture_output=True, text=True)
    return ended.stdout + ended.stderr if ended.returncode else ""


def test_every_resource_is_valid_kubernetes() -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    files = [BASE / name for name in kustomization["resources"]]
    assert sorted(path.name for path in BASE.iterdir()) == sorted(
        [*kustomization["resources"], "kustomization.yaml", "parameters.yaml", "models.yaml"]
    )
    assert validate(files) == ""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_it_renders_with_the_parameters_where_the_pod_looks(tmp_path: Path) -> None:
    ended = subprocess.run(["kubectl", "kustomize", BASE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "rendered.yaml").write_text(ended.stdout)
    resources: dict[str, Any] = {resource["kind"]: resource for resource in yaml.safe_load_all(ended.stdout)}
    assert resources.keys() == {"Namespace", "ServiceAccount", "ConfigMap", "CronJob"}
    volumes = resources["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["volumes"]
    [config_map] = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    assert resources["ConfigMap"]["metadata"]["name"] == config_map
    assert sorted(resources["ConfigMap"]["data"]) == ["models.yaml", "parameters.yaml"]
    assert {resource["metadata"].get("namespace") for resource in resources.values()} == {None, "neuroshard"}
    assert validate([tmp_path / "rendered.yaml"]) == ""


def test_one_run_a_night_and_never_two_at_once() -> None:
    spec = CRONJOB["spec"]
    assert (spec["concurrencyPolicy"], spec["timeZone"], spec["jobTemplate"]["spec"]["backoffLimit"]) == (
        "Forbid",
        "Etc/UTC",
        0,
    )


def test_the_pod_keeps_to_the_restricted_standard() -> None:
    assert POD["automountServiceAccountToken"] is False
    assert POD["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for container in POD["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["image"] == f"neuroshard-cpu:{__version__}"


def test_its_parameters_are_the_pipelines() -> None:
    types = {"STRING": str, "NUMBER_INTEGER": int, "BOOLEAN": bool, "STRUCT": dict, "LIST": list}
    spec = next(yaml.safe_load_all((ROOT / "pipelines" / "neuroshard.yaml").read_text()))
    known = spec["root"]["inputDefinitions"]["parameters"]
    for name, value in yaml.safe_load((BASE / "parameters.yaml").read_text()).items():
        assert type(value) is types[known[name]["parameterType"]], name
