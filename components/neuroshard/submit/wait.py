"""Waits for a run: it fails where the run fails, and says which pods cannot start, and why.

What a run says of itself is what its steps recorded in the store, in runs of any size, whatever Kubeflow's API shows.
"""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import NamedTuple, TypeVar

from neuroshard.core.clean import log
from neuroshard.core.errors import NO_CREDENTIALS, NeuroshardError
from neuroshard.core.text import counted, first_few, one_line
from neuroshard.core.units import format_duration
from neuroshard.kube import last_warning
from neuroshard.orders.nightly import Survey, Verdict
from neuroshard.store.night import NightRecords, not_learned, read_night, read_verdict
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.submit.kubeflow import Kubeflow, NotAnswering, Run
from neuroshard.submit.steps import (
    MOST_STEPS,
    FailedStep,
    Pod,
    Task,
    Workflow,
    cut,
    step_text,
    steps_of_tasks,
    steps_text,
)

PATIENCE_SECONDS = 600.0  # longer than an API server takes to restart
MOST_POLL_SECONDS = 15.0  # between two requests to an API that does not answer
STORM = 6  # pods of one step that failed at once: KFP makes three of a step, so the levels above it have begun again
# Of a run that failed: a deploy is one swap.
WHAT_IS_LIVE = "models that it had deployed by then have their new plans, and the others keep theirs"
STILL_SECONDS = 300.0  # a run of which nothing has changed for so long may be an orphan
STILL_CHECKS = 2  # the same for its pods: a persistence agent that restarts is late too
STARTING_SECONDS = 180.0  # a pod that has not started for so long is named; large images take a minute or two to pull
LOOK_SECONDS = 60.0  # between two looks at Argo's nodes, which may be 1 MB

Answer = TypeVar("Answer")
NOTHING = NightRecords((), None)  # was recorded


class Waiting(NamedTuple):
    """How long a run is waited for, and where its outcome is reported: a metrics file or Pushgateway, an event at this pod.

    A run of which a pod has not started for `start_seconds` is terminated; 0 for never. `namespace` is that of its pods.
    """

    seconds: float
    poll_seconds: float
    metrics: str | None = None
    event: bool = False
    start_seconds: float = 0.0
    namespace: str = "kubeflow"


class Terminated(NeuroshardError):
    """This process received SIGTERM while it waited."""

    exit_code = 143


class Orphaned(NeuroshardError):
    """Kubeflow records a run as running, but none of its pods exists any more."""


class Lost(NeuroshardError):
    """A run failed by no fault of its steps: a container was lost with its node, or a driver of Kubeflow's failed."""


class Patience:
    """Repeats requests to an API that does not answer, with one note when it stops answering and one when it answers again."""

    def __init__(self, seconds: float, poll_seconds: float) -> None:
        self.seconds, self.poll_seconds = seconds, min(poll_seconds, MOST_POLL_SECONDS)

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """What `question` returns. Raises NotAnswering if it has not answered within `seconds`."""
        began: float | None = None
        while True:
            try:
                answer = question()
            except NotAnswering as error:
                if self.seconds <= (time.monotonic() - began if began else 0):
                    raise
                if began is None:
                    began = time.monotonic()
                    note(f"{error}; asking again for {format_duration(self.seconds)}")
                time.sleep(self.poll_seconds)
                continue
            if began is not None:
                note(f"Kubeflow Pipelines answers again, after {format_duration(time.monotonic() - began)}")
            return answer


def wait(kubeflow: Kubeflow, run_id: str, patience: Patience, waiting: Waiting) -> Iterator[str]:
    """Each state of the run until it has succeeded, and which pods do not start. Raises NeuroshardError where it ends otherwise.

    kfp's own wait never sees a run that was cancelled, nor one whose Workflow was deleted. A run whose pods are refused again
    and again is terminated: KFP would retry them hundreds of times.
    """
    with stoppable(lambda: f"run {run_id} continues, and the same command waits for it again"):
        deadline, orphans, pods, state = time.monotonic() + waiting.seconds, OrphanWatch(), PodWatch(waiting), ""
        while True:
            try:
                run = patience.ask(lambda: kubeflow.run(run_id))
            except NotAnswering as error:
                raise NeuroshardError(f"{error}; run {run_id} may continue, and nothing waits for it") from None
            if run.state != state:
                state = run.state
                yield f"run {run_id}: {state}"
            if run.ended:
                break
            if reason := orphans.orphaned(kubeflow, run):
                raise Orphaned(f"run {run_id} is recorded as {state} for ever: {reason}; delete the record in Kubeflow")
            yield from pods.look(kubeflow, run)
            step, times = pods.workflow.storm()
            if times >= STORM and state != "CANCELING":
                reason = f"{times} pods of {step} failed as soon as they were created, and Kubeflow keeps creating them"
                # what steps recorded is left out: those that run have not ended
                end(
                    kubeflow,
                    run,
                    patience,
                    f"{reason}{why(kubeflow, run, pods.workflow.failed_steps(), waiting, NOTHING)}",
                )
            if pods.too_long:
                end(kubeflow, run, patience, pods.too_long)
            if time.monotonic() > deadline:
                raise NeuroshardError(
                    f"run {run_id} is {state} after {format_duration(waiting.seconds)}; it continues, but nothing waits for it"
                )
            time.sleep(pause(waiting.poll_seconds, waiting.seconds - (deadline - time.monotonic())))
        workflow = kubeflow.workflow(run) if state != "SUCCEEDED" else Workflow()
        failed = workflow.failed_steps() or steps_of_tasks(run.tasks)
        if run.terminated and state != "SUCCEEDED":
            steps = ", ".join(dict.fromkeys(step.name for step in failed))
            during = f" during {steps}" if steps else ""
            raise NeuroshardError(f"run {run_id} was terminated by a request to Kubeflow{during}; {WHAT_IS_LIVE}")
        night, lines = night_of(run)
        yield from (f"run {run_id}: {line}" for line in lines)
        if state != "SUCCEEDED":
            said = why(kubeflow, run, failed, waiting, night, workflow.message)
            own = any(one.error for one in night.outcomes) or not all(step.is_kubeflows for step in failed)
            kind = NeuroshardError if own or not failed else Lost
            raise kind(f"run {run_id} ended as {state}{said}; {WHAT_IS_LIVE}")


