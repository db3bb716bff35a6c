"""What this machine computes with: its CPU, and its NVIDIA GPUs as NVML tells of them, each as a kind of Hardware."""

import os
from typing import Any

from neuroshard import system
from neuroshard.core.cost import Hardware

GIB = 2**30


def cpu() -> Hardware:
    """This machine's CPU, with as many cores as this process may use."""
    return Hardware(
        kind="cpu",
        name=f"{system.cpu_name() or 'CPU'}, {cores()} cores",
        memory_bytes=whole_gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        interconnect="gloo over loopback",
    )


def gpus() -> tuple[Hardware, ...]:
    """The NVIDIA GPUs, or the MIG slices of those that are cut, in NVML's order; none without nvidia-ml-py or a driver.

    How they are shared in time is not to be seen from here.
    """
    return tuple(gpus_by_uuid().values())


def gpus_by_uuid() -> dict[str, Hardware]:
    """The same by UUID (as `bare_uuid`), by which CUDA's are found: it numbers them in another order, and may see fewer."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        driver, machine = _text(pynvml.nvmlSystemGetDriverVersion()), machine_name()
        found = {}
        for device in nvml_gpus(pynvml):
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device)
            for part in _parts(pynvml, device):
                found[bare_uuid(pynvml.nvmlDeviceGetUUID(part))] = Hardware(
                    kind="cuda",
                    name=_text(pynvml.nvmlDeviceGetName(part)),
                    memory_bytes=whole_gib(pynvml.nvmlDeviceGetMemoryInfo(part).total),
                    driver=driver,
                    compute_capability=f"{major}.{minor}",
                    machine=machine,
                )
        return found
    except pynvml.NVMLError:  # it was loaded, and does not answer
        return {}
    finally:
        pynvml.nvmlShutdown()


def nvml_gpus(nvml: Any) -> list[Any]:
    """Handles of the GPUs that this process may ask of. Those that a container or a job lacks are counted and not given."""
    handles = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError:
            continue
    return handles


def bare_uuid(told: str | bytes) -> str:
    """As CUDA tells it: `GPU-6f3a…` -> `6f3a…`."""
    return _text(told).partition("-")[2]


def machine_name() -> str:
    """What its maker calls this machine: the same file, in the same spelling, as NVIDIA's node label gpu.machine."""
    return system.read("/sys/class/dmi/id/product_name").replace(" ", "-")  # a container may not show it


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def whole_gib(count: int) -> int:
    """Bytes rounded to GiB: firmware and drivers keep a little for themselves, more or less of it by version."""
    return round(count / GIB) * GIB


def _parts(nvml: Any, device: Any) -> list[Any]:
    """The MIG slices of a GPU that is cut into such, else the GPU itself."""
    try:
        enabled, _ = nvml.nvmlDeviceGetMigMode(device)
    except nvml.NVMLError:  # it cannot be cut
        return [device]
    if not enabled:
        return [device]
    slices = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))
        except nvml.NVMLError:  # no slice at this index, or not one of ours
            continue
    return slices


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
