"""manifests/: both overlays render, are valid Kubernetes, and their pods are as tame as `restricted` wants."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuroshard import __version__
from neuroshard.kube import POD_LABELS
from neuroshard.orders.nightly import read_specs

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
OVERLAYS = ("dev", "prod")
PARAMETERS = next(yaml.safe_load_all((ROOT / "pipelines" / "neuroshard.yaml").read_text()))["root"]["inputDefinitions"][
    "parameters"
]
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def validate(files: list[Path]) -> str:
    """What `kubernetes-validate --strict` has to say against these files."""
    command: list[str | Path] = [Path(sys.executable).with_name("kubernetes-validate"), "--strict", "--quiet"]
    ended = subprocess.run([*command, *files], capture_output=True, text=True)
    return ended.stdout + ended.stderr if ended.returncode else ""


def kustomizations() -> Iterator[tuple[Path, Any]]:
    for path in sorted(MANIFESTS.rglob("kustomization.yaml")):
        yield path.parent, yaml.safe_load(path.read_text())


def resources() -> list[Any]:
    """Every resource of base and overlays, as it is written."""
    found = []
    for folder, kustomization in kustomizations():
        for name in kustomization["resources"]:
            if name.endswith(".yaml"):
                found += list(yaml.safe_load_all((folder / name).read_text()))
    return found


def pods(of: list[Any] | None = None) -> list[Any]:
    """The pod specs of every workload."""
    found = []
    for resource in resources() if of is None else of:
        spec = resource.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if resource["kind"] == "TrainingRuntime":
            [job] = spec["template"]["spec"]["replicatedJobs"]
            spec = job["template"]["spec"]
        if "template" in spec:
            found.append(spec["template"]["spec"])
    return found


@pytest.fixture(scope="module", params=[*OVERLAYS, "every component"])
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kubectl kustomize` makes of an overlay, and of prod with each component that it leaves out."""
    folder = tmp_path_factory.mktemp("rendered")
    overlay = MANIFESTS / "overlays" / request.param
    if request.param not in OVERLAYS:
        there = {
            Path(one).name
            for one in yaml.safe_load((MANIFESTS / "overlays/prod/kustomization.yaml").read_text())["components"]
        }
        more = [path for path in sorted((MANIFESTS / "components").iterdir()) if path.name not in there]
        overlay = folder / "overlay"
        overlay.mkdir()
        (overlay / "kustomization.yaml").write_text(
            json.dumps(
                {
                    "resources": [os.path.relpath(MANIFESTS / "overlays" / "prod", overlay)],
                    "components": [os.path.relpath(path, overlay) for path in more],
                }
            )
        )
    ended = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    path = folder / "rendered.yaml"
    path.write_text(ended.stdout)
    return path


def test_every_file_is_named_by_its_kustomization() -> None:
    for folder, kustomization in kustomizations():
        generated = [name for one in kustomization.get("configMapGenerator", ()) for name in one["files"]]
        named = {name for name in (*kustomization["resources"], *generated) if "/" not in name}
        assert {path.name for path in folder.glob("*.yaml")} == {*named, "kustomization.yaml"}


def test_every_resource_is_valid_kubernetes() -> None:
    files = [folder / name for folder, k in kustomizations() for name in k["resources"] if name.endswith(".yaml")]
    assert validate(files) == ""


@pytest.mark.slow
@needs_kubectl
def test_an_overlay_renders_to_valid_kubernetes_in_two_namespaces(rendered: Path) -> None:
    assert validate([rendered]) == ""
    all_of_them = list(yaml.safe_load_all(rendered.read_text()))
    assert {one["metadata"].get("namespace") for one in all_of_them} == {None, "neuroshard", "kubeflow"}
    assert {one["kind"] for one in all_of_them if "namespace" not in one["metadata"]} == {
        "Namespace",
        "ClusterRole",
        "ClusterRoleBinding",
    }
    assert "Secret" not in {one["kind"] for one in all_of_them}


