"""What differs between this machine's CPU and its GPUs, for real_devices.py: memory, concurrency, and how labels are made."""

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any, Literal

from neuroshard import __version__, devices, system
from neuroshard.core.case import Cases
from neuroshard.core.cost import READS, SLOWDOWN_EXPONENTS, SMALL_SET, Bench, Hardware
from neuroshard.core.errors import MeasureError
from neuroshard.core.extras import install_command, pip
from neuroshard.core.units import format_bytes
from neuroshard.core.versions import GPU_BUILD, TORCH_OF_FBGEMM, Installed
from neuroshard.devices import POD_CPU, ask_nvml, bare_uuid, nvml_gpus
from neuroshard.measure.backends import MeasureSettings, of_bench
from neuroshard.measure.rowcap import PROCESS_BYTES, MemoryQuotas, capped_tables, default_memory_limit, least_cap
from neuroshard.measure.timing.all_to_all import (
    AGREEMENT,
    BACKWARDS,
    BURSTS,
    COLLECTIVES,
    LONG_SECONDS,
    MOST_BURSTS,
)
from neuroshard.measure.timing.calm import SETTLED_ERROR, dealt_out
from neuroshard.measure.timing.clocks import may_go_first
from neuroshard.measure.timing.harness import FASTEST, LONG_CASE_MS, MIN_REPEATS, SETTLED_DIFFERENCE


class Machine:
    """One kind of device of this machine, for its backend: what differs. What is here already holds for GPUs."""

    kind: Literal["cpu", "cuda"]  # Hardware.kind of the device
    install: str  # how to install FBGEMM
    no_tiers = ""  # why no table lies beyond HBM here; empty where it may

    def hardware(self) -> Hardware:
        """The same for every machine of this kind. Raises MeasureError where there is no such device."""
        raise NotImplementedError

    def most_devices(self) -> int:
        """Devices of the largest all-to-all here."""
        raise NotImplementedError

    def memory_limit(self, budget_seconds: float | None) -> int | None:
        """Default bytes for the tables of a case; None where a case that does not fit is to fail."""
        return None

    def check_room(self, buffer_bytes: int) -> None:
        """Raise MeasureError if memory does not hold the tables of a case, where they are allocated beforehand."""

    def apart(self, buffer_bytes: int, ranks: int) -> bool:
        """Whether memory is too small for the worker for table sets and this many ranks together."""
        return False

    def take_steps(self, ranks: int) -> bool:
        """Whether so many ranks take steps at the same time here as in a trainer, where memory holds them. GPUs share no memory:
        one after another they take as long."""
        return False

    def holds(self, ranks: int, rank_bytes: int) -> bool:
        """Whether memory holds so many ranks of steps, each with so many bytes of its own."""
        return False

    def concurrency(self) -> int:
        """How many table sets can be measured side by side without disturbing each other."""
        raise NotImplementedError

    def in_turns(self) -> int:
        """How many table sets each worker measures in turns. Nothing else uses a GPU: no need to spread visits over time."""
        return 1

    def label_note(self, repeats: int) -> str:
        """How the label of a table set is made, as a note of the bench."""
        raise NotImplementedError

    def facts(self) -> dict[str, str]:
        """Facts about the hardware beyond its kind. The same at every start."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """Notes of the bench: what a reader of the costs should know."""
        raise NotImplementedError


class CpuMachine(Machine):
    """This machine's CPU. Any number of processes can be ranks of an all-to-all on it, but slow ones."""

    kind = "cpu"
    install = install_command("measure")
    no_tiers = "a CPU has no tiers"

    def hardware(self) -> Hardware:
        return devices.cpu()

    def most_devices(self) -> int:
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

    def notes(self) -> tuple[str, ...]:
        return (
            "with one thread, compute is in ms of CPU time, so waiting for a busy core does not count",
            f"measured on a CPU: the ranks of an all-to-all are processes that share {system.cores()} cores, "
            + ("ahead of all other processes" if may_go_first() else "in turns with all other processes"),
            "workers keep their memory, in huge pages where Linux grants them",
            "all-to-alls are scaled to calm_all_to_all_ms by a reference all-to-all, timed with each",
            "flush_bytes are written before each timed step, so the cache holds nothing of the step before",
        )


class CudaMachine(Machine):
    """The NVIDIA GPUs of this machine."""

    kind = "cuda"
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

    def most_devices(self) -> int:
        return len(self.seen)

    def concurrency(self) -> int:
        return len(self.seen)

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


