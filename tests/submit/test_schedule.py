"""`neuroshard schedule` against a stub of the API: made once, changed when something has changed, never none in between."""

from pathlib import Path
from typing import Any

import pytest

from helpers.kubeflow import CREATED, KfpStub
from helpers.limits import HANGS
from helpers.refusals import refused
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.submit import schedule
from neuroshard.submit.kubeflow import Server
from neuroshard.submit.package import RunSettings
from neuroshard.submit.schedule import Nightly, run, wanted

NAME = "neuroshard-nightly"
GIVEN = {"store": "s3://bucket/p", "pods": 2}


def scheduled(stub: KfpStub, cron: str = "0 2 * * *", given: dict[str, Any] = GIVEN, **more: Any) -> list[str]:
    return list(run(Server(stub.url), NAME, Nightly(cron, RunSettings(given)), **more))


def removed(stub: KfpStub, **more: Any) -> list[str]:
    return list(run(Server(stub.url), NAME, None, **more))


def test_it_is_made_as_the_facts_want_it(kfp_stub: KfpStub) -> None:
    assert scheduled(kfp_stub) == [f"make {NAME}: cron 0 0 2 * * *; pods=2, store=s3://bucket/p"]
    [made] = kfp_stub.recurring
    assert made["trigger"]["cron_schedule"] == {"cron": "0 0 2 * * *"}  # seconds first
    assert (made["mode"], made["max_concurrency"], made["no_catchup"]) == ("ENABLE", 1, True)
    assert made["runtime_config"]["parameters"] == GIVEN  # numbers are numbers
    assert made["pipeline_spec"].keys() == {"pipeline_spec", "platform_spec"}
    platform = made["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]
    assert platform["pipelineConfig"] == {"activeDeadlineSeconds": 86400}


def test_again_it_changes_nothing(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    asked = kfp_stub.changes()
    assert scheduled(kfp_stub) == [f"{NAME} (j1) is up to date"]
    assert kfp_stub.changes() == asked


def test_a_dry_run_says_what_would_change_and_changes_nothing(kfp_stub: KfpStub) -> None:
    assert scheduled(kfp_stub, dry_run=True) == [f"would make {NAME}: cron 0 0 2 * * *; pods=2, store=s3://bucket/p"]
    assert kfp_stub.changes() == []  # not even an experiment is made
    scheduled(kfp_stub)
    asked = kfp_stub.changes()
    assert removed(kfp_stub, dry_run=True) == [f"would delete {NAME} (j1)"]
    assert kfp_stub.changes() == asked


def test_a_dry_run_of_another_schedule_says_would_of_the_new_one_and_of_the_old_one(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    kfp_stub.recurring.insert(0, {**kfp_stub.recurring[0], "recurring_run_id": "twin"})
    asked = kfp_stub.changes()
    again = scheduled(kfp_stub, dry_run=True)
    assert again == [f"{NAME} (j1) is up to date", f"would delete {NAME} (twin), of the same name"]
    lines = scheduled(kfp_stub, "30 3 * * *", dry_run=True)
    assert lines[:2] == [f"would recreate {NAME} with", "  cron: 0 0 2 * * * -> 0 30 3 * * *"]
    assert lines[-2:] == [f"would delete {NAME} (j1)", f"would delete {NAME} (twin)"]
    assert kfp_stub.changes() == asked


def test_what_has_changed_is_reported_line_by_line(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    kfp_stub.recurring[0]["mode"] = "DISABLE"
    lines = scheduled(kfp_stub, "30 3 * * *", {"store": "s3://bucket/p", "seed": 1})
    assert lines[0] == f"recreate {NAME} with"
    assert lines[1] == "  cron: 0 0 2 * * * -> 0 30 3 * * *"
    assert lines[2].startswith("  description: neuroshard 0.1.0, package and parameters ")
    assert lines[3:] == [
        "  enabled: (none) -> True",
        "  pods: 2 -> (the default)",
        "  seed: (the default) -> 1",
        f"delete {NAME} (j1)",
    ]
    assert kfp_stub.changes()[-2:] == ["POST /recurringruns", "DELETE /recurringruns/j1"]  # never none in between


def test_killed_between_making_and_deleting_the_next_call_puts_it_right(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    scheduled(kfp_stub, "30 3 * * *")
    kfp_stub.recurring.insert(0, {**kfp_stub.recurring[0], "recurring_run_id": "old", "description": "before"})
    assert scheduled(kfp_stub, "30 3 * * *") == [
        f"{NAME} (j2) is up to date",
        f"delete {NAME} (old), of the same name",
    ]
    assert [one["recurring_run_id"] for one in kfp_stub.recurring] == ["j2"]


def test_others_recurring_runs_are_left_alone(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    kfp_stub.recurring.append({**kfp_stub.recurring[0], "recurring_run_id": "theirs", "display_name": "theirs"})
    assert removed(kfp_stub) == [f"delete {NAME} (j1)"]
    assert [one["recurring_run_id"] for one in kfp_stub.recurring] == ["theirs"]
    assert removed(kfp_stub) == [f"{NAME} is not there; nothing to do"]


def under_way(stub: KfpStub, recurring_run_id: str = "j1") -> None:
    """A run of a recurring run, as it is recorded: KFP's own name, and whose it is."""
    stub.experiments = stub.experiments or [{"experiment_id": "e1", "display_name": "neuroshard"}]
    run = {"run_id": "n1", "display_name": "neuroshard-nightly4b8lf-1-358216334", "state": "RUNNING"}
    stub.runs.append({**run, "recurring_run_id": recurring_run_id, "created_at": CREATED})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(schedule, "TERMINATE_SECONDS", 0.05)


@pytest.mark.parametrize("cron", [None, "30 3 * * *"])
def test_a_run_under_way_is_not_killed_unasked(kfp_stub: KfpStub, cron: str | None) -> None:
    scheduled(kfp_stub)
    under_way(kfp_stub)
    asked = kfp_stub.changes()
    with refused(NeuroshardError, "run n1", "neuroshard-nightly4b8lf-1-358216334", "RUNNING", "would be deleted"):
        next(run(Server(kfp_stub.url), NAME, Nightly(cron, RunSettings(GIVEN)) if cron else None))  # not a line before
    assert kfp_stub.changes() == asked  # nothing was made either
    assert scheduled(kfp_stub) == [f"{NAME} (j1) is up to date"]  # and what changes nothing is not in the way


@pytest.mark.usefixtures("quick")
def test_the_end_of_a_run_under_way_is_waited_for(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    under_way(kfp_stub)
    waiting = run(Server(kfp_stub.url), NAME, None, wait_seconds=HANGS)
    assert next(waiting) == "wait for run n1 (neuroshard-nightly4b8lf-1-358216334, RUNNING)"
    assert "DELETE /recurringruns/j1" not in kfp_stub.changes()
    kfp_stub.runs[0]["state"] = "SUCCEEDED"
    assert list(waiting) == [f"delete {NAME} (j1)"]
    assert kfp_stub.changes()[-1] == "DELETE /recurringruns/j1"


@pytest.mark.usefixtures("quick")
def test_a_run_that_takes_longer_than_one_waits_is_left_alone(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    under_way(kfp_stub)
    with refused(NeuroshardError, "n1"):
        removed(kfp_stub, wait_seconds=0.05)
    assert kfp_stub.recurring


@pytest.mark.usefixtures("quick")
def test_with_now_the_run_is_terminated_first_so_that_its_end_is_recorded(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    under_way(kfp_stub)
    assert removed(kfp_stub, now=True)[0] == "terminate run n1 (neuroshard-nightly4b8lf-1-358216334)"
    assert kfp_stub.changes()[-2:] == ["POST /runs/n1:terminate", "DELETE /recurringruns/j1"]
    assert kfp_stub.runs[0]["state"] == "FAILED"


@pytest.mark.usefixtures("quick")
def test_with_now_an_orphan_that_cannot_be_terminated_is_in_nobodys_way(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    under_way(kfp_stub)
    answer = kfp_stub.answer

    def without_a_workflow(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (500, {"message": "no such workflow"}) if path.endswith(":terminate") else answer(method, path, body)

    kfp_stub.answer = without_a_workflow
    lines = removed(kfp_stub, now=True)
    assert lines[0].startswith("run n1 (neuroshard-nightly4b8lf-1-358216334) cannot be terminated: ")
    assert lines[1].startswith("after 0 s Kubeflow still records run n1 ")
    assert kfp_stub.recurring == []


def test_runs_of_others_and_a_dry_run_are_in_nobodys_way(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    under_way(kfp_stub, "theirs")
    assert removed(kfp_stub, dry_run=True) == [f"would delete {NAME} (j1)"]
    kfp_stub.runs[0]["recurring_run_id"] = "j1"
    assert removed(kfp_stub, dry_run=True)[1].startswith("would wait for run n1 ")
    kfp_stub.runs[0]["state"] = "SUCCEEDED"
    assert removed(kfp_stub) == [f"delete {NAME} (j1)"]


def test_a_refusal_leaves_what_was_there(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    answer = kfp_stub.answer

    def refusing(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (
            (400, {"message": "invalid cron"})
            if method == "POST" and "recurring" in path
            else answer(method, path, body)
        )

    kfp_stub.answer = refusing
    with refused(NeuroshardError, 400, "invalid cron"):
        scheduled(kfp_stub, "61 2 * * *")
    assert [one["recurring_run_id"] for one in kfp_stub.recurring] == ["j1"]


def test_a_cron_of_the_wrong_length_is_reported() -> None:
    with refused(UsageError, "'2am'", 1):
        wanted(Nightly("2am", RunSettings({})))
    assert wanted(Nightly("0 0 2 * * *", RunSettings({}))).cron == "0 0 2 * * *"


def test_the_command_schedules_several_models_and_shows_what_it_would_change(
    kfp_stub: KfpStub, neuroshard, parameters: Path, models: Path
) -> None:
    command = ["schedule", "--parameters", parameters, "--models", models, "--endpoint", kfp_stub.url]
    ended = neuroshard(*command, "--cron", "0 2 * * *", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"would make {NAME}: cron 0 0 2 * * *; batch_size=512, measure_cpus=8, models=[")
    ended = neuroshard(*command)
    assert (ended.returncode, ended.stderr) == (2, "error: give one of --cron and --remove\n")
    ended = neuroshard(*command, "--remove", "--wait", "1h", "--now")
    assert (ended.returncode, ended.stderr) == (2, "error: give one of --wait and --now\n")


def test_another_deadline_makes_another_recurring_run(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    nightly = Nightly("0 2 * * *", RunSettings(GIVEN, deadline_seconds=48 * 3600))
    lines = list(run(Server(kfp_stub.url), NAME, nightly))
    assert [line.partition(":")[0].strip() for line in lines] == [
        f"recreate {NAME} with",
        "description",
        f"delete {NAME} (j1)",
    ]
    platform = kfp_stub.recurring[0]["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]
    assert platform["pipelineConfig"] == {"activeDeadlineSeconds": 172800}


def test_the_recurring_run_has_the_parallelism_that_is_asked_for(
    kfp_stub: KfpStub, neuroshard, parameters: Path, models: Path
) -> None:
    command = ["schedule", "--parameters", parameters, "--models", models, "--endpoint", kfp_stub.url]
    ended = neuroshard(*command, "--cron", "0 2 * * *", "--parallelism", "5")
    assert ended.returncode == 0, ended.stderr
    spec = kfp_stub.recurring[0]["pipeline_spec"]["pipeline_spec"]
    tasks = [
        task
        for one in (spec["root"], *spec["components"].values())
        for task in one.get("dag", {}).get("tasks", {}).values()
    ]
    limits = [task["iteratorPolicy"] for task in tasks if "parameterIterator" in task]
    assert limits
    assert all(limit == {"parallelismLimit": 5} for limit in limits)
    assert "parallelism" not in kfp_stub.recurring[0]["runtime_config"]["parameters"]
