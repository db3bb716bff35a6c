"""Which steps of a run failed, from what Kubeflow Pipelines answers about its tasks.

    wf(0).root(0).plan-models(0).for-loop-1(0).iteration-iterations(1:1)(0).iteration-item(0).search(0).executor(0)

KFP 2.17 answers with Argo's nodes: a display name, a state and the ids of the children each. A node's id is the name of the
workflow and a hash of the node's full name, so the full names can be found again from the display names. `(0)` is an attempt,
`(1:1)` an item of a loop.

Above 1 MB Argo keeps `nodes` as `compressedNodes` (gzip, then base64), which the API does not read: of such a run its tasks are
those of the time before (recorded: 42 tasks of 172 nodes). Then the nodes are read from the Workflow.
"""

import base64
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from neuroshard.core.text import one_line

ATTEMPT = re.compile(r"\((\d+)\)")
ITEM = re.compile(r"\((\d+):[^()]*\)$")
MOST_ATTEMPTS = 10  # of a node; KFP makes three, and an administrator may have asked for more
OF_A_MODEL = ("plan", "search", "deploy")  # search and deploy in packages of before
DRIVER, POD = "-driver", "executor"  # names of a step's two pods
# Argo's templates, which are part of pods' names: of a step with as many labels as ours has, of one without, of a driver
TEMPLATES = (
    "metadata-0-1-system-container-impl",
    "system-container-impl",
    "system-container-driver",
    "system-dag-driver",
)
AGAIN = re.compile(r"-(later|\d+)$")  # of the name of a step that a pipeline has in several places
MOST_STEPS = 5  # in one message
QUICK_SECONDS = 60.0  # pods that are refused fail at once; pods that fail later are not counted
FNV_OFFSET, FNV_PRIME = 0x811C9DC5, 0x01000193
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


class Task(NamedTuple):
    """A task as the API answers. `state` is empty for a node that ended in an error, and for one that was left out."""

    name: str
    state: str
    children: tuple[str, ...] = ()
    began: float = 0.0  # seconds since 1970
    ended: float = 0.0  # 0 while it has not
    error: str = ""  # empty from KFP 2.17


class FailedStep(NamedTuple):
    """A step that failed. `path` is its full name without attempts, `pods` its pods, the last attempt last."""

    name: str
    path: str = ""
    pods: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # the ids of those pods' nodes
    error: str = ""


def fnv1a(text: str, value: int = FNV_OFFSET) -> int:
    """The 32-bit FNV-1a hash of a text, with which Argo makes a node's id from its name; `value` is that of what comes before."""
    for byte in text.encode():
        value = ((value ^ byte) * FNV_PRIME) & 0xFFFFFFFF
    return value


class Nodes:
    """The tasks of a run, by the full names of Argo's nodes."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.ids = {child for task in tasks for child in task.children}
        self.workflow = next(iter(self.ids)).rpartition("-")[0] if self.ids else ""

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The full name of every node by its id; empty where the ids are not Argo's."""
        displayed = sorted({task.name for task in self.tasks if not re.search(r"\(\d+\)$", task.name)})
        ends = [*(f".{name}" for name in displayed), *(f"({attempt})" for attempt in range(MOST_ATTEMPTS))]
        found, todo = {}, [(self.workflow, fnv1a(self.workflow))]
        while todo and self.workflow:
            scope, value = todo.pop()
            for end in ends:
                inner = fnv1a(end, value)
                key = f"{self.workflow}-{inner}"
                if key in self.ids and key not in found:
                    found[key] = scope + end
                    todo.append((found[key], inner))
        return found

    @cached_property
    def parents(self) -> Mapping[str, Task]:
        """The tasks that have nodes inside of them, by full name. Nodes of one display name differ in their children's ids."""
        found: dict[str, Task] = {}
        for task in self.tasks:
            inner = (self.names.get(child, "") for child in task.children)
            scopes = [scope for name in inner for scope in _scopes(name) if _displayed(scope) == task.name]
            if scopes:
                found[max(scopes, key=len)] = task
        return found

    def failed(self) -> Iterator[tuple[str, Task]]:
        """The innermost nodes that failed without a later attempt that succeeded, by full name, in the order of time."""
        bad = {name: task for name, task in self.parents.items() if task.state == "FAILED"}
        outer = {scope for name in bad for scope in _scopes(name)}
        for name, task in sorted(bad.items(), key=lambda one: (one[1].ended, one[0])):
            well = (self.parents.get(scope) for scope in _scopes(name))
            if name not in outer and not any(one is not None and one.state == "SUCCEEDED" for one in well):
                yield name, task

    def attempts(self, name: str) -> list[str]:
        """The ids of the pods of a node that is tried again and again, the first one first."""
        made = (f"{self.workflow}-{fnv1a(f'{name}({attempt})')}" for attempt in range(MOST_ATTEMPTS))
        return [key for key in made if key in self.ids]