MOST_LINKS = 18  # NVLinks of an H100 or H200; NVML raises for a link that does not exist


def gpu_facts(uuids: Collection[str]) -> dict[str, str]:
    """Name -> value with its unit; values of GPUs that differ are joined by slashes. {} without NVML.

    Covers the GPUs of these UUIDs, or all of them where NVML knows none of the UUIDs, as with MIG slices.
    """
    return ask_nvml(lambda nvml: _facts(nvml, uuids), {})


def _facts(nvml: Any, uuids: Collection[str]) -> dict[str, str]:
    """Limits, not readings: they are the same at every start, so a run that continues finds the bench of the run before."""
    known = nvml_gpus(nvml)
    gpus = [gpu for gpu in known if bare_uuid(nvml.nvmlDeviceGetUUID(gpu)) in uuids] or known
    questions: dict[str, Callable[[Any], str]] = {
        "largest SM clock": lambda gpu: f"{nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)} MHz",
        "largest memory clock": lambda gpu: f"{nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM)} MHz",
        "power cap": lambda gpu: f"{nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000:.0f} W",
        "NVLinks": lambda gpu: str(_links(nvml, gpu) or ""),
        "PCIe": lambda gpu: (
            f"generation {nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)}"
        ),
    }
    values = {name: [value for gpu in gpus if (value := _asked(nvml, ask, gpu))] for name, ask in questions.items()}
    return {name: " / ".join(dict.fromkeys(found)) for name, found in values.items() if found}


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


def bench_of(machine: Machine, cases: Cases, settings: MeasureSettings, begun: Bench | None) -> Bench:
    """The conditions of this run. A run that continues keeps the memory limit of `begun`, unless the settings give another."""
    limit = settings.memory_limit_bytes or (
        machine.memory_limit(settings.budget_seconds) if begun is None else begun.memory_limit_bytes
    )
    found = machine.hardware()
    hardware = wanted_hardware(found, settings.hardware)
    return Bench(
        backend=machine.kind,
        hardware=hardware,
        **of_bench(settings),
        memory_limit_bytes=limit,
        row_cap_bytes=least_cap(cases.compute, settings.optimizer, limit),
        capped_tables=capped_tables(cases.compute, settings.optimizer, limit),
        versions=installed_versions(),
        facts=machine.facts() | ({"cpu": found.name} if hardware.name == POD_CPU else {}),
        notes=(
            *machine.notes(),
            machine.label_note(settings.repeats),
            f"the label of an all-to-all is the median of {BURSTS * settings.repeats} forwards, and of {BACKWARDS} times "
            f"as many backwards; of up to {MOST_BURSTS * settings.repeats} forwards while the fastest differ by more than "
            f"{AGREEMENT:.0%}; of at least {settings.repeats} if they take longer than {LONG_SECONDS:g} s",
            f"all-to-alls in fp32 over {COLLECTIVES[machine.kind]}, all devices on one host",
            "lookups from traces" if settings.traces else "lookups drawn to match the tables' reuse bins",
        ),
    )


def wanted_hardware(found: Hardware, wanted: Hardware | None) -> Hardware:
    """The hardware that was found here. Raises MeasureError if it is of another kind than `wanted`."""
    if wanted is None:
        return found
    found = with_hidden_facts(found, wanted)
    if found.fingerprint != wanted.fingerprint:
        raise MeasureError(
            f"{wanted.name} was to be measured ({_kind_text(wanted)}), but this machine has {found.name} ({_kind_text(found)}): "
            "correct the node's labels, or the node selector"
        )
    return found


def with_hidden_facts(found: Hardware, known: Hardware) -> Hardware:
    """The hardware found here, with what is `known` otherwise: the machine's name, which a container hides, and the sharing,
    which is invisible from inside. Of pods' CPUs only what was asked for is known: which one is here is a fact of the bench."""
    if found.kind == "cpu" and known.name == POD_CPU:
        return known
    return found.model_copy(update={"machine": found.machine or known.machine, "sharing": known.sharing})


def _kind_text(hardware: Hardware) -> str:
    facts = (
        format_bytes(hardware.memory_bytes),
        hardware.driver and f"driver {hardware.driver}",
        hardware.compute_capability and f"compute {hardware.compute_capability}",
        hardware.machine,
    )
    return ", ".join(filter(None, facts))


def installed_versions() -> dict[str, str]:
    """Versions of the packages that times depend on."""
    here = Installed.here()
    return {"neuroshard": __version__, **({"torch": here.torch} if here.torch else {}), **here.fbgemm}
