"""The backends that measure real devices: this machine's CPU, or its NVIDIA GPUs.

Both are the same but for the device: FBGEMM in a worker process (on GPUs one each), and all-to-all in one worker process a
device.
"""

import contextlib
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.clean import log
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, Hardware
from neuroshard.core.errors import MeasureError
from neuroshard.core.units import format_bytes
from neuroshard.measure.all_to_all import (
    ALIKE,
    BACKWARDS,
    BURSTS,
    CALM_LOOKS,
    COLLECTIVES,
    LONG_EXCHANGE_SECONDS,
    MOST_BURSTS,
    AllToAll,
    Measured,
    at_speed,
    reference_kernel,
)
from neuroshard.measure.backends import Settings
from neuroshard.measure.harness import collective_cost
from neuroshard.measure.machine import CpuMachine, CudaMachine, Machine, installed_versions
from neuroshard.measure.rowcap import buffer_bytes, capped_tables, least_cap
from neuroshard.measure.sets import Look, Lot
from neuroshard.measure.worker import WorkerLost, WorkerPool, tried

# gloo otherwise looks for the address of this host's name, which a container may not have
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}

# How glibc gets workers' memory: docs/measure.md. It gives back to Linux what a step frees, or not,
# by what was freed before it, and the next step pays for new pages; here all of less than the highest threshold it takes is
# kept. And of small pages each process gets others, and with them a speed of its own; of huge ones it does not.
MEMORY = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 32 * 2**20,
    "glibc.malloc.trim_threshold": 2**40,
    "glibc.malloc.top_pad": 64 * 2**20,
}
# Of looking how calm a machine can be, when a run begins: over 10 s the calmest is had again within 4 %, over 0.3 s within 10.
CALM_SECONDS = 10.0
CALM_SHARE = 0.05  # of a budget, at most
LOT_SECONDS = 5.0  # that table sets measured in turns may take together: as much is lost when a run is killed


