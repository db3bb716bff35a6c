"""What this machine computes with: its CPU, and its NVIDIA GPUs as NVML reports them, each as a kind of Hardware."""

from collections.abc import Callable
from typing import Any, TypeVar

from neuroshard import system
from neuroshard.core.cost import Hardware

GIB = 2**30

_Answer = TypeVar("_Answer")


POD_CPU = "CPU of measuring pods"


def pod_cpu(memory_bytes: int) -> Hardware:
    """The CPU of pods with so much memory, as who asks for such pods knows it: which one it is, they alone can see."""
    return Hardware(
        kind="cpu",
        name=POD_CPU,
        memory_bytes=max(whole_gib(memory_bytes), GIB),
        interconnect="gloo over loopback",
    )


def cpu() -> Hardware:
    """This machine's CPU, with as many cores and as much memory as this process may use: less than there is, in a container."""
    return Hardware(
        kind="cpu",
        name=f"{system.cpu_name() or 'CPU'}, {system.cores()} cores",
        memory_bytes=max(whole_gib(system.memory_bytes()), GIB),
        interconnect="gloo over loopback",
    )


def gpus() -> tuple[Hardware, ...]:
    """The NVIDIA GPUs in NVML's order, with the MIG slices of a GPU in its place. Empty without nvidia-ml-py or a driver.

    Does not cover how GPUs are shared in time: NVML does not report it.
    """
    return tuple(gpus_by_uuid().values())


def gpus_by_uuid() -> dict[str, Hardware]:
    """The same by UUID (as `bare_uuid`). CUDA numbers GPUs in another order and may see fewer, so UUIDs match the two."""
    return ask_nvml(_gpus_by_uuid, {})


def ask_nvml(question: Callable[[Any], _Answer], otherwise: _Answer) -> _Answer:
    """What `question` returns, given NVML as an open module.

    Returns `otherwise` without nvidia-ml-py, without a driver, or where NVML answers with an error.
    """
    try:
        import pynvml
    except ImportError:
        return otherwise
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return otherwise
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return otherwise
    finally:
        pynvml.nvmlShutdown()


def _gpus_by_uuid(nvml: Any) -> dict[str, Hardware]:
    driver, machine = _text(nvml.nvmlSystemGetDriverVersion()), machine_name()
    found = {}
    for device in nvml_gpus(nvml):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
        for part in _parts(nvml, device):
            found[bare_uuid(nvml.nvmlDeviceGetUUID(part))] = Hardware(
                kind="cuda",
                name=_text(nvml.nvmlDeviceGetName(part)),
                memory_bytes=whole_gib(nvml.nvmlDeviceGetMemoryInfo(part).total),
                driver=driver,
                compute_capability=f"{major}.{minor}",
                machine=machine,
            )
    return found


def nvml_gpus(nvml: Any) -> list[Any]:
    """Handles of the GPUs that this process may use. NVML also counts those of other containers and jobs; they are left out."""
    handles = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError:
            continue
    return handles


def bare_uuid(uuid: str | bytes) -> str:
    """NVML's UUID as CUDA writes it: `GPU-6f3a…` -> `6f3a…`."""
    return _text(uuid).partition("-")[2]


def machine_name() -> str:
    """The maker's name for this machine: the same file, in the same spelling, as NVIDIA's node label gpu.machine."""
    return system.read("/sys/class/dmi/id/product_name").replace(" ", "-")  # a container may not show it


def whole_gib(count: int) -> int:
    """Bytes rounded to GiB: firmware and drivers reserve a little, which differs by version."""
    return round(count / GIB) * GIB


def _parts(nvml: Any, device: Any) -> list[Any]:
    """The MIG slices of a GPU that is cut into slices, otherwise the GPU itself."""
    try:
        enabled, _ = nvml.nvmlDeviceGetMigMode(device)
    except nvml.NVMLError:  # this GPU has no MIG
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
