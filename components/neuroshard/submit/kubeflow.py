"""Kubeflow Pipelines by its SDK: runs and recurring runs of the packaged pipeline. The only module here that knows kfp."""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any, NamedTuple

from neuroshard.core.errors import PASSING_STATUSES, NeuroshardError
from neuroshard.core.text import one_line
from neuroshard.kube import said
from neuroshard.submit.package import PACKAGE

ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
PROJECTED = "KF_PIPELINES_SA_TOKEN_PATH"  # where the kubelet projects a token into the pod
PAGE = 50
TIMEOUT = (5.0, 60.0)  # seconds to connect, and to an answer


class NotAnswering(NeuroshardError):
    """The API cannot be reached, or says that it cannot answer now: later it may."""


class Run(NamedTuple):
    """A run as the API tells of it. `failures` are the steps that failed, each with what it said."""

    run_id: str
    name: str
    state: str
    failures: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return self.state in ENDED


class Recurring(NamedTuple):
    """A recurring run as it is, or as it shall be. `description` holds the digest of its package."""

    cron: str
    description: str
    parameters: Mapping[str, Any]
    service_account: str = ""
    enabled: bool = True
    max_concurrency: int = 1
    no_catchup: bool = True


class Kubeflow:
    """An experiment of the Kubeflow Pipelines at `endpoint`.

    Raises NeuroshardError in one line, NotAnswering where later may help. It shows the token that the kubelet projects into
    the pod, where there is one.
    """

    def __init__(self, endpoint: str, experiment: str = "neuroshard", namespace: str | None = None) -> None:
        self.endpoint, self.experiment, self.namespace = endpoint.rstrip("/"), experiment, namespace
        try:
            import kfp
            from kfp.client import Client, ServiceAccountTokenVolumeCredentials
        except ImportError as error:
            raise NeuroshardError(_missing(error)) from None
        if int(kfp.__version__.split(".")[0]) < 2:
            raise NeuroshardError(f"kfp {kfp.__version__} is too old: pip install 'neuroshard[pipeline]'")
        token = ServiceAccountTokenVolumeCredentials() if PROJECTED in os.environ else None
        with self._asking(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # "only works with Kubeflow Pipeline v2.0.0-beta.2 and later"
            # without a namespace kfp asks for the API's health five times, with tracebacks on stderr
            self.client = Client(host=self.endpoint, namespace=namespace or "default", credentials=token)
        self.client._context_setting["namespace"] = namespace or ""
        rest = self.client._run_api.api_client.rest_client  # of all its APIs; by itself it waits for ever
        rest.request = partial(_in_time, rest.request)
        with self._asking(health=True):
            self.client._healthz_api.healthz_service_get_healthz()

    def under_way(self, name: str) -> Run | None:
        """The newest run whose name begins with `name` and that has not ended."""
        experiment_id = self._experiment_id()
        if experiment_id is None:
            return None
        with self._asking():
            listed = self.client.list_runs(experiment_id=experiment_id, sort_by="created_at desc", page_size=PAGE)
        found = (_run(one) for one in listed.runs or ())
        return next((run for run in found if run.name.startswith(name) and not run.ended), None)

    def start(self, name: str, parameters: Mapping[str, Any], service_account: str | None) -> Run:
        """Submit the packaged pipeline."""
        with self._asking(), redirect_stdout(sys.stderr):  # kfp prints where to look at the run
            made = self.client.create_run_from_pipeline_package(
                str(PACKAGE),
                arguments=dict(parameters),
                run_name=name,
                experiment_name=self.experiment,
                namespace=self.namespace,
                service_account=service_account,
            )
        return Run(made.run_id, name, "PENDING")

    def run(self, run_id: str) -> Run:
        with self._asking():
            return _run(self.client.get_run(run_id))

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

    def start_recurring(self, name: str, wanted: Recurring) -> str:
        """A new recurring run; its id."""
        with self._asking(), redirect_stdout(sys.stderr):
            experiment = self.client.create_experiment(name=self.experiment, namespace=self.namespace)
            made = self.client.create_recurring_run(
                experiment_id=experiment.experiment_id,
                job_name=name,
                description=wanted.description,
                cron_expression=wanted.cron,
                max_concurrency=wanted.max_concurrency,
                no_catchup=wanted.no_catchup,
                params=dict(wanted.parameters),
                pipeline_package_path=str(PACKAGE),
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
            except ValueError:  # kfp's word for "No experiment is found with name …"
                return None
        return str(found.experiment_id)

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
            way_out = {401: "; show a token that it takes", 403: "; may this account submit in that namespace?"}
            told = f"Kubeflow Pipelines answered {error.status}: {said(error)}{way_out.get(error.status, '')}"
            kind = NotAnswering if error.status in PASSING_STATUSES else NeuroshardError
            raise kind(f"{self.endpoint}: {told}") from None
        except (HTTPError, OSError) as error:
            raise NotAnswering(f"{self.endpoint}: Kubeflow Pipelines does not answer: {one_line(error)}") from None
        except (
            ValueError,
            TypeError,
            AttributeError,
        ) as error:  # an answer of another shape: a login page, a newer server
            raise NeuroshardError(
                f"{self.endpoint}: answers otherwise than Kubeflow Pipelines 2.17 does: {type(error).__name__}: {one_line(error)}"
            ) from None


def _in_time(request: Any, *arguments: Any, **options: Any) -> Any:
    """The SDK's request, which ends in an error where the answer takes too long."""
    return request(*arguments, **{**options, "_request_timeout": options.get("_request_timeout") or TIMEOUT})


def _run(told: Any) -> Run:
    details = getattr(told.run_details, "task_details", None) or ()
    failed = [task for task in details if task.state == "FAILED" and not task.child_tasks]
    failures = tuple(f"{task.display_name}: {_why(task)}" for task in failed)
    return Run(str(told.run_id), str(told.display_name or ""), str(told.state or "PENDING"), failures)


def _why(task: Any) -> str:
    """What a failed task says: where the server keeps it depends on its version."""
    history = [status.error for status in task.state_history or ()]
    said = [error.message for error in (task.error, *history[::-1]) if error is not None and error.message]
    return one_line(said[0]) if said else "failed"


def _recurring(told: Any) -> Recurring:
    return Recurring(
        cron=str(getattr(getattr(told.trigger, "cron_schedule", None), "cron", None) or ""),
        description=told.description or "",
        parameters=getattr(told.runtime_config, "parameters", None) or {},
        service_account=told.service_account or "",
        enabled=str(told.mode) == "ENABLE",
        max_concurrency=int(told.max_concurrency or 0),
        no_catchup=bool(told.no_catchup),
    )


def _missing(error: ImportError) -> str:
    return f"submitting needs the package {(error.name or 'kfp').partition('.')[0]}: pip install 'neuroshard[pipeline]'"
