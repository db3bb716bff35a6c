"""A run as Argo keeps it: its nodes with their reasons, also those that Argo compressed, and the pods that wait to start.

Above 1 MB Argo keeps `nodes` as `compressedNodes` (gzip, then base64), which the Kubeflow Pipelines API does not read: of such a
run its tasks are those of the time before (recorded: 42 tasks of 172 nodes).
"""

import base64
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from neuroshard.core.text import one_line
from neuroshard.submit.steps import ATTEMPT, Task, step_name

MOST_BYTES = 2**26  # of the nodes of one run: Argo's own limit is 1 MB compressed
STATES = {
    "Pending": "PENDING",
    "Running": "RUNNING",
    "Succeeded": "SUCCEEDED",
    "Failed": "FAILED",
    "Skipped": "SKIPPED",
}
# what Argo says of a pod that was given a node and does not start, without the reason
STARTING = ("ContainerCreating", "PodInitializing")


class WaitingPod(NamedTuple):
    """A pod that was made and has not started. `since` is in seconds since 1970; `why` is empty where Argo does not say."""

    step: str
    pod: str
    since: float
    why: str


class Workflow(NamedTuple):
    """Its message, and its nodes by id, both empty where they cannot be read."""

    message: str = ""
    nodes: Mapping[str, Mapping[str, Any]] = {}
    compressed: bool = False

    def tasks(self) -> tuple[Task, ...]:
        """The nodes as the API answers with them where they are not compressed."""
        return tuple(
            Task(
                name=str(node.get("displayName") or ""),
                state=STATES.get(str(node.get("phase")), ""),
                children=tuple(str(child) for child in _list(node.get("children"))),
                began=_seconds(node.get("startedAt")),
                ended=_seconds(node.get("finishedAt")),
            )
            for node in self.nodes.values()
        )

    def waiting(self) -> list[WaitingPod]:
        """The pods that have not started, the oldest first."""
        found = []
        for key, node in self.nodes.items():
            if node.get("type") == "Pod" and node.get("phase") == "Pending":
                workflow, _, end = key.rpartition("-")
                pod = "-".join(filter(None, (workflow, str(node.get("templateName") or ""), end)))
                why = one_line(str(node.get("message") or ""))
                step = step_name(ATTEMPT.sub("", str(node.get("name") or "")))
                found.append(
                    WaitingPod(step or "a step", pod, _seconds(node.get("startedAt")), "" if why in STARTING else why)
                )
        return sorted(found, key=lambda one: one.since)


def read_workflow(manifest: object) -> Workflow:
    """Parses `workflow_manifest` of API v1beta1. What is damaged, or kept elsewhere, is left out."""
    try:
        status = json.loads(manifest)["status"] if isinstance(manifest, str) else {}
        nodes, packed = status.get("nodes"), status.get("compressedNodes")
        if packed and not nodes:
            with gzip.open(io.BytesIO(base64.b64decode(packed))) as unpacked:
                nodes = json.loads(unpacked.read(MOST_BYTES))
        message = str(status.get("message") or "")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Workflow()
    whole = {key: one for key, one in nodes.items() if isinstance(one, dict)} if isinstance(nodes, dict) else {}
    return Workflow(message, whole, bool(packed))


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _seconds(moment: object) -> float:
    """Seconds since 1970; 0 for a time that has not come."""
    try:
        return datetime.fromisoformat(moment).timestamp() if isinstance(moment, str) else 0.0
    except ValueError:
        return 0.0
