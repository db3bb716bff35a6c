"""A night's measuring, from drawing to a live cost model, in a folder store: shares, and what a killed pod leaves."""

import json
from pathlib import Path

import pytest

from helpers.refusals import names, refused
from helpers.servers import KEY, SECRET, rclone
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput, MeasureError, StoreError
from neuroshard.devices import cpu, pod_cpu
from neuroshard.files.costs import read_costs
from neuroshard.measure.machine import wanted_hardware
from neuroshard.measure.shares import job as job_module
from neuroshard.measure.shares.job import merge_shares, run
from neuroshard.nightly import augment
from neuroshard.nightly.augment import run as draw
from neuroshard.orders.nightly import Campaign, Job, ModelSpec, Request, Survey
from neuroshard.store.folder import FolderStore
from neuroshard.store.measuring import FAILED, Share, measuring, read_record

TWIN = Hardware(kind="synthetic", name="H200, by a formula", memory_bytes=80 * 2**30)


def night(pods: int = 2, seed: int = 0) -> Survey:
    campaign = Campaign(
        hardware=TWIN,
        folder="_measuring/f/1",
        pods=pods,
        devices=8,
        resource="",
        node_selector={},
        tolerations=(),
        ranks=(2, 4),
        measurable=(2, 4),
    )
    models = (
        ModelSpec(name="ads", tables="mlperf-dlrm-dcnv2", devices=4, memory="80GiB"),
        ModelSpec(name="feed", tables="mlperf-dlrm-dcnv2", devices=2, memory="80GiB"),
    )
    request = Request(compute_cases=30, collective_cases=12, batch_size=512, seed=seed, backend="synthetic")
    return Survey(request=request, models=models, hardware={}, campaigns=(campaign,))


def drawn(store: Path, pods: int = 2, seed: int = 0) -> list[Job]:
    found = night(pods, seed)
    [asked] = found.campaigns
    return [Job(campaign=asked, share=share) for share in draw(found, asked, str(store))]


def measure(job: Job, store: Path) -> None:
    run(job, str(store), backend="synthetic", batch_size=512, budget_seconds=1e6, seed=0)


def test_a_draw_too_large_to_be_read_again_is_not_written_and_the_failure_says_what_to_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augment, "MOST_BYTES", 1000)
    assert drawn(tmp_path) == []

    store, folder = FolderStore(tmp_path), night().campaigns[0].folder
    assert measuring(store, folder).draws == ()
    record = read_record(store, f"{folder}/{FAILED}")
    assert record is not None
    for fact in ("draw-0001/cases/compute.parquet", "1,000", "fewer compute_cases"):
        assert names(record["why"], fact), record


@pytest.mark.slow
def test_two_pods_measure_what_one_would(tmp_path: Path) -> None:
    for pods in (1, 2):
        store = tmp_path / f"store-{pods}"
        for job in drawn(store, pods):
            measure(job, store)
        merge_shares(night(pods).campaigns[0], str(store), tmp_path / f"costs-{pods}")
    one, two = (read_costs(tmp_path / f"costs-{pods}") for pods in (1, 2))
    assert {case.case_id for case, _ in one.compute} == {case.case_id for case, _ in two.compute}
    assert {case.case_id for case, _ in one.collective} == {case.case_id for case, _ in two.collective}
    assert one.bench.hardware == TWIN
    names = {table.name.partition("/")[0] for case, _ in one.compute for table in case.tables}
    assert names == {"ads", "feed"}


def test_a_share_with_nothing_left_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(job_module, "measure", None)
    measure(job, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert drawn(tmp_path, 1) == []


def folder_of(job: Job, store: Path) -> Path:
    return store / job.campaign.folder / Share(1, job.share, job.campaign.pods).costs


def forget_the_end(job: Job, store: Path) -> None:
    (store / job.campaign.folder / Share(1, job.share, job.campaign.pods).ended).unlink()


def test_a_share_that_ran_out_of_budget_records_the_rest_and_is_continued(tmp_path: Path) -> None:
    [job] = drawn(tmp_path, 1)
    run(job, str(tmp_path), backend="synthetic", batch_size=512, budget_seconds=0.0, seed=0)
    ended = tmp_path / job.campaign.folder / Share(1, 1, 1).ended
    assert json.loads(ended.read_text())["left"] > 0
    assert drawn(tmp_path, 1) == [job]
    measure(job, tmp_path)
    assert json.loads(ended.read_text())["left"] == 0
    assert len({case.case_id for case, _ in read_costs(folder_of(job, tmp_path)).compute}) == 30


def test_the_share_of_a_killed_pod_is_continued(tmp_path: Path) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    folder = folder_of(job, tmp_path)
    forget_the_end(job, tmp_path)  # as if killed before the end,
    (folder / "collective-00000.parquet").unlink()  # and before the all-to-alls
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    measure(job, tmp_path)
    merge_shares(job.campaign, str(tmp_path), tmp_path / "costs")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in kept} == kept
    assert {len(case.device_dims) for case, _ in read_costs(tmp_path / "costs").collective} == {2, 4}


def test_a_part_that_a_store_damaged_is_measured_again_and_taken_out_of_the_store(tmp_path: Path) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    forget_the_end(job, tmp_path)
    part = folder_of(job, tmp_path) / "compute-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    measure(job, tmp_path)
    assert not part.exists()
    merge_shares(job.campaign, str(tmp_path), tmp_path / "costs")
    assert len({case.case_id for case, _ in read_costs(tmp_path / "costs").compute}) == 30


