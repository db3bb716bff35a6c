"""The Kubernetes API, asked with the official client as this pod's account, or as a kubeconfig says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neuroshard.core.errors import NeuroshardError
from neuroshard.core.text import one_line

TIMEOUT_SECONDS = 30.0


@contextmanager
def kubernetes_api(doing: str) -> Iterator[Any]:
    """A client of the API. What fails in the block is one line that begins with `doing`: NeuroshardError."""
    try:
        from kubernetes import client, config
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError
    except ImportError:
        raise NeuroshardError(f"{doing}: needs the package kubernetes: pip install 'neuroshard[fleet]'") from None
    try:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
        configuration = client.Configuration.get_default_copy()
        configuration.retries = 3
        with client.ApiClient(configuration) as api:
            yield api
    except ApiException as error:
        raise NeuroshardError(f"{doing}: the Kubernetes API answered {error.status}: {said(error)}") from None
    except (config.ConfigException, HTTPError, OSError) as error:
        raise NeuroshardError(f"{doing}: {one_line(error)}") from None


def said(error: Any) -> str:
    """What an API, Kubeflow's too, said when it refused, of all that its answer holds."""
    try:
        body = json.loads(error.body)
        return one_line(body.get("message") or body.get("error") or error.reason)
    except (TypeError, ValueError, AttributeError):
        return one_line(error.reason)
