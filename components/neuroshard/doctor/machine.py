"""The machine: cores, memory, disk, GPUs, and whether FBGEMM's operator runs on them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from neuroshard import devices, system
from neuroshard.core.cost import Hardware
from neuroshard.core.extras import pip
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.core.versions import Installed
from neuroshard.doctor.checks import Check
from neuroshard.doctor.packages import install

GIB = 2**30
LITTLE_MEMORY, LITTLE_DISK = 6 * GIB, 5 * GIB
AMD_COMPUTE = Path("/dev/kfd")  # of AMD's driver, amdgpu
OPERATOR_SECONDS = 600  # a busy machine imports torch and FBGEMM in minutes


def check_machine(folder: Path) -> Iterator[Check]:
    """Cores, memory, and the disk of `folder`, where a run would write."""
    cpu = devices.cpu()
    cores = system.cores()
    few = "to measure all-to-alls, use a machine with a core for each device" if cores < 2 else ""
    yield Check("cores", "warn" if few else "ok", f"{cpu.name}", few)
    yield memory_check(system.available_bytes() if sys.platform == "linux" else None, system.binding_ulimit())
    yield disk_check(folder, shutil.disk_usage(folder).free)


def memory_check(available: int | None, ulimit: str = "") -> Check:
    """Whether the free memory, which a `ulimit` may bound, is enough to measure some tables."""
    if available is None:
        return Check("memory", "none", "this system does not report how much memory is free")
    free = f"{format_bytes(available)} are free{f' ({ulimit} leaves no more: raise it)' if ulimit else ''}"
    if available >= LITTLE_MEMORY:
        return Check("memory", "ok", free)
    return Check("memory", "warn", free, "measure with --memory-limit 1GiB: larger tables are measured with fewer rows")


def disk_check(folder: Path, free: int) -> Check:
    """Whether `folder` can be written and has space for costs and models."""
    where = f"{format_bytes(free)} are free at {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} cannot be written", "run it in a folder that you can write")
    if free >= LITTLE_DISK:
        return Check("disk", "ok", where)
    return Check("disk", "warn", where, "free some: a full run writes some hundred MB, lookups of traces many GB")


def check_backends(gpus: Sequence[Hardware]) -> Iterator[Check]:
    """Whether FBGEMM's operator runs on the CPU, and on this machine's `gpus` if there are any."""
    yield operator_check("cpu", has_gpu=bool(gpus))
    if not gpus:
        yield Check("gpu backend", "none", "no NVIDIA GPU found", _why_no_gpu())
        return
    yield Check("gpus", "ok", f"{counted(len(gpus), 'GPU')}: {gpus[0].name}, driver {gpus[0].driver}")
    yield operator_check("cuda", has_gpu=True)


def operator_check(kind: str, python: str = sys.executable, has_gpu: bool = False) -> Check:
    """Whether the operator runs, in a process of its own, and computes the right values."""
    name = "cpu backend" if kind == "cpu" else "gpu backend"
    packages = install("measure" if kind == "cpu" else "cuda", has_gpu)
    mend = "see versions above" if Installed.here().unloadable else f"see versions above; {packages}"
    if kind == "cpu" and (lacks := system.fbgemm_lacks()):
        mend = lacks
    try:
        done = subprocess.run(
            [python, "-P", "-m", "neuroshard.doctor.operator", kind],  # -P ignores the working directory's modules
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=OPERATOR_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Check(name, "fail", f"FBGEMM's operator did not end within {OPERATOR_SECONDS} s", mend)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        last = said[-1] if said else f"exit status {done.returncode}"
        if last.startswith("ModuleNotFoundError"):
            return Check(name, "warn", f"cannot measure here: {last.partition(': ')[2]}", packages)
        return Check(name, "fail", f"FBGEMM's operator does not run: {last:.200}", mend)
    result = json.loads(done.stdout.splitlines()[-1])
    agrees = f"and agrees with torch (forward {result['forward_ms']:.2f} ms)"
    return Check(name, "ok", f"FBGEMM's operator runs on {result['device']}, {agrees}")


def _why_no_gpu() -> str:
    """How to fix it, with or without a driver."""
    if AMD_COMPUTE.exists():
        return "AMD's GPUs are planned by a datasheet (search --model analytic:mi300x), and with ROCm nothing was tried"
    if not Path("/proc/driver/nvidia").exists():
        return "measure on a node with GPUs, or with --backend cpu; without measuring: search --model analytic:h100"
    return f"a driver is loaded, but NVML shows no GPU: {pip()} install nvidia-ml-py; give containers the devices"
