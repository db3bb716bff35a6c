"""Reports the outcome of a run: metrics for Prometheus, in a file or at a Pushgateway, and an event of Kubernetes."""

import base64
import http.client
import os
import re
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from neuroshard.core.clean import clean, log
from neuroshard.core.errors import NeuroshardError
from neuroshard.files.disk import write_bytes
from neuroshard.kube import kubernetes_api

TIMEOUT_SECONDS = 10.0
SUCCESS_TIME = "neuroshard_nightly_last_success_timestamp_seconds"


class RunOutcome(NamedTuple):
    """When waiting for a run began and ended, in seconds since 1970, whether it succeeded, and a message."""

    began: float
    ended: float
    succeeded: bool
    message: str


def metrics_text(outcome: RunOutcome, last_success: int | None = None) -> str:
    """The outcome in Prometheus' text format. `last_success` is when an earlier run succeeded, if known."""
    values = {
        "neuroshard_nightly_success": ("1 where the last run succeeded, else 0", int(outcome.succeeded)),
        "neuroshard_nightly_start_timestamp_seconds": ("When waiting for the last run began", round(outcome.began)),
        "neuroshard_nightly_end_timestamp_seconds": ("When waiting for the last run ended", round(outcome.ended)),
        SUCCESS_TIME: ("When a run last succeeded", round(outcome.ended) if outcome.succeeded else last_success),
    }
    lines = [
        f"# HELP {name} {text}.\n# TYPE {name} gauge\n{name} {value}\n"
        for name, (text, value) in values.items()
        if value is not None
    ]
    return "".join(lines)


def write_metrics(target: str, outcome: RunOutcome) -> None:
    """Write a file, renamed into place, or with http:// post to a Pushgateway. Raises NeuroshardError."""
    if not target.startswith(("http://", "https://")):
        write_bytes(Path(target), metrics_text(outcome, _last_success(Path(target))).encode())
        return
    # POST keeps metrics that are not sent: when a run last succeeded
    url, headers = without_user_info(f"{target.rstrip('/')}/metrics/job/neuroshard")
    headers["Content-Type"] = "text/plain"
    request = urllib.request.Request(url, metrics_text(outcome).encode(), headers, method="POST")
    try:
        urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()  # nosec B310 # http or https, as seen above
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NeuroshardError(f"{url}: cannot post the metrics: {error}") from None


def without_user_info(url: str) -> tuple[str, dict[str, str]]:
    """The URL without `user:password@`, and the header in its place: urllib would parse a password as a port."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    user_info, at, host = place.rpartition("@")
    header = base64.b64encode(unquote(user_info).encode()).decode()
    return f"{scheme}://{host}{slash}{path}", {"Authorization": f"Basic {header}"} if at else {}


def write_event(outcome: RunOutcome) -> None:
    """An event of the pod that this runs in, which POD_NAME, POD_NAMESPACE and POD_UID name. Raises NeuroshardError."""
    pod = {name: os.environ.get(f"POD_{name.upper()}", "") for name in ("name", "namespace", "uid")}
    if not all(pod.values()):
        raise NeuroshardError("an event needs POD_NAME, POD_NAMESPACE and POD_UID in the environment")
    now = datetime.fromtimestamp(outcome.ended, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    event = {
        "metadata": {"generateName": "neuroshard-nightly-", "namespace": pod["namespace"]},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **pod},
        "type": "Normal" if outcome.succeeded else "Warning",
        "reason": "RunSucceeded" if outcome.succeeded else "RunFailed",
        "message": clean(outcome.message)[:1024],  # as long as an event may be
        "source": {"component": "neuroshard"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    with kubernetes_api("no event could be written") as api:
        from kubernetes import client

        client.CoreV1Api(api).create_namespaced_event(
            pod["namespace"], event, _request_timeout=TIMEOUT_SECONDS, _preload_content=False
        )


def report_outcome(outcome: RunOutcome, metrics: str | None, event: bool) -> None:
    """Report the outcome to all that are asked for. A failure to report is only a note: it does not change the outcome."""
    for target in (metrics, event):
        try:
            if target is True:
                write_event(outcome)
            elif target:
                write_metrics(target, outcome)
        except NeuroshardError as error:
            log(f"note: {error}")


def _last_success(path: Path) -> int | None:
    if not path.is_file():  # reading /dev/stdout or a pipe would never end
        return None
    try:
        found = re.search(rf"^{SUCCESS_TIME} (\d{{1,12}})$", path.read_text(errors="replace"), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
