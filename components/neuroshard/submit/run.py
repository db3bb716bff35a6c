"""Submit the packaged pipeline, wait, and fail where it fails: `neuroshard submit`, which the nightly CronJob runs."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

from neuroshard.core.clean import log
from neuroshard.core.errors import NeuroshardError
from neuroshard.core.units import format_duration
from neuroshard.kube import Admission, admission
from neuroshard.submit.kubeflow import Kubeflow, NotAnswering, Run, Server
from neuroshard.submit.outcome import RunOutcome, report_outcome
from neuroshard.submit.package import RunSettings
from neuroshard.submit.steps import refused_at_once, steps_text

PATIENCE_SECONDS = 600.0  # longer than an API server takes to restart
MOST_POLL_SECONDS = 15.0  # between two requests to an API that does not answer
STORM = 6  # pods of one step that failed at once: KFP makes three of a step, so the levels above it have begun again
# Of a run that failed: a deploy is one swap.
WHAT_IS_LIVE = "models that it had deployed by then have their new plans, and the others keep theirs"
STILL_SECONDS = 300.0  # a run of which nothing has changed for so long may be an orphan
STILL_CHECKS = 2  # the same for its pods: a persistence agent that restarts is late too

# the namespace and the account in which Kubeflow Pipelines runs pods by default
RUNS_NAMESPACE, RUNS_ACCOUNT, PROFILE_ACCOUNT = "kubeflow", "pipeline-runner", "default-editor"

Answer = TypeVar("Answer")


class Waiting(NamedTuple):
    """How long a run is waited for, and where its outcome is reported: a metrics file or Pushgateway, an event at this pod."""

    seconds: float
    poll_seconds: float
    metrics: str | None = None
    event: bool = False


class Terminated(NeuroshardError):
    """This process received SIGTERM while it waited."""

    exit_code = 143


class Orphaned(NeuroshardError):
    """Kubeflow records a run as running, but none of its pods exists any more."""


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


def run(
    server: Server,
    settings: RunSettings,
    waiting: Waiting | None,
    *,
    dry_run: bool = False,
    patience_seconds: float = PATIENCE_SECONDS,
    check: Callable[[], Admission] | None = None,
) -> Iterator[str]:
    """Submit and, with `waiting`, wait for the end: lines to print, as they come. Raises NeuroshardError where the run fails.

    An API that does not answer is asked again for `patience_seconds`. `check` asks the cluster whether it accepts the run's
    pods, before any is created.
    """
    began, succeeded, message = time.time(), False, "was cut off"
    patience = Patience(patience_seconds, waiting.poll_seconds if waiting else MOST_POLL_SECONDS)
    submission = Submission(lambda: Kubeflow(server), settings, check)
    try:
        if dry_run:
            yield from submission.rehearsed()
            return
        yield from submit_and_wait(submission, patience, waiting)
        succeeded, message = True, f"run {submission.run_id} succeeded"
    except NeuroshardError as error:
        message = str(error)
        raise
    finally:
        if waiting is not None and not dry_run:
            report_outcome(RunOutcome(began, time.time(), succeeded, message), waiting.metrics, waiting.event)


def submit_and_wait(submission: "Submission", patience: Patience, waiting: Waiting | None) -> Iterator[str]:
    """Submit and, with `waiting`, wait. If the run with the same parameters is an orphan, another run is submitted."""
    while True:
        with stoppable(lambda: submission.unfinished):
            submitted = settled(patience, submission)
        yield f"run {submitted.run_id}: {submission.how} ({submitted.name})"
        if waiting is None:
            return
        try:
            yield from wait(submission.kubeflow, submitted.run_id, waiting.seconds, patience, waiting.poll_seconds)
            return
        except Orphaned as error:
            if submission.started:
                raise
            note(f"{error}; another one is submitted")
            submission.ignored.add(submitted.run_id)


class Submission:
    """Starts a run of the packaged pipeline, or finds the one with the same parameters that has not ended.

    Called again after an answer that was lost, it starts no second run.
    """

    def __init__(
        self,
        connect: Callable[[], Kubeflow],
        settings: RunSettings,
        check: Callable[[], Admission] | None = None,
    ) -> None:
        self.connect, self.settings, self.check = connect, settings, check
        self.name = f"neuroshard {settings.digest()}"
        self.kubeflow: Kubeflow
        self.started: list[str] = []  # names of runs that the API may have started although it did not answer
        self.ignored: set[str] = set()
        self.run_id = ""

    @property
    def how(self) -> str:
        return "submitted" if self.started else "under way with the same parameters"

    @property
    def unfinished(self) -> str:
        """What to report if this ends before there is a run."""
        if self.started:
            return "it is unknown whether a run was submitted; if so, the same command waits for it"
        return "no run was submitted"

    def __call__(self) -> Run:
        self.kubeflow = self.connect()
        found = self._there()
        if not found:
            if not self.started:
                admitted(self.check)
            again = bool(self.started)
            self.started.append(f"{self.name} {datetime.now(UTC):%Y-%m-%d %H:%M:%S}")
            found = [self.kubeflow.start(self.started[-1], self.settings)]
            if again:
                found = self._there() or found
        kept = (
            found[-1] if self.started else found[0]
        )  # the first that this process started; else the newest, since others may be orphans
        for twin in found if self.started else ():
            if twin is not kept and not twin.ended:  # an earlier start that seemed to fail was only late
                self.kubeflow.terminate(twin.run_id)
                note(f"run {kept.run_id} was submitted before; run {twin.run_id} is terminated")
        self.run_id = kept.run_id
        return kept

    def rehearsed(self) -> Iterator[str]:
        """What submitting would do, in lines."""
        self.kubeflow = self.connect()
        if found := self._there():
            yield f"would wait for run {found[0].run_id} ({found[0].name}), which has the same parameters and is {found[0].state}"
            return
        admitted(self.check)
        yield f"would submit {self.name} with"
        yield from (f"  {key}: {value}" for key, value in sorted(self.settings.parameters.items()))
        if self.settings.parallelism:
            yield f"  at most {self.settings.parallelism:,} items of each loop at once"

    def _there(self) -> list[Run]:
        """The runs with the same parameters that have not ended, and those that this one started, the newest first."""
        return [
            run
            for run in self.kubeflow.runs()
            if run.name.startswith(self.name)
            and run.run_id not in self.ignored
            and (not run.ended or run.name in self.started)
        ]


def run_admission(namespace: str | None, service_account: str | None) -> Callable[[], Admission]:
    """Asks whether the cluster admits a run's pods; without an account, under Kubeflow's default one."""
    account = service_account or (RUNS_ACCOUNT if namespace is None else PROFILE_ACCOUNT)
    return partial(admission, namespace or RUNS_NAMESPACE, account)


def admitted(check: Callable[[], Admission] | None) -> None:
    """Raises NeuroshardError where the cluster would refuse the run's pods. If it cannot be asked, prints a note."""
    if check is None:
        return
    answer = check()
    if answer.verdict == "refused":
        raise NeuroshardError(f"nothing was submitted: {answer.says}; --no-check submits anyway")
    if answer.verdict == "unknown":
        note(answer.says)


