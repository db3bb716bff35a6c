"""The Kubernetes API, by the official client, with this pod's service account or a kubeconfig."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.extras import install_command
from neuroshard.core.text import one_line

TIMEOUT_SECONDS = 30.0
ASK_SECONDS = 5.0  # for a request whose answer is useful but not needed
NOT_FOUND, FORBIDDEN = 404, 403
USER = 10001  # of our images
POD_LABELS = {"app.kubernetes.io/name": "neuroshard"}  # the network policy selects the pods of steps by these labels
# The security context that Kubeflow Pipelines 2.17 and the pipeline give a step's pod
SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


# What urllib3 puts before why there is no connection: the connection, and what it is not
_CONNECTION = re.compile(
    r"^(?:<[^>]*>|HTTPS?Connection(?:Pool)?\([^)]*\)): (?:Failed to establish a new connection: )?"
)


class Admission(NamedTuple):
    """Whether a cluster admits the pods of a run, and why. `note` is what else was seen."""

    verdict: Literal["admitted", "refused", "unknown"]
    says: str
    note: str = ""


def admission(namespace: str, account: str, context: str | None = None) -> Admission:
    """Ask whether a step's pod is admitted in `namespace` under the service account `account`, in a dry run.

    Without the permission to create pods, only the existence of the account is checked. Without the permission for that, or
    without access to a cluster, the verdict is `unknown`.
    """
    what = f"a pod of a run under {namespace}/{account}"
    unknown = f"whether {what} is admitted could not be checked"
    pod = {
        "metadata": {"generateName": "neuroshard-check-", "labels": POD_LABELS},
        "spec": {
            "serviceAccountName": account,
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "neuroshard", "securityContext": SECURITY}],
        },
    }
    options = {"_request_timeout": ASK_SECONDS, "_preload_content": False}
    try:
        with _core(context) as (core, host):
            from kubernetes.client import ApiException

            try:
                core.create_namespaced_pod(namespace, pod, dry_run="All", **options)
                return Admission("admitted", f"{what} is admitted, says {host}")
            except ApiException as error:
                why = said(error)
                if error.status not in (FORBIDDEN, NOT_FOUND, 400, 422):
                    raise
                if error.status != FORBIDDEN or 'cannot create resource "pods"' not in why:
                    return Admission("refused", f"{host} refuses {what}: {why}")
            why = "the account exists, but this one may not make pods there, not even in a dry run"
            try:
                core.read_namespaced_service_account(account, namespace, **options)
            except ApiException as error:
                if error.status == NOT_FOUND:
                    none = "there is no such service account, and its runs would end at once without a reason"
                    return Admission("refused", f"{host} refuses {what}: {none}")
                if error.status != FORBIDDEN:
                    raise
                why = said(error)
            return Admission("unknown", f"{unknown} at {host}: {why}")
    except NeuroshardError as error:
        return Admission("unknown", f"{unknown}: {error}")


def last_warning(namespace: str, pod: str) -> str:
    """The newest warning among a pod's events (`FailedMount: …`); empty where there is none, or it cannot be asked for."""
    selector = f"involvedObject.name={pod},type=Warning"
    with suppress(NeuroshardError), _core() as (core, _):
        asked = core.list_namespaced_event(namespace, field_selector=selector, _request_timeout=ASK_SECONDS)
        newest = max(asked.items, key=lambda one: str(one.last_timestamp or one.event_time or ""), default=None)
        return one_line(f"{newest.reason}: {newest.message}") if newest else ""
    return ""


def missing_secret(namespace: str, name: str) -> bool:
    """Whether the API says that there is no such secret; false where it may not be asked."""
    with suppress(NeuroshardError), _core() as (core, _):
        from kubernetes.client import ApiException

        try:
            core.read_namespaced_secret(name, namespace, _request_timeout=ASK_SECONDS, _preload_content=False)
        except ApiException as error:
            return bool(error.status == NOT_FOUND)
    return False


@contextmanager
def _core(context: str | None = None) -> Iterator[tuple[Any, str]]:
    """The API of pods and its address, for a question whose answer is useful but not needed."""
    with kubernetes_api(context=context, retries=0) as api:
        from kubernetes.client import CoreV1Api

        yield CoreV1Api(api), api.configuration.host


@contextmanager
def kubernetes_api(
    doing: str = "", context: str | None = None, hints: Mapping[int, str] | None = None, retries: int = 3
) -> Iterator[Any]:
    """A client of the API, in the kubeconfig's `context`. A request without an answer is repeated `retries` times.

    Errors of the block become a NeuroshardError of one line, which begins with `doing`, by default the address of the API.
    `hints` maps the status of an answer to what to do about it. Raises UsageError without access to a cluster.
    """
    try:
        from kubernetes import client, config
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError
    except ImportError:
        what = doing or "asking a Kubernetes cluster"
        raise NeuroshardError(f"{what}: needs the package kubernetes: {install_command('fleet')}") from None
    try:
        _configure(config, context)
    except config.ConfigException as error:
        before = f"{doing}: " if doing else ""
        raise UsageError(
            f"{before}no access to a Kubernetes cluster: {one_line(error)}; give a kubeconfig (KUBECONFIG), or run in a pod "
            "whose service account has access"
        ) from None
    configuration = client.Configuration.get_default_copy()
    configuration.retries = retries
    where = doing or configuration.host
    try:
        with client.ApiClient(configuration) as api:
            yield api
    except ApiException as error:
        way_out = (hints or {}).get(error.status, "")
        raise NeuroshardError(f"{where}: the Kubernetes API answered {error.status}: {said(error)}{way_out}") from None
    except (HTTPError, OSError) as error:
        at = f" at {configuration.host}" if doing else ""
        raise NeuroshardError(
            f"{where}: the Kubernetes API{at} does not answer: {why_no_answer(error)}; check the kubeconfig and the network"
        ) from None


def _configure(config: Any, context: str | None) -> None:
    """Use the pod's own service account, where there is one and no context is given; else the kubeconfig."""
    if context is None:
        try:
            config.load_incluster_config()
            return
        except config.ConfigException:
            pass
    config.load_kube_config(context=context)


def why_no_answer(error: Exception) -> str:
    """Why a request of urllib3 has no answer, in one line without its Python objects: `[Errno 111] Connection refused`."""
    reason = one_line(getattr(error, "reason", None) or error)  # of the last of several tries
    return _CONNECTION.sub("", reason)


def said(error: Any) -> str:
    """The message in an error of an API, of Kubernetes or Kubeflow, in one line."""
    try:
        body = json.loads(error.body)
        return one_line(body.get("message") or body.get("error") or error.reason)
    except (TypeError, ValueError, AttributeError):
        return one_line(error.reason)
