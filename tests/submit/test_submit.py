"""`neuroshard submit`, and kfp's own command line, against a stub of the API (no Kubeflow Pipelines can be run here)."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import loopback
from helpers.kubeflow import KfpStub, recorded, recorded_workflow
from helpers.limits import HANGS
from helpers.processes import wait_until
from helpers.refusals import refused
from neuroshard.core.errors import NeuroshardError
from neuroshard.core.extras import install_command
from neuroshard.kube import Admission
from neuroshard.orders.nightly import read_specs
from neuroshard.submit import kubeflow
from neuroshard.submit import run as submit_run
from neuroshard.submit import wait as submit_wait
from neuroshard.submit.kubeflow import Kubeflow, Server
from neuroshard.submit.package import DEADLINE_SECONDS, RunSettings
from neuroshard.submit.run import run
from neuroshard.submit.wait import Waiting

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipelines" / "neuroshard.yaml"
WAITING = Waiting(seconds=HANGS, poll_seconds=0.001)


def submitted(
    stub: KfpStub,
    given: dict[str, Any] | None = None,
    waiting: Waiting | None = WAITING,
    service_account: str | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    **more: Any,
) -> list[str]:
    settings = RunSettings(given or {}, service_account, deadline_seconds)
    return list(run(Server(stub.url), settings, waiting, **more))


def kfp_run(stub: KfpStub, *words: str | Path) -> "subprocess.CompletedProcess[str]":
    """kfp's own command line."""
    kfp = Path(sys.executable).with_name("kfp")
    return subprocess.run(
        [kfp, *words], env={**os.environ, "KFP_ENDPOINT": stub.url}, capture_output=True, text=True, timeout=HANGS
    )