def settled(patience: Patience, submission: Submission) -> Run:
    """The run, once the API answers. Raises NotAnswering, which says what may have happened to the run."""
    try:
        return patience.ask(submission)
    except NotAnswering as error:
        asked = f"; asked for {format_duration(patience.seconds)}" if patience.seconds else ""
        raise NotAnswering(f"{error}{asked}; {submission.unfinished}") from None


def wait(kubeflow: Kubeflow, run_id: str, seconds: float, patience: Patience, poll_seconds: float) -> Iterator[str]:
    """Each state of the run until it has succeeded. Raises NeuroshardError where it ends otherwise, or not in `seconds`.

    kfp's own wait never sees a run that was cancelled, nor one whose Workflow was deleted. A run whose pods are refused again
    and again is terminated: KFP would retry them hundreds of times.
    """
    with stoppable(lambda: f"run {run_id} continues, and the same command waits for it again"):
        deadline, still, state = time.monotonic() + seconds, OrphanWatch(), ""
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
            if reason := still.orphaned(kubeflow, run):
                raise Orphaned(f"run {run_id} is recorded as {state} for ever: {reason}; delete the record in Kubeflow")
            end_storm(kubeflow, run, patience)
            if time.monotonic() > deadline:
                raise NeuroshardError(
                    f"run {run_id} is {state} after {seconds / 3600:g} h; it continues, but nothing waits for it"
                )
            time.sleep(poll_seconds)
        if state != "SUCCEEDED":
            raise NeuroshardError(f"run {run_id} ended as {state}{why(kubeflow, run)}; {WHAT_IS_LIVE}")


class OrphanWatch:
    """Detects orphans: runs whose record does not change and of which nothing runs."""

    def __init__(self) -> None:
        self.tasks: tuple[Any, ...] = ()
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


def end_storm(kubeflow: Kubeflow, run: Run, patience: Patience) -> None:
    """Terminate a run whose pods are refused again and again, and raise NeuroshardError."""
    step, times = refused_at_once(run.tasks)
    if times < STORM or run.state == "CANCELING":
        return
    patience.ask(lambda: kubeflow.terminate(run.run_id))
    raise NeuroshardError(
        f"run {run.run_id} was terminated: {times} pods of {step} failed as soon as they were created, and Kubeflow keeps "
        f"creating them{why(kubeflow, run)}; {WHAT_IS_LIVE}"
    )


def why(kubeflow: Kubeflow, run: Run) -> str:
    """The steps that failed, in brackets; empty if none did."""
    failures = kubeflow.failures(run)
    return f" ({steps_text(failures)})" if failures else ""


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
