"""Which steps of a run failed, and which pods do not start, from the nodes that Argo keeps of it.

    wf(0).root(0).night(0).for-loop-1(0).iteration-iterations(1:1)(0).iteration-item(0).plan(0).executor(0)

That is the name of a node, here of a pod; `(0)` is an attempt, `(1:1)` an item of a loop. A step has two pods, `plan-driver` and
`plan.executor`. Argo's Workflow has the reasons, which the API of runs leaves out, and above 1 MB it has `compressedNodes` (gzip,
then base64) in place of `nodes`.
"""

import base64
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from neuroshard.core.text import counted, one_line

ATTEMPT = re.compile(r"\((\d+)\)")
DRIVER, EXECUTOR = "-driver", "executor"  # the ends of the names of a step's two pods
AGAIN = re.compile(r"-(later|\d+)$")  # of the name of a step that a pipeline has in several places
OF_A_MODEL = ("plan", "search", "deploy")  # search and deploy in packages of before
MOST_STEPS = 5  # in one message
QUICK_SECONDS = 60.0  # pods that are refused fail at once; pods that fail later are not counted
MOST_BYTES = 2**26  # of the nodes of one run: Argo's own limit is 1 MB compressed
# what Argo says of a pod that was given a node and does not start, without the reason
STARTING = ("ContainerCreating", "PodInitializing")
# what it says of a pod that was lost with its node, or taken from it
LOST = re.compile(r"Unknown \(exit code 255\)|^pod deleted|imminent node shutdown", re.IGNORECASE)
ITS_POD = re.compile(r'^pods "[^"]*" is ')  # forbidden: …
FATAL = re.compile(r"F\d{4} [^]]*\] (.*)")  # a last line of glog's; of a step's own failure the launcher has one too


class Task(NamedTuple):
    """A task as the API answers. `state` is empty for a node that ended in an error, and for one that was left out."""

    name: str
    state: str
    is_leaf: bool = True
    error: str = ""  # empty from KFP 2.17
    moved: float = 0.0  # when it began or ended, in seconds since 1970


class Pod(NamedTuple):
    """A pod as Argo keeps it: its step, its node's name, when it began and ended in seconds since 1970 (0 where it has not), and
    what Argo says of it."""

    step: str
    node: str
    name: str
    phase: str
    began: float
    ended: float
    why: str

    @property
    def path(self) -> str:
        return ATTEMPT.sub("", self.node)


class FailedStep(NamedTuple):
    """A step that failed, however often it was tried; its last pod; and the first reason that Argo has for it."""

    name: str
    pod: str = ""
    why: str = ""

    @property
    def is_lost(self) -> bool:
        return bool(LOST.search(self.why))

    @property
    def is_kubeflows(self) -> bool:
        """Whether it is no failure of a step's own, and may go well another time: of a node, or of a driver that was begun."""
        return self.is_lost or (self.name.startswith("the driver") and not ITS_POD.match(self.why))


class Workflow(NamedTuple):
    """Its message, and its nodes by id, both empty where they cannot be read."""

    message: str = ""
    nodes: Mapping[str, Mapping[str, Any]] = {}

    def pods(self, *phases: str) -> list[Pod]:
        """Those in one of these phases, the oldest first."""
        found = []
        for key, node in self.nodes.items():
            if node.get("type") == "Pod" and node.get("phase") in phases:
                workflow, _, end = key.rpartition("-")
                name, why = str(node.get("name") or ""), one_line(str(node.get("message") or ""))
                pod = "-".join(filter(None, (workflow, str(node.get("templateName") or ""), end)))
                began, ended = (_seconds(node.get(time)) for time in ("startedAt", "finishedAt"))
                found.append(Pod(step_name(name), name, pod, str(node["phase"]), began, ended, why))
        return sorted(found, key=lambda one: (one.began, one.node))

    def failed(self) -> list[list[Pod]]:
        """The pods of each step that failed and of which no later attempt succeeded, the first failure first."""
        well = {str(node.get("name")) for node in self.nodes.values() if node.get("phase") == "Succeeded"}
        by_step: dict[str, list[Pod]] = {}
        for pod in self.pods("Failed", "Error"):
            if well.isdisjoint(_scopes(pod.node)):
                by_step.setdefault(pod.path, []).append(pod)
        return list(by_step.values())

    def failed_steps(self) -> list[FailedStep]:
        """Each step that failed, once, whatever its number of attempts."""
        return [
            FailedStep(pods[0].step, pods[-1].name, next((pod.why for pod in pods if pod.why), ""))
            for pods in self.failed()
        ]

    def storm(self) -> tuple[str, int]:
        """The step whose pods failed most often within a minute of their start, and how often that was.

        KFP tries a pod three times, then each level above it three times: a step of which more pods failed is on its way to
        hundreds.
        """
        quick = ([pod for pod in pods if pod.ended - pod.began < QUICK_SECONDS] for pods in self.failed())
        worst = max(quick, key=len, default=[])
        return (worst[0].step, len(worst)) if worst else ("", 0)

    def waiting(self) -> list[Pod]:
        """The pods that have not started, the oldest first, without a reason where Argo does not say it."""
        return [pod._replace(why="" if pod.why in STARTING else pod.why) for pod in self.pods("Pending")]


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
    return Workflow(message, whole)


