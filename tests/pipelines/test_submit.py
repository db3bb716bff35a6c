"""Submitting the compiled pipeline: kfp's own command line and our nightly submitter, against the stub of the API."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuroshard.fleet.night import read_orders

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipelines" / "neuroshard.yaml"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment without this machine's kfp and proxy settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KFP", "KF_")) and "_PROXY" not in name.upper()
    }
    return {**kept, "HOME": str(tmp_path)}


def submit(arguments: list[object], env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, ROOT / "pipelines" / "submit.py", "--poll-seconds", "0.01", *arguments]
    return subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True, timeout=60)


def parameters(folder: Path, values: Any) -> Path:
    path = folder / "parameters.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_kfps_command_line_takes_the_package_and_its_parameters(kfp_stub, home: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    given = ["batch_size=512", "store=s3://bucket/plans", 'measure_cpus="8"', "min_gain=0.05"]
    ended = subprocess.run(
        [Path(sys.executable).with_name("kfp"), "run", "submit", "-e", "neuroshard", "-f", PACKAGE, *given],
        env={**home, "KFP_ENDPOINT": kfp_stub.url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    run = kfp_stub.submitted()
    spec, platform = yaml.safe_load_all(PACKAGE.read_text())
    assert run["experiment_id"] == "e1"
    assert run["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}
    assert run["runtime_config"]["parameters"] == {
        "batch_size": 512,
        "store": "s3://bucket/plans",
        "measure_cpus": "8",
        "min_gain": 0.05,
    }


def test_the_submitter_waits_for_the_end(kfp_stub, home: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    kfp_stub.states = ["PENDING", "RUNNING", "SUCCEEDED"]
    file = parameters(tmp_path, {"batch_size": 512, "measure_cpus": "8"})
    ended = submit(["--parameters", file, "--endpoint", kfp_stub.url], home)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "run r1: SUCCEEDED")
    assert kfp_stub.submitted()["runtime_config"]["parameters"] == {"batch_size": 512, "measure_cpus": "8"}
    assert kfp_stub.states == ["SUCCEEDED"]


@pytest.mark.parametrize("state", ["FAILED", "CANCELED"])
def test_a_run_that_fails_or_is_cancelled_fails_the_submitter(  # type: ignore[no-untyped-def]
    state: str, kfp_stub, home: dict[str, str], tmp_path: Path
) -> None:
    kfp_stub.states = ["RUNNING", state]
    ended = submit(["--parameters", parameters(tmp_path, {}), "--endpoint", kfp_stub.url], home)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"error: run r1 ended as {state}; the live plan is the one from before"


def test_a_run_that_takes_too_long_fails_the_submitter(kfp_stub, home: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    kfp_stub.states = ["RUNNING"]
    file = parameters(tmp_path, {})
    ended = submit(["--parameters", file, "--endpoint", kfp_stub.url, "--hours", "0.0001"], home)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: run r1 is RUNNING after 0.0001 h")


def test_a_pod_shows_the_token_that_it_was_given(kfp_stub, home: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    token = tmp_path / "token"
    token.write_text("of-the-kubelet")
    env = {**home, "KF_PIPELINES_SA_TOKEN_PATH": str(token)}
    assert submit(["--parameters", parameters(tmp_path, {}), "--endpoint", kfp_stub.url], env).returncode == 0
    assert kfp_stub.tokens == {"Bearer of-the-kubelet"}


def test_an_unknown_parameter_is_told_before_anything_is_sent(kfp_stub, home: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = parameters(tmp_path, {"batchsize": 8})
    ended = submit(["--parameters", file, "--endpoint", kfp_stub.url], home)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {file}: batchsize; the pipeline's parameters are algorithm, ")
    assert kfp_stub.requests == []


def test_an_api_that_is_not_there_is_one_line(home: dict[str, str], tmp_path: Path) -> None:
    ended = submit(["--parameters", parameters(tmp_path, {}), "--endpoint", "http://127.0.0.1:9"], home)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: http://127.0.0.1:9: ")
    assert "Traceback" not in ended.stderr


MODELS = [
    {"name": "ads", "tables": "s3://b/ads.json", "devices": 8, "memory": "80GiB", "hardware": "h200"},
    {"name": "feed", "tables": "s3://b/feed.json", "devices": 16, "memory": "60GiB", "hardware": "h100"},
]


def test_the_models_of_a_file_go_as_text_in_which_numbers_stay_whole(  # type: ignore[no-untyped-def]
    kfp_stub, home: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(MODELS))
    file = parameters(tmp_path, {"store": "s3://b/p"})
    ended = submit(["--parameters", file, "--models", tmp_path / "models.yaml", "--endpoint", kfp_stub.url], home)
    assert ended.returncode == 0, ended.stderr
    sent = kfp_stub.submitted()["runtime_config"]["parameters"]
    assert sent.keys() == {"store", "models"}
    assert json.loads(sent["models"]) == MODELS
    assert len(read_orders(sent["models"])) == 2


@pytest.mark.parametrize("text", ["{", "a: 1", "[1]", "[{tables: t}]"])
def test_models_that_are_no_list_of_models_are_told(  # type: ignore[no-untyped-def]
    text: str, kfp_stub, home: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "models.yaml").write_text(text)
    ended = submit(
        ["--parameters", parameters(tmp_path, {}), "--models", tmp_path / "models.yaml", "--endpoint", kfp_stub.url],
        home,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {tmp_path / 'models.yaml'}: no")
    assert kfp_stub.requests == []


@pytest.mark.parametrize(("state", "success"), [("SUCCEEDED", 1), ("FAILED", 0)])
def test_the_metrics_file_says_how_it_went(  # type: ignore[no-untyped-def]
    state: str, success: int, kfp_stub, home: dict[str, str], tmp_path: Path
) -> None:
    kfp_stub.states = [state]
    began = time.time()
    file, metrics = parameters(tmp_path, {}), tmp_path / "neuroshard.prom"
    submit(["--parameters", file, "--endpoint", kfp_stub.url, "--metrics", metrics], home)
    values = dict(line.split() for line in metrics.read_text().splitlines() if not line.startswith("#"))
    assert values["neuroshard_nightly_success"] == str(success)
    assert round(began) <= int(values["neuroshard_nightly_start_timestamp_seconds"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".neuroshard")] == []
