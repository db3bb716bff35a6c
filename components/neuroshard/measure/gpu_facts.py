"""Facts that NVML reports about this machine's GPUs beyond their kind: limits of clock and power, and how they are joined.

These are limits, not readings: they are the same at every start, so a run that continues finds the bench of the run before.
"""

from collections.abc import Callable, Collection
from typing import Any

from neuroshard.devices import ask_nvml, bare_uuid, nvml_gpus

MOST_LINKS = 18  # NVLinks of an H100 or H200; NVML raises for a link that does not exist


def gpu_facts(uuids: Collection[str]) -> dict[str, str]:
    """Name -> value with its unit; values of GPUs that differ are joined by slashes. {} without NVML.

    Covers the GPUs of these UUIDs, or all of them where NVML knows none of the UUIDs, as with MIG slices.
    """
    return ask_nvml(lambda nvml: _facts(nvml, uuids), {})


def _facts(nvml: Any, uuids: Collection[str]) -> dict[str, str]:
    known = nvml_gpus(nvml)
    devices = [gpu for gpu in known if bare_uuid(nvml.nvmlDeviceGetUUID(gpu)) in uuids] or known
    values = {
        name: [value for device in devices if (value := _asked(nvml, ask, device))]
        for name, ask in _questions(nvml).items()
    }
    return {name: " / ".join(dict.fromkeys(found)) for name, found in values.items() if found}


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
    """The answer; empty where this GPU, or the driver in a container, does not report it."""
    try:
        return ask(device)
    except nvml.NVMLError:
        return ""


def _links(nvml: Any, device: Any) -> int:
    """How many NVLinks of the GPU are active."""
    up = 0
    for link in range(MOST_LINKS):
        try:
            up += nvml.nvmlDeviceGetNvLinkState(device, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:
            break
    return up
