"""How large Argo's record of a nightly run is: its nodes, and the bytes of its JSON.

Kubeflow Pipelines 2.17 compiles a pipeline for Argo so that each node holds what it was given: a driver the specifications of its
component, its task and its container, a step the command of its container, with the source of its body. Each is there twice, as
a node that is tried and as one that tries again. What else a node has (times, ids, children) is BESIDE. Above 1 MB Argo
compresses the record. No server is asked: of the one run whose size was recorded, this counts all 121 nodes, and 0.87 MB by the
choice of BESIDE.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from neuroshard.submit.steps import loop_source

BESIDE = 2500  # bytes of a node beside what it was given
PATCH = 1200  # bytes of a step's pod beside its command: environment, resources, labels, node selector
PLACEHOLDER = 60  # bytes of a parameter that is a name or a number
MESSAGES = ("survey", "campaign", "job")  # parameters that were whole messages before steps met in the store

Items = Callable[
    [str, tuple[int, ...]], int
]  # how many items a loop has: its source, and the items of the loops around it


class WorkflowSize(NamedTuple):
    nodes: int = 0
    nbytes: int = 0

    def plus(self, nodes: int, given: int = 0) -> "WorkflowSize":
        """So many more nodes, with so many bytes of inputs and outputs together."""
        return WorkflowSize(self.nodes + nodes, self.nbytes + nodes * BESIDE + given)


class WorkflowSizer:
    """The size of runs of a compiled pipeline. `values` are the bytes of a run's parameters, `message` those of a message."""

    def __init__(self, spec: Mapping[str, Any], platform: Mapping[str, Any], values: int, message: int) -> None:
        self.spec, self.values, self.message = spec, values, message
        self.executors = spec["deploymentSpec"]["executors"]
        self.configs = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]

    def size(self, items: Items) -> WorkflowSize:
        root = self.spec["root"]
        found = WorkflowSize(0, _bytes(self.spec)).plus(2).plus(2, 2 * (_bytes(root) + self.values)).plus(2)
        return self._dag(found, root["dag"], {}, (), items)

    def _dag(
        self, found: WorkflowSize, dag: Mapping[str, Any], inputs: Mapping[str, str], at: tuple[int, ...], items: Items
    ) -> WorkflowSize:
        for task in dag["tasks"].values():
            found = self._task(found, task, inputs, at, items)
        return found

    def _task(
        self, found: WorkflowSize, task: Mapping[str, Any], outer: Mapping[str, str], at: tuple[int, ...], items: Items
    ) -> WorkflowSize:
        component = self.spec["components"][task["componentRef"]["name"]]
        given = 2 * (_bytes(component) + _bytes(task))
        if "dag" not in component:
            label = component["executorLabel"]
            container = self.executors[label]["container"]
            patch = _bytes([*container["command"], *container["args"]]) + PATCH + self._inputs(task)
            driver = given + 2 * (_bytes(container) + _bytes(self.configs.get(label, {})) + patch)
            return found.plus(2, driver).plus(4, 4 * patch)  # the driver; the step, and its pod
        inputs, source = loop_source(task, outer)
        if "condition" in task.get("triggerPolicy", {}) and not items("measures", at):
            return found.plus(3, given)
        if source is None:
            return self._dag(found.plus(4, given), component["dag"], inputs, at, items)
        found = found.plus(5, given)  # the loop, its driver, and its items together
        for item in range(items(source, at)):
            found = self._dag(found.plus(6, given), component["dag"], inputs, (*at, item), items)
        return found

    def _inputs(self, task: Mapping[str, Any]) -> int:
        """Bytes of the parameters and artifacts of a step, as an argument of its command."""
        inputs = task.get("inputs", {})
        names = inputs.get("parameters", {})
        large = sum(self.message for name in names if name in MESSAGES or (name == "model" and "run" not in names))
        return large + PLACEHOLDER * len(names) + 5 * PLACEHOLDER * len(inputs.get("artifacts", {}))


def _bytes(value: object) -> int:
    """As JSON in JSON."""
    return len(json.dumps(json.dumps(value, separators=(",", ":"))))
