"""The nodes of a Kubernetes cluster, asked with the official client, and what a fleet needs of each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from neuroshard import system
from neuroshard.core.errors import InvalidInput
from neuroshard.core.text import first_few
from neuroshard.core.value import Value, decode_json, shown
from neuroshard.files.disk import read_bytes
from neuroshard.kube import kubernetes_api

# Of AMD's node labeller (ROCm/k8s-device-plugin, cmd/k8s-node-labeller), which gives some nodes no product; of node feature
# discovery by the rule of AMD's GPU operator
AMD_DEVICE, AMD_PRODUCT = "amd.com/gpu.device-id", "amd.com/gpu.product-name"
AMD_NODES = AMD_DEVICE, "feature.node.kubernetes.io/amd-gpu"
GPU_NODES = "nvidia.com/gpu.present=true", *AMD_NODES
# Seconds to connect, and between two bytes of an answer: 1,000 nodes with their labels are 10 MB of JSON
TIMEOUT = (5.0, 30.0)
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # where a pod finds its token
WAYS_OUT = {
    401: "; the token is not valid there",
    403: "; bind the ClusterRole neuroshard-fleet (manifests/base/rbac.yaml) to this account",
}


class Taint(Value):
    key: str
    value: str = ""
    effect: str


class Toleration(Value):
    """A toleration, by the rules of Kubernetes: an empty effect, or an empty key, tolerates any."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def bears(self, taint: Taint) -> bool:
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == taint.value)


class Node(Value):
    """A node. `allocatable` counts each resource that its pods may have in all."""

    name: str
    labels: dict[str, str]
    allocatable: dict[str, Annotated[int, Field(ge=0, lt=2**63)]]  # int64 in Kubernetes
    taints: tuple[Taint, ...]
    cordoned: bool
    ready: bool

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Parse a Node object of the API. Raises InvalidInput."""
        try:
            metadata, spec, status = data["metadata"], data.get("spec") or {}, data.get("status") or {}
            conditions = {condition["type"]: condition["status"] for condition in status.get("conditions") or ()}
            return cls.parse(
                {
                    "name": metadata["name"],
                    "labels": metadata.get("labels") or {},
                    # devices are whole numbers; CPUs and memory have units (7820m, 32Gi), and are not needed here
                    "allocatable": {
                        name: int(count)
                        for name, count in (status.get("allocatable") or {}).items()
                        if str(count).isdecimal()
                    },
                    "taints": spec.get("taints") or (),
                    "cordoned": bool(spec.get("unschedulable")),
                    "ready": conditions.get("Ready") == "True",
                },
                where,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{where}: is not a Kubernetes node: {type(error).__name__}: {shown(error)}") from None

    def takes_work(self, tolerations: Sequence[Toleration]) -> bool:
        """Whether a pod with these tolerations would be scheduled here and stay."""
        keeping_off = (taint for taint in self.taints if taint.effect in ("NoSchedule", "NoExecute"))
        return (
            self.ready and not self.cordoned and all(any(t.bears(taint) for t in tolerations) for taint in keeping_off)
        )

    def label(self, key: str) -> str:
        """The value of a label. Raises InvalidInput where the node lacks it."""
        if key not in self.labels:
            raise InvalidInput(f"node {self.name}: has no label {key}; is GPU feature discovery running there?")
        return self.labels[key]

    def number(self, key: str, default: int | None = None) -> int:
        """The value of a label that is a number. Raises InvalidInput."""
        text = self.labels.get(key, "" if default is None else str(default)) or self.label(key)
        if not text.isdecimal() or len(text) > 12:
            raise InvalidInput(f"node {self.name}: label {key} is {shown(text)}, not a whole number")
        return int(text)


def in_cluster() -> bool:
    """Whether this process runs in a pod with access to the API."""
    return bool(system.read(f"{ACCOUNT}/token"))


def labelled(nodes: Sequence[Node]) -> list[Node]:
    """Those that are found by GPU_NODES."""
    key, present = GPU_NODES[0].split("=")
    return [one for one in nodes if one.labels.get(key) == present or not one.labels.keys().isdisjoint(AMD_NODES)]


def unlabelled(nodes: Sequence[Node]) -> str:
    """What to say where no node is found by its label: which label it is, and which nodes have GPUs without one."""
    having = [one.name for one in nodes if one.allocatable.get("nvidia.com/gpu") or one.allocatable.get("amd.com/gpu")]
    whose = f", and there are GPUs without it in {first_few(having)}: is GPU feature discovery running there?"
    return f"no node has the label {' or '.join(GPU_NODES)}{whose if having else ''}"


def list_nodes(recorded: Path | None = None, context: str | None = None) -> tuple[str, list[Node]]:
    """The nodes of a file that `kubectl get nodes -o json` wrote, else of the cluster, and where they were listed.

    In a pod its service account is used, else the kubeconfig, whose `context` may be chosen. Raises NeuroshardError in one line.
    """
    if recorded is not None:
        return str(recorded), _nodes(decode_json(read_bytes(recorded), str(recorded)), str(recorded))
    with kubernetes_api(context=context, hints=WAYS_OUT) as api:
        from kubernetes.client import CoreV1Api

        # As JSON, since the client's own classes refuse fields of newer servers; and all at once, as the server holds them in its
        # memory: pages of a list expire while they are asked for
        answer = CoreV1Api(api).list_node(resource_version="0", _request_timeout=TIMEOUT, _preload_content=False)
        return (host := api.configuration.host), _nodes(decode_json(answer.data, "the Kubernetes API"), host)


def _nodes(listed: Any, where: str) -> list[Node]:
    items = listed.get("items") if isinstance(listed, dict) else None
    if not isinstance(items, list):
        raise InvalidInput(f"{where}: is not a list of nodes, as `kubectl get nodes -o json` writes it")
    return [Node.from_json(item, f"{where}: items[{index}]") for index, item in enumerate(items)]