class OnMachine:
    """FBGEMM and torch.distributed on the devices of one machine."""

    def __init__(self, machine: Machine, cases: Cases, settings: Settings, begun: Bench | None) -> None:
        for package in ("torch", "fbgemm_gpu"):
            if importlib.util.find_spec(package) is None:
                raise MeasureError(f"backend {machine.kind} needs {package}, not installed here: {machine.install}")
        self.machine, self.settings = machine, settings
        bench = bench_of(machine, cases, settings, begun)
        self.most_devices = machine.most_devices()
        counts = {len(case.device_dims) for case in cases.collective}
        self.counts = tuple(sorted(n for n in counts if self.most_devices is None or n <= self.most_devices))

        limit = bench.memory_limit_bytes
        self.seconds_a_set = math.inf  # of the last that were measured
        self.repeats = settings.repeats
        buffers = buffer_bytes(cases.compute, settings.optimizer, limit)
        machine.check_room(sum(buffers))
        self.apart = machine.apart(sum(buffers), max(self.counts, default=0))
        serving = (settings, limit, *buffers)
        workers = machine.concurrency()
        environment = {"OMP_NUM_THREADS": str(settings.threads), **LOOPBACK, **kept_memory(os.environ)}
        self.sets = WorkerPool(
            "neuroshard.measure.sets:TableSets",
            lambda: [(machine.kind, index, *serving) for index in range(workers)],
            settings.timeout_seconds,
            environment,
        )
        self.meetings = contextlib.ExitStack()
        self.all = WorkerPool("neuroshard.measure.all_to_all:Rank", self._ranks, settings.timeout_seconds, environment)
        try:
            self.bench = bench.model_copy(update=self._looked_at(begun, bool(cases.compute)))
        except BaseException:
            self.close()
            raise

    @property
    def concurrency(self) -> int:
        together = min(LOT_SECONDS, self.settings.timeout_seconds / 4) / self.seconds_a_set
        return self.machine.concurrency() * max(1, min(self.machine.in_turns(), int(together)))

    def compute(self, case: ComputeCase, round_: int) -> ComputeCost:
        return self.compute_concurrency([(case, round_)])[0]

    def compute_concurrency(self, cases: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        began = time.monotonic()
        workers = min(len(cases), self.machine.concurrency())
        bench = self.bench
        lots = [
            Lot(tuple(cases[worker::workers]), self.repeats, bench.calm_compute_ms, bench.flush_bytes)
            for worker in range(workers)
        ]
        self._make_room_for(self.sets)
        answers = self.sets.ask_each(lots)
        self.seconds_a_set = (time.monotonic() - began) / len(lots[0].cases)
        return [answers[place % workers][place // workers] for place in range(len(cases))]

    def all_to_all(self, case: CollectiveCase, round_: int) -> CollectiveCost:
        self._make_room_for(self.all)
        answers = self.all.ask(AllToAll(case, self.repeats), count=len(case.device_dims))
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:
            return CollectiveCost(case_id=case.case_id, round=round_, error=max(errors))
        calm, now = self.bench.calm_all_to_all_ms.get(str(len(answers))), reference_ms(answers)
        speed = calm / now if calm and now else 1.0
        last = max(case.start_delays_ms)
        return collective_cost(
            case,
            round_,
            [
                at_speed(one.forward, speed, last - delay)
                for one, delay in zip(answers, case.start_delays_ms, strict=True)
            ],
            [at_speed(one.backward, speed) for one in answers],
        )

    def _make_room_for(self, pool: WorkerPool) -> None:
        """End the other workers where memory does not hold both."""
        other = self.all if pool is self.sets else self.sets
        if self.apart and other.workers:
            other.close()

    def _looked_at(self, begun: Bench | None, sets_wanted: bool) -> dict[str, Any]:
        """Of the bench what is found by looking at the machine. Every label is scaled to it, so a run that goes on keeps what
        `begun` has; numbers of devices that it lacks are added."""
        if self.machine.kind != "cpu":
            return {}
        known = begun.calm_all_to_all_ms if begun else {}
        found: dict[str, Any] = {"calm_all_to_all_ms": known | self._calm_all_to_all_ms(known)}
        if begun and begun.calm_compute_ms:
            return found | {"flush_bytes": begun.flush_bytes, "calm_compute_ms": begun.calm_compute_ms}
        if sets_wanted:
            budget = self.settings.budget_seconds
            seconds = min(CALM_SECONDS, self.settings.timeout_seconds / 4, CALM_SHARE * (budget or math.inf))
            self._make_room_for(self.sets)
            look = Look(seconds, begun.flush_bytes if begun else None)
            seen = tried(lambda: self.sets.ask(look, count=1)[0])
            found |= {"flush_bytes": seen.flush_bytes, "calm_compute_ms": seen.calm_ms}
        return found

    def _calm_all_to_all_ms(self, known: Mapping[str, float]) -> dict[str, float]:
        """The reference kernel's ms for each number of devices that is not known, at the calmest of some looks.

        Where its ranks are lost, no all-to-all can be measured: then `most_devices` is 1 for this run.
        """
        counts = [count for count in self.counts if str(count) not in known]
        if not counts:
            return {}
        looks: list[tuple[int, list[Any]]] = []
        self._make_room_for(self.all)
        try:
            looks = tried(
                lambda: [
                    (n, self.all.ask(AllToAll(reference_kernel(n), self.repeats), count=n))
                    for _ in range(CALM_LOOKS)
                    for n in counts
                ]
            )
        except WorkerLost as error:  # table sets can still be measured
            log(f"note: no all-to-all can be measured here just now, so all are left out: {error}")
            self.most_devices = 1
        seen = [(str(n), reference_ms(answers)) for n, answers in looks if not any(isinstance(a, str) for a in answers)]
        return {devices: min(ms for n, ms in seen if n == devices) for devices in sorted({n for n, _ in seen})}

    def close(self) -> None:
        self.sets.close()
        self.all.close()
        self.meetings.close()

    def _ranks(self) -> list[tuple[Any, ...]]:
        """Arguments of each rank, with a new folder to meet in, which rank 0 removes when they have met, or else we do."""
        self.meetings.close()
        folder = self.meetings.enter_context(
            tempfile.TemporaryDirectory(prefix="neuroshard-all_to_all-", ignore_cleanup_errors=True)
        )
        return [(self.machine.kind, rank, self.counts, folder, self.settings) for rank in range(max(self.counts))]


def kept_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes a worker keep its memory; what else `environment` has of glibc's settings stays as it is."""
    others = [
        setting
        for setting in environment.get("GLIBC_TUNABLES", "").split(":")
        if setting and setting.partition("=")[0] not in MEMORY
    ]
    return {"GLIBC_TUNABLES": ":".join([*others, *(f"{name}={value}" for name, value in MEMORY.items())])}


def reference_ms(answers: Sequence[Measured]) -> float:
    """The reference kernel's ms over all devices; 0 where there is none."""
    return statistics.mean(answer.reference_ms or 0.0 for answer in answers)


def bench_of(machine: Machine, cases: Cases, settings: Settings, begun: Bench | None) -> Bench:
    """What is told about the conditions, and kept equal over restarts: the limit of `begun` stays unless another is given."""
    limit = settings.memory_limit_bytes or (
        machine.memory_limit(settings.budget_seconds) if begun is None else begun.memory_limit_bytes
    )
    return Bench(
        backend=machine.kind,
        hardware=wanted_hardware(machine.hardware(), settings.hardware),
        batch_size=settings.batch_size,
        warmup=settings.warmup,
        repeats=settings.repeats,
        optimizer=settings.optimizer,
        threads=settings.threads,
        seed=settings.seed,
        memory_limit_bytes=limit,
        row_cap_bytes=least_cap(cases.compute, settings.optimizer, limit),
        capped_tables=capped_tables(cases.compute, settings.optimizer, limit),
        versions=installed_versions(),
        facts=machine.facts(),
        notes=(
            *machine.notes(),
            machine.what_counts(settings.repeats),
            f"of an all-to-all the lower decile counts, of {BURSTS * settings.repeats} forwards and {BACKWARDS} times as many "
            f"backwards or, until the fastest are within {ALIKE:.0%}, of up to {MOST_BURSTS * settings.repeats}; in "
            f"{LONG_EXCHANGE_SECONDS:g} s at least of {settings.repeats}",
            f"all-to-alls in fp32 over {COLLECTIVES[machine.kind]}, all devices on one host",
            "lookups from traces" if settings.traces else "lookups drawn to match the tables' reuse bins",
        ),
    )


def wanted_hardware(found: Hardware, wanted: Hardware | None) -> Hardware:
    """What was found here, if it is of the kind that was wanted. Raises MeasureError.

    What a container hides (the machine's name) or nobody can see from inside (sharing) is taken from `wanted`.
    """
    if wanted is None:
        return found
    hidden = {"machine": found.machine or wanted.machine, "sharing": wanted.sharing}
    found = found.model_copy(update=hidden)
    if found.fingerprint != wanted.fingerprint:
        raise MeasureError(
            f"{wanted.name} was to be measured ({_facts(wanted)}), and here is {found.name} ({_facts(found)}): the node's "
            "labels are out of date, or its selector leads elsewhere"
        )
    return found


def _facts(hardware: Hardware) -> str:
    told = (
        format_bytes(hardware.memory_bytes),
        hardware.driver and f"driver {hardware.driver}",
        hardware.compute_capability and f"compute {hardware.compute_capability}",
        hardware.machine,
    )
    return ", ".join(filter(None, told))


def cpu(cases: Cases, settings: Settings, begun: Bench | None) -> OnMachine:
    """This machine's CPU."""
    return OnMachine(CpuMachine(), cases, settings, begun)


def cuda(cases: Cases, settings: Settings, begun: Bench | None) -> OnMachine:
    """This machine's NVIDIA GPUs."""
    return OnMachine(CudaMachine(), cases, settings, begun)