def pause(most: float, elapsed: float) -> float:
    """Seconds between two looks at a run: at first one, then 3 % of the time that it has taken, so that a short one is seen."""
    return min(most, max(elapsed * 0.03, 1.0))


class OrphanWatch:
    """Detects orphans: runs whose record does not change and of which nothing runs."""

    def __init__(self) -> None:
        self.tasks: tuple[Task, ...] = ()
        self.since = self.asked = time.monotonic()
        self.gone = 0

    def orphaned(self, kubeflow: Kubeflow, run: Run) -> str:
        """Why the run will never end; empty if it may. Asks the cluster only now and then."""
        now = time.monotonic()
        if run.tasks != self.tasks:
            self.tasks, self.since, self.asked, self.gone = run.tasks, now, now, 0
        if now - self.asked < STILL_SECONDS:
            return ""
        self.asked = now
        try:
            if run.recurring_run_id and not kubeflow.has_recurring(run.recurring_run_id):
                return "its recurring run was deleted while it ran, and its pods with that"
            self.gone = self.gone + 1 if kubeflow.pods_are_gone(run) else 0
        except NotAnswering:
            return ""
        return "its pods are gone (was its Workflow deleted?)" if self.gone >= STILL_CHECKS else ""


class PodWatch:
    """Says which pods do not start and why, again when the reason changes.

    `workflow` is what Argo had when it was last looked at; `too_long` says of which pod the caller need not wait any longer.
    """

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.workflow = Workflow()
        self.too_long = ""
        self.tasks: tuple[Task, ...] = ()
        self.moved = self.looked = time.monotonic()
        self.said: set[tuple[str, str]] = set()  # steps and reasons

    def look(self, kubeflow: Kubeflow, run: Run) -> Iterator[str]:
        """A line for each step whose pods have not started for some minutes. Asks for Argo's nodes only while that may be so, and
        where a task failed."""
        now = time.monotonic()
        failed = any(task.state in ("FAILED", "") for task in run.tasks)
        if run.tasks != self.tasks and not any(task.state == "PENDING" for task in run.tasks):
            self.tasks, self.moved = run.tasks, now
        if now - self.looked < LOOK_SECONDS or not (failed or now - self.moved >= STARTING_SECONDS):
            return
        self.looked = now
        self.workflow = workflow = kubeflow.workflow(run)
        late: dict[tuple[str, str], list[Pod]] = {}
        for pod in workflow.waiting():
            if time.time() - pod.began >= STARTING_SECONDS:
                reason = pod.why or last_warning(self.waiting.namespace, pod.name)
                late.setdefault((pod.step, reason), []).append(pod)
        if not workflow.nodes and not run.tasks and run.state == "PENDING":
            command = f"kubectl -n {self.waiting.namespace} describe workflows -l pipeline/runid={run.run_id}"
            late["", f"it has no pod yet: {workflow.message or command}"] = []
        begins = [pods[0].began for pods in late.values() if pods]
        still, step = (time.time(), "") if workflow.nodes else idle(run)
        if step and time.time() - still >= STARTING_SECONDS:
            begins.append(still)
            command = f"kubectl -n {self.waiting.namespace} get workflows -l pipeline/runid={run.run_id} -o yaml"
            late["", f"no step has run since {step}, and Kubeflow does not say why: {command} may"] = []
        lines = {key: self._line(*key, pods) for key, pods in late.items()}
        yield from (f"run {run.run_id}: {line}" for key, line in lines.items() if key not in self.said)
        self.said = set(late)
        since = min(begins, default=time.time())
        if self.waiting.start_seconds and time.time() - since >= self.waiting.start_seconds:
            self.too_long = f"{next(iter(lines.values()))}, for {format_duration(time.time() - since)}"

    def _line(self, step: str, reason: str, pods: list[Pod]) -> str:
        if not pods:
            return reason
        command = f"kubectl -n {self.waiting.namespace} describe pod {pods[0].name}"
        which = f"pod {pods[0].name} has" if len(pods) == 1 else f"{counted(len(pods), 'pod')} have"
        return f"{step} waits, its {which} not started: {reason or f'{command} says why'}"


