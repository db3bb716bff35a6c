"""Failed steps by name and reason: from runs that a real Kubeflow Pipelines recorded, reduced."""

import json

import pytest

from helpers.kubeflow import KfpStub, recorded, recorded_workflow
from neuroshard.submit.kubeflow import Kubeflow, Server
from neuroshard.submit.steps import (
    FailedStep,
    Workflow,
    cut,
    error_line,
    read_workflow,
    step_name,
    step_text,
    steps_text,
)

FEED = json.dumps({"model": json.dumps({"models": [{"name": "feed"}]})})  # inputs of a step of one model
LOG = """\
[KFP Executor 2026-01-01 00:00:00,000 INFO]: Got executor_input:
{
    "inputs": {
        "parameterValues": %s
    }
}
loaded 26 tables
Traceback (most recent call last):
  File "/usr/lib/python3.11/runpy.py", line 196, in _run_module_as_main
    return _run_code(code, main_globals, None,
neuroshard.core.errors.Infeasible: tables need 93.1 GiB, and one device has 80.0 GiB
I0101 00:00:01.000000      12 launcher_v2.go:151] publish success.
F0101 00:00:01.000000      12 main.go:49] failed to execute component: exit status 1
"""


def workflow(name: str) -> Workflow:
    return read_workflow(json.dumps(recorded_workflow(name)))


def test_the_models_of_a_run_that_gives_none_are_the_pipelines_default(kfp_stub: KfpStub) -> None:
    kfp_stub.shape, kfp_stub.runs = recorded("cpu2"), [{"run_id": "r1"}]
    kfp_stub.shape["runtime_config"]["parameters"] = {}
    root = kfp_stub.shape["pipeline_spec"]["pipeline_spec"]["root"]
    root["inputDefinitions"] = {"parameters": {"models": {"defaultValue": "[]"}}}
    assert Kubeflow(Server(kfp_stub.url)).run("r1").models == "[]"


@pytest.mark.parametrize(
    ("name", "failed", "storm"),
    [
        ("cpu2", ["search"], ("search", 1)),
        ("cron-failed", ["search"], ("search", 1)),
        ("pss-forbidden", ["survey"], ("survey", 45)),
        ("terminated-storm", ["deploy"], ("deploy", 9)),
        ("recurring-orphan", [], ("", 0)),
        ("driver-failed", ["the driver of for-loop-2"], ("the driver of for-loop-2", 1)),
        (
            "account-deleted",
            [f"the driver of {of}" for of in ("for-loop-1", "for-loop-3", "survey", "root")],
            ("the driver of for-loop-1", 9),
        ),
    ],
)
def test_a_step_that_failed_is_named_once_however_often_it_was_tried(
    name: str, failed: list[str], storm: tuple[str, int]
) -> None:
    found = workflow(name)
    assert [step.name for step in found.failed_steps()] == failed
    assert found.storm() == storm


def test_thirty_refused_pods_have_one_reason() -> None:
    found = workflow("account-deleted")
    said = steps_text(step_text(step, "", "") for step in found.failed_steps())
    assert said == [
        "the driver of for-loop-1 and 3 more steps: its pod is forbidden: error looking up service account kubeflow/storm: "
        'serviceaccount "storm" not found'
    ]


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("w(0).root(0).night(0).plan-2(0).executor(0)", "plan"),
        ("w(0).root(0).kind(0).for-loop-2(0).iteration-iterations(1:1)(0).iteration-item(0).plan-later(0).executor(1)", "plan"),
        ("w(0).root(0).night(0).plan-driver(2)", "the driver of plan"),
        ("w(0).root(0).for-loop-1(0).iteration-driver(0)", "the driver of for-loop-1"),
        ("w(0).for-loop-1(0).iteration-iterations(0:0)(0).iteration-item-driver(0)", "the driver of an item of for-loop-1"),
        ("w(0).root-driver(0)", "the driver of root"),
    ],
)  # fmt: skip
def test_a_step_is_called_as_in_the_pipeline(node: str, name: str) -> None:
    assert step_name(node) == name


def test_a_step_is_reported_by_its_own_inputs_where_its_log_has_them_else_by_the_only_model() -> None:
    of_job = LOG % json.dumps({"job": json.dumps({"campaign": {"hardware": {"name": "NVIDIA-H200"}}, "share": 2})})
    measure, plan, two = (
        FailedStep("measure"),
        FailedStep("plan", why="OOMKilled"),
        '[{"name": "ads"}, {"name": "feed"}]',
    )
    assert step_text(measure, two, of_job)[0] == "measure on NVIDIA-H200"
    assert step_text(plan, two, LOG % FEED)[0] == "plan of model 'feed'"
    assert step_text(plan, '[{"name": "ads"}]', "") == ("plan of model 'ads'", "OOMKilled")
    assert step_text(plan, two, "") == ("plan", "OOMKilled")
    assert step_text(measure, '[{"name": "ads"}]', "") == ("measure", "failed")


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (LOG % "{}", "tables need 93.1 GiB, and one device has 80.0 GiB"),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("Traceback (most recent call last):\n  File x\nMemoryError\nexit\n", "MemoryError"),
        ("note: x\nerror: share 2 of 4 is not there\nF0101 main.go:49] exit status 1\n", "share 2 of 4 is not there"),
        (
            "F1128 17:32:29.1       1 main.go:110] KFP driver: two tasks have the same task name\n",
            "KFP driver: two tasks have the same task name",
        ),
        ("all is well\n", ""),
        ("", ""),
    ],
)
def test_the_line_of_error_is_found_in_a_log(log: str, line: str) -> None:
    assert error_line(log) == line


def test_a_long_list_is_cut() -> None:
    assert cut(["a", "b"]) == "a; b"
    assert cut([f"s{index}" for index in range(45)]) == "s0; s1; s2; s3; s4 and 40 more"
