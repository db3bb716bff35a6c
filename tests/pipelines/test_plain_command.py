"""`kfp run create -e neuroshard -f pipelines/neuroshard.yaml`, without a parameter, on a Kubeflow as it is installed."""

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from bench.nightly.steps import ended
from helpers import nodes, servers
from helpers.forked import run_script
from helpers.nightly import tables
from helpers.nodes import FakeApiServer, node
from helpers.pods import GIB, machine, secrets_of
from neuroshard.client import load_plan
from neuroshard.core.store_url import KUBEFLOW_BUCKET
from neuroshard.devices import pod_cpu
from neuroshard.files.tables import write_tables
from neuroshard.orders.parameters import quantity
from neuroshard.store.s3 import KUBEFLOW_ENDPOINT
from neuroshard.submit.package import parameter

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
KUBEFLOW = {"mlpipeline-minio-artifact": {"accesskey": "minio", "secretkey": "minio123"}}  # as it is installed


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kubeflow's own, under its own name: this process and those that it starts reach it through a proxy."""
    for name in list(os.environ):
        if name.upper().startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("S3_IGNORE_SUBDOMAIN_BUCKETNAME", "true")  # moto would take `seaweedfs` for a bucket
    with servers.moto() as url:
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("no_proxy", "127.0.0.1,::1")
        for name, value in secrets_of(KUBEFLOW).items():
            monkeypatch.setenv(name, value)
        keys = {"aws_access_key_id": "minio", "aws_secret_access_key": "minio123", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=KUBEFLOW_ENDPOINT, **keys).create_bucket(Bucket=KUBEFLOW_BUCKET)
        yield


def run(folder: Path, parameters: Mapping[str, Any], **pods: Mapping[str, str]) -> str:
    """Run the compiled pipeline, each step in a process with the environment of its pod; what they printed."""
    main = partial(ended, parameters, str(folder / "steps"), pods)
    done = run_script(main, cwd=ROOT, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


H200 = node("h200-0")


@pytest.mark.usefixtures("object_store")
@pytest.mark.parametrize(
    ("may_list", "there", "facts"),
    [
        (False, [H200], ["analytic:h100", "names no hardware", "403", "ClusterRole neuroshard-fleet"]),
        (True, [H200], ["analytic:h200", "no cost model of its hardware is live", "torch sees none here"]),
    ],
    ids=["may not list nodes", "one kind"],
)
def test_it_ends_with_a_live_plan_that_says_first_what_is_not_known(
    tmp_path: Path, may_list: bool, there: list[dict[str, Any]], facts: list[str]
) -> None:
    """The nodes' GPUs are not in this machine, so nothing can be measured of them: where some are to be, few cases are drawn."""
    with nodes.serving(FakeApiServer(there)) as api:
        pod = {
            "KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig", token=None if may_list else "pipeline-runner")),
            "NEUROSHARD_SYSTEM_ROOT": str(machine(tmp_path / "pod", memory_bytes=8 * GIB)),
        }
        printed = run(tmp_path, {"compute_cases": 24, "collective_cases": 8} if may_list else {}, step=pod, measure=pod)
    plan = load_plan(f"s3://{KUBEFLOW_BUCKET}/neuroshard", "mlperf-dlrm-dcnv2")
    first = plan.provenance.instead
    assert [fact for fact in facts if fact not in first] == [], first
    assert "mlperf-dlrm-dcnv2 has today's plan (release 1 is live): degraded: " in printed


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("overlay", sorted(path.name for path in (ROOT / "manifests" / "overlays").iterdir()))
def test_a_first_night_of_an_overlay_measures_in_pods_with_its_limits_and_plans_by_that(
    tmp_path: Path, overlay: str
) -> None:
    """Its parameters and models; but few cases, tables of here, and a formula in place of GPUs. Measuring pods have other limits
    than the others, and here another CPU: one node is not another."""
    folder = ROOT / "manifests" / "overlays" / overlay
    write_tables(tmp_path / "tables.json", tables(6))
    given, models = (yaml.safe_load((folder / name).read_text()) for name in ("parameters.yaml", "models.yaml"))
    kinds = [node(f"{name}-0", product=f"NVIDIA-{name}", labels={"node-pool": "train"}) for name in ("H200", "H100")]
    (tmp_path / "nodes.json").write_text(json.dumps({"items": kinds}))
    here = {"store": str(tmp_path / "store"), "compute_cases": 40, "collective_cases": 16, "max_error": 0.0}
    if given["backend"] == "cuda":
        here |= {"backend": "synthetic", "nodes": str(tmp_path / "nodes.json")}
    here["models"] = json.dumps([{**model, "tables": str(tmp_path / "tables.json")} for model in models])
    limits = {}
    for pod, cpu in (("step", "AMD EPYC 7763"), ("measure", "Intel Xeon 8488C")):
        has = {name: str(parameter(given, f"{pod}_{name}")) for name in ("cpus", "memory")}
        amounts = {"memory_bytes": quantity(has["memory"]), "cores": quantity(has["cpus"]), "node_bytes": 2**40}
        limits[pod] = {"NEUROSHARD_SYSTEM_ROOT": str(machine(tmp_path / pod, cpu=cpu, **amounts))}
    run(tmp_path, {**given, **here}, **limits)
    for model in models:
        plan = load_plan(str(tmp_path / "store"), model["name"])
        assert (plan.provenance.instead, plan.provenance.cost_model_backend) == ("", here.get("backend", "cpu"))
    if given["backend"] == "cpu":
        kind = pod_cpu(quantity(given["measure_memory"])).fingerprint
        assert (tmp_path / "store" / "hardware" / kind / "512" / "live.json").exists()
        [costs] = (tmp_path / "store").rglob("costs.json")
        assert json.loads(costs.read_bytes())["bench"]["facts"] == {"cpu": "Intel Xeon 8488C, 2 cores"}
