"""Facts from NVML. NVML is a fake: there is no GPU where the tests run."""

import sys
from types import SimpleNamespace

import pytest

from neuroshard.measure.machine import gpu_facts


class NVMLError(Exception):
    pass


def fake(gpus: int = 2, links: int = 18, broken: bool = False) -> SimpleNamespace:
    def link(device: int, number: int) -> int:
        if number >= links:
            raise NVMLError("invalid argument")
        return 1

    def init() -> None:
        if broken:
            raise NVMLError("driver not loaded")

    def width(device: int) -> int:
        raise NVMLError("not supported")

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_FEATURE_ENABLED=1,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda device: f"GPU-{device}{device}-f",
        nvmlDeviceGetMaxClockInfo=lambda device, clock: {1: 1980, 2: 3201}[clock],
        nvmlDeviceGetEnforcedPowerLimit=lambda device: 700_000 - 200_000 * device,
        nvmlDeviceGetNvLinkState=link,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda device: 5,
        nvmlDeviceGetMaxPcieLinkWidth=width,
    )


def test_limits_have_units_and_unsupported_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    assert gpu_facts(()) == {
        "largest SM clock": "1980 MHz",
        "largest memory clock": "3201 MHz",
        "power cap": "700 W / 500 W",
        "NVLinks": "18",
    }


def test_gpus_that_are_not_measured_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    assert gpu_facts(["11-f"])["power cap"] == "500 W"


@pytest.mark.parametrize("nvml", [None, fake(gpus=0), fake(broken=True)])
def test_without_gpus_or_nvml_there_are_none(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_facts(()) == {}


def test_gpus_that_are_not_joined_have_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake(links=0))
    assert "NVLinks" not in gpu_facts(())
