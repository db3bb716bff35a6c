"""Kubeflow Pipelines by its SDK: runs and recurring runs of the packaged pipeline. The only module here that knows kfp."""

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from neuroshard.core.clean import CleanedStream
from neuroshard.core.errors import PASSING_STATUSES, NeuroshardError
from neuroshard.core.extras import install_command
from neuroshard.core.text import one_line
from neuroshard.kube import said, why_no_answer
from neuroshard.submit.package import RunSettings, packaged
from neuroshard.submit.steps import FailedStep, Task, Workflow, error_line, read_workflow, step_text

ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
PROJECTED = "KF_PIPELINES_SA_TOKEN_PATH"  # where the kubelet projects a token into the pod
PAGE = 50
TIMEOUT = (5.0, 60.0)  # seconds to connect, and to an answer
LOG = "/apis/v1alpha1/runs/{run_id}/nodes/{node_id}/log"
OLD_RUN = "/apis/v1beta1/runs/{run_id}"
MOST_LOG, KEPT_LOG = 2**24, 2**18  # bytes that are read of an answer, and kept of a log's beginning and end
GONE = re.compile(r"not ?found|does not exist|no ?such ?key", re.IGNORECASE)


class NotAnswering(NeuroshardError):
    """The API cannot be reached, or says that it cannot answer now: later it may."""


class Run(NamedTuple):
    """A run as the API answers. `recurring_run_id` is empty for a run that somebody submitted."""

    run_id: str
    name: str
    state: str
    tasks: tuple[Task, ...] = ()
    terminated: bool = False  # somebody asked the API to end it
    recurring_run_id: str = ""
    models: str = ""  # the parameter, as JSON
    secret: str = ""  # the parameter store_secret
    store: str = ""  # the parameter

    @property
    def ended(self) -> bool:
        return self.state in ENDED


class Server(NamedTuple):
    """Where runs go: the address of the Kubeflow Pipelines API, the experiment, and the profile where there are several users."""

    endpoint: str
    experiment: str = "neuroshard"
    namespace: str | None = None


class Recurring(NamedTuple):
    """A recurring run, as the API has it or as it should be. `description` holds the digest of its package."""

    cron: str
    description: str
    parameters: Mapping[str, Any]
    service_account: str = ""
    enabled: bool = True
    max_concurrency: int = 1
    no_catchup: bool = True


