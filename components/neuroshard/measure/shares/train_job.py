"""All shares of a kind of hardware at once, as a TrainJob of Kubeflow Trainer, for clusters that queue GPU work as train jobs.

Nodes, secrets and limits come from a TrainingRuntime that the cluster keeps for the kind, NAME-FINGERPRINT
(manifests/components/several-nodes), since the TrainJob field for them has another name in every minor version. The pods run
this module, one on each node, and each measures the share of its index:

    python3 -m neuroshard.measure.shares.train_job OPTIONS     OPTIONS is JSON; Kubernetes sets JOB_COMPLETION_INDEX
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from neuroshard.core.errors import PASSING_STATUSES, MeasureError, NeuroshardError
from neuroshard.core.text import one_line
from neuroshard.core.value import decode_json, sha256
from neuroshard.kube import TIMEOUT_SECONDS, kubernetes_api
from neuroshard.measure.shares.job import run as run_job
from neuroshard.orders.nightly import Campaign, Job

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
POLL_SECONDS = 10.0
PATIENCE_SECONDS = 600.0  # with an API that does not answer
CONFLICT, GONE = 409, 404
RUN_OPTIONS = ("store_url", "backend", "batch_size", "budget_seconds", "seed", "single_writer")  # arguments of job.run


def train_job(campaign: Campaign, runtime: str, image: str, options: dict[str, Any]) -> dict[str, Any]:
    """The TrainJob that measures a campaign: a pod for each share, with all GPUs of its node. `options` are RUN_OPTIONS."""
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": campaign.pods,
        "command": ["python3", "-m", "neuroshard.measure.shares.train_job"],
        "args": [json.dumps({"campaign": campaign.model_dump(mode="json"), **options})],
    }
    if campaign.resource:
        trainer["resourcesPerNode"] = {"limits": {campaign.resource: str(campaign.devices)}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": f"neuroshard-{sha256(campaign.folder.encode())[:16]}",
            "labels": {"app.kubernetes.io/name": "neuroshard"},
        },
        "spec": {
            "runtimeRef": {
                "apiGroup": GROUP,
                "kind": "TrainingRuntime",
                "name": f"{runtime}-{campaign.hardware.fingerprint}",
            },
            "trainer": trainer,
        },
    }


def run(
    body: dict[str, Any], timeout_seconds: float, poll_seconds: float = POLL_SECONDS, namespace: str | None = None
) -> None:
    """Create a TrainJob, or adopt the one of an earlier run, and wait for its end. Raises MeasureError, NeuroshardError.

    A TrainJob that an earlier run left finished is replaced. One that ends, or runs longer than `timeout_seconds`, is deleted:
    what it measured is in the store.
    """
    from kubernetes import client

    name, namespace = body["metadata"]["name"], namespace or own_namespace()
    where = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}
    with kubernetes_api(f"TrainJob {namespace}/{name}") as api:
        jobs = client.CustomObjectsApi(api)

        def delete() -> None:
            try:
                jobs.delete_namespaced_custom_object(**where, name=name, _request_timeout=TIMEOUT_SECONDS)
            except client.ApiException as error:
                if error.status != GONE:
                    raise

        def create() -> None:
            jobs.create_namespaced_custom_object(**where, body=body, _request_timeout=TIMEOUT_SECONDS)

        try:
            create()
        except client.ApiException as error:
            if error.status != CONFLICT:
                raise
            if _ended(_asked(jobs, where, name)):
                delete()
                _gone(jobs, where, name, poll_seconds)
                create()
        deadline = time.monotonic() + timeout_seconds
        while not (ended := _ended(_asked(jobs, where, name))):
            if time.monotonic() > deadline:
                delete()
                raise MeasureError(f"TrainJob {name} did not end in {timeout_seconds:.0f} s; are its nodes free?")
            time.sleep(poll_seconds)
        delete()
    kind, message = ended
    if kind == "Failed":
        raise MeasureError(f"TrainJob {name} failed: {one_line(message) or 'see its pods'}")


def own_namespace() -> str:
    """The namespace of this pod."""
    return NAMESPACE.read_text().strip() if NAMESPACE.exists() else "kubeflow"


def _asked(jobs: Any, where: dict[str, str], name: str) -> Any:
    """The TrainJob. Tries again for a while if the API does not answer."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    began = time.monotonic()
    while True:
        try:
            return jobs.get_namespaced_custom_object(**where, name=name, _request_timeout=TIMEOUT_SECONDS)
        except (ApiException, HTTPError) as error:
            passing = not isinstance(error, ApiException) or error.status in PASSING_STATUSES
            if not passing or time.monotonic() - began > PATIENCE_SECONDS:
                raise
        time.sleep(1.0)


def _gone(jobs: Any, where: dict[str, str], name: str, poll_seconds: float) -> None:
    """Wait until a deleted TrainJob is gone. Its pods end first."""
    from kubernetes.client.exceptions import ApiException

    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_SECONDS:
        try:
            _asked(jobs, where, name)
        except ApiException as error:
            if error.status == GONE:
                return
            raise
        time.sleep(poll_seconds)
    raise NeuroshardError(f"TrainJob {name} was deleted, but still exists; does a finalizer hold it?")


def _ended(job: Any) -> tuple[str, str] | None:
    """Complete or Failed, with the message; None while it runs."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return str(condition["type"]), str(condition.get("message") or "")
    return None


def main() -> None:
    """In a pod of the TrainJob: measure the share of this pod's index."""
    try:
        if len(sys.argv) != 2 or "JOB_COMPLETION_INDEX" not in os.environ:
            raise NeuroshardError(
                "this runs in a pod of a TrainJob: give OPTIONS, and JOB_COMPLETION_INDEX in the environment"
            )
        options = decode_json(sys.argv[1].encode(), "OPTIONS")
        if not isinstance(options, dict) or options.keys() != {"campaign", *RUN_OPTIONS}:
            raise NeuroshardError(f"OPTIONS must be an object of campaign, {', '.join(RUN_OPTIONS)}")
        share = int(os.environ["JOB_COMPLETION_INDEX"]) + 1
        run_job(Job.parse({"campaign": options.pop("campaign"), "share": share}, "OPTIONS"), **options)
    except NeuroshardError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
