"""Backend `cuda`: on a machine without a GPU it says so; on one with, it measures."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from helpers.refusals import refused
from neuroshard import devices, system
from neuroshard.core.case import Cases, ComputeCase
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import Table
from neuroshard.measure.backends import MeasureSettings, open_backend
from neuroshard.measure.machine import CudaMachine
from neuroshard.measure.timing import fbgemm
from neuroshard.measure.timing.clocks import Cuda

GPUS = torch.cuda.device_count()


def cases_of(*tables: Table) -> Cases:
    compute = tuple(ComputeCase(tables=(one,)) for one in tables)
    return Cases(tables=tables, compute=compute, collective=(), max_dim=128, seed=0)


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(table: Callable[..., Table]) -> None:
    with refused(MeasureError, "backend cuda", "NVIDIA GPU"):
        open_backend("cuda", cases_of(table("a")), MeasureSettings(batch_size=64))


def gpu(name: str) -> Hardware:
    return Hardware(kind="cuda", name=name, memory_bytes=80 * 2**30, driver="570.86.15", compute_capability="9.0")


def machine_with(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> CudaMachine:
    """GPUs that torch sees, on a machine where NVML reports three, of two kinds, in another order."""

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=uuids[index], name="T400", total_memory=4 * 2**30, major=7, minor=5)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    known = {"aa": gpu("T400"), "bb": gpu("H100"), "cc": gpu("H100")}
    monkeypatch.setattr(devices, "gpus_by_uuid", lambda: known)
    return CudaMachine()


def test_the_hardware_is_the_gpu_that_torch_sees_and_not_nvmls_first(monkeypatch: pytest.MonkeyPatch) -> None:
    two = machine_with(monkeypatch, "cc", "bb")
    assert two.hardware() == gpu("H100").model_copy(update={"interconnect": "NCCL"})
    assert (two.most_devices(), two.concurrency()) == (2, 2)


def test_a_gpu_that_nvml_does_not_know_by_its_uuid_is_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_with(monkeypatch, "dd").hardware() == gpu("T400")


def test_gpus_of_two_kinds_are_not_measured_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(MeasureError, "H100", "T400", "CUDA_VISIBLE_DEVICES"):
        machine_with(monkeypatch, "bb", "aa").hardware()


class Events:
    """As much of torch.cuda as a step is timed with, on a GPU that takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[int] = []
        self.released = 0
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.slept.append)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.release)
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)

    def release(self) -> None:
        self.released += 1


def test_a_gpu_waits_as_long_as_the_host_needs_to_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(monkeypatch)
    device = Cuda(1)
    device.eviction = torch.zeros(1)
    seconds = iter([0.0, 0.0001, 1.0, 1.002, 2.0, 2.0001, 3.0, 3.0001, 4.0, 4.1])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    for _ in range(5):
        device.flush()
        assert device.timed(lambda: "out") == (1.0, "out")
    device.flush()
    assert [cycles / 2e6 for cycles in events.slept] == pytest.approx([0.5, 0.5, 4.0, 4.0, 0.5, 5.0])


def test_a_table_set_gives_its_memory_back_for_the_all_to_all_on_the_same_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events(monkeypatch)
    Cuda(0).release()
    assert events.released == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    Cuda(0).release()
    assert events.released == 1


@pytest.mark.parametrize(("available_gib", "kept_gib"), [(128, 16), (4, 2)])
def test_gpus_share_the_hosts_memory_for_lookups(
    monkeypatch: pytest.MonkeyPatch, available_gib: int, kept_gib: int
) -> None:
    Events(monkeypatch)
    monkeypatch.setattr(system, "available_bytes", lambda: available_gib * 2**30)
    sets = fbgemm.TableBatchedEmbedding("cuda", 0, MeasureSettings(batch_size=65536), None, 0, 0)
    assert sets.lookups.cache_bytes == kept_gib * 2**30


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU; torch sees none here")
def test_more_lookups_cost_more_and_what_does_not_fit_is_a_row(table: Callable[..., Table]) -> None:
    tables = (
        table("few", rows=10**6, dim=64),
        table("many", rows=10**6, dim=64, pooling_factor=64.0),
        table("huge", rows=10**9, dim=128),
    )
    cases = cases_of(*tables)
    backend = open_backend("cuda", cases, MeasureSettings(batch_size=65536))
    try:
        few, many, huge = (backend.compute(case, 0) for case in cases.compute)
    finally:
        backend.close()
    assert few.total_ms < many.total_ms / 4
    assert (huge.error or "").startswith("out of memory")


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs")
def test_gpus_measure_table_sets_side_by_side(table: Callable[..., Table]) -> None:
    tables = tuple(table(f"t{i}", rows=10**6, dim=64, pooling_factor=float(i + 1)) for i in range(GPUS))
    cases = cases_of(*tables)
    backend = open_backend("cuda", cases, MeasureSettings(batch_size=65536))
    try:
        costs = backend.compute_many([(case, 0) for case in cases.compute])
        alone = [backend.compute(case, 1) for case in cases.compute]
    finally:
        backend.close()
    assert [cost.case_id for cost in costs] == [case.case_id for case in cases.compute]
    for side_by_side, one in zip(costs, alone, strict=True):
        assert side_by_side.total_ms == pytest.approx(one.total_ms, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU; torch sees none here")
def test_a_bench_on_gpus_has_their_clocks_and_power(table: Callable[..., Table]) -> None:
    pytest.importorskip("pynvml")
    backend = open_backend("cuda", cases_of(table("a")), MeasureSettings(batch_size=64))
    backend.close()
    assert {"largest SM clock", "largest memory clock", "power cap"} <= backend.bench.facts.keys()
