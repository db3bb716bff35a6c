"""Submit the packaged pipeline, wait, and fail where it fails: `neuroshard submit`, which the nightly CronJob runs."""

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from neuroshard.core.errors import NeuroshardError
from neuroshard.submit.kubeflow import Kubeflow, NotAnswering, Run
from neuroshard.submit.package import digest
from neuroshard.submit.tell import Outcome, tell

PATIENCE_SECONDS = 600.0  # an API server that restarts is back by then


class Watch(NamedTuple):
    """How a run is waited for, and who is told how it went: a metrics file or Pushgateway, an event at this pod."""

    seconds: float
    poll_seconds: float
    metrics: str | None = None
    event: bool = False


class Stopped(NeuroshardError):
    """The pod that waits is told to go."""

    exit_code = 143


def run(
    endpoint: str,
    parameters: Mapping[str, Any],
    watch: Watch | None,
    experiment: str = "neuroshard",
    namespace: str | None = None,
    service_account: str | None = None,
    *,
    dry_run: bool = False,
) -> Iterator[str]:
    """Submit and, with `watch`, wait: what there is to say, as it comes. Raises NeuroshardError where the run fails."""
    began, succeeded, message = time.time(), False, "was cut off"
    try:
        kubeflow = Kubeflow(endpoint, experiment, namespace)
        if dry_run:
            yield from rehearsed(kubeflow, parameters, service_account)
            return
        submitted, was_there = submit(kubeflow, parameters, service_account)
        yield f"run {submitted.run_id}: {'under way with the same parameters' if was_there else 'submitted'} ({submitted.name})"
        if watch is not None:
            with stoppable(submitted.run_id):
                yield from wait(kubeflow, submitted.run_id, watch.seconds, watch.poll_seconds)
        succeeded, message = True, f"run {submitted.run_id} succeeded"
    except NeuroshardError as error:
        message = str(error)
        raise
    finally:
        if watch is not None and not dry_run:
            tell(Outcome(began, time.time(), succeeded, message), watch.metrics, watch.event)


def submit(kubeflow: Kubeflow, parameters: Mapping[str, Any], service_account: str | None = None) -> tuple[Run, bool]:
    """A run of the packaged pipeline, and whether it was there: one with the same parameters that has not ended is taken."""
    name = _name(parameters, service_account)
    if found := kubeflow.under_way(name):
        return found, True
    return kubeflow.start(f"{name} {datetime.now(UTC):%Y-%m-%d %H:%M:%S}", parameters, service_account), False


def rehearsed(kubeflow: Kubeflow, parameters: Mapping[str, Any], service_account: str | None) -> Iterator[str]:
    """What submitting would do."""
    name = _name(parameters, service_account)
    if found := kubeflow.under_way(name):
        yield f"would wait for run {found.run_id} ({found.name}), which has the same parameters and is {found.state}"
    else:
        yield f"would submit {name} with"
        yield from (f"  {key}: {value}" for key, value in sorted(parameters.items()))


def wait(kubeflow: Kubeflow, run_id: str, seconds: float, poll_seconds: float) -> Iterator[str]:
    """Each state of the run until it has succeeded. Raises NeuroshardError where it ends otherwise, or not in `seconds`.

    kfp's own wait never sees a run that was cancelled. An API that does not answer is asked again for ten minutes.
    """
    deadline, answered, state = time.monotonic() + seconds, time.monotonic(), ""
    while True:
        try:
            run = kubeflow.run(run_id)
        except NotAnswering as error:
            if time.monotonic() - answered > PATIENCE_SECONDS:
                raise NeuroshardError(f"{error}; run {run_id} may go on, and nobody waits for it") from None
            print(f"note: {error}; asking again", file=sys.stderr, flush=True)
            time.sleep(poll_seconds)
            continue
        answered = time.monotonic()
        if run.state != state:
            state = run.state
            yield f"run {run_id}: {state}"
        if run.ended:
            break
        if time.monotonic() > deadline:
            raise NeuroshardError(
                f"run {run_id} is {state} after {seconds / 3600:g} h; it goes on, nobody waits for it"
            )
        time.sleep(poll_seconds)
    if state != "SUCCEEDED":
        steps = f" ({'; '.join(run.failures)})" if run.failures else ""
        raise NeuroshardError(f"run {run_id} ended as {state}{steps}; the live plans are those from before")


@contextmanager
def stoppable(run_id: str) -> Iterator[None]:
    """For as long as the block lasts, SIGTERM is an error of one line: a drained node, a deadline, a deleted job."""

    def stop(*_: object) -> None:
        raise Stopped(f"told to stop; run {run_id} goes on, and the same command waits for it again")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _name(parameters: Mapping[str, Any], service_account: str | None) -> str:
    """What the names of all runs with these parameters begin with."""
    return f"neuroshard {digest(parameters, service_account)}"
