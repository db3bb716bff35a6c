"""`neuroshard schedule` against a stub of the API: made once, changed when something has changed, never none in between."""

from pathlib import Path
from typing import Any

import pytest

from helpers.kubeflow import KfpStub
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.submit.schedule import run, wanted

NAME = "neuroshard-nightly"
GIVEN = {"store": "s3://b/p", "pods": 2}


def scheduled(stub: KfpStub, cron: str = "0 2 * * *", given: dict[str, Any] = GIVEN, **more: Any) -> list[str]:
    return list(run(stub.url, NAME, wanted(cron, given, None), **more))


def removed(stub: KfpStub, **more: Any) -> list[str]:
    return list(run(stub.url, NAME, None, **more))


def test_it_is_made_as_the_facts_want_it(kfp_stub: KfpStub) -> None:
    assert scheduled(kfp_stub) == [f"make {NAME}: cron 0 0 2 * * *; pods=2, store=s3://b/p"]
    [made] = kfp_stub.recurring
    assert made["trigger"]["cron_schedule"] == {"cron": "0 0 2 * * *"}  # seconds first
    assert (made["mode"], made["max_concurrency"], made["no_catchup"]) == ("ENABLE", 1, True)
    assert made["runtime_config"]["parameters"] == GIVEN  # numbers are numbers
    assert made["pipeline_spec"].keys() == {"pipeline_spec", "platform_spec"}


def test_again_it_changes_nothing(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    asked = kfp_stub.changes()
    assert scheduled(kfp_stub) == [f"{NAME} (j1) is as it shall be"]
    assert kfp_stub.changes() == asked


def test_a_dry_run_says_what_would_change_and_changes_nothing(kfp_stub: KfpStub) -> None:
    assert scheduled(kfp_stub, dry_run=True) == [f"would make {NAME}: cron 0 0 2 * * *; pods=2, store=s3://b/p"]
    assert kfp_stub.changes() == []  # not even an experiment is made
    scheduled(kfp_stub)
    asked = kfp_stub.changes()
    assert removed(kfp_stub, dry_run=True) == [f"would delete {NAME} (j1)"]
    assert kfp_stub.changes() == asked


def test_what_has_changed_is_told_line_by_line(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    kfp_stub.recurring[0]["mode"] = "DISABLE"
    told = scheduled(kfp_stub, "30 3 * * *", {"store": "s3://b/p", "seed": 1})
    assert told[0] == f"make {NAME} anew, with"
    assert told[1] == "  cron: 0 0 2 * * * -> 0 30 3 * * *"
    assert told[2].startswith("  description: neuroshard 0.1.0, package and parameters ")
    assert told[3:] == [
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
        f"{NAME} (j2) is as it shall be",
        f"delete {NAME} (old), of the same name",
    ]
    assert [one["recurring_run_id"] for one in kfp_stub.recurring] == ["j2"]


def test_others_recurring_runs_are_left_alone(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    kfp_stub.recurring.append({**kfp_stub.recurring[0], "recurring_run_id": "theirs", "display_name": "theirs"})
    assert removed(kfp_stub) == [f"delete {NAME} (j1)"]
    assert [one["recurring_run_id"] for one in kfp_stub.recurring] == ["theirs"]
    assert removed(kfp_stub) == [f"{NAME} is not there; nothing to do"]


def test_a_refusal_leaves_what_was_there(kfp_stub: KfpStub) -> None:
    scheduled(kfp_stub)
    answer = kfp_stub.answer

    def refusing(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (
            (400, {"message": "invalid cron"})
            if method == "POST" and "recurring" in path
            else answer(method, path, body)
        )

    kfp_stub.answer = refusing  # type: ignore[method-assign]
    with pytest.raises(NeuroshardError, match=r"answered 400: invalid cron$"):
        scheduled(kfp_stub, "61 2 * * *")
    assert [one["recurring_run_id"] for one in kfp_stub.recurring] == ["j1"]


def test_a_cron_of_the_wrong_length_is_told() -> None:
    with pytest.raises(UsageError, match="'2am' has 1 fields; give five"):
        wanted("2am", {}, None)
    assert wanted("0 0 2 * * *", {}, None).cron == "0 0 2 * * *"


def test_the_command_schedules_several_models_and_shows_what_it_would_change(  # type: ignore[no-untyped-def]
    kfp_stub: KfpStub, neuroshard, parameters: Path, models: Path
) -> None:
    command = ["schedule", "--parameters", parameters, "--models", models, "--endpoint", kfp_stub.url]
    ended = neuroshard(*command, "--cron", "0 2 * * *", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"would make {NAME}: cron 0 0 2 * * *; batch_size=512, measure_cpus=8, models=[")
    ended = neuroshard(*command)
    assert (ended.returncode, ended.stderr) == (2, "error: give one of --cron and --remove\n")
