"""What NVML tells of this machine's GPUs beyond their kind: the limits of clock and power, and how they are joined.

Limits and not readings: they are the same whenever one asks, so that a run that goes on finds the bench that it left.
"""

from collections.abc import Callable, Collection
from typing import Any

from neuroshard.devices import bare_uuid, nvml_gpus

MOST_LINKS = 18  # NVLinks of an H100 or H200; of a link that is not there NVML says so


def gpu_facts(uuids: Collection[str]) -> dict[str, str]:
    """Name -> value with its unit, the values of several GPUs between slashes where they differ; {} without NVML.

    Of the GPUs of these UUIDs; of all where NVML knows none of them, as it may of MIG slices.
    """
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        known = nvml_gpus(pynvml)
        devices = [one for one in known if bare_uuid(pynvml.nvmlDeviceGetUUID(one)) in uuids] or known
        told = {
            name: [value for device in devices if (value := _asked(pynvml, ask, device))]
            for name, ask in _questions(pynvml).items()
        }
        return {name: " / ".join(dict.fromkeys(values)) for name, values in told.items() if values}
    except pynvml.NVMLError:  # it was loaded, and does not answer
        return {}
    finally:
        pynvml.nvmlShutdown()


def _questions(nvml: Any) -> dict[str, Callable[[Any], str]]:
    return {
        "largest SM clock": lambda gpu: f"{nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)} MHz",
        "largest memory clock": lambda gpu: f"{nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM)} MHz",
        "power cap": lambda gpu: f"{nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000:.0f} W",
        "NVLinks": lambda gpu: str(_links(nvml, gpu) or ""),
        "PCIe": lambda gpu: (
            f"generation {nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)}"
        ),
    }


def _asked(nvml: Any, ask: Callable[[Any], str], device: Any) -> str:
    """The answer; empty where this GPU, or a container's driver, does not say."""
    try:
        return ask(device)
    except nvml.NVMLError:
        return ""


def _links(nvml: Any, device: Any) -> int:
    """How many NVLinks of the GPU are up."""
    up = 0
    for link in range(MOST_LINKS):
        try:
            up += nvml.nvmlDeviceGetNvLinkState(device, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:
            break
    return up