def steps_of_tasks(tasks: Sequence[Task]) -> list[FailedStep]:
    """The steps that failed, where there is no Workflow and the server answers with the steps themselves (KFP after 2.17)."""
    failed = {task.name: task for task in tasks if task.state == "FAILED" and task.is_leaf}
    found = {ATTEMPT.sub("", name): task.error for name, task in failed.items()}
    return [FailedStep(step_name(name), why=why) for name, why in found.items() if name != EXECUTOR]


def step_text(step: FailedStep, models: str, log: str) -> tuple[str, str]:
    """A step and what it was for, and why it failed: `plan of model 'ads'`, `tables need 40 GiB …`.

    `models` is the run's parameter, `log` that of the step's last pod; each may be empty.
    """
    why = error_line(log) or ITS_POD.sub("its pod is ", step.why) or "failed"
    if step.is_lost:
        why = f"its container was lost with its node ({step.why})"
    return f"{step.name}{_of(step, models, log)}", why


def steps_text(said: Iterable[tuple[str, str]]) -> list[str]:
    """Each reason once, with the first of its steps: `the driver of plan and 4 more steps: its pod is forbidden: …`."""
    reasons: dict[str, list[str]] = {}
    for step, why in said:
        reasons.setdefault(why, []).append(step)
    more = {why: f" and {counted(len(steps) - 1, 'more step')}" if steps[1:] else "" for why, steps in reasons.items()}
    return [f"{steps[0]}{more[why]}: {why}" for why, steps in reasons.items()]


def cut(said: Sequence[str]) -> str:
    """`plan of model 'ads': …; plan of model 'feed': … and 3 more`: the first few."""
    return "; ".join(said[:MOST_STEPS]) + (f" and {len(said) - MOST_STEPS} more" if said[MOST_STEPS:] else "")


def error_line(log: str) -> str:
    """The step's error in the log of its pod: the last line of its traceback, `error: …`, or a driver's; empty without one."""
    lines = log.splitlines()
    begins = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    raised: Iterable[str] = lines[begins[-1] + 1 :] if begins else ()
    for line in raised:
        # neuroshard.core.errors.Infeasible: tables need …; the frames before it are indented
        if match := re.match(r"(?:[\w.]+\.)?([A-Za-z_]\w*)(?:: (.*))?$", line):
            ours = line.startswith("neuroshard.") and match[2]
            return one_line(match[2] if ours else line)
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    fatal = [match[1] for line in lines if (match := FATAL.match(line)) and "failed to execute component" not in line]
    return one_line((errors or fatal or [""])[-1])


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


def _scopes(name: str) -> Iterator[str]:
    """All nodes around a node: `a(0).b(1)` -> a, a(0), a(0).b."""
    return (name[:index] for index, letter in enumerate(name) if letter == "." or (letter == "(" and index))


def step_name(node: str) -> str:
    """`plan` of the node of its executor; `the driver of plan`, `the driver of for-loop-1` of those of drivers."""
    path = ATTEMPT.sub("", node).removesuffix(f".{EXECUTOR}").split(".")
    name = path[-1].removesuffix(DRIVER)
    if name == path[-1]:
        return AGAIN.sub("", name)
    loops = [one for one in path[:-1] if one.startswith("for-loop")]
    if name.startswith("iteration") and loops:  # of the loop itself, or of an item
        return f"the driver of {'an item of ' if name.endswith('item') else ''}{loops[-1]}"
    return f"the driver of {AGAIN.sub('', name)}"


def _seconds(moment: object) -> float:
    """Seconds since 1970; 0 for a time that has not come."""
    try:
        return datetime.fromisoformat(moment).timestamp() if isinstance(moment, str) else 0.0
    except ValueError:
        return 0.0
