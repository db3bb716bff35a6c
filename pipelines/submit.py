"""Submit the compiled pipeline, wait for its end, and fail where it fails: what the nightly CronJob runs in its image.

    python pipelines/submit.py --parameters parameters.yaml --endpoint http://ml-pipeline.kubeflow:8888

Parameters are a YAML mapping; what it leaves out keeps the pipeline's default.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import yaml
from kfp.client import Client, ServiceAccountTokenVolumeCredentials
from kfp_server_api import ApiException
from urllib3.exceptions import HTTPError

PACKAGE = Path(__file__).with_name("neuroshard.yaml")
ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=Path, required=True, help="YAML mapping of pipeline parameters")
    parser.add_argument("--endpoint", required=True, help="address of the Kubeflow Pipelines API")
    parser.add_argument("--experiment", default="neuroshard")
    parser.add_argument("--namespace", help="profile to run in, where Kubeflow has several users")
    parser.add_argument("--hours", type=float, default=12, help="longest that a run may take")
    parser.add_argument("--poll-seconds", type=float, default=15)
    options = parser.parse_args()
    try:
        submit(options)
    except (ApiException, HTTPError) as error:
        reason = getattr(error, "reason", None) or error
        sys.exit(f"error: {options.endpoint}: {' '.join(str(reason).split())[:300]}")


def submit(options: argparse.Namespace) -> None:
    """One run, from its parameters to its end. Exits 1 unless it succeeded."""
    parameters = read_parameters(options.parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "only works with Kubeflow Pipeline v2.0.0-beta.2 and later"
        # the token that the kubelet projects into the pod; kfp looks for it by itself only where no host is given
        token = ServiceAccountTokenVolumeCredentials() if "KF_PIPELINES_SA_TOKEN_PATH" in os.environ else None
        client = Client(host=options.endpoint, credentials=token)
    run = client.create_run_from_pipeline_package(
        str(PACKAGE), arguments=parameters, experiment_name=options.experiment, namespace=options.namespace
    )
    state = wait(client, run.run_id, options.hours * 3600, options.poll_seconds)
    print(f"run {run.run_id}: {state}", flush=True)
    if state != "SUCCEEDED":
        sys.exit(f"error: run {run.run_id} ended as {state}; the live plan is the one from before")


def read_parameters(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, if the pipeline knows every name in it."""
    given = yaml.safe_load(path.read_text())
    known = next(yaml.safe_load_all(PACKAGE.read_text()))["root"]["inputDefinitions"]["parameters"]
    if not isinstance(given, dict) or given.keys() - known:
        unknown = ", ".join(map(str, given.keys() - known)) if isinstance(given, dict) else "no mapping"
        sys.exit(f"error: {path}: {unknown}; the pipeline's parameters are {', '.join(sorted(known))}")
    return given


def wait(client: Client, run_id: str, seconds: float, poll_seconds: float) -> str:
    """The state in which the run ended. kfp's own wait never sees a run that was cancelled."""
    deadline = time.monotonic() + seconds
    while (state := str(client.get_run(run_id).state)) not in ENDED:
        if time.monotonic() > deadline:
            sys.exit(f"error: run {run_id} is {state} after {seconds / 3600:g} h; it goes on, nobody waits for it")
        time.sleep(poll_seconds)
    return state


if __name__ == "__main__":
    main()
