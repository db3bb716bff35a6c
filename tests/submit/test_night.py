"""What a run says of itself by what its steps recorded in the store, whatever Kubeflow's API shows of it."""

import time
from contextlib import suppress
from typing import Any

import pytest

from helpers.kubeflow import KfpStub, recorded, recorded_workflow
from helpers.limits import HANGS
from helpers.refusals import refused
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import Infeasible, NeuroshardError, StoreError
from neuroshard.orders.nightly import Campaign, ModelSpec, Request, Survey, Verdict
from neuroshard.store import night as night_store
from neuroshard.store.folder import FolderStore
from neuroshard.store.lease import LEASE_SECONDS
from neuroshard.store.measuring import note_failure, write_record
from neuroshard.store.night import recorded as recording
from neuroshard.store.night import write_survey
from neuroshard.submit import wait
from neuroshard.submit.kubeflow import Kubeflow, Run, Server
from neuroshard.submit.package import RunSettings
from neuroshard.submit.run import run
from neuroshard.submit.steps import Workflow
from neuroshard.submit.wait import Waiting

KIND = Hardware(kind="cuda", name="NVIDIA H200", memory_bytes=140 * 2**30)
CAMPAIGN = Campaign(
    hardware=KIND,
    folder="_measuring/h200/1",
    pods=2,
    devices=8,
    resource="nvidia.com/gpu",
    node_selector={},
    tolerations=(),
    why="no cost model of this kind is live",
)
SURVEY = Survey(
    owner="r1",
    request=Request(compute_cases=1, collective_cases=1, batch_size=512, seed=0, backend="cuda"),
    models=tuple(ModelSpec(name=name, tables="t.json", devices=8, memory="80GiB") for name in ("ads", "feed")),
    hardware={},
    campaigns=(CAMPAIGN,),
)
NOTHING_LEFT = {"status": {"message": "No more retries left"}}  # all that Argo says of a storm that ended by itself


def waited(stub: KfpStub, **more: Any) -> list[str]:
    return list(run(Server(stub.url), RunSettings({}), Waiting(HANGS, 0.001, **more)))[1:]


def fails(store: FolderStore, step: str, of: str, error: Exception) -> None:
    with pytest.raises(type(error)), recording(store.url, "r1", step, of, single_writer=False):
        raise error


class Killed(BaseException):
    """The pod of a step is killed: nothing more is written."""


