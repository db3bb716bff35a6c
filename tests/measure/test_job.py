"""A night's measuring, from drawing to a live cost model, in a folder store: shares, and what a killed pod leaves."""

import json
from pathlib import Path

import pytest

from helpers.servers import KEY, SECRET, rclone
from neuroshard.augment.night import device_counts
from neuroshard.augment.night import run as draw
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput, MeasureError, StoreError
from neuroshard.core.nightly import Job, Order, Survey, Work
from neuroshard.files.costs import read_costs
from neuroshard.measure import job as job_module
from neuroshard.measure.hardware import wanted_hardware
from neuroshard.measure.job import merge_shares, run

TWIN = Hardware(kind="synthetic", name="H200, by a formula", memory_bytes=80 * 2**30)


def night(pods: int = 2) -> Survey:
    work = Work(
        hardware=TWIN, folder="_measuring/f/1", pods=pods, devices=8, resource="", node_selector={}, tolerations=()
    )
    orders = (
        Order(name="ads", tables="mlperf-dlrm-dcnv2", devices=4, memory="80GiB"),
        Order(name="feed", tables="mlperf-dlrm-dcnv2", devices=2, memory="80GiB"),
    )
    return Survey(orders=orders, hardware={}, works=(work,))


def drawn(store: Path, pods: int = 2, seed: int = 0) -> list[Job]:
    return draw(night(pods), str(store), compute_cases=30, comm_cases=12, seed=seed)


def measure(job: Job, store: Path) -> None:
    run(job, str(store), backend="synthetic", batch_size=512, budget_seconds=60, seed=0)


def test_two_pods_measure_what_one_would(tmp_path: Path) -> None:
    for pods in (1, 2):
        store = tmp_path / f"store-{pods}"
        for job in drawn(store, pods):
            measure(job, store)
        merge_shares(night(pods).works[0], str(store), tmp_path / f"costs-{pods}")
    one, two = (read_costs(tmp_path / f"costs-{pods}") for pods in (1, 2))
    assert {case.case_id for case, _ in one.compute} == {case.case_id for case, _ in two.compute}
    assert {case.case_id for case, _ in one.comm} == {case.case_id for case, _ in two.comm}
    assert one.bench.hardware == TWIN
    names = {table.name.partition("/")[0] for case, _ in one.compute for table in case.tables}
    assert names == {"ads", "feed"}


def test_a_share_that_ended_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(job_module, "measure", None)
    measure(job, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_pod_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    folder = tmp_path / job.folder
    (tmp_path / job.work.folder / "ended-1-of-1.json").unlink()  # as if killed before the end,
    (folder / "comm-00000.parquet").unlink()  # and before the exchanges
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    measure(job, tmp_path)
    merge_shares(job.work, str(tmp_path), tmp_path / "costs")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in kept} == kept
    costs = read_costs(tmp_path / "costs")
    assert len({case.case_id for case, _ in costs.comm}) == 12


def test_a_part_that_a_store_damaged_is_measured_again_and_taken_out_of_the_store(tmp_path: Path) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    (tmp_path / job.work.folder / "ended-1-of-1.json").unlink()
    part = tmp_path / job.folder / "compute-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    measure(job, tmp_path)
    assert not part.exists()
    merge_shares(job.work, str(tmp_path), tmp_path / "costs")
    assert len({case.case_id for case, _ in read_costs(tmp_path / "costs").compute}) == 30


def test_costs_that_cannot_be_merged_are_told_with_where_they_lie_in_the_store(tmp_path: Path) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    (tmp_path / job.folder / "comm-00000.parquet").write_bytes(b"")
    with pytest.raises(InvalidInput) as caught:
        merge_shares(job.work, str(tmp_path), tmp_path / "costs")
    assert "comm-00000.parquet: not a whole Parquet file" in str(caught.value)
    assert str(caught.value).endswith(f" (of {tmp_path}/_measuring/f/1; once that is deleted, a run measures anew)")


