"""Whether a cluster takes a run's pods, asked of a fake of the Kubernetes API before there are any; and what doctor says."""

import re
from pathlib import Path

import pytest
import yaml
from kubernetes.config import kube_config

from helpers.kubeflow import KfpStub
from helpers.nodes import RUNNER, FakeApiServer, serving
from neuroshard.doctor.services import check_runs
from neuroshard.kube import POD_LABELS, SECURITY, admission
from neuroshard.submit.package import RunSettings
from neuroshard.submit.run import admitted, run_admission

PACKAGE = Path(__file__).parents[2] / "pipelines" / "neuroshard.yaml"


def test_a_pod_that_is_admitted_is_only_rehearsed(api: FakeApiServer) -> None:
    assert admission("kubeflow", "neuroshard-runner")[:2] == (
        "admitted",
        f"a pod of a run under {RUNNER} is admitted, says {api.url}",
    )
    assert api.asked == [{"dryRun": "All"}]
    [pod] = api.posted
    assert pod["metadata"]["labels"] == POD_LABELS
    assert pod["spec"]["containers"][0]["securityContext"] == SECURITY


def test_a_secret_that_is_not_there_is_noted_where_it_may_be_asked_for(
    api: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeflows_own, asked = (
        run_admission(RunSettings({"store_secret": "keys", **store}, "neuroshard-runner"), None)
        for store in ({}, {"store": "s3://plans/prod"})
    )
    assert asked().note == ""  # it may not ask
    api.allowed += ("get secrets",)
    assert kubeflows_own().note == ""  # its keys are in a secret of its own
    admitted(asked)
    assert "namespace kubeflow: the pods use the store by what their service account neuroshard-runner may do" in (
        capsys.readouterr().err
    )
    api.secrets = ("kubeflow/keys",)
    assert asked().note == ""


@pytest.mark.parametrize("allowed", [("create pods",), ("get serviceaccounts",)])
def test_an_account_that_is_not_there_is_refused_whoever_may_see_either(
    api: FakeApiServer, allowed: tuple[str]
) -> None:
    api.allowed = allowed
    answer = admission("kubeflow", "nobody")
    assert answer.verdict == "refused"
    assert "kubeflow/nobody" in answer.says
    assert check_runs("kubeflow", "nobody").verdict == "fail"


def test_what_pod_security_refuses_is_said(api: FakeApiServer) -> None:
    api.violation = '"restricted:latest": runAsNonRoot != true'
    answer = admission("kubeflow", "neuroshard-runner")
    assert (answer.verdict, "runAsNonRoot != true" in answer.says) == ("refused", True)


@pytest.mark.parametrize(
    ("allowed", "words"),
    [((), "cannot get"), (("get serviceaccounts",), "the account exists, but this one may not make pods there")],
)
def test_what_may_not_be_asked_is_not_known(api: FakeApiServer, allowed: tuple[str, ...], words: str) -> None:
    api.allowed = allowed
    answer = admission("kubeflow", "neuroshard-runner")
    assert (answer.verdict, words in answer.says) == ("unknown", True), answer
    assert check_runs("kubeflow", "neuroshard-runner").verdict == "warn"


def test_without_access_to_a_cluster_nothing_is_known() -> None:
    answer = admission("kubeflow", "neuroshard-runner")
    assert answer.verdict == "unknown"
    assert "KUBECONFIG" in answer.says


def test_why_an_api_does_not_answer_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeApiServer([])) as server:
        config = server.kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    assert admission("kubeflow", "neuroshard-runner").says.endswith(
        f"{server.url}: the Kubernetes API does not answer: [Errno 111] Connection refused; check the kubeconfig and the network"
    )


def test_the_command_submits_nothing_under_an_account_that_is_not_there(
    kfp_stub: KfpStub, neuroshard_process, tmp_path: Path
) -> None:
    with serving(FakeApiServer([], accounts=(RUNNER,))) as server:
        config = server.kubeconfig(tmp_path / "kubeconfig")
        command = ["submit", "--endpoint", kfp_stub.url, "--service-account", "nobody"]
        ended = neuroshard_process(*command, KUBECONFIG=str(config))
        assert ended.returncode == 1
        assert ended.stderr.startswith(
            f"error: nothing was submitted: {server.url} refuses a pod of a run under kubeflow/nobody"
        )
        assert kfp_stub.runs == []
        assert neuroshard_process(*command, "--no-check", KUBECONFIG=str(config)).returncode == 0
    assert len(kfp_stub.runs) == 1


def test_every_step_of_the_compiled_pipeline_runs_as_our_images_do() -> None:
    """What equip() asks for; KFP 2.17 sets seccomp, privilege escalation and capabilities itself, and takes no more."""
    spec, platform = yaml.safe_load_all(PACKAGE.read_text())
    steps = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert steps.keys() == spec["deploymentSpec"]["executors"].keys()
    for name, step in steps.items():
        assert step["securityContext"] == {"runAsUser": "10001", "runAsGroup": "10001", "runAsNonRoot": True}, name
        assert step["podMetadata"] == {"labels": POD_LABELS}, name


def test_secrets_come_by_key_and_never_in_a_command_line() -> None:
    spec, platform = yaml.safe_load_all(PACKAGE.read_text())
    steps = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for step in steps.values():
        [stores, _] = step["secretAsEnv"]
        assert {one["secretKey"] for one in stores["keyToEnv"]} == {one["envVar"] for one in stores["keyToEnv"]}
    assert not re.search("AWS_SECRET|KUBEFLOW_SECRET", yaml.safe_dump(spec))  # commands, arguments and parameters
