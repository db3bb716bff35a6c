"""Submitting the compiled pipeline: kfp's own command line and our nightly submitter, against the stub of the API."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    given = ["devices=8", "memory=40GiB", "store=s3://bucket/plans", 'gpus="8"', 'measure_nodes={"pool": "h200"}']
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
        "devices": 8,
        "memory": "40GiB",
        "store": "s3://bucket/plans",
        "gpus": "8",
        "measure_nodes": {"pool": "h200"},
    }


def test_the_submitter_waits_for_the_end(kfp_stub, home: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    kfp_stub.states = ["PENDING", "RUNNING", "SUCCEEDED"]
    file = parameters(tmp_path, {"devices": 8, "gpus": "8"})
    ended = submit(["--parameters", file, "--endpoint", kfp_stub.url], home)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "run r1: SUCCEEDED")
    assert kfp_stub.submitted()["runtime_config"]["parameters"] == {"devices": 8, "gpus": "8"}
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
    file = parameters(tmp_path, {"device": 8})
    ended = submit(["--parameters", file, "--endpoint", kfp_stub.url], home)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {file}: device; the pipeline's parameters are algorithm, ")
    assert kfp_stub.requests == []


def test_an_api_that_is_not_there_is_one_line(home: dict[str, str], tmp_path: Path) -> None:
    ended = submit(["--parameters", parameters(tmp_path, {}), "--endpoint", "http://127.0.0.1:9"], home)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: http://127.0.0.1:9: ")
    assert "Traceback" not in ended.stderr