def failed_steps(tasks: Sequence[Task]) -> list[FailedStep]:
    """Each step that failed, once, whatever its number of attempts.

    A server that answers with the steps themselves (KFP after 2.17) is understood too; its steps have no path and no pods.
    """
    nodes = Nodes(tasks)
    found: dict[str, FailedStep] = {}
    for name, _ in nodes.failed():
        path = ATTEMPT.sub("", name)
        step = step_name(path)
        keys = nodes.attempts(name)
        if step:
            pods = tuple(key.rpartition("-")[2] for key in keys)
            found[path] = FailedStep(step, path.removesuffix(f".{POD}"), pods, tuple(keys))  # the last attempt stays
    if found or nodes.names:
        return list(found.values())
    for task in tasks:
        if task.state == "FAILED" and not task.children:
            found[task.name] = FailedStep(ATTEMPT.sub("", task.name), error=task.error)
    return list(found.values())


def refused_at_once(tasks: Sequence[Task]) -> tuple[str, int]:
    """The step whose pods failed most often within a minute of their start, and how often that was.

    KFP tries a pod three times, then each level above it three times: a step of which more pods failed is on its way to hundreds.
    """
    if not any(task.state == "FAILED" for task in tasks):
        return "", 0
    nodes = Nodes(tasks)
    counts: dict[str, int] = {}
    for name, task in nodes.failed():
        if task.ended - task.began < QUICK_SECONDS:
            path = ATTEMPT.sub("", name)
            counts[path] = counts.get(path, 0) + len(nodes.attempts(name))
    worst = max(counts, key=lambda path: counts[path], default="")
    return (step_name(worst), counts[worst]) if worst else ("", 0)


def running_pods(tasks: Sequence[Task]) -> list[str]:
    """The ends of the names of the pods that are recorded as running."""
    nodes = Nodes(tasks)
    running = {task.name for task in tasks if task.state == "RUNNING" and not task.children}
    found = []
    for name, task in nodes.parents.items():
        last = nodes.attempts(name)[-1:]
        if task.state == "RUNNING" and last and _displayed(nodes.names[last[0]]) in running:
            found.append(last[0].rpartition("-")[2])
    return found


def step_text(step: FailedStep, models: str, log: str, message: str) -> str:
    """`search of model 'ads': tables need 40 GiB …`: the step, what it was for, and why it failed.

    `models` is the run's parameter, `log` that of the step's last pod and `message` what Argo says of that pod; each may be
    empty.
    """
    why = error_line(log) or one_line(message) or step.error or "failed"
    return f"{step.name}{_of(step, models, log)}: {why}"


def steps_text(said: Sequence[str]) -> str:
    """`search of 'ads': …; deploy of 'feed': … and 3 more`: the error of each step, for the first few."""
    more = f" and {len(said) - MOST_STEPS} more" if len(said) > MOST_STEPS else ""
    return "; ".join(said[:MOST_STEPS]) + more


def error_line(log: str) -> str:
    """The step's error in the log of its pod: the last line of its traceback, or `error: …`; empty if there is none."""
    lines = log.splitlines()
    begins = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    raised: Iterable[str] = lines[begins[-1] + 1 :] if begins else ()
    for line in raised:
        # neuroshard.core.errors.Infeasible: tables need …; the frames before it are indented
        if match := re.match(r"(?:[\w.]+\.)?([A-Za-z_]\w*)(?:: (.*))?$", line):
            ours = line.startswith("neuroshard.") and match[2]
            return one_line(match[2] if ours else line)
    errors = [line for line in lines if line.startswith("error: ")]
    return one_line(errors[-1].removeprefix("error: ")) if errors else ""


def _of(step: FailedStep, models: str, log: str) -> str:
    """The model or the kind of hardware of a step, by its inputs in its log, else the only model of the run."""
    _, _, rest = log.partition("Got executor_input:\n")  # kfp writes them at the beginning
    given = _in_json(rest, "inputs", "parameterValues")
    given = given if isinstance(given, dict) else {}
    model = given.get("model")  # a name; of packages of before, a Survey of the model alone
    if name := _in_json(model, "models", 0, "name") if str(model).startswith("{") else model:
        return f" of model {name!r}"
    for value in given.values():  # a Job or a Campaign
        if hardware := _in_json(value, "campaign", "hardware", "name") or _in_json(value, "hardware", "name"):
            return f" on {one_line(hardware, 80)}"
    only = _in_json(models, 0, "name") if _in_json(models, 1) is None and step.name in OF_A_MODEL else ""
    return f" of model {only!r}" if only else ""


def _in_json(text: object, *path: str | int) -> Any:
    """What the JSON at the beginning of a text has at a path; None where it has nothing there."""
    try:
        found = json.JSONDecoder().raw_decode(text)[0]  # type: ignore[arg-type]
        for key in path:
            found = found[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found


def _scopes(name: str) -> list[str]:
    """All nodes around a node: `a(0).b(1)` -> a, a(0), a(0).b."""
    return [name[:index] for index, letter in enumerate(name) if letter == "." or (letter == "(" and index)]


def _displayed(name: str) -> str:
    """The display name of a node: the end of its full name."""
    return name.rpartition(".")[2]


def step_name(path: str) -> str:
    """The step of a node's path, without attempts and AGAIN; empty for a node that only contains steps."""
    name = _displayed(path.removesuffix(f".{POD}"))
    return AGAIN.sub("", name.removesuffix(DRIVER)) if not ITEM.search(name) else ""


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
