"""The facts about this machine's CPU and GPUs. The GPUs are a fake NVML's: there is none where the tests run."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from neuroshard import devices, system

GIB = 2**30


class NVMLError(Exception):
    pass


class FakeNvml:
    """As much of nvidia-ml-py as devices.py asks, on two GPUs of which the second is cut into MIG slices."""

    NVMLError = NVMLError

    def __init__(
        self, driver: str | bytes = "570.86.15", broken: bool = False, silent: bool = False, hidden: int = 0
    ) -> None:
        self.driver, self.broken, self.silent, self.hidden, self.open = driver, broken, silent, hidden, False

    def nvmlInit(self) -> None:  # noqa: N802 # NVML's names
        if self.broken:
            raise NVMLError("driver not loaded")
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlSystemGetDriverVersion(self) -> str | bytes:  # noqa: N802
        if self.silent:
            raise NVMLError("unknown error")
        return self.driver

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2 + self.hidden

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index >= 2:
            raise NVMLError("insufficient permissions")
        return f"NVIDIA H100 80GB HBM3/{index}"

    def nvmlDeviceGetUUID(self, device: str) -> str:  # noqa: N802
        return ("MIG" if "MIG" in device else "GPU") + f"-{device[-1]}-{len(device)}"

    def nvmlDeviceGetCudaComputeCapability(self, device: str) -> tuple[int, int]:  # noqa: N802
        return 9, 0

    def nvmlDeviceGetName(self, device: str) -> str:  # noqa: N802
        return device.partition("/")[0]

    def nvmlDeviceGetMemoryInfo(self, device: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=(20_000 if "MIG" in device else 81_559) * 2**20)

    def nvmlDeviceGetMigMode(self, device: str) -> tuple[int, int]:  # noqa: N802
        if device.endswith("/0"):
            raise NVMLError("not supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, device: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: str, index: int) -> str:  # noqa: N802
        if index > 1:
            raise NVMLError("not found")
        return f"NVIDIA H100 80GB HBM3 MIG 2g.20gb/{index}"


def nvml(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(devices, "machine_name", lambda: "DGX-H100")


def test_gpus_and_mig_slices_are_kinds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(driver=b"570.86.15")
    nvml(monkeypatch, fake)
    whole, *slices = devices.gpus()
    assert (whole.name, whole.memory_bytes, whole.driver) == ("NVIDIA H100 80GB HBM3", 80 * GIB, "570.86.15")
    assert (whole.compute_capability, whole.machine) == ("9.0", "DGX-H100")
    assert [part.name for part in slices] == ["NVIDIA H100 80GB HBM3 MIG 2g.20gb"] * 2
    assert not fake.open


def test_gpus_of_other_jobs_are_counted_by_nvml_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, FakeNvml(hidden=6))
    assert list(devices.gpus_by_uuid()) == ["0-23", "0-35", "1-35"]


@pytest.mark.parametrize("fake", [None, FakeNvml(broken=True), FakeNvml(silent=True)])
def test_without_bindings_or_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml | None) -> None:
    nvml(monkeypatch, fake)
    assert devices.gpus() == ()


def test_the_cpu_is_this_one_and_always_the_same() -> None:
    cpu = devices.cpu()
    assert cpu == devices.cpu()
    assert (cpu.kind, cpu.name.endswith(f", {system.cores()} cores")) == ("cpu", True)
    assert cpu.memory_bytes % GIB == 0 < cpu.memory_bytes
