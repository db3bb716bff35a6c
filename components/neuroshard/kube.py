"""The Kubernetes API, asked with the official client as this pod's account, or as a kubeconfig says."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.text import one_line

TIMEOUT_SECONDS = 30.0


@contextmanager
def kubernetes_api(
    doing: str = "", context: str | None = None, ways_out: Mapping[int, str] | None = None
) -> Iterator[Any]:
    """A client of the API; `context` chooses among those of the kubeconfig.

    What fails in the block is one line that begins with `doing`, or, where nothing is said, with where the API is:
    NeuroshardError. `ways_out` are what to do about an answer, by its status. Raises UsageError without a way to a cluster.
    """
    try:
        from kubernetes import client, config
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError
    except ImportError:
        what = doing or "asking a Kubernetes cluster"
        raise NeuroshardError(f"{what}: needs the package kubernetes: pip install 'neuroshard[fleet]'") from None
    try:
        _configure(config, context)
    except config.ConfigException as error:
        before = f"{doing}: " if doing else ""
        raise UsageError(
            f"{before}no way to a Kubernetes cluster: {one_line(error)}; give a kubeconfig (KUBECONFIG), or run in a pod whose "
            "service account may do so"
        ) from None
    configuration = client.Configuration.get_default_copy()
    configuration.retries = 3
    told = doing or configuration.host
    try:
        with client.ApiClient(configuration) as api:
            yield api
    except ApiException as error:
        way_out = (ways_out or {}).get(error.status, "")
        raise NeuroshardError(f"{told}: the Kubernetes API answered {error.status}: {said(error)}{way_out}") from None
    except (HTTPError, OSError) as error:
        raise NeuroshardError(f"{told}: the Kubernetes API does not answer: {one_line(error)}") from None


def _configure(config: Any, context: str | None) -> None:
    """The pod's own service account, where there is one and no context is asked for, else the kubeconfig."""
    if context is None:
        try:
            config.load_incluster_config()
            return
        except config.ConfigException:
            pass
    config.load_kube_config(context=context)


def said(error: Any) -> str:
    """What an API, Kubeflow's too, said when it refused, of all that its answer holds."""
    try:
        body = json.loads(error.body)
        return one_line(body.get("message") or body.get("error") or error.reason)
    except (TypeError, ValueError, AttributeError):
        return one_line(error.reason)
