"""All shares of a kind by one TrainJob: against a stub of the API whose controller runs the pods as processes of this machine."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.json_handler import JsonHandler
from helpers.limits import HANGS
from helpers.loopback import HttpServer
from helpers.nodes import FakeApiServer
from helpers.refusals import refused
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import MeasureError, NeuroshardError
from neuroshard.measure.shares.job import merge_shares
from neuroshard.measure.shares.train_job import run, train_job
from neuroshard.nightly.augment import run as draw
from neuroshard.orders.nightly import Campaign, ModelSpec, Request, Survey

TRAIN_JOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/kubeflow/trainjobs"
HARDWARE = Hardware(kind="synthetic", name="NVIDIA-H200, by a formula", memory_bytes=140 * 2**30)


class Controller:
    """A stub of Kubeflow Trainer: it keeps TrainJobs, and runs the pods of one to their end when it is asked for."""

    def __init__(self) -> None:
        self.jobs: dict[str, Any] = {}
        self.asked: list[str] = []
        self.faults: list[int] = []
        self.not_yet = 0  # so often is a TrainJob still under way
        self.ends: tuple[str, str] | None = None  # in place of running the pods

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append(method)
        if self.faults:
            return self.faults.pop(0), {"message": "a fault"}
        name = path.removeprefix(TRAIN_JOBS).strip("/")
        if method == "POST":
            if body["metadata"]["name"] in self.jobs:
                return 409, {"message": "already exists"}
            self.jobs[body["metadata"]["name"]] = body
            return 201, body
        if name not in self.jobs:
            return 404, {"message": "not found"}
        if method == "DELETE":
            return 200, self.jobs.pop(name)
        job = self.jobs[name]
        if self.not_yet:
            self.not_yet -= 1
            return 200, job
        if "status" not in job and self.ends != ("", ""):
            kind, message = self.ends or self.run_pods(job["spec"]["trainer"])
            job["status"] = {"conditions": [{"type": kind, "status": "True", "message": message}]}
        return 200, job

    def run_pods(self, trainer: Any) -> tuple[str, str]:
        for index in range(trainer["numNodes"]):
            ended = subprocess.run(
                [sys.executable, *trainer["command"][1:], *trainer["args"]],
                env={**os.environ, "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            if ended.returncode:
                return "Failed", ended.stderr.strip().splitlines()[-1]
        return "Complete", ""


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    from kubernetes.config import kube_config

    kept = Controller()

    class Handler(JsonHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            self.send_json(*kept.answer(self.command, self.path.partition("?")[0], body))

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 # names that http.server looks for

    with HttpServer(Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        api = FakeApiServer([], url=server.url)
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(api.kubeconfig(tmp_path / "kubeconfig")))
        yield kept
        server.shutdown()
        thread.join()


def campaign(**more: Any) -> Campaign:
    options = {"folder": "_measuring/f/a", "pods": 2, "devices": 8, "resource": "nvidia.com/gpu"}
    return Campaign.model_validate({"hardware": HARDWARE, "node_selector": {}, "tolerations": (), **options, **more})


def body(**options: Any) -> dict[str, Any]:
    return train_job(campaign(), "neuroshard-measure", "neuroshard-gpu:0.1.0", options)


def test_the_train_job_asks_for_a_nodes_gpus_and_for_the_runtime_of_the_kind() -> None:
    spec = body()["spec"]
    assert spec["runtimeRef"]["name"] == f"neuroshard-measure-{HARDWARE.fingerprint}"
    assert spec["trainer"]["numNodes"] == 2
    assert spec["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}}


@pytest.mark.slow
def test_its_pods_measure_all_shares_and_a_second_one_finds_them_there(controller: Controller, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    spec = ModelSpec(name="ads", tables="mlperf-dlrm-dcnv2", devices=2, memory="80GiB")
    request = Request(compute_cases=20, collective_cases=8, batch_size=512, seed=0, backend="synthetic")
    asked = campaign(ranks=(2,), measurable=(2,))
    draw(
        Survey(request=request, models=(spec,), hardware={"ads": HARDWARE.fingerprint}, campaigns=(asked,)),
        asked,
        store,
    )
    options = {"backend": "synthetic", "batch_size": 512, "budget_seconds": 1e6, "seed": 0, "single_writer": False}
    job = body(store_url=store, **options)
    run(job, HANGS, 0.01)
    assert controller.jobs == {}
    merge_shares(campaign(), store, tmp_path / "costs")
    ended = sorted(path.name for path in (tmp_path / "store").rglob("ended-*"))
    assert ended == ["ended-1-of-2.json", "ended-2-of-2.json"]
    run(job, HANGS, 0.01)


def test_a_failed_train_job_is_an_error_and_the_next_run_starts_again(controller: Controller) -> None:
    controller.ends = ("Failed", "pods are\nout of memory")
    with refused(MeasureError, body()["metadata"]["name"], "pods are out of memory"):
        run(body(), HANGS, 0.01)
    controller.jobs[body()["metadata"]["name"]] = {
        **body(),
        "status": {"conditions": [{"type": "Failed", "status": "True"}]},
    }
    controller.ends = ("Complete", "")
    run(body(), HANGS, 0.01)


def test_a_running_train_job_is_waited_for(controller: Controller) -> None:
    controller.jobs[body()["metadata"]["name"]] = body()
    controller.not_yet, controller.ends = 3, ("Complete", "")
    run(body(), HANGS, 0.01)
    assert controller.asked.count("POST") == 1  # which was refused


def test_an_api_that_restarts_is_asked_again_and_one_that_refuses_is_one_line(controller: Controller) -> None:
    controller.ends = ("Complete", "")
    run(body(), HANGS, 0.01)
    controller.faults = [403] * 5
    with refused(NeuroshardError, body()["metadata"]["name"], 403):
        run(body(), HANGS, 0.01)


def test_a_train_job_that_never_ends_is_deleted(controller: Controller) -> None:
    controller.ends = ("", "")
    with refused(MeasureError, body()["metadata"]["name"], "0 s"):
        run(body(), 0.05, 0.01)
    assert controller.jobs == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "index"), [([], "0"), (["{}"], None), (["{"], "0"), (["[]"], "0"), (["{}"], "0")]
)
def test_a_pod_with_wrong_arguments_fails_in_one_line(arguments: list[str], index: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "JOB_COMPLETION_INDEX"}
    ended = subprocess.run(
        [sys.executable, "-m", "neuroshard.measure.shares.train_job", *arguments],
        env=env | ({} if index is None else {"JOB_COMPLETION_INDEX": index}),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1
