"""The nodes of a Kubernetes cluster, asked with the official client."""

from pathlib import Path
from typing import Any

from neuroshard import system
from neuroshard.core.errors import InvalidInput
from neuroshard.core.value import decode_json
from neuroshard.files.disk import read_bytes
from neuroshard.fleet.node import Node
from neuroshard.kube import kubernetes_api

GPU_NODES = "nvidia.com/gpu.present=true"
PAGE = 500  # nodes; 1,000 with their labels are 10 MB of JSON
TIMEOUT = (5.0, 30.0)  # seconds to connect, and between two bytes of an answer
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # where a pod finds its token
EXPIRED = 410  # the status for a page's token that is older than the server's snapshots
LISTINGS = 3  # attempts at a whole listing
WAYS_OUT = {
    401: "; the token is not valid there",
    403: "; bind the ClusterRole neuroshard-fleet (manifests/base/rbac.yaml) to this account",
}


def in_cluster() -> bool:
    """Whether this process runs in a pod with access to the API."""
    return bool(system.read(f"{ACCOUNT}/token"))


def recorded_nodes(path: Path) -> list[Node]:
    """The GPU nodes of a file that `kubectl get nodes -o json` wrote. Raises InvalidInput."""
    listed = decode_json(read_bytes(path), str(path))
    return [node for node in _nodes(listed, str(path)) if node.labels.get("nvidia.com/gpu.present") == "true"]


def list_nodes(context: str | None = None) -> tuple[str, list[Node]]:
    """The address of the cluster's API, and its GPU nodes. Raises NeuroshardError and UsageError in one line.

    In a pod its service account is used, else the kubeconfig, whose `context` may be chosen.
    """
    with kubernetes_api(context=context, hints=WAYS_OUT) as api:
        from kubernetes.client import CoreV1Api

        host = api.configuration.host
        return host, [node for page in _pages(CoreV1Api(api)) for node in _nodes(page, host)]


def _pages(core: Any) -> list[Any]:
    """The pages of the NodeList, as decoded JSON: the client's own classes refuse fields of newer servers."""
    from kubernetes.client.exceptions import ApiException

    for left in reversed(range(LISTINGS)):
        pages: list[Any] = []
        token: str | None = ""
        try:
            while token is not None:
                more = {"_continue": token} if token else {}
                answer = core.list_node(
                    label_selector=GPU_NODES, limit=PAGE, _request_timeout=TIMEOUT, _preload_content=False, **more
                )
                pages.append(decode_json(answer.data, "the Kubernetes API"))
                token = _continue(pages[-1])
            return pages
        except ApiException as error:
            if error.status != EXPIRED or not left:
                raise
    raise AssertionError("unreachable")


def _continue(page: Any) -> str | None:
    """The token of the next page, None after the last."""
    metadata = page.get("metadata") if isinstance(page, dict) else None
    token = metadata.get("continue") if isinstance(metadata, dict) else None
    return token if isinstance(token, str) and token else None


def _nodes(listed: Any, where: str) -> list[Node]:
    items = listed.get("items") if isinstance(listed, dict) else None
    if not isinstance(items, list):
        raise InvalidInput(f"{where}: is not a list of nodes, as `kubectl get nodes -o json` writes it")
    return [Node.from_json(item, f"{where}: items[{index}]") for index, item in enumerate(items)]
