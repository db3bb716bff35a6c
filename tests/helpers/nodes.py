"""Nodes as a cluster with NVIDIA's GPU feature discovery has them, and a fake API server that lists them over HTTP."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from helpers.json_handler import JsonHandler
from helpers.loopback import HttpServer

GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def node(
    name: str,
    product: str = "NVIDIA-H200",
    memory_mib: int = 143771,
    devices: int = 8,
    *,
    driver: str = "570.86.15",
    compute: str = "9.0",
    machine: str = "p5en.48xlarge",
    labels: dict[str, str] | None = None,
    allocatable: dict[str, str] | None = None,
    taints: list[dict[str, str]] | None = None,
    ready: bool = True,
    cordoned: bool = False,
) -> dict[str, Any]:
    """A GPU node; `labels` and `allocatable` are put over what such a node has."""
    major, minor = compute.split(".")
    versions = driver.split(".")
    discovered = {
        "kubernetes.io/hostname": name,
        "nvidia.com/gfd.timestamp": "1763712000",
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.memory": str(memory_mib),
        "nvidia.com/gpu.count": str(devices),
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.family": {"9": "hopper", "8": "ampere"}.get(major, "blackwell"),
        "nvidia.com/gpu.compute.major": major,
        "nvidia.com/gpu.compute.minor": minor,
        "nvidia.com/gpu.machine": machine,
        "nvidia.com/gpu.mode": "compute",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "single",
        "nvidia.com/cuda.driver-version.full": driver,
        "nvidia.com/cuda.driver-version.major": versions[0],
        "nvidia.com/cuda.runtime-version.full": "12.8",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**discovered, **(labels or {})}},
        "spec": {**({"taints": taints} if taints else {}), **({"unschedulable": True} if cordoned else {})},
        "status": {
            "allocatable": {"cpu": "190", "memory": "2000Gi", "nvidia.com/gpu": str(devices), **(allocatable or {})},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def mixed_fleet() -> list[dict[str, Any]]:
    """Ten nodes that between them hold every way in which GPUs are cut, shared, kept away or out of order."""
    a100 = {"product": "NVIDIA-A100-SXM4-80GB", "memory_mib": 81920, "compute": "8.0", "machine": "p4de.24xlarge"}
    h100 = {"product": "NVIDIA-H100-80GB-HBM3", "memory_mib": 81559, "machine": "DGX-H100", "taints": [GPU_TAINT]}
    l4 = {"compute": "8.9", "machine": "g6.xlarge", "memory_mib": 23034, "devices": 4, "product": "NVIDIA-L4-SHARED"}
    mig = {"nvidia.com/mig-1g.10gb.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "nvidia.com/mig.strategy": "mixed"}
    single = {**a100, "product": "NVIDIA-A100-SXM4-80GB-MIG-2g.20gb", "memory_mib": 19968, "devices": 24}
    plain = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cpu-0"}, "spec": {}, "status": {}}
    return [
        node("h200-0"),
        node("h200-1"),
        node("h200-2", cordoned=True),
        node("h100-0", **h100),  # type: ignore[arg-type]
        node("h100-1", **h100, ready=False),  # type: ignore[arg-type]
        node("mig-single", **single),  # type: ignore[arg-type]
        node(
            "mig-mixed",
            **a100,  # type: ignore[arg-type]
            labels={**mig, "nvidia.com/mig-1g.10gb.memory": "9728", "nvidia.com/mig-1g.10gb.count": "14"},
            allocatable={"nvidia.com/gpu": "6", "nvidia.com/mig-1g.10gb": "14"},
        ),
        node(
            "shared",
            **l4,  # type: ignore[arg-type]
            labels={"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing"},
        ),
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "no-gfd", "labels": {"nvidia.com/gpu.present": "true"}},
        },
        plain,
    ]


RUNNER = "kubeflow/neuroshard-runner"  # an account


@dataclass
class FakeApiServer:
    """Not Kubernetes: it lists `nodes` as the API does, by label selector, and refuses other tokens.

    It also answers a dry run of a pod: what RBAC allows is in `allowed`, which `accounts` and `secrets` there are is
    "namespace/name", and with `violation` Pod Security refuses. The next answers are those in `faults` (HTTP statuses) while
    there are any. `asked` holds the queries, `posted` what was sent.
    """

    nodes: list[dict[str, Any]]
    token: str = "fleet-token"  # of a fake
    url: str = ""
    faults: list[int] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    allowed: tuple[str, ...] = ("create pods", "get serviceaccounts")
    accounts: tuple[str, ...] = ()
    violation: str = ""
    secrets: tuple[str, ...] = ()
    warnings: dict[str, str] = field(default_factory=dict)  # of pods: "FailedMount: …"
    posted: list[Any] = field(default_factory=list)

    def answer_account(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """Of a dry run of a pod, and of a service account, in the words of the real server's source."""
        self.asked.append(query)
        self.posted.append(body)
        namespace, resource, *name = path.removeprefix("/api/v1/namespaces/").split("/")
        what = f"{'create' if method == 'POST' else 'get'} {resource}"

        def refuse(status: int, message: str) -> tuple[int, Any]:
            return status, {"kind": "Status", "code": status, "message": message}

        if what not in self.allowed:
            cannot = f'User "x" cannot {what.split()[0]} resource "{resource}" in API group ""'
            return refuse(403, f'{resource} is forbidden: {cannot} in the namespace "{namespace}"')
        if resource == "events":
            reason, _, message = self.warnings.get(query["fieldSelector"].split("=")[1].split(",")[0], "").partition(
                ": "
            )
            event = {"metadata": {}, "involvedObject": {}, "reason": reason, "message": message}
            return 200, {"kind": "EventList", "items": [event] if reason else []}
        if method == "GET":
            if f"{namespace}/{name[0]}" not in (self.secrets if resource == "secrets" else self.accounts):
                return refuse(404, f'{resource} "{name[0]}" not found')
            return 200, {"kind": "Secret", "metadata": {"name": name[0], "namespace": namespace}}
        account = body["spec"]["serviceAccountName"]
        if f"{namespace}/{account}" not in self.accounts:
            why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            return refuse(403, f'pods "neuroshard-check-x" is forbidden: {why}')
        if self.violation:
            return refuse(403, f'pods "neuroshard-check-x" is forbidden: violates PodSecurity {self.violation}')
        return 201, body

    def answer(self, path: str, query: dict[str, str], authorization: str | None) -> tuple[int, Any]:
        self.asked.append(query)
        if self.faults:
            status = self.faults.pop(0)
            return status, {"kind": "Status", "code": status, "message": f"fault {status}"}
        if authorization != f"Bearer {self.token}":
            return 403, {"kind": "Status", "code": 403, "message": 'nodes is forbidden: User "x" cannot list "nodes"'}
        if path != "/api/v1/nodes":
            return 404, {"kind": "Status", "code": 404, "message": "not here"}
        key, _, value = query.get("labelSelector", "").partition("=")
        chosen = [one for one in self.nodes if not key or one["metadata"].get("labels", {}).get(key) == value]
        return 200, {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": chosen}

    def kubeconfig(self, path: Path, token: str | None = None) -> Path:
        """A kubeconfig file that leads here."""
        cluster = {"name": "fake", "cluster": {"server": self.url}}
        user = {"name": "fleet", "user": {"token": token or self.token}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "fleet"}}
        heads = {"apiVersion": "v1", "kind": "Config", "current-context": "fake"}
        path.write_text(json.dumps({**heads, "clusters": [cluster], "users": [user], "contexts": [context]}))
        return path


@contextmanager
def serving(server: FakeApiServer) -> Iterator[FakeApiServer]:
    class Handler(JsonHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802 # a name that http.server looks for
            parts = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            if "/namespaces/" in parts.path:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                self.send_json(*server.answer_account(self.command, parts.path, query, body))
                return
            self.send_json(*server.answer(parts.path, query, self.headers.get("Authorization")))

        do_POST = do_GET  # noqa: N815

    with HttpServer(Handler) as http:
        server.url = http.url
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        http.shutdown()
        thread.join()