class Kubeflow:
    """An experiment on a server of Kubeflow Pipelines.

    Raises NeuroshardError in one line, NotAnswering where a later try may succeed. It sends the token that the kubelet projects
    into the pod, where there is one.
    """

    def __init__(self, server: Server) -> None:
        self.endpoint = server.endpoint.rstrip("/")
        self.experiment, self.namespace = server.experiment, server.namespace
        try:
            import kfp
            from kfp.client import Client, ServiceAccountTokenVolumeCredentials
        except ImportError as error:
            raise NeuroshardError(_missing(error)) from None
        if int(kfp.__version__.split(".")[0]) < 2:
            raise NeuroshardError(f"kfp {kfp.__version__} is too old: {install_command('pipeline')}")
        token = ServiceAccountTokenVolumeCredentials() if PROJECTED in os.environ else None
        with self._asking(), warnings.catch_warnings():
            # "only works with Kubeflow Pipeline v2.0.0-beta.2 and later"
            warnings.simplefilter("ignore", FutureWarning)
            # without a namespace kfp asks for the API's health five times, with tracebacks on stderr
            self.client = Client(host=self.endpoint, namespace=self.namespace or "default", credentials=token)
        self.client._context_setting["namespace"] = self.namespace or ""
        rest = self.client._run_api.api_client.rest_client  # of all its APIs; by itself it waits for ever
        rest.request = partial(_in_time, rest.request)
        with self._asking(health=True):
            of_users = self.client._healthz_api.healthz_service_get_healthz().multi_user
        if of_users and not self.namespace:
            raise NeuroshardError(
                f"{self.endpoint}: this Kubeflow has several users, and runs go into a profile's namespace: give --namespace"
            )

    def runs(self) -> list[Run]:
        """The newest runs of the experiment, the newest first."""
        experiment_id = self._experiment_id()
        if experiment_id is None:
            return []
        with self._asking():
            listed = self.client.list_runs(experiment_id=experiment_id, sort_by="created_at desc", page_size=PAGE)
        return [read_run(one) for one in listed.runs or ()]

    def start(self, name: str, settings: RunSettings) -> Run:
        """Submit the packaged pipeline."""
        with self._packaged(settings) as package:
            made = self.client.create_run_from_pipeline_package(
                package,
                arguments=dict(settings.parameters),
                run_name=name,
                experiment_name=self.experiment,
                namespace=self.namespace,
                service_account=settings.service_account,
            )
        return Run(made.run_id, name, "PENDING")

    def run(self, run_id: str) -> Run:
        with self._asking():
            return read_run(self.client.get_run(run_id))

    def terminate(self, run_id: str) -> None:
        """End a run: its pods are stopped, and later it is recorded as FAILED or CANCELED."""
        with self._asking():
            self.client.terminate_run(run_id)

    def has_recurring(self, recurring_run_id: str) -> bool:
        """Whether there is such a recurring run; those that were deleted take their runs' Workflows with them."""
        from kfp_server_api import ApiException

        with self._asking():
            try:
                self.client.get_recurring_run(recurring_run_id)
            except ApiException as error:
                if error.status == 404:
                    return False
                raise
        return True

    def reason(self, run: Run, step: FailedStep, namespace: str) -> tuple[str, str]:
        """What a step that failed was for, and why, as far as its log and Argo say; else the command that shows its log."""
        log = self._log(run, step.pod)[0] or "" if step.pod else ""
        what, why = step_text(step, run.models, log)
        if step.pod and not error_line(log) and (not step.why or "exit code" in step.why):
            why += f"; kubectl -n {namespace} logs {step.pod} -c main shows its log"
        return what, why

    def pods_are_gone(self, run: Run) -> bool:
        """Whether pods are recorded as running of which the API finds none."""
        logs = [self._log(run, pod.name) for pod in self.workflow(run).pods("Running")]
        return bool(logs) and all(log is None and GONE.search(refusal) for log, refusal in logs)

    def _log(self, run: Run, pod: str) -> tuple[str | None, str]:
        """A pod's log without its middle; where there is none, None and the API's message.

        The API answers 200 with an error in the text (source of KFP 2.17.0).
        """
        from urllib3.exceptions import HTTPError

        try:
            answer = self._get(LOG, {"run_id": run.run_id, "node_id": pod})
            head, tail, most = b"", b"", MOST_LOG
            while most > 0 and (chunk := answer.read(2**16)):
                most -= len(chunk)
                head, tail = (head + chunk, tail) if len(head) < KEPT_LOG else (head, (tail + chunk)[-KEPT_LOG:])
            answer.release_conn()
        except (NeuroshardError, HTTPError, OSError):
            return None, ""
        text = (head + tail).decode(errors="replace")
        return (None, text) if text.startswith('{"error_message":') else (text, "")

    def workflow(self, run: Run) -> Workflow:
        """The run as Argo keeps it, with the reasons that API v2beta1 leaves out; empty where it cannot be read.

        API v1beta1 answers with it for runs of version 2 too (source of KFP 2.17.0).
        """
        from urllib3.exceptions import HTTPError

        try:
            answer = json.loads(self._get(OLD_RUN, {"run_id": run.run_id}).read(MOST_LOG))
            return read_workflow(answer["pipeline_runtime"]["workflow_manifest"])
        except (NeuroshardError, HTTPError, OSError, ValueError, KeyError, TypeError, RecursionError):
            return Workflow()

    def _get(self, path: str, names: Mapping[str, str]) -> Any:
        """The answer to a request that the SDK does not have, as a stream."""
        with self._asking():
            return self.client._run_api.api_client.call_api(
                path,
                "GET",
                path_params=dict(names),
                header_params={"Accept": "*/*"},
                auth_settings=["Bearer"],
                _preload_content=False,
                _return_http_data_only=True,
            )

    def recurring(self, name: str) -> dict[str, Recurring]:
        """The recurring runs that are called `name`, by id, the newest first."""
        experiment_id, token = self._experiment_id(), ""
        found: dict[str, Recurring] = {}
        while experiment_id is not None:
            with self._asking():
                page = self.client.list_recurring_runs(
                    page_token=token, page_size=PAGE, sort_by="created_at desc", experiment_id=experiment_id
                )
            named = (one for one in page.recurring_runs or () if one.display_name == name)
            found |= {one.recurring_run_id: _recurring(one) for one in named}
            token = page.next_page_token
            if not token:
                break
        return found

    def start_recurring(self, name: str, wanted: Recurring, settings: RunSettings) -> str:
        """A new recurring run, whose package has the deadline and parallelism of `settings`; its id."""
        with self._packaged(settings) as package:
            experiment = self.client.create_experiment(name=self.experiment, namespace=self.namespace)
            made = self.client.create_recurring_run(
                experiment_id=experiment.experiment_id,
                job_name=name,
                description=wanted.description,
                cron_expression=wanted.cron,
                max_concurrency=wanted.max_concurrency,
                no_catchup=wanted.no_catchup,
                params=dict(wanted.parameters),
                pipeline_package_path=package,
                enabled=wanted.enabled,
                service_account=wanted.service_account or None,
            )
        return str(made.recurring_run_id)

    def delete_recurring(self, recurring_run_id: str) -> None:
        with self._asking():
            self.client.delete_recurring_run(recurring_run_id)

    def _experiment_id(self) -> str | None:
        """None where there is no such experiment yet."""
        with self._asking():
            try:
                found = self.client.get_experiment(experiment_name=self.experiment, namespace=self.namespace)
            except ValueError:  # kfp's type for "No experiment is found with name …"
                return None
        return str(found.experiment_id)

    @contextmanager
    def _packaged(self, settings: RunSettings) -> Iterator[str]:
        """The package to upload. What kfp prints meanwhile, where to look at the run, goes to stderr."""
        with self._asking(), packaged(settings) as package, redirect_stdout(CleanedStream(sys.stderr)):
            yield str(package)

    @contextmanager
    def _asking(self, health: bool = False) -> Iterator[None]:
        """Turn what the SDK raises into one line."""
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            if health and error.status == 404:
                raise NeuroshardError(
                    f"{self.endpoint}: answers, but not as Kubeflow Pipelines 2 does (no /apis/v2beta1/healthz); "
                    "is it the address of its API, and of version 2?"
                ) from None
            way_out = {401: "; send a token that it accepts", 403: "; may this account submit in that namespace?"}
            message = f"Kubeflow Pipelines answered {error.status}: {said(error)}{way_out.get(error.status, '')}"
            kind = NotAnswering if error.status in PASSING_STATUSES else NeuroshardError
            raise kind(f"{self.endpoint}: {message}") from None
        except (HTTPError, OSError) as error:
            raise NotAnswering(
                f"{self.endpoint}: Kubeflow Pipelines does not answer: {why_no_answer(error)}; check the address and the network "
                "(--endpoint, or KFP_ENDPOINT)"
            ) from None
        except (ValueError, TypeError, AttributeError) as error:  # of another shape: a login page, a newer server
            raise NeuroshardError(
                f"{self.endpoint}: answers otherwise than Kubeflow Pipelines 2.17 does: {type(error).__name__}: {one_line(error)}"
            ) from None