def end(kubeflow: Kubeflow, run: Run, patience: Patience, reason: str) -> None:
    """Terminate a run and raise NeuroshardError."""
    patience.ask(lambda: kubeflow.terminate(run.run_id))
    raise NeuroshardError(f"run {run.run_id} was terminated: {reason}; {WHAT_IS_LIVE}")


def why(
    kubeflow: Kubeflow, run: Run, failed: Sequence[FailedStep], waiting: Waiting, night: NightRecords, message: str = ""
) -> str:
    """Why the steps failed, in brackets: as they recorded it, then what Kubeflow knows of those that recorded nothing; the
    Workflow's `message` if there is none. Empty if none failed."""
    recorded = Counter(one.step for one in night.outcomes if one.error)
    counts = Counter(step.name for step in failed)
    others = [step for step in failed if counts[step.name] > recorded[step.name]]
    reasons = steps_text(
        kubeflow.reason(run, step, waiting.namespace) if index < MOST_STEPS else step_text(step, run.models, "")
        for index, step in enumerate(others)
    )
    said = [*night.texts(counts), *reasons, *([one_line(message)] if message and not failed else [])]
    last = night.outcomes[-1:]
    if not recorded and last:  # a pod that is never made records nothing
        said.append(f"the last step that began was {last[0].step} at {last[0].began}")
    text = cut(said)
    if NO_CREDENTIALS in text and run.secret:
        text += f"; is there a secret {run.secret} in namespace {waiting.namespace}, with credentials of the store?"
    return f" ({text})" if text else ""


def night_of(run: Run) -> tuple[NightRecords, tuple[str, ...]]:
    """What the steps of a run recorded, and what is to be said of its models and kinds of hardware.

    Nothing, and a note, where its store cannot be read from here.
    """
    if not run.store:
        return NOTHING, ()
    try:
        store = open_store(run.store)
        found = read_night(store, run.run_id)
        return found, told(store, found.survey, ended_well=run.state == "SUCCEEDED") if found.survey else ()
    except NeuroshardError as error:
        log(f"note: what the steps recorded in {run.store} cannot be read from here: {one_line(error)}")
        return NOTHING, ()


def told(store: Store, survey: Survey, *, ended_well: bool) -> tuple[str, ...]:
    """What was measured, what of it failed, which models have another kind of hardware than before, and which have less than they
    should: a line for all models of which the same is to be said. What failed in measuring is said once, not of each model too.

    Of a run that did not end well nothing is said of models that it did not come to. Raises Unreachable.
    """
    lines, causes = [f"measured {kind.hardware.name}: {kind.why}" for kind in survey.campaigns], []
    for kind in survey.campaigns:
        if failed := not_learned(store, kind):
            lines.append(f"degraded: {failed}")
            causes.append(failed.removeprefix(f"{kind.hardware.name}: "))
    models: dict[str, list[Verdict]] = {}
    for spec in survey.models:
        verdict = read_verdict(store, survey, spec.name)
        if verdict is None and ended_well:
            lines.append(f"degraded: {spec.name}: this run's verdict is not in the store; did another run plan it?")
        elif (
            verdict is not None and verdict.end != "red" and (verdict.is_degraded or verdict.before)
        ):  # red: its step failed
            key = verdict.model_copy(update={"model": "", "release": 0}).text
            models.setdefault(key, []).append(verdict)
    for same in models.values():
        text = same[0].text
        for cause in causes:
            text = text.replace(f"; {cause}", "")
        others = f"; the same of {first_few([one.model for one in same[1:]])}" if same[1:] else ""
        lines.append(f"{'degraded: ' if same[0].is_degraded else ''}{text}{others}")
    return tuple(lines)


def idle(run: Run) -> tuple[float, str]:
    """Since when no step of a run under way has run, in seconds since 1970, and after which step.

    Now and "" while one runs, and where that cannot be known.
    """
    with suppress(NeuroshardError, ValueError):
        outcomes = read_night(open_store(run.store), run.run_id).outcomes if run.store else ()
        if outcomes and all(one.ended for one in outcomes):
            last = max(outcomes, key=lambda one: one.ended)
            return datetime.fromisoformat(last.ended).timestamp(), f"{last.step} ended at {last.ended}"
    return time.time(), ""


def note(text: str) -> None:
    log(f"note: {text}")


@contextmanager
def stoppable(what: Callable[[], str]) -> Iterator[None]:
    """During the block, SIGTERM raises an error of one line: a drained node, a deadline, a deleted job.

    `what` returns the state to report.
    """

    def stop(*_: object) -> None:
        raise Terminated(f"stopped by SIGTERM; {what()}")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
