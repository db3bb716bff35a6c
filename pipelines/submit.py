"""Submit the compiled pipeline, wait for its end, and fail where it fails: what the nightly CronJob runs in its image.

    python pipelines/submit.py --parameters parameters.yaml --models models.yaml --endpoint http://ml-pipeline.kubeflow:8888

Parameters are a YAML mapping; what it leaves out keeps the pipeline's default. Models are a YAML list, one mapping a model that
wants a plan. How the run ended is told by the exit status, the last line, and with --metrics in a file for Prometheus.
"""

import argparse
import json
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
    parser.add_argument("--models", type=Path, help="YAML list of the models [default: the pipeline's own]")
    parser.add_argument("--metrics", type=Path, help="write how it went here, in Prometheus' text format")
    parser.add_argument("--endpoint", required=True, help="address of the Kubeflow Pipelines API")
    parser.add_argument("--experiment", default="neuroshard")
    parser.add_argument("--namespace", help="profile to run in, where Kubeflow has several users")
    parser.add_argument("--service-account", help="of the run's pods [default: what Kubeflow Pipelines gives them]")
    parser.add_argument("--hours", type=float, default=12, help="longest that a run may take")
    parser.add_argument("--poll-seconds", type=float, default=15)
    options = parser.parse_args()
    began, succeeded = time.time(), False
    try:
        submit(options)
        succeeded = True
    except (ApiException, HTTPError) as error:
        reason = getattr(error, "reason", None) or error
        sys.exit(f"error: {options.endpoint}: {' '.join(str(reason).split())[:300]}")
    finally:
        if options.metrics:
            write_metrics(options.metrics, began, time.time(), succeeded)


def submit(options: argparse.Namespace) -> None:
    """One run, from its parameters to its end. Exits 1 unless it succeeded."""
    parameters = read_parameters(options.parameters, options.models)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "only works with Kubeflow Pipeline v2.0.0-beta.2 and later"
        # the token that the kubelet projects into the pod; kfp looks for it by itself only where no host is given
        token = ServiceAccountTokenVolumeCredentials() if "KF_PIPELINES_SA_TOKEN_PATH" in os.environ else None
        client = Client(host=options.endpoint, credentials=token)
    run = client.create_run_from_pipeline_package(
        str(PACKAGE),
        arguments=parameters,
        experiment_name=options.experiment,
        namespace=options.namespace,
        service_account=options.service_account,
    )
    state = wait(client, run.run_id, options.hours * 3600, options.poll_seconds)
    print(f"run {run.run_id}: {state}", flush=True)
    if state != "SUCCEEDED":
        sys.exit(f"error: run {run.run_id} ended as {state}; the live plan is the one from before")


def read_parameters(path: Path, models: Path | None = None) -> dict[str, Any]:
    """The mapping in a YAML file, if the pipeline knows every name in it, with the list of models of another."""
    given = read_yaml(path)
    known = next(yaml.safe_load_all(PACKAGE.read_text()))["root"]["inputDefinitions"]["parameters"]
    if not isinstance(given, dict) or given.keys() - known:
        unknown = ", ".join(map(str, given.keys() - known)) if isinstance(given, dict) else "no mapping"
        sys.exit(f"error: {path}: {unknown}; the pipeline's parameters are {', '.join(sorted(known))}")
    if models is None:
        return given
    listed = read_yaml(models)
    if not isinstance(listed, list) or not all(isinstance(model, dict) and "name" in model for model in listed):
        sys.exit(f"error: {models}: no list of models, each with its name, tables, devices and memory")
    return {**given, "models": json.dumps(listed)}


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Exits where it cannot be read."""
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        sys.exit(f"error: {path}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        sys.exit(f"error: {path}: not YAML: {' '.join(str(error).split())[:200]}")


def write_metrics(path: Path, began: float, ended: float, succeeded: bool) -> None:
    """How the run went, for the textfile collector of node_exporter: renamed into place, so that none reads half of it."""
    values = {
        "neuroshard_nightly_success": ("1 where the last run succeeded, else 0", int(succeeded)),
        "neuroshard_nightly_start_timestamp_seconds": ("When the last run began", round(began)),
        "neuroshard_nightly_end_timestamp_seconds": ("When the last run ended", round(ended)),
    }
    lines = [f"# HELP {name} {text}.\n# TYPE {name} gauge\n{name} {value}\n" for name, (text, value) in values.items()]
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text("".join(lines))
    temporary.replace(path)


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