def is_killed(store: FolderStore, step: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise StoreError("killed")

    with (
        monkeypatch.context() as patched,
        suppress(Killed),
        recording(store.url, "r1", step, of, single_writer=False),
    ):
        patched.setattr(night_store, "write_over", never)
        raise Killed


def test_what_failed_is_named_where_neither_the_api_nor_argo_shows_it(
    kfp_stub: KfpStub, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_survey(store, SURVEY)
    with recording(store.url, "r1", "survey", single_writer=False):
        pass
    is_killed(store, "measure", f"{KIND.fingerprint}/2", monkeypatch)
    fails(store, "search", "feed", Infeasible("tables need 93.1 GiB, and one device has 80.0 GiB"))
    fails(store, "deploy", "ads", KeyError("a"))
    kfp_stub.states, kfp_stub.workflow = ["FAILED"], NOTHING_LEFT
    with refused(
        NeuroshardError,
        "run r1 ended as FAILED",
        "measure on NVIDIA H200: it began at",
        "never ended: its pod was killed or deleted",
        "search of model 'feed': tables need 93.1 GiB, and one device has 80.0 GiB",
        "deploy of model 'ads': KeyError: 'a'",
    ):
        waited(kfp_stub)


def test_a_container_that_was_lost_with_its_node_is_said_and_another_run_follows_when_its_leases_have_expired(
    kfp_stub: KfpStub, store: FolderStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_survey(store, SURVEY)
    kfp_stub.states, kfp_stub.workflow = ["FAILED", "SUCCEEDED"], recorded_workflow("cron-failed")
    for node in kfp_stub.workflow["status"]["nodes"].values():
        node["message"] = "main: Unknown (exit code 255)"
    paused: list[float] = []
    monkeypatch.setattr("neuroshard.submit.run.time.sleep", paused.append)
    assert "run r2: SUCCEEDED" in waited(kfp_stub)
    assert LEASE_SECONDS in paused
    assert "its container was lost with its node (main: Unknown (exit code 255))" in capsys.readouterr().err


def test_a_run_whose_pods_were_refused_says_how_far_it_came_and_which_models_have_nothing(
    kfp_stub: KfpStub, store: FolderStore
) -> None:
    write_survey(store, SURVEY)
    with recording(store.url, "r1", "augment", KIND.fingerprint, single_writer=False):
        pass
    kfp_stub.states, kfp_stub.workflow = ["FAILED"], NOTHING_LEFT
    lines: list[str] = []
    with refused(NeuroshardError, "No more retries left; the last step that began was augment at"):
        lines.extend(run(Server(kfp_stub.url), RunSettings({}), Waiting(HANGS, 0.001)))
    assert not [line for line in lines if "degraded" in line]  # of models that the run did not come to


def test_a_failure_that_the_api_shows_too_is_said_once(kfp_stub: KfpStub, store: FolderStore) -> None:
    kfp_stub.shape, kfp_stub.workflow = recorded("cpu2"), recorded_workflow("cpu2")
    kfp_stub.shape["runtime_config"]["parameters"]["store"] = store.url
    fails(store, "search", "m", Infeasible("no room"))
    with refused(NeuroshardError, "run r1 ended as FAILED (search of model 'm': no room); models"):
        waited(kfp_stub)


def test_a_night_that_ended_well_says_what_it_ended_with_less_than_it_should(
    kfp_stub: KfpStub, store: FolderStore
) -> None:
    write_survey(store, SURVEY)
    for name, doubts in (("ads", ("by a datasheet",)), ("feed", ())):
        verdict = Verdict(run="r1", model=name, end="live", why="better", doubts=doubts, release=3)
        write_record(store, f"_nightly/{name}.json", verdict.model_dump(mode="json"))
    note_failure(store, CAMPAIGN.folder, "measure", "the workers were lost")
    assert waited(kfp_stub) == [
        "run r1: SUCCEEDED",
        "run r1: measured NVIDIA H200: no cost model of this kind is live",
        "run r1: degraded: NVIDIA H200: measure: the workers were lost",
        "run r1: degraded: ads has today's plan (release 3 is live): degraded: by a datasheet; better",
    ]


def test_a_cause_is_said_once_and_the_same_of_many_models_in_one_line(kfp_stub: KfpStub, store: FolderStore) -> None:
    write_survey(store, SURVEY)
    note_failure(store, CAMPAIGN.folder, "measure", "a GPU has 16.0 GiB")
    doubts = ("this plan is by analytic:h200: no cost model is live; measure: a GPU has 16.0 GiB",)
    for name, release in (("ads", 3), ("feed", 7)):
        verdict = Verdict(run="r1", model=name, end="live", why="better", doubts=doubts, release=release)
        write_record(store, f"_nightly/{name}.json", verdict.model_dump(mode="json"))
    assert waited(kfp_stub)[2:] == [
        "run r1: degraded: NVIDIA H200: measure: a GPU has 16.0 GiB",
        "run r1: degraded: ads has today's plan (release 3 is live): degraded: this plan is by analytic:h200: no cost model is "
        "live; better; the same of feed",
    ]


def test_another_kind_of_hardware_under_a_model_is_said_with_what_the_gate_decided(
    kfp_stub: KfpStub, store: FolderStore
) -> None:
    write_survey(store, SURVEY.model_copy(update={"models": SURVEY.models[:1], "campaigns": ()}))
    verdict = Verdict(run="r1", model="ads", end="kept", why="9 % higher", release=3)
    kinds = {"hardware": "NVIDIA H100", "before": "NVIDIA H200"}
    write_record(store, "_nightly/ads.json", verdict.model_dump(mode="json") | kinds)
    said = "ads keeps its live plan (release 3 is live) for NVIDIA H100, the night before for NVIDIA H200: 9 % higher"
    assert waited(kfp_stub)[1:] == [f"run r1: {said}"]


def test_a_store_that_cannot_be_read_from_here_is_a_note(
    kfp_stub: KfpStub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(url: str) -> None:
        raise StoreError(f"{url}: access denied")

    monkeypatch.setattr(wait, "open_store", denied)
    assert waited(kfp_stub) == ["run r1: SUCCEEDED"]
    assert "what the steps recorded in s3://mlpipeline/neuroshard cannot be read from here" in capsys.readouterr().err


def test_a_storm_that_neither_the_api_nor_argo_shows_is_seen_as_no_step_runs_and_ended_where_that_was_asked_for(
    kfp_stub: KfpStub, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account of the pods was deleted: no step begins any more, and the API's tasks are those of the time before."""
    for name in ("STARTING_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(wait, name, 0.0)
    whole = {**recorded("terminated-storm"), "state": "RUNNING"}
    whole["runtime_config"]["parameters"]["store"] = store.url
    kfp_stub.shape = {**whole, "run_details": {"task_details": whole["run_details"]["task_details"][:2]}}
    with recording(store.url, "r1", "search", "ads", single_writer=False):
        assert wait.idle(Run("r1", "", "RUNNING", store=store.url))[1] == ""
    with refused(NeuroshardError, "run r1 was terminated: no step has run since search ended at", "does not say why"):
        waited(kfp_stub, start_seconds=0.001)
    assert kfp_stub.changes()[-1] == "POST /runs/r1:terminate"


def test_a_run_whose_next_step_is_about_to_begin_is_not_given_up(
    kfp_stub: KfpStub, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod may take STARTING_SECONDS to start, whatever less one is ready to wait."""
    under_way = Run("r1", "", "RUNNING", store=store.url)
    kubeflow, watch = Kubeflow(Server(kfp_stub.url)), wait.PodWatch(Waiting(HANGS, 0.001, start_seconds=0.001))
    monkeypatch.setattr(kubeflow, "workflow", lambda run: Workflow())
    with recording(store.url, "r1", "search", "ads", single_writer=False):
        pass
    watch.moved = watch.looked = time.monotonic() - wait.STARTING_SECONDS - wait.LOOK_SECONDS
    time.sleep(0.01)
    assert list(watch.look(kubeflow, under_way)) == []
    assert watch.too_long == ""
