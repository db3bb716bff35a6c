"""Which pods do not start and why, runs whose nodes Argo compressed, runs that were terminated, and secrets that are missing."""

import base64
import gzip
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from helpers.kubeflow import KfpStub, recorded, recorded_workflow
from helpers.limits import HANGS
from helpers.nodes import FakeApiServer
from helpers.refusals import refused
from neuroshard.core.errors import NeuroshardError
from neuroshard.submit import wait
from neuroshard.submit.kubeflow import Server
from neuroshard.submit.package import RunSettings
from neuroshard.submit.run import run
from neuroshard.submit.steps import read_workflow
from neuroshard.submit.wait import Waiting

NO_ROOM = "Unschedulable: 0/3 nodes are available: 3 Insufficient memory."
SEARCH = "w(0).root(0).for-loop-1(0).iteration-iterations(0:0)(0).iteration-item(0).search(0).executor(0)"
IMPL = "metadata-0-1-system-container-impl"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods are late at once, and are looked at each time."""
    monkeypatch.setattr(wait, "STARTING_SECONDS", 0.0)
    monkeypatch.setattr(wait, "LOOK_SECONDS", 0.0)


def waited(stub: KfpStub, **more: Any) -> list[str]:
    return list(run(Server(stub.url), RunSettings({}), Waiting(HANGS, 0.001, **more)))[1:]


def pending(message: str, name: str = SEARCH, template: str = IMPL) -> dict[str, Any]:
    """A node as Argo keeps it of a pod that does not start."""
    node = {"name": name, "type": "Pod", "phase": "Pending", "templateName": template}
    return {**node, "message": message, "startedAt": datetime.now(UTC).isoformat()}


def test_a_pod_that_finds_no_room_is_named_once_and_again_for_another_reason(kfp_stub: KfpStub) -> None:
    answers = [NO_ROOM, NO_ROOM, "ImagePullBackOff: Back-off pulling image", ""]
    kfp_stub.states = ["RUNNING", *["RUNNING"] * len(answers), "SUCCEEDED"]
    answer = kfp_stub.answer

    def changing(method: str, path: str, body: Any) -> tuple[int, Any]:
        if "/v1beta1/runs/" in path and answers:
            kfp_stub.workflow = {"status": {"nodes": {"neuroshard-x-1": pending(answers.pop(0))}}}
        return answer(method, path, body)

    kfp_stub.answer = changing
    pod = f"neuroshard-x-{IMPL}-1"
    assert waited(kfp_stub) == [
        "run r1: RUNNING",
        f"run r1: search waits, its pod {pod} has not started: {NO_ROOM}",
        f"run r1: search waits, its pod {pod} has not started: ImagePullBackOff: Back-off pulling image",
        f"run r1: search waits, its pod {pod} has not started: kubectl -n kubeflow describe pod {pod} says why",
        "run r1: SUCCEEDED",
    ]


def test_what_argo_does_not_say_is_in_the_pods_events(kfp_stub: KfpStub, api: FakeApiServer) -> None:
    api.allowed += ("get events",)
    api.warnings = {"w-system-container-driver-7": "FailedCreatePodSandBox: no space left on device"}
    nodes = {
        "w-7": pending(
            "PodInitializing", SEARCH.replace("search(0).executor(0)", "search-driver(0)"), "system-container-driver"
        )
    }
    kfp_stub.workflow = {"status": {"nodes": nodes}}
    kfp_stub.states = ["RUNNING", "RUNNING", "SUCCEEDED"]
    assert waited(kfp_stub)[1].endswith("has not started: FailedCreatePodSandBox: no space left on device")


def test_it_gives_up_where_that_was_asked_for(kfp_stub: KfpStub) -> None:
    kfp_stub.states = ["RUNNING"]
    nodes = {f"w-{index}": pending(NO_ROOM) for index in range(3)}
    kfp_stub.workflow = {"status": {"nodes": nodes}}
    with refused(NeuroshardError, "run r1 was terminated: search waits, its 3 pods have not started", NO_ROOM):
        waited(kfp_stub, start_seconds=0.001)
    assert kfp_stub.changes()[-1] == "POST /runs/r1:terminate"


def test_a_run_without_a_pod_says_where_to_look(kfp_stub: KfpStub) -> None:
    kfp_stub.states = ["PENDING", "PENDING", "SUCCEEDED"]
    assert "kubectl -n kubeflow describe workflows -l pipeline/runid=r1" in waited(kfp_stub)[1]


def compressed(name: str) -> dict[str, Any]:
    """As Argo keeps nodes that take more than 1 MB."""
    nodes = recorded_workflow(name)["status"]["nodes"]
    packed = base64.b64encode(gzip.compress(json.dumps(nodes).encode())).decode()
    return {"status": {"compressedNodes": packed}}


def test_a_storm_in_a_run_whose_nodes_are_compressed_is_ended_with_its_reason(kfp_stub: KfpStub) -> None:
    kfp_stub.workflow = compressed("account-deleted")
    tasks = recorded("terminated-storm")["run_details"]["task_details"]
    kfp_stub.shape = {"state": "RUNNING", "run_details": {"task_details": tasks[:2]}}  # what the API had before
    with refused(NeuroshardError, "run r1 was terminated: 9 pods of the driver of for-loop-1", "service account"):
        waited(kfp_stub)


def test_what_failed_in_a_run_whose_nodes_are_compressed_is_named(kfp_stub: KfpStub) -> None:
    kfp_stub.workflow = compressed("cpu2")
    kfp_stub.shape = {**recorded("cpu2"), "run_details": {}}
    with refused(NeuroshardError, "run r1 ended as FAILED", "search of model 'm'"):
        waited(kfp_stub)


@pytest.mark.parametrize(
    "packed", ["", "AA==", "%", base64.b64encode(gzip.compress(b"[1]", mtime=0) + b"x").decode(), 7]
)
def test_nodes_that_cannot_be_read_are_left_out(packed: object) -> None:
    assert read_workflow(json.dumps({"status": {"compressedNodes": packed}})).nodes == {}


def test_a_run_is_looked_at_often_while_it_may_be_a_short_one() -> None:
    assert [wait.pause(15.0, elapsed) for elapsed in (5.0, 100.0, 3600.0)] == [1.0, 3.0, 15.0]


def test_a_run_that_somebody_ended_says_so(kfp_stub: KfpStub) -> None:
    history = [{"state": state} for state in ("PENDING", "RUNNING", "CANCELING", "FAILED")]
    kfp_stub.shape, kfp_stub.workflow = {**recorded("cpu2"), "state_history": history}, recorded_workflow("cpu2")
    with refused(NeuroshardError, "run r1 was terminated by a request to Kubeflow during search; models"):
        waited(kfp_stub)


def test_credentials_that_fail_name_the_secret(kfp_stub: KfpStub) -> None:
    kfp_stub.shape, kfp_stub.workflow = recorded("cpu2"), recorded_workflow("cpu2")
    kfp_stub.shape["runtime_config"]["parameters"]["store_secret"] = "keys"
    kfp_stub.logs["neuroshard-zgxwn-metadata-0-1-system-container-impl-2501641722"] = (
        "Traceback (most recent call last):\n  x\nneuroshard.core.errors.StoreError: s3://b: no usable credentials (X); set y\n"
    )
    with refused(NeuroshardError, "no usable credentials", "is there a secret keys in namespace teams"):
        waited(kfp_stub, namespace="teams")
