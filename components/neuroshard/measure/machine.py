"""What differs between this machine's CPU and its GPUs, for real_devices.py: memory, concurrency, and how labels are made."""

from functools import cached_property
from typing import Any, Literal, Protocol

from neuroshard import devices, system
from neuroshard.core.cost import READS, SLOWDOWN_EXPONENTS, SMALL_SET, Hardware
from neuroshard.core.errors import MeasureError
from neuroshard.core.extras import install_command, pip
from neuroshard.core.units import format_bytes
from neuroshard.core.versions import GPU_BUILD, TORCH_OF_FBGEMM
from neuroshard.measure.gpu_facts import gpu_facts
from neuroshard.measure.memory_quotas import PROCESS_BYTES, MemoryQuotas
from neuroshard.measure.rowcap import default_memory_limit
from neuroshard.measure.timing.calm import SETTLED_ERROR, dealt_out
from neuroshard.measure.timing.harness import FASTEST, LONG_CASE_MS, MIN_REPEATS, SETTLED_DIFFERENCE
from neuroshard.measure.workers.cores import may_go_first


class Machine(Protocol):
    """One kind of device of this machine, for its backend."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Hardware.kind of the device."""

    @property
    def install(self) -> str:
        """How to install FBGEMM."""

    @property
    def no_tiers(self) -> str:
        """Why no table lies beyond HBM here; empty where it may."""

    def hardware(self) -> Hardware:
        """The same for every machine of this kind. Raises MeasureError where there is no such device."""

    def most_devices(self) -> int | None:
        """Devices of the largest all-to-all here; None for any number."""

    def memory_limit(self, budget_seconds: float | None) -> int | None:
        """Default bytes for the tables of a case; None where a case that does not fit is to fail."""

    def check_room(self, buffer_bytes: int) -> None:
        """Raise MeasureError if memory does not hold the tables of a case, where they are allocated beforehand."""

    def apart(self, buffer_bytes: int, ranks: int) -> bool:
        """Whether memory is too small for the worker for table sets and this many ranks together."""

    def take_steps(self, ranks: int) -> bool:
        """Whether so many ranks take steps at the same time here as in a trainer, where memory holds them."""

    def holds(self, ranks: int, rank_bytes: int) -> bool:
        """Whether memory holds so many ranks of steps, each with so many bytes of its own."""

    def concurrency(self) -> int:
        """How many table sets can be measured side by side without disturbing each other."""

    def in_turns(self) -> int:
        """How many table sets each worker measures in turns."""

    def label_note(self, repeats: int) -> str:
        """How the label of a table set is made, as a note of the bench."""

    def facts(self) -> dict[str, str]:
        """Facts about the hardware beyond its kind. The same at every start."""

    def notes(self) -> tuple[str, ...]:
        """Notes of the bench: what a reader of the costs should know."""