def test_costs_that_cannot_be_merged_are_set_aside_and_measured_again(tmp_path: Path) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    (folder_of(job, tmp_path) / "collective-00000.parquet").write_bytes(b"")
    with refused(InvalidInput, "no case was measured"):
        merge_shares(job.campaign, str(tmp_path), tmp_path / "costs")
    assert (tmp_path / job.campaign.folder / "aside" / "draw-0001" / "costs-1-of-1" / "compute-00000.parquet").exists()
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    merge_shares(job.campaign, str(tmp_path), tmp_path / "costs")


def test_what_another_bench_began_is_set_aside_and_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    forget_the_end(job, tmp_path)
    path = folder_of(job, tmp_path) / "costs.json"
    begun = json.loads(path.read_text())
    begun["bench"]["versions"]["neuroshard"] = "0.0.1"
    path.write_text(json.dumps(begun))
    measure(job, tmp_path)
    assert "set aside in _measuring/f/1/aside" in capsys.readouterr().err
    assert json.loads(path.read_text())["bench"]["versions"]["neuroshard"] != "0.0.1"
    assert (tmp_path / job.campaign.folder / "aside" / "draw-0001" / "costs-1-of-1" / "costs.json").exists()


def test_a_failure_to_measure_is_noted_for_the_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MeasureError("no GPU is here")

    [job] = drawn(tmp_path, 1)
    monkeypatch.setattr(job_module, "measure", broken)
    measure(job, tmp_path)
    assert json.loads((tmp_path / job.campaign.folder / "failed.json").read_text())["why"] == "no GPU is here"
    assert drawn(tmp_path, 1) == [job]
    assert not (tmp_path / job.campaign.folder / "failed.json").exists()


def test_cases_are_drawn_once_for_all_nights(tmp_path: Path) -> None:
    drawn(tmp_path)
    cases = tmp_path / "_measuring/f/1/draw-0001/cases"
    before = {path.name: path.read_bytes() for path in cases.iterdir()}
    drawn(tmp_path)
    assert {path.name: path.read_bytes() for path in cases.iterdir()} == before
    assert {path.name for path in (tmp_path / "_measuring/f/1").iterdir()} == {"draw-0001"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compute.parquet", "collective.parquet", "cases.json"])
@pytest.mark.parametrize("lost", [True, False])
def test_cases_that_a_store_lost_or_damaged_are_drawn_again(tmp_path: Path, name: str, lost: bool) -> None:
    drawn(tmp_path, 1)
    path = tmp_path / "_measuring/f/1/draw-0001/cases" / name
    path.write_bytes(path.read_bytes()[:-1])
    if lost:
        path.unlink()
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    merge_shares(job.campaign, str(tmp_path), tmp_path / "costs")
    assert len({case.case_id for case, _ in read_costs(tmp_path / "costs").compute}) == 30


def test_a_pod_on_other_hardware_than_its_job_is_for_says_so() -> None:
    h200 = Hardware(kind="cuda", name="NVIDIA-H200", memory_bytes=140 * 2**30, driver="570.1", machine="HGX")
    inside = h200.model_copy(update={"name": "NVIDIA H200", "machine": "", "driver": "570.1"})
    assert wanted_hardware(inside, h200).fingerprint == h200.fingerprint
    assert wanted_hardware(inside, None) == inside
    with refused(MeasureError, "NVIDIA-H200", f"driver {h200.driver}", "driver 580.2"):
        wanted_hardware(inside.model_copy(update={"driver": "580.2"}), h200)


def test_a_pod_whose_cpu_only_it_can_see_measures_it_whatever_its_limits_are() -> None:
    asked = pod_cpu(4 * 2**30)
    inside = cpu().model_copy(update={"name": "AMD EPYC, 64 cores", "memory_bytes": 3 * 2**30})
    assert wanted_hardware(inside, asked) == asked
    with refused(MeasureError, "AMD EPYC, 64 cores", "Intel Xeon, 2 cores"):
        wanted_hardware(inside, inside.model_copy(update={"name": "Intel Xeon, 2 cores"}))
    with refused(MeasureError, asked.name):
        wanted_hardware(inside.model_copy(update={"kind": "cuda"}), asked)


@pytest.mark.slow
def test_a_store_that_ignores_conditions_is_measured_into_by_a_single_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plans").mkdir()
    with rclone(tmp_path) as url:
        environment = {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "ENDPOINT_URL": url, "REGION": "us-east-1"}
        for name, value in environment.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        found = night(1)
        [asked] = found.campaigns
        with refused(StoreError, "single-writer"):
            draw(found, asked, "s3://plans/p")
        assert draw(found, asked, "s3://plans/p", single_writer=True) == [1]
        job = Job(campaign=asked, share=1)
        how = {"backend": "synthetic", "batch_size": 512, "budget_seconds": 1e6, "seed": 0}
        run(job, "s3://plans/p", single_writer=True, **how)  # type: ignore[arg-type]
        merge_shares(job.campaign, "s3://plans/p", tmp_path / "costs", single_writer=True)
    assert read_costs(tmp_path / "costs").compute
