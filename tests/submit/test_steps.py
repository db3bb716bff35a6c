"""Failed steps by name: from runs that a real Kubeflow Pipelines recorded, reduced (recorded.json), and whole where they are."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.kubeflow import recorded
from neuroshard.submit.kubeflow import read_run
from neuroshard.submit.steps import (
    FailedStep,
    Task,
    error_line,
    failed_steps,
    fnv1a,
    refused_at_once,
    running_pods,
    step_text,
    steps_text,
)

# the recordings as they came lie beside the checkout, where they are kept at all
WHOLE = next((one for folder in Path(__file__).parents if (one := folder / "shared/recorded/kfp-2.17").is_dir()), None)
FEED = json.dumps({"model": json.dumps({"models": [{"name": "feed"}]})})  # inputs of a step of one model
JOB = json.dumps({"job": json.dumps({"campaign": {"hardware": {"name": "NVIDIA-H200"}}, "share": 2})})
TOO_LARGE = "tables need 93.1 GiB, and one device has 80.0 GiB"
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


def answered(answer: dict[str, Any]) -> Any:
    """The SDK's class for a run, made of JSON."""
    from kfp_server_api import ApiClient, V2beta1Run

    kept = ("display_name", "state", "start_time", "end_time", "child_tasks")
    tasks = [{key: task[key] for key in kept if task.get(key)} for task in answer["run_details"]["task_details"]]
    response = SimpleNamespace(data=json.dumps({**answer, "run_id": "r1", "run_details": {"task_details": tasks}}))
    return read_run(ApiClient().deserialize(response, V2beta1Run))


def names(tasks: tuple[Task, ...]) -> list[str]:
    return [step.name for step in failed_steps(tasks)]


def test_the_models_of_a_run_that_gives_none_are_the_pipelines_default() -> None:
    answer = {**recorded("cpu2"), "runtime_config": {"parameters": {}}}
    answer["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"] = {
        "parameters": {"models": {"defaultValue": "[]"}}
    }
    assert answered(answer).models == "[]"


def test_the_hash_is_argos() -> None:
    assert fnv1a("") == 0x811C9DC5
    assert fnv1a("foobar") == 0xBF9CF968  # from the authors' own test vectors
    assert fnv1a("bar", fnv1a("foo")) == fnv1a("foobar")


@pytest.mark.parametrize(
    ("name", "failed", "at_once"),
    [
        ("cpu2", ["search"], ("search", 1)),
        ("cron-failed", ["search"], ("search", 1)),
        ("pss-forbidden", ["survey"], ("survey", 45)),
        ("terminated-storm", ["deploy"], ("deploy", 9)),
        ("recurring-orphan", [], ("", 0)),
    ],
)
def test_a_step_that_failed_is_named_once_however_often_it_was_tried(
    name: str, failed: list[str], at_once: tuple[str, int]
) -> None:
    tasks = answered(recorded(name)).tasks
    assert names(tasks) == failed
    assert refused_at_once(tasks) == at_once


def test_the_pods_and_the_model_of_a_failed_step_are_known() -> None:
    run = answered(recorded("cpu2"))
    [step] = failed_steps(run.tasks)
    assert step.pods == ("2501641722",)
    log = LOG % '{"batch_size": 512}'
    assert step_text(step, run.models, log, "Error (exit code 1)") == (
        "search of model 'm': tables need 93.1 GiB, and one device has 80.0 GiB"
    )


@pytest.mark.skipif(WHOLE is None, reason="the recordings as they came are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("cpu2", ["search"]),
        ("cpu3", []),
        ("cron-failed", ["search"]),
        ("gpu1", []),
        ("own-cpu", []),
        ("own-synthetic", []),
        ("pss-forbidden", ["survey"]),
        ("pss-retried", []),
        ("recurring-orphan", []),
        ("terminated-storm", ["deploy"]),
    ],
)
def test_the_recordings_as_they_came_say_the_same(name: str, failed: list[str]) -> None:
    assert WHOLE is not None
    tasks = answered(json.loads((WHOLE / f"run-{name}.json").read_text())).tasks
    assert len(tasks) >= 12
    assert names(tasks) == failed
    assert (refused_at_once(tasks)[1] >= 6) == (name in ("pss-forbidden", "terminated-storm"))
    assert bool(running_pods(tasks)) == (name == "recurring-orphan")


def tree(nodes: dict[str, str], workflow: str = "w") -> tuple[Task, ...]:
    """Tasks as Argo's nodes, from full names and states."""

    def key(name: str) -> str:
        return f"{workflow}-{fnv1a(name)}"

    def outer(name: str) -> str:
        return max((one for one in nodes if name.startswith((f"{one}.", f"{one}("))), key=len, default="")

    return tuple(
        Task(name.rpartition(".")[2], state, tuple(key(one) for one in nodes if outer(one) == name), 0.0, 100.0)
        for name, state in nodes.items()
    )


def step_nodes(scope: str, name: str, states: str) -> dict[str, str]:
    """A step with an attempt for each letter of `states`: F for one that failed, S for one that succeeded."""
    states_of = {"F": "FAILED", "S": "SUCCEEDED"}
    nodes = {f"{scope}.{name}": states_of[states[-1]]}
    for attempt, letter in enumerate(states):
        inner = f"{scope}.{name}({attempt})"
        nodes |= {
            inner: states_of[letter],
            f"{inner}.executor": states_of[letter],
            f"{inner}.executor(0)": states_of[letter],
        }
    return nodes


def test_what_a_later_attempt_made_good_did_not_fail() -> None:
    root = {"w": "FAILED", "w(0)": "FAILED", "w(0).root": "FAILED", "w(0).root(0)": "FAILED"}
    tasks = tree({**root, **step_nodes("w(0).root(0)", "draw", "FS"), **step_nodes("w(0).root(0)", "survey", "FF")})
    assert names(tasks) == ["survey"]


def test_a_step_is_reported_by_its_own_inputs_where_its_log_has_them_else_by_the_only_model() -> None:
    of_job = LOG % json.dumps({"job": json.dumps({"campaign": {"hardware": {"name": "NVIDIA-H200"}}, "share": 2})})
    measure, plan, two = FailedStep("measure"), FailedStep("plan"), '[{"name": "ads"}, {"name": "feed"}]'
    assert step_text(measure, two, of_job, "").startswith("measure on NVIDIA-H200: ")
    assert step_text(plan, two, LOG % FEED, "").startswith("plan of model 'feed': ")
    assert step_text(plan, '[{"name": "ads"}]', "", "OOMKilled") == "plan of model 'ads': OOMKilled"
    assert step_text(plan, two, "", "OOMKilled") == "plan: OOMKilled"
    assert step_text(measure, '[{"name": "ads"}]', "", "") == "measure: failed"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (LOG % "{}", "tables need 93.1 GiB, and one device has 80.0 GiB"),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("Traceback (most recent call last):\n  File x\nMemoryError\nexit\n", "MemoryError"),
        ("note: x\nerror: share 2 of 4 is not there\nF0101 main.go:49] exit status 1\n", "share 2 of 4 is not there"),
        ("all is well\n", ""),
        ("", ""),
    ],
)
def test_the_line_of_error_is_found_in_a_log(log: str, line: str) -> None:
    assert error_line(log) == line


def test_a_long_list_is_cut() -> None:
    assert steps_text(["a", "b"]) == "a; b"
    assert steps_text([f"s{index}" for index in range(45)]) == "s0; s1; s2; s3; s4 and 40 more"