def _in_time(request: Any, *arguments: Any, **options: Any) -> Any:
    """The SDK's request, which ends in an error where the answer takes too long."""
    return request(*arguments, **{**options, "_request_timeout": options.get("_request_timeout") or TIMEOUT})


def read_run(answer: Any) -> Run:
    """Parses a run of the SDK."""
    details = getattr(answer.run_details, "task_details", None) or ()
    given = getattr(answer.runtime_config, "parameters", None) or {}
    spec = _spec(answer.pipeline_spec)
    return Run(
        run_id=str(answer.run_id),
        name=str(answer.display_name or ""),
        state=str(answer.state or "PENDING"),
        tasks=tuple(_task(task) for task in details),
        terminated=any(str(one.state) == "CANCELING" for one in answer.state_history or ()),
        recurring_run_id=str(answer.recurring_run_id or ""),
        models=str(given.get("models") or _default(spec, "models")),
        secret=str(given.get("store_secret") or _default(spec, "store_secret")),
        store=str(given.get("store") or _default(spec, "store")),
    )


def _spec(answer: object) -> Mapping[str, Any]:
    """The pipeline alone: a package of two documents comes back as an object of both."""
    spec = answer.get("pipeline_spec", answer) if isinstance(answer, dict) else {}
    return spec if isinstance(spec, dict) else {}


def _default(spec: Mapping[str, Any], name: str) -> object:
    """The default of a parameter of the pipeline."""
    given = spec.get("root", {}).get("inputDefinitions", {}).get("parameters", {}).get(name, {})
    return given.get("defaultValue", "")


def _task(answer: Any) -> Task:
    return Task(
        name=str(answer.display_name or ""),
        state=str(answer.state or ""),
        is_leaf=not answer.child_tasks,
        error=_why(answer),
        moved=max(map(_seconds, (answer.start_time, answer.end_time))),
    )


def _seconds(moment: Any) -> float:
    """Seconds since 1970; 0 for a time that has not come, which the server calls the year 1970."""
    return max(moment.timestamp(), 0.0) if isinstance(moment, datetime) else 0.0


def _why(task: Any) -> str:
    """The error of a failed task. Where it is depends on the server's version; 2.17 keeps none."""
    history = [status.error for status in task.state_history or ()]
    said = [error.message for error in (task.error, *history[::-1]) if error is not None and error.message]
    return one_line(said[0]) if said else ""


def _recurring(answer: Any) -> Recurring:
    return Recurring(
        cron=str(getattr(getattr(answer.trigger, "cron_schedule", None), "cron", None) or ""),
        description=answer.description or "",
        parameters=getattr(answer.runtime_config, "parameters", None) or {},
        service_account=answer.service_account or "",
        enabled=str(answer.mode) == "ENABLE",
        max_concurrency=int(answer.max_concurrency or 0),
        no_catchup=bool(answer.no_catchup),
    )


def _missing(error: ImportError) -> str:
    return f"submitting needs the package {(error.name or 'kfp').partition('.')[0]}: {install_command('pipeline')}"
