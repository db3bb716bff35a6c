"""What this machine is: the facts about its CPU or its GPUs that a bench tells, and what each needs installed."""

from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol

from neuroshard import __version__, devices, system
from neuroshard.core.cost import READS, SHARES, SMALL_SET, Hardware
from neuroshard.core.errors import MeasureError
from neuroshard.core.extras import install_command, pip
from neuroshard.core.units import format_bytes
from neuroshard.measure import calm
from neuroshard.measure.calm import dealt_out
from neuroshard.measure.cores import may_go_first
from neuroshard.measure.gpu_facts import gpu_facts
from neuroshard.measure.harness import AGREEING, LONG_CASE_MS, MIN_REPEATS, SETTLED
from neuroshard.measure.room import PROCESS_BYTES, Room
from neuroshard.measure.rowcap import default_memory_limit


class Machine(Protocol):
    """One kind of device of this machine, as its backend sees it."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """As a Hardware calls it."""

    @property
    def install(self) -> str:
        """The way out where FBGEMM is missing."""

    def hardware(self) -> Hardware:
        """The same for every machine of this kind. Raises MeasureError where there is no such device."""

    def most_devices(self) -> int | None:
        """Devices that an all-to-all can have here; None for any number."""

    def memory_limit(self, budget_seconds: float | None) -> int | None:
        """Bytes for the tables of a case unless the user says; None where a case that does not fit is to fail."""

    def check_room(self, buffer_bytes: int) -> None:
        """Raise MeasureError where the tables of a case, allocated beforehand, are more than there is memory for."""

    def apart(self, buffer_bytes: int, ranks: int) -> bool:
        """Must the worker that measures table sets end before so many ranks start, for want of memory?"""

    def concurrency(self) -> int:
        """How many table sets can be measured side by side without one disturbing the other."""

    def in_turns(self) -> int:
        """Of how many table sets each side is best measured in turns."""

    def what_counts(self, repeats: int) -> str:
        """What a label of a table set is made of."""

    def facts(self) -> dict[str, str]:
        """Of the hardware, beyond its kind. The same at every start."""

    def notes(self) -> tuple[str, ...]:
        """What a reader of the costs should know."""


class CpuMachine:
    """This machine's CPU. Any number of processes can join an all-to-all on it, if slowly."""

    kind: Literal["cpu"] = "cpu"
    install = install_command("measure")

    def hardware(self) -> Hardware:
        return devices.cpu()

    def most_devices(self) -> int | None:
        """As many ranks as memory holds processes: each has torch loaded."""
        return max(system.available_bytes() // PROCESS_BYTES, 1)

    def memory_limit(self, budget_seconds: float | None) -> int | None:
        return default_memory_limit(budget_seconds)

    def check_room(self, buffer_bytes: int) -> None:
        worker, available = Room.here().worker_bytes, system.available_bytes()
        if buffer_bytes + worker > available:
            raise MeasureError(
                f"the tables of a case take up to {format_bytes(buffer_bytes)} and the process that measures them "
                f"{format_bytes(worker)}, but {format_bytes(available)} of memory are available; measure with a smaller "
                "--memory-limit, or give more memory"
            )

    def apart(self, buffer_bytes: int, ranks: int) -> bool:
        needed = buffer_bytes + Room.here().worker_bytes + ranks * PROCESS_BYTES
        return needed > system.available_bytes()

    def concurrency(self) -> int:
        return 1  # cores share the last-level cache and the memory

    def in_turns(self) -> int:
        return 12  # neighbours on the host keep it slow for a second and more, in which as many are visited

    def what_counts(self, repeats: int) -> str:
        visits, each = dealt_out(repeats)
        return (
            f"of a table set the median of {visits * each} repeats counts, in {visits} visits apart, each scaled by what random "
            f"reads (to the power {SHARES[READS]:g}) and a small table set ({SHARES[SMALL_SET]:g}) right after it take of "
            f"calm_compute_ms; while the standard error of the visits is above {calm.SETTLED:.0%}, of up to twice as many; in "
            f"{LONG_CASE_MS:.0f} ms at least of {MIN_REPEATS}"
        )

    def facts(self) -> dict[str, str]:
        return {}

    def notes(self) -> tuple[str, ...]:
        return (
            "with one thread, compute is in ms of CPU time, so that waiting for a busy core does not count",
            f"measured on a CPU: an all-to-all is among processes that share {devices.cores()} cores, "
            + ("ahead of all others there" if may_go_first() else "in turn with all others there"),
            "memory in huge pages, where Linux grants them, and kept",
            "all-to-alls scaled to the calmest of a few looks at one that is measured beside each (calm_all_to_all_ms)",
            "before each timed step flush_bytes were written, so that the cache holds nothing of the step before",
        )


class CudaMachine:
    """The NVIDIA GPUs of this machine."""

    kind: Literal["cuda"] = "cuda"
    install = f"{pip()} install fbgemm-gpu==1.8.0 for torch 2.13, fbgemm-gpu==1.6.0 for torch 2.11"

    def hardware(self) -> Hardware:
        import torch

        if not torch.cuda.is_available():
            raise MeasureError("backend cuda needs an NVIDIA GPU, and torch sees none here; measure with backend cpu")
        told = devices.gpus_by_uuid()
        known = [told[uuid] for uuid in self.uuids if uuid in told] or list(told.values())[:1]
        kinds = list(dict.fromkeys(known or map(_as_torch_tells, self.seen)))
        if len(kinds) > 1:
            raise MeasureError(
                f"the GPUs here are of {len(kinds)} kinds ({', '.join(kind.name for kind in kinds)}), and costs are of one; say "
                "which to measure with CUDA_VISIBLE_DEVICES"
            )
        return kinds[0].model_copy(update={"interconnect": "NCCL" if len(self.seen) > 1 else ""})

    @cached_property
    def seen(self) -> list[Any]:
        """What torch tells of the GPUs that it sees, in its order."""
        import torch

        return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]

    @property
    def uuids(self) -> list[str]:
        return [str(found.uuid) for found in self.seen]

    def most_devices(self) -> int | None:
        return len(self.seen)

    def memory_limit(self, budget_seconds: float | None) -> int | None:
        return None

    def check_room(self, buffer_bytes: int) -> None:
        """Nothing is allocated beforehand."""

    def apart(self, buffer_bytes: int, ranks: int) -> bool:
        return False

    def concurrency(self) -> int:
        return len(self.seen)

    def in_turns(self) -> int:
        return 1  # a GPU is one's own

    def what_counts(self, repeats: int) -> str:
        return (
            f"of a table set the fastest repeat counts, scaled by nothing, of {repeats} or, until the fastest {AGREEING} are "
            f"within {SETTLED:.0%}, of up to {2 * repeats}; in {LONG_CASE_MS:.0f} ms at least of {MIN_REPEATS}"
        )

    def facts(self) -> dict[str, str]:
        return gpu_facts(self.uuids)

    def notes(self) -> tuple[str, ...]:
        return (
            "before each timed step twice the L2 cache was written",
            "table sets on all GPUs of a machine side by side, one each",
        )


def _as_torch_tells(found: Any) -> Hardware:
    """A GPU without nvidia-ml-py: its driver stays unknown."""
    return Hardware(
        kind="cuda",
        name=found.name,
        memory_bytes=devices.whole_gib(found.total_memory),
        compute_capability=f"{found.major}.{found.minor}",
        machine=devices.machine_name(),
    )


def installed_versions() -> dict[str, str]:
    """Versions of what the times depend on."""
    found = {"neuroshard": __version__}
    for name in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