def test_what_another_bench_began_is_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [job] = drawn(tmp_path, 1)
    measure(job, tmp_path)
    (tmp_path / job.work.folder / "ended-1-of-1.json").unlink()
    path = tmp_path / job.folder / "costs.json"
    begun = json.loads(path.read_text())
    begun["bench"]["versions"]["neuroshard"] = "0.0.1"
    path.write_text(json.dumps(begun))
    measure(job, tmp_path)
    assert "begun again, for what an earlier run left cannot be gone on with" in capsys.readouterr().err
    assert json.loads(path.read_text())["bench"]["versions"]["neuroshard"] != "0.0.1"


def test_cases_are_drawn_once_for_all_nights_and_again_where_a_killed_run_left_half_of_them(tmp_path: Path) -> None:
    drawn(tmp_path)
    cases = tmp_path / "_measuring/f/1/cases"
    before = {path.name: path.read_bytes() for path in cases.iterdir()}
    drawn(tmp_path, seed=1)
    assert {path.name: path.read_bytes() for path in cases.iterdir()} == before
    (cases / "cases.json").unlink()
    drawn(tmp_path, seed=1)
    assert {path.name for path in cases.iterdir()} == before.keys()
    assert (cases / "compute.parquet").read_bytes() != before["compute.parquet"]


@pytest.mark.parametrize("name", ["compute.parquet", "comm.parquet", "cases.json"])
def test_cases_that_a_store_damaged_are_drawn_again(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [job] = drawn(tmp_path, 1)
    path = tmp_path / "_measuring/f/1/cases" / name
    path.write_bytes(path.read_bytes()[:-1])
    drawn(tmp_path, 1)
    assert "drawn again, for " in capsys.readouterr().err
    measure(job, tmp_path)
    merge_shares(job.work, str(tmp_path), tmp_path / "costs")
    assert len({case.case_id for case, _ in read_costs(tmp_path / "costs").compute}) == 30


def test_a_fleet_that_is_covered_reads_no_tables_and_has_no_jobs(tmp_path: Path) -> None:
    orders = (Order(name="ads", tables="s3://not-there/tables.json", devices=4, memory="80GiB"),)
    covered = Survey(orders=orders, hardware={}, works=())
    assert draw(covered, str(tmp_path), compute_cases=30, comm_cases=12, seed=0) == []


@pytest.mark.parametrize(("devices", "counts"), [(8, (2, 4, 8)), (6, (2, 4, 6)), (2, (2,)), (1, ())])
def test_gpus_exchange_in_doubling_numbers_up_to_all_of_a_node(devices: int, counts: tuple[int, ...]) -> None:
    work = night().works[0]
    cuda = work.model_copy(update={"devices": devices, "hardware": TWIN.model_copy(update={"kind": "cuda"})})
    assert device_counts(cuda, night().orders) == counts
    assert device_counts(work, night().orders) == (2, 4)


def test_a_pod_on_other_hardware_than_its_job_is_for_says_so() -> None:
    h200 = Hardware(kind="cuda", name="NVIDIA-H200", memory_bytes=140 * 2**30, driver="570.1", machine="HGX")
    inside = h200.model_copy(update={"name": "NVIDIA H200", "machine": "", "driver": "570.1"})
    assert wanted_hardware(inside, h200).fingerprint == h200.fingerprint
    assert wanted_hardware(inside, None) == inside
    with pytest.raises(MeasureError, match=r"NVIDIA-H200 was to be measured .*driver 570\.1.*here is .*driver 580\.2"):
        wanted_hardware(inside.model_copy(update={"driver": "580.2"}), h200)


def test_a_store_that_ignores_conditions_is_measured_into_by_a_single_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plans").mkdir()
    with rclone(tmp_path) as url:
        told = {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "ENDPOINT_URL": url, "REGION": "us-east-1"}
        for name, value in told.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        cases = {"compute_cases": 30, "comm_cases": 12, "seed": 0}
        with pytest.raises(StoreError, match="single-writer"):
            draw(night(1), "s3://plans/p", **cases)
        [job] = draw(night(1), "s3://plans/p", single_writer=True, **cases)
        how = {"backend": "synthetic", "batch_size": 512, "budget_seconds": 60, "seed": 0}
        run(job, "s3://plans/p", single_writer=True, **how)  # type: ignore[arg-type]
        merge_shares(job.work, "s3://plans/p", tmp_path / "costs")
    assert read_costs(tmp_path / "costs").compute