def test_kfps_command_line_takes_the_package_and_what_is_printed_of_parameters(
    kfp_stub: KfpStub, neuroshard, models: Path
) -> None:
    """It reads each value as JSON, and the server refuses a list or a number where text is declared."""
    for bare in ("step_cpus=4", "models=[]", "tolerations=[]", "node_selector={}"):
        ended = kfp_run(kfp_stub, "run", "submit", "-e", "neuroshard", "-f", PACKAGE, bare)
        assert "requires type STRING" in ended.stdout + ended.stderr, bare
        kfp_stub.requests.clear()
    given = ["step_cpus=4", "tolerations=[]", "node_selector={}", "batch_size=512", "min_gain=0.05", "max_age="]
    asked = [word for setting in given for word in ("--set", setting)]
    printed = neuroshard("submit", "--print-command", "--models", models, *asked)
    assert neuroshard("submit").stderr == "error: give --endpoint, the address of the API (or set KFP_ENDPOINT)\n"
    assert (printed.returncode, kfp_stub.requests) == (0, []), printed.stderr
    kfp, *words = shlex.split(printed.stdout)
    assert kfp == "kfp"
    assert kfp_run(kfp_stub, *words).returncode == 0
    sent = kfp_stub.submitted()
    spec, platform = yaml.safe_load_all(PACKAGE.read_text())
    assert sent["experiment_id"] == "e1"
    assert sent["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}
    parameters = sent["runtime_config"]["parameters"]
    assert json.loads(parameters.pop("models")) == yaml.safe_load(models.read_text())
    assert parameters == {
        "step_cpus": "4", "tolerations": "[]", "node_selector": "{}", "batch_size": 512, "min_gain": 0.05, "max_age": "",
    }  # fmt: skip


def test_the_command_submits_the_same_package_for_all_models_and_waits(
    kfp_stub: KfpStub, neuroshard, parameters: Path, models: Path
) -> None:
    kfp_stub.states = ["PENDING", "RUNNING", "SUCCEEDED"]
    ended = neuroshard(
        "submit", "--parameters", parameters, "--models", models, "--set", "pods=2", "--poll", "0.01s",
        "--service-account", "neuroshard-runner", KFP_ENDPOINT=kfp_stub.url,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("run r1: submitted (neuroshard ")
    assert lines[1:] == ["run r1: PENDING", "run r1: RUNNING", "run r1: SUCCEEDED"]
    sent = kfp_stub.submitted()
    spec, platform = yaml.safe_load_all(PACKAGE.read_text())
    platform["platforms"]["kubernetes"]["pipelineConfig"] = {"activeDeadlineSeconds": 86400}
    assert sent["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}
    assert sent["service_account"] == "neuroshard-runner"
    given = sent["runtime_config"]["parameters"]
    assert {**given, "models": None} == {
        "store": "s3://bucket/p", "batch_size": 512, "measure_cpus": "8", "pods": 2, "models": None,
    }  # fmt: skip
    assert json.loads(given["models"]) == yaml.safe_load(models.read_text())  # numbers in it stay whole
    assert len(read_specs(given["models"])) == 2


def test_what_is_under_way_with_the_same_parameters_is_waited_for(kfp_stub: KfpStub) -> None:
    submitted(kfp_stub, {"pods": 1}, None)
    kfp_stub.states = ["RUNNING", "SUCCEEDED"]
    lines = submitted(kfp_stub, {"pods": 1})
    assert lines[0].startswith("run r1: under way with the same parameters")
    assert len(kfp_stub.runs) == 1


def test_of_several_that_are_under_way_the_newest_is_waited_for(kfp_stub: KfpStub) -> None:
    submitted(kfp_stub, {"pods": 1}, None)
    kfp_stub.runs.append({**kfp_stub.runs[0], "run_id": "r2"})
    assert submitted(kfp_stub, {"pods": 1}, None)[0].startswith("run r2: under way with the same parameters")
    assert [one["state"] for one in kfp_stub.runs] == ["PENDING", "PENDING"]


@pytest.mark.parametrize("given", [{"pods": 2}, {"pods": 1}])
def test_other_parameters_or_an_ended_run_make_another(kfp_stub: KfpStub, given: dict[str, int]) -> None:
    submitted(kfp_stub, {"pods": 1}, None)
    kfp_stub.runs[0]["state"] = "RUNNING" if given == {"pods": 2} else "FAILED"
    assert submitted(kfp_stub, given)[0].startswith("run r2: submitted")


def test_a_dry_run_says_what_it_would_do_and_changes_nothing(kfp_stub: KfpStub) -> None:
    lines = submitted(kfp_stub, {"pods": 1, "store": "s3://bucket/p"}, dry_run=True)
    assert lines[0].startswith("would submit neuroshard ")
    assert lines[1:] == ["  pods: 1", "  store: s3://bucket/p"]
    assert kfp_stub.changes() == []
    submitted(kfp_stub, {"pods": 1}, None)
    assert submitted(kfp_stub, {"pods": 1}, dry_run=True)[0].startswith("would wait for run r1 (neuroshard ")


@pytest.mark.parametrize("state", ["FAILED", "CANCELED", "SKIPPED"])
def test_a_run_that_ends_otherwise_is_an_error(state: str, kfp_stub: KfpStub) -> None:
    kfp_stub.states = ["RUNNING", state]
    with refused(NeuroshardError, "run r1", state):
        submitted(kfp_stub)


def test_the_step_that_failed_is_named_with_its_model_and_its_own_line(kfp_stub: KfpStub) -> None:
    kfp_stub.shape, kfp_stub.workflow = recorded("cpu2"), recorded_workflow("cpu2")
    kfp_stub.logs["neuroshard-zgxwn-metadata-0-1-system-container-impl-2501641722"] = (
        "Traceback (most recent call last):\n  File x\nneuroshard.core.errors.Infeasible: tables need 93.1 GiB\n"
    )
    with pytest.raises(NeuroshardError) as caught:
        submitted(kfp_stub)
    assert str(caught.value) == (
        "run r1 ended as FAILED (search of model 'm': tables need 93.1 GiB); models that it had deployed by then have their "
        "new plans, and the others keep theirs"
    )


def test_without_a_log_the_reason_is_argos(kfp_stub: KfpStub) -> None:
    kfp_stub.shape, kfp_stub.workflow = recorded("cron-failed"), recorded_workflow("cron-failed")
    kfp_stub.workflow["status"]["nodes"]["neuroshard-tznzf-3043119314"]["message"] = "OOMKilled (exit code 137)"
    with refused(NeuroshardError, "OOMKilled (exit code 137)"):
        submitted(kfp_stub)


def test_a_driver_that_failed_is_named_with_the_command_that_shows_its_log_and_another_run_follows_once(
    kfp_stub: KfpStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_run, "LEASE_SECONDS", 0.0)
    kfp_stub.states, kfp_stub.workflow = ["FAILED"], recorded_workflow("driver-failed")
    pod = "neuroshard-4ln4c-system-dag-driver-1399717138"
    with refused(
        NeuroshardError, "run r2", f"the driver of for-loop-2: failed; kubectl -n kubeflow logs {pod} -c main"
    ):
        submitted(kfp_stub)


def test_a_run_whose_pods_were_refused_says_why_once_and_is_not_followed_by_another(kfp_stub: KfpStub) -> None:
    kfp_stub.states, kfp_stub.workflow = ["FAILED"], recorded_workflow("account-deleted")
    why = 'its pod is forbidden: error looking up service account kubeflow/storm: serviceaccount "storm" not found'
    with refused(NeuroshardError, f"run r1 ended as FAILED (the driver of for-loop-1 and 3 more steps: {why}); models"):
        submitted(kfp_stub)
    assert len(kfp_stub.runs) == 1


def test_a_run_that_ended_before_its_first_step_says_why(kfp_stub: KfpStub) -> None:
    kfp_stub.states = ["FAILED"]
    kfp_stub.workflow = {"status": {"message": 'serviceaccounts "nobody" not found'}}
    with refused(NeuroshardError, "FAILED", 'serviceaccounts "nobody" not found'):
        submitted(kfp_stub)


def test_a_server_that_answers_with_steps_is_understood_too(kfp_stub: KfpStub) -> None:
    kfp_stub.states = ["FAILED"]
    kfp_stub.details = [
        {"display_name": "survey", "state": "SUCCEEDED"},
        {"display_name": "measure-jobs", "state": "FAILED", "child_tasks": [{"task_id": "t"}]},
        {"display_name": "measure", "state": "FAILED", "error": {"code": 13, "message": "out of\nluck"}},
        {
            "display_name": "place",
            "state": "FAILED",
            "state_history": [{"state": "FAILED", "error": {"message": "lost"}}],
        },
        {"display_name": "merge", "state": "FAILED"},
    ]
    with refused(NeuroshardError, "FAILED", "measure: out of luck", "place: lost", "merge: failed"):
        submitted(kfp_stub)


@pytest.mark.parametrize(
    ("name", "step", "times"), [("pss-forbidden", "survey", 45), ("terminated-storm", "deploy", 9)]
)
def test_a_storm_of_retries_is_ended_in_one_line(
    kfp_stub: KfpStub, monkeypatch: pytest.MonkeyPatch, name: str, step: str, times: int
) -> None:
    monkeypatch.setattr(submit_wait, "LOOK_SECONDS", 0.0)
    kfp_stub.shape = {**recorded(name), "state": "RUNNING"}  # as it was before somebody ended it
    kfp_stub.workflow = recorded_workflow(name)
    refusal = 'forbidden: violates PodSecurity "restricted:latest"'
    for node in kfp_stub.workflow["status"]["nodes"].values():
        node["message"] = f'pods "x" is {refusal}'
    with pytest.raises(NeuroshardError) as caught:
        submitted(kfp_stub)
    assert str(caught.value).startswith(f"run r1 was terminated: {times} pods of {step} ")
    assert refusal in str(caught.value)
    assert "\n" not in str(caught.value)
    assert kfp_stub.changes()[-1] == "POST /runs/r1:terminate"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands still is looked at at once."""
    monkeypatch.setattr(submit_wait, "STILL_SECONDS", 0.0)


@pytest.mark.usefixtures("soon")
def test_a_run_whose_recurring_run_was_deleted_is_not_waited_for(kfp_stub: KfpStub) -> None:
    kfp_stub.shape = recorded("recurring-orphan")
    with pytest.raises(NeuroshardError) as caught:
        submitted(kfp_stub)
    assert str(caught.value) == (
        "run r1 is recorded as RUNNING for ever: its recurring run was deleted while it ran, and its pods with that; delete the "
        "record in Kubeflow"
    )


@pytest.mark.usefixtures("soon")
def test_a_run_whose_pods_are_gone_is_not_waited_for_and_another_is_submitted(
    kfp_stub: KfpStub, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kfp_stub, None, None)
    kfp_stub.runs[0]["state"] = "RUNNING"
    orphan = {**recorded("recurring-orphan"), "recurring_run_id": ""}
    kfp_stub.workflow = recorded_workflow("recurring-orphan")
    answer = kfp_stub.answer

    def first_is_an_orphan(method: str, path: str, body: Any) -> tuple[int, Any]:
        status, reply = answer(method, path, body)
        return status, {**reply, **orphan} if method == "GET" and path.endswith("/v2beta1/runs/r1") else reply

    kfp_stub.answer = first_is_an_orphan
    lines = submitted(kfp_stub)
    assert lines[0].startswith("run r1: under way with the same parameters")
    assert lines[2].startswith("run r2: submitted")
    assert lines[-1] == "run r2: SUCCEEDED"
    assert "run r1 is recorded as RUNNING for ever: its pods are gone" in capsys.readouterr().err


@pytest.mark.usefixtures("soon")
def test_a_run_whose_pods_have_logs_is_waited_for(kfp_stub: KfpStub) -> None:
    kfp_stub.shape = {**recorded("recurring-orphan"), "recurring_run_id": ""}
    kfp_stub.workflow = recorded_workflow("recurring-orphan")
    pod = "neuroshard-nightly4b8lf-1-358216334-system-container-impl-1853361701"
    kfp_stub.logs[pod] = "measuring\n"
    with refused(NeuroshardError, "run r1", "RUNNING"):
        submitted(kfp_stub, waiting=Waiting(0.5, 0.001))


def test_a_run_that_takes_too_long_is_an_error(kfp_stub: KfpStub) -> None:
    kfp_stub.states = ["RUNNING"]
    with refused(NeuroshardError, "run r1 is RUNNING after 0 s"):
        submitted(kfp_stub, waiting=Waiting(0.0036, 0.001))


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was said on stderr, without what kfp says there."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]


def test_an_api_that_restarts_meanwhile_is_asked_again(kfp_stub: KfpStub, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = run(Server(kfp_stub.url), RunSettings({}), WAITING)
    next(waiting)
    kfp_stub.faults = [503, 502]
    assert list(waiting) == ["run r1: SUCCEEDED"]
    said = notes(capsys)
    assert [line.count("; asking again for 10 min") for line in said] == [1, 0]  # once, however often
    assert "Kubeflow Pipelines answers again, after " in said[1]


def test_an_api_that_stays_away_is_an_error(kfp_stub: KfpStub) -> None:
    waiting = run(Server(kfp_stub.url), RunSettings({}), WAITING, patience_seconds=0.0)
    next(waiting)
    kfp_stub.faults = [503] * 9
    with refused(NeuroshardError, 503, "run r1"):
        list(waiting)


def test_an_api_that_is_away_at_the_start_loses_no_night(kfp_stub: KfpStub, capsys: pytest.CaptureFixture[str]) -> None:
    kfp_stub.faults = [503, 502, 503]
    assert submitted(kfp_stub)[-1] == "run r1: SUCCEEDED"
    assert len(kfp_stub.runs) == 1
    assert len(notes(capsys)) == 2


def test_a_start_whose_answer_was_lost_is_not_made_twice(kfp_stub: KfpStub) -> None:
    kfp_stub.lost = True
    lines = submitted(kfp_stub)
    assert lines[0].startswith("run r1: submitted")
    assert len(kfp_stub.runs) == 1


def test_a_start_whose_answer_was_lost_and_that_has_ended_is_not_made_again(kfp_stub: KfpStub) -> None:
    kfp_stub.lost = True
    answer = kfp_stub.answer

    def quick(method: str, path: str, body: Any) -> tuple[int, Any]:
        reply = answer(method, path, body)
        for one in kfp_stub.runs:
            one["state"] = "SUCCEEDED"
        return reply

    kfp_stub.answer = quick
    assert submitted(kfp_stub)[-1] == "run r1: SUCCEEDED"
    assert len(kfp_stub.runs) == 1


def test_a_start_that_comes_late_ends_the_second_one(kfp_stub: KfpStub, capsys: pytest.CaptureFixture[str]) -> None:
    kfp_stub.lost = True
    answer, hidden = kfp_stub.answer, [True]

    def late(method: str, path: str, body: Any) -> tuple[int, Any]:
        status, reply = answer(method, path, body)
        if method == "GET" and path.endswith("/v2beta1/runs") and len(kfp_stub.runs) == 1 and hidden:
            return 200, {}  # the first run is not listed yet
        return status, reply

    kfp_stub.answer = late
    assert submitted(kfp_stub)[0].startswith("run r1: submitted")
    assert [one["state"] for one in kfp_stub.runs][1] == "FAILED"
    assert "run r2 is terminated" in capsys.readouterr().err


def test_an_api_that_never_comes_says_what_became_of_the_run(kfp_stub: KfpStub) -> None:
    kfp_stub.faults = [503] * 999
    with refused(NeuroshardError, 503, "no run was submitted"):
        submitted(kfp_stub, patience_seconds=0.01)


def test_a_run_that_the_cluster_would_refuse_is_not_submitted(
    kfp_stub: KfpStub, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "the API refuses a pod of a run under kubeflow/nobody: there is no such service account"
    with refused(NeuroshardError, why, "--no-check"):
        submitted(kfp_stub, check=lambda: Admission("refused", why))
    assert kfp_stub.runs == []
    submitted(kfp_stub, check=lambda: Admission("unknown", "it could not be checked"))
    assert "note: it could not be checked\n" in capsys.readouterr().err


def test_a_pod_shows_the_token_that_it_was_given(
    kfp_stub: KfpStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of-the-kubelet")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    submitted(kfp_stub)
    assert kfp_stub.tokens == {"Bearer of-the-kubelet"}


@pytest.mark.parametrize(
    ("status", "facts"),
    [
        (404, ["/apis/v2beta1/healthz"]),
        (401, ["fault 401", "token"]),
        (403, ["fault 403", "account", "namespace"]),
        (500, ["fault 500"]),
    ],
)
def test_what_the_api_refuses_is_one_line(kfp_stub: KfpStub, status: int, facts: list[str]) -> None:
    kfp_stub.faults = [status] * 20
    with refused(NeuroshardError, kfp_stub.url, *facts):
        Kubeflow(Server(kfp_stub.url))


def test_an_api_of_several_users_needs_the_namespace_of_one_and_says_how_to_give_it(kfp_stub: KfpStub) -> None:
    kfp_stub.several_users = True
    with refused(NeuroshardError, kfp_stub.url, "several users", "--namespace"):
        Kubeflow(Server(kfp_stub.url))
    assert kfp_stub.changes() == []
    Kubeflow(Server(kfp_stub.url, namespace="team-a"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["create", "submit"])
def test_the_plain_commands_that_readme_shows_submit_the_pipeline_with_its_defaults(
    kfp_stub: KfpStub, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    [command] = re.findall(r"^ +kfp (run create .*?) +#.* kfp run submit,", (ROOT / "README.md").read_text(), re.M)
    monkeypatch.chdir(ROOT)
    ended = kfp_run(kfp_stub, *command.replace("create", verb).split())
    assert ended.returncode == 0, ended.stderr
    body, [spec, _] = kfp_stub.submitted(), yaml.safe_load_all(PACKAGE.read_text())
    assert body["pipeline_spec"]["pipeline_spec"]["root"] == spec["root"]
    assert body["runtime_config"] == {"parameters": {}}


def test_a_page_that_is_no_api_is_one_line(kfp_stub: KfpStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kfp_stub, "answer", lambda *_: (200, ["a login page"]))
    with refused(NeuroshardError, "Kubeflow Pipelines 2.17"):
        submitted(kfp_stub)


def test_an_api_that_is_not_there_is_one_line(neuroshard) -> None:
    line = (
        "error: http://127.0.0.1:9: Kubeflow Pipelines does not answer: [Errno 111] Connection refused; check the address and "
        "the network (--endpoint, or KFP_ENDPOINT)"
    )
    for how, more in (("--dry-run", ""), ("--no-check", "; no run was submitted")):
        ended = neuroshard("submit", "--endpoint", "http://127.0.0.1:9", "--patience", "0", how)
        assert ended.returncode == 1
        assert [said for said in ended.stderr.splitlines() if said.startswith("error: ")] == [line + more]
        assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [["submit"], ["schedule", "--cron", "0 2 * * *"]])
def test_without_kfp_the_way_out_is_one_line(command: list[str]) -> None:
    code = "import sys; sys.modules['kfp'] = None; from neuroshard.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, *command, "--endpoint", "http://127.0.0.1:9"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (
        1, f"error: submitting needs the package kfp: {install_command('pipeline')}\n",
    )  # fmt: skip


def test_an_old_kfp_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import kfp

    monkeypatch.setattr(kfp, "__version__", "1.8.22")
    with refused(NeuroshardError, "kfp 1.8.22") as raised:
        Kubeflow(Server("http://127.0.0.1:9"))
    assert str(raised.value).endswith(install_command("pipeline"))


def test_stopped_by_sigterm_it_says_that_the_run_continues_and_again_it_waits_for_it(
    kfp_stub: KfpStub, tmp_path: Path
) -> None:
    kfp_stub.states = ["RUNNING"]
    metrics = tmp_path / "neuroshard.prom"
    command = [sys.executable, "-m", "neuroshard", "submit", "--poll", "0.05s", "--endpoint", kfp_stub.url]
    process = subprocess.Popen(
        [*command, "--metrics", metrics], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert wait_until(lambda: any(path.endswith("/runs/r1") for _, path, _ in kfp_stub.requests), HANGS)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=HANGS)
    assert process.returncode == 143
    assert (
        stderr.splitlines()[-1]
        == "error: stopped by SIGTERM; run r1 continues, and the same command waits for it again"
    )
    assert "neuroshard_nightly_success 0\n" in metrics.read_text()
    kfp_stub.states = ["SUCCEEDED"]
    assert "run r1: SUCCEEDED" in submitted(kfp_stub)


@pytest.mark.slow
def test_stopped_by_sigterm_while_the_api_is_away_it_says_that_nothing_was_submitted() -> None:
    command = [sys.executable, "-m", "neuroshard", "submit", "--no-check", "--endpoint", "http://127.0.0.1:9"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "; asking again for 10 min" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=HANGS)
    assert (process.returncode, stderr.splitlines()[-1]) == (143, "error: stopped by SIGTERM; no run was submitted")


def test_a_wait_that_outlasts_the_run_is_a_slip(neuroshard) -> None:
    ended = neuroshard("submit", "--endpoint", "http://127.0.0.1:9", "--timeout", "48h")
    assert (ended.returncode, ended.stderr) == (
        2, "error: --timeout 48h is longer than --deadline 24h, at which Kubeflow ends the run\n",
    )  # fmt: skip
    ended = neuroshard("submit", "--endpoint", "http://127.0.0.1:9", "--timeout", "1h", "--give-up", "2h")
    assert (ended.returncode, ended.stderr) == (
        2, "error: --give-up 2h never comes: nothing waits for the run after --timeout 1h\n",
    )  # fmt: skip


def test_who_does_not_wait_cannot_tell_how_it_ended(neuroshard) -> None:
    ended = neuroshard("submit", "--endpoint", "http://127.0.0.1:9", "--no-wait", "--event")
    assert (ended.returncode, ended.stderr) == (
        2, "error: --metrics and --event report how a run ended; leave out --no-wait\n",
    )  # fmt: skip


def test_an_api_that_takes_the_question_and_says_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow, "TIMEOUT", (1.0, 0.05))
    with loopback.listening() as silent:
        url = loopback.url(loopback.port_of(silent))
        with refused(NeuroshardError, url, "timed out"):
            Kubeflow(Server(url))
