"""Submit the packaged pipeline, wait, and fail where it fails: `neuroshard submit`, which the nightly CronJob runs."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from neuroshard.core.errors import NeuroshardError
from neuroshard.core.store_url import KUBEFLOW_BUCKET, parse_store_url
from neuroshard.core.units import format_duration
from neuroshard.kube import Admission, admission, missing_secret
from neuroshard.store.lease import LEASE_SECONDS
from neuroshard.submit.kubeflow import Kubeflow, NotAnswering, Run, Server
from neuroshard.submit.outcome import RunOutcome, report_outcome
from neuroshard.submit.package import RunSettings, parameter
from neuroshard.submit.wait import (
    MOST_POLL_SECONDS,
    PATIENCE_SECONDS,
    Lost,
    Orphaned,
    Patience,
    Waiting,
    note,
    stoppable,
    wait,
)

# the namespace and the account in which Kubeflow Pipelines runs pods by default
RUNS_NAMESPACE, RUNS_ACCOUNT, PROFILE_ACCOUNT = "kubeflow", "pipeline-runner", "default-editor"


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
    """Submit and, with `waiting`, wait. If the run with the same parameters is an orphan, another run is submitted; once, too, if
    it failed by no fault of its steps: it continues with what is in the store."""
    again = False
    while True:
        with stoppable(lambda: submission.unfinished):
            try:
                submitted = patience.ask(submission)
            except NotAnswering as error:
                asked = f"; asked for {format_duration(patience.seconds)}" if patience.seconds else ""
                raise NotAnswering(f"{error}{asked}; {submission.unfinished}") from None
        how = "submitted" if submission.started else "under way with the same parameters"
        yield f"run {submitted.run_id}: {how} ({submitted.name})"
        if waiting is None:
            return
        try:
            yield from wait(submission.kubeflow, submitted.run_id, patience, waiting)
            return
        except Orphaned as error:
            if submission.started:
                raise
            note(f"{error}; another one is submitted")
        except Lost as error:
            if again:
                raise
            again = True
            note(f"{error}; in {format_duration(LEASE_SECONDS)}, when its leases have expired, another run goes on")
            with stoppable(lambda: "no other run was submitted"):
                time.sleep(LEASE_SECONDS)
        submission.ignored.add(submitted.run_id)


class Submission:
    """Starts a run of the packaged pipeline, or finds the one with the same parameters that has not ended.

    Called again after an answer that was lost, it starts no second run.
    """

    def __init__(
        self, connect: Callable[[], Kubeflow], settings: RunSettings, check: Callable[[], Admission] | None = None
    ) -> None:
        self.connect, self.settings, self.check = connect, settings, check
        self.name = f"neuroshard {settings.digest()}"
        self.kubeflow: Kubeflow
        self.started: list[str] = []  # names of runs that the API may have started although it did not answer
        self.ignored: set[str] = set()
        self.run_id = ""

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
        # the first that this process started; else the newest, since others may be orphans
        kept = found[-1] if self.started else found[0]
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


def run_admission(settings: RunSettings, namespace: str | None) -> Callable[[], Admission]:
    """Asks whether the cluster admits a run's pods, without an account under Kubeflow's default one, and has their secret."""
    account = settings.service_account or (RUNS_ACCOUNT if namespace is None else PROFILE_ACCOUNT)
    where, secret = namespace or RUNS_NAMESPACE, str(parameter(settings.parameters, "store_secret"))
    kubeflows_own = parse_store_url(str(parameter(settings.parameters, "store"))).bucket == KUBEFLOW_BUCKET

    def asked() -> Admission:
        answer = admission(where, account)
        if answer.verdict == "refused" or not secret or kubeflows_own or not missing_secret(where, secret):
            return answer
        role = f"the pods use the store by what their service account {account} may do, as no secret {secret} is there"
        return answer._replace(note=f"namespace {where}: {role} (store_secret)")

    return asked


def admitted(check: Callable[[], Admission] | None) -> None:
    """Raises NeuroshardError where the cluster would refuse the run's pods. If it cannot be asked, prints a note."""
    if check is None:
        return
    answer = check()
    if answer.verdict == "refused":
        raise NeuroshardError(f"nothing was submitted: {answer.says}; --no-check submits anyway")
    if answer.verdict == "unknown":
        note(answer.says)
    if answer.note:
        note(answer.note)