@needs_kubectl
def test_the_parameters_and_models_lie_where_the_submitter_looks_and_are_the_pipelines(rendered: Path) -> None:
    by_kind = {one["kind"]: one for one in yaml.safe_load_all(rendered.read_text())}
    pod = by_kind["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    [config_map] = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    assert by_kind["ConfigMap"]["metadata"]["name"] == config_map
    data = by_kind["ConfigMap"]["data"]
    assert {f"--{name.partition('.')[0]}=/etc/neuroshard/{name}" for name in data} <= set(
        pod["containers"][0]["command"]
    )
    types = {"STRING": str, "NUMBER_INTEGER": int, "NUMBER_DOUBLE": float, "BOOLEAN": bool}
    for name, value in yaml.safe_load(data["parameters.yaml"]).items():
        assert type(value) is types[PARAMETERS[name]["parameterType"]], name
    models = read_specs(json.dumps(yaml.safe_load(data["models.yaml"])))
    assert all(model.order.task["device_memory_bytes"] for model in models)


def test_one_run_a_night_and_never_two_at_once() -> None:
    [cronjob] = [one for one in resources() if one["kind"] == "CronJob"]
    spec = cronjob["spec"]
    assert (spec["concurrencyPolicy"], spec["timeZone"], spec["jobTemplate"]["spec"]["backoffLimit"]) == (
        "Forbid",
        "Etc/UTC",
        0,
    )
    [container] = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


@needs_kubectl
def test_every_pod_keeps_to_the_restricted_standard(rendered: Path) -> None:
    for pod in pods(list(yaml.safe_load_all(rendered.read_text()))):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(
            volume.keys() & {"configMap", "emptyDir", "projected", "persistentVolumeClaim"} for volume in pod["volumes"]
        )
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert container["resources"]["limits"].keys() == {"cpu", "memory"}


def test_images_are_pinned_and_our_own_of_this_version() -> None:
    images = {container["image"] for pod in pods() for container in pod["containers"]}
    assert all(re.fullmatch(r"[a-z0-9./-]+:\d+\.\d+\.\d+", image) for image in images)
    assert {image for image in images if image.startswith("neuroshard")} == {
        f"neuroshard-{kind}:{__version__}" for kind in ("cpu", "gpu")
    }
    parameters = [yaml.safe_load(path.read_text()) for path in sorted(MANIFESTS.rglob("parameters.yaml"))]
    named = {value for one in parameters for key, value in one.items() if key.endswith("_image")}
    assert all(image.endswith(f":{__version__}") for image in named)


def test_a_run_may_look_at_nodes_and_nothing_else_cluster_wide() -> None:
    [role] = [one for one in resources() if one["kind"] == "ClusterRole"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    [binding] = [one for one in resources() if one["kind"] == "ClusterRoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "neuroshard-runner", "namespace": "kubeflow"}]
    roles = {
        (one["metadata"]["namespace"], one["metadata"]["name"]): one["rules"]
        for one in resources()
        if one["kind"] == "Role"
    }
    assert roles == {
        ("neuroshard", "neuroshard-events"): [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}],
        ("kubeflow", "neuroshard-check"): [
            {
                "apiGroups": [""],
                "resources": ["serviceaccounts"],
                "resourceNames": ["neuroshard-runner"],
                "verbs": ["get"],
            },
            {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
        ],
        ("kubeflow", "neuroshard-trainjobs"): [
            {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["create", "get", "delete"]}
        ],
        ("kubeflow", "neuroshard-runner"): [
            {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["kfp-launcher"], "verbs": ["get"]},
            {
                "apiGroups": [""],
                "resources": ["secrets"],
                "resourceNames": ["mlpipeline-minio-artifact"],
                "verbs": ["get"],
            },
        ],
    }
    bound = {one["roleRef"]["name"] for one in resources() if one["kind"] == "RoleBinding"}
    assert bound == {name for _, name in roles}  # and pipeline-runner, which may do much more, is not


def test_secrets_come_by_key_and_stand_in_no_command_line() -> None:
    for pod in pods():
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert "envFrom" not in container
            said = " ".join([*container.get("command", ()), *container.get("args", ())])
            assert not re.search("secret|password|auth-key|AWS_", said, re.IGNORECASE), said
            for one in container.get("env", ()):
                if "SECRET" in one["name"] or "ACCESS_KEY" in one["name"]:
                    assert one["valueFrom"]["secretKeyRef"]["key"] == one["name"]


def test_steps_are_closed_but_for_what_they_use() -> None:
    """Their labels are in the compiled pipeline, and TrainJobs' pods carry them too."""
    policies = {one["metadata"]["name"]: one for one in resources() if one["kind"] == "NetworkPolicy"}
    steps = policies["neuroshard-steps"]
    assert steps["metadata"]["namespace"] == "kubeflow"
    assert steps["spec"]["podSelector"] == {"matchLabels": POD_LABELS}
    assert set(steps["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in steps["spec"]
    assert policies["neuroshard-steps-s3"]["spec"]["podSelector"] == steps["spec"]["podSelector"]
    [runtime] = [one for one in resources() if one["kind"] == "TrainingRuntime"]
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["metadata"]["labels"] == POD_LABELS


@needs_kubectl
def test_the_submitter_is_called_as_its_command_line_wants(rendered: Path) -> None:
    from typer.testing import CliRunner

    from neuroshard.cli import app

    [cronjob] = [one for one in yaml.safe_load_all(rendered.read_text()) if one["kind"] == "CronJob"]
    [container] = cronjob["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "neuroshard"
    ended = CliRunner().invoke(app, [*arguments, "--set", "no-such=1"])
    # all is understood: what fails is the file, which is in the pod alone
    assert "/etc/neuroshard/parameters.yaml: no such file" in str(ended.exception)
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    variables = {one["name"] for one in container["env"]}
    assert ("--event" in arguments) == ("/var/run/secrets/kubernetes.io/serviceaccount" in mounted)
    assert ("--event" in arguments) == ({"POD_NAME", "POD_NAMESPACE", "POD_UID"} <= variables)


def test_the_namespace_is_restricted_and_closed() -> None:
    [namespace] = [one for one in resources() if one["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    policies = {one["metadata"]["name"]: one["spec"] for one in resources() if one["kind"] == "NetworkPolicy"}
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for name, policy in policies.items():
        for rule in (*policy.get("ingress", ()), *policy.get("egress", ())):
            assert rule.get("from") or rule.get("to"), f"{name} is open to everybody"
            assert rule["ports"]


def test_the_budget_is_for_pods_that_there_are() -> None:
    [budget] = [one for one in resources() if one["kind"] == "PodDisruptionBudget"]
    [cronjob] = [one for one in resources() if one["kind"] == "CronJob"]
    labels = cronjob["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