class CpuMachine:
    """This machine's CPU. Any number of processes can be ranks of an all-to-all on it, but slow ones."""

    kind: Literal["cpu"] = "cpu"
    install = install_command("measure")
    no_tiers = "a CPU has no tiers"

    def hardware(self) -> Hardware:
        return devices.cpu()

    def most_devices(self) -> int | None:
        """As many ranks as memory holds processes, each with torch loaded."""
        return max(system.available_bytes() // PROCESS_BYTES, 1)

    def memory_limit(self, budget_seconds: float | None) -> int | None:
        return default_memory_limit(budget_seconds)

    def check_room(self, buffer_bytes: int) -> None:
        worker, available = MemoryQuotas.here().worker_bytes, system.available_bytes()
        if buffer_bytes + worker > available:
            raise MeasureError(
                f"the tables of a case take up to {format_bytes(buffer_bytes)}, and the process that measures them takes "
                f"{format_bytes(worker)}, but {format_bytes(available)} of memory are available; measure with a smaller "
                f"--memory-limit, or {f'raise {ulimit}' if (ulimit := system.binding_ulimit()) else 'give more memory'}"
            )

    def apart(self, buffer_bytes: int, ranks: int) -> bool:
        needed = buffer_bytes + MemoryQuotas.here().worker_bytes + ranks * PROCESS_BYTES
        return needed > system.available_bytes()

    def take_steps(self, ranks: int) -> bool:
        return ranks <= system.cores()

    def holds(self, ranks: int, rank_bytes: int) -> bool:
        return ranks * (rank_bytes + PROCESS_BYTES) <= system.available_bytes()

    def concurrency(self) -> int:
        return 1  # cores share the last-level cache and the memory

    def in_turns(self) -> int:
        return 12  # visits that take longer than the second or more for which a neighbour slows the host

    def label_note(self, repeats: int) -> str:
        visits, each = dealt_out(repeats)
        return (
            f"the label of a table set is the median of {visits * each} repeats in {visits} visits, each repeat scaled by how "
            f"much longer than calm_compute_ms random reads (to the power {SLOWDOWN_EXPONENTS[READS]:g}) and a small table set "
            f"({SLOWDOWN_EXPONENTS[SMALL_SET]:g}) take right after it, both run once before; of up to twice as many while the "
            f"standard error of the visits is above {SETTLED_ERROR:.0%}; of at least {MIN_REPEATS} if they take longer than "
            f"{LONG_CASE_MS:.0f} ms"
        )

    def facts(self) -> dict[str, str]:
        return {}

    def notes(self) -> tuple[str, ...]:
        return (
            "with one thread, compute is in ms of CPU time, so waiting for a busy core does not count",
            f"measured on a CPU: the ranks of an all-to-all are processes that share {system.cores()} cores, "
            + ("ahead of all other processes" if may_go_first() else "in turns with all other processes"),
            "workers keep their memory, in huge pages where Linux grants them",
            "all-to-alls are scaled to calm_all_to_all_ms by a reference all-to-all, timed with each",
            "flush_bytes are written before each timed step, so the cache holds nothing of the step before",
        )


class CudaMachine:
    """The NVIDIA GPUs of this machine."""

    kind: Literal["cuda"] = "cuda"
    no_tiers = ""
    install = ", ".join(
        f"{pip()} install {GPU_BUILD}=={fbgemm}.0 for torch {torch}"
        for fbgemm, torch in reversed(TORCH_OF_FBGEMM.items())
    )

    def hardware(self) -> Hardware:
        import torch

        if not torch.cuda.is_available():
            raise MeasureError("backend cuda needs an NVIDIA GPU, and torch sees none here; measure with backend cpu")
        by_uuid = devices.gpus_by_uuid()
        known = [by_uuid[uuid] for uuid in self.uuids if uuid in by_uuid] or list(by_uuid.values())[:1]
        kinds = list(dict.fromkeys(known or map(_from_torch, self.seen)))
        if len(kinds) > 1:
            raise MeasureError(
                f"the GPUs here are of {len(kinds)} kinds ({', '.join(kind.name for kind in kinds)}), and costs are of one; "
                "choose which to measure with CUDA_VISIBLE_DEVICES"
            )
        return kinds[0].model_copy(update={"interconnect": "NCCL" if len(self.seen) > 1 else ""})

    @cached_property
    def seen(self) -> list[Any]:
        """torch's properties of the GPUs that it sees, in its order."""
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

    def take_steps(self, ranks: int) -> bool:
        return False  # GPUs share no memory: one after another they take as long

    def holds(self, ranks: int, rank_bytes: int) -> bool:
        return False  # no ranks of steps are started

    def concurrency(self) -> int:
        return len(self.seen)

    def in_turns(self) -> int:
        return 1  # nothing else uses the GPU, so there is no need to spread visits over time

    def label_note(self, repeats: int) -> str:
        return (
            f"the label of a table set is the fastest of {repeats} repeats; of up to {2 * repeats} while the fastest {FASTEST} "
            f"differ by more than {SETTLED_DIFFERENCE:.0%}; of at least {MIN_REPEATS} if they take longer than "
            f"{LONG_CASE_MS:.0f} ms"
        )

    def facts(self) -> dict[str, str]:
        return gpu_facts(self.uuids)

    def notes(self) -> tuple[str, ...]:
        return (
            "twice the size of the L2 cache is written before each timed step",
            "table sets are measured on all GPUs of a machine side by side, one on each",
        )


def _from_torch(found: Any) -> Hardware:
    """A GPU from torch's properties, for machines without nvidia-ml-py. Its driver stays unknown."""
    return Hardware(
        kind="cuda",
        name=found.name,
        memory_bytes=devices.whole_gib(found.total_memory),
        compute_capability=f"{found.major}.{found.minor}",
        machine=devices.machine_name(),
    )
