"""Backends `cpu` and `cuda`: FBGEMM and torch.distributed on this machine's CPU, or on its NVIDIA GPUs.

What differs between the two is in machine.py. Worker processes measure table sets, one on the CPU or one for each GPU. Further
worker processes, one for each device, are the ranks of all-to-alls.
"""

import contextlib
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from neuroshard import system
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase, TierCase
from neuroshard.core.clean import log
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, TierCost
from neuroshard.core.errors import MeasureError
from neuroshard.core.operator_limits import fault_of_tables
from neuroshard.core.plan import DeviceCost
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.machine import CpuMachine, CudaMachine, Machine, bench_of
from neuroshard.measure.rowcap import buffer_bytes
from neuroshard.measure.timing.all_to_all import (
    BUFFERS,
    CALM_TRIALS,
    REFERENCE_DIM,
    RankTiming,
    TimeAllToAll,
    TimeReorder,
    reference_all_to_all,
)
from neuroshard.measure.timing.fbgemm import BACKWARD_BYTES
from neuroshard.measure.timing.harness import collective_cost
from neuroshard.measure.timing.steps import TimeSteps
from neuroshard.measure.timing.table_sets import ProbeCpu, TimeBeyondHbm, TimeTableSets
from neuroshard.measure.workers.processes import WorkerLost, WorkerPool, tried

# otherwise gloo resolves this host's name, which fails in some containers
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}

# How glibc manages a worker's memory. By default it returns freed memory to Linux, depending on what was freed before, and the
# next step pays for new pages; with these settings it keeps everything below its highest threshold. Huge pages make processes
# equally fast: small pages are spread over memory differently in each process. Threads share one arena: an arena of its own takes
# 64 MiB of what a process may take (`system.take_no_more`), and hardly uses them.
MEMORY = {
    "glibc.malloc.arena_max": 1,
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 32 * 2**20,
    "glibc.malloc.trim_threshold": 2**40,
    "glibc.malloc.top_pad": 64 * 2**20,
}
# To find how fast the CPU is in calm when a run begins. Twelve trials of 5 s, a second apart, were within 3 %.
CALM_SECONDS = 10.0
CALM_SHARE = 0.05  # of a budget, at most
LOOKUP_BYTES = 16 + BACKWARD_BYTES  # in a worker: an index of 8 bytes as it is drawn, and joined; and in backward
TURNS_SECONDS = 5.0  # for all table sets that are measured in turns: a killed run loses this much


class RealDevices:
    """The devices of one machine: its CPU, with processes for ranks, or its GPUs."""

    def __init__(self, machine: Machine, cases: Cases, settings: MeasureSettings, begun: Bench | None) -> None:
        for package in ("torch", "fbgemm_gpu"):
            if importlib.util.find_spec(package) is None:
                raise MeasureError(f"backend {machine.kind} needs {package}, not installed here: {machine.install}")
        if machine.kind == "cpu" and (lacks := system.fbgemm_lacks()):
            raise MeasureError(lacks)
        self.machine, self.settings = machine, settings
        bench = bench_of(machine, cases, settings, begun)
        self.most_devices, self.no_tiers = machine.most_devices(), machine.no_tiers
        counts = {len(case.device_dims) for case in cases.collective}
        self.counts = tuple(sorted(n for n in counts if self.most_devices is None or n <= self.most_devices))

        limit = bench.memory_limit_bytes
        self.seconds_a_set = math.inf  # of the latest table sets
        self.repeats = settings.repeats
        buffers = buffer_bytes(cases.compute, settings.optimizer, limit)
        machine.check_room(sum(buffers))
        ranks = max(self.counts, default=0)
        widest = max([REFERENCE_DIM, *(max(case.device_dims) for case in cases.collective)])
        self.apart = machine.apart(sum(buffers) + ranks * BUFFERS * 4 * settings.batch_size * widest, ranks)
        serving = (settings, limit, *buffers)
        workers = machine.concurrency()
        environment = {"OMP_NUM_THREADS": str(settings.threads), **LOOPBACK, **kept_memory(os.environ)}
        self.set_workers = WorkerPool(
            "neuroshard.measure.timing.table_sets:TableSets",
            lambda: [(machine.kind, index, *serving) for index in range(workers)],
            settings.timeout_seconds,
            environment,
        )
        self.meetings = contextlib.ExitStack()
        self.rank_workers = WorkerPool(
            "neuroshard.measure.timing.all_to_all:Rank", self._ranks, settings.timeout_seconds, environment
        )
        self.buffers = buffers
        self.step_workers = WorkerPool(
            "neuroshard.measure.timing.steps:StepRank",
            lambda: [(*of_rank, limit, *buffers) for of_rank in self._ranks()],
            settings.timeout_seconds,
            environment,
        )
        try:
            self.bench = bench.model_copy(update=self._probed(begun, bool(cases.compute)))
        except BaseException:
            self.close()
            raise

    @property
    def concurrency(self) -> int:
        together = min(TURNS_SECONDS, self.settings.timeout_seconds / 4) / self.seconds_a_set
        return self.machine.concurrency() * max(1, min(self.machine.in_turns(), int(together)))

    def compute(self, case: ComputeCase, round_: int) -> ComputeCost:
        return self.compute_many([(case, round_)])[0]

    def compute_many(self, cases: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        too_wide = {
            case.case_id: fault for case, _ in cases if (fault := fault_of_tables(case.tables, self.machine.kind))
        }
        timed = iter(self._timed([one for one in cases if one[0].case_id not in too_wide]))
        return [
            ComputeCost(case_id=case.case_id, round=round_, error=too_wide[case.case_id])
            if case.case_id in too_wide
            else next(timed)
            for case, round_ in cases
        ]

    def _timed(self, cases: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        if not cases:
            return []
        began = time.monotonic()
        workers = min(len(cases), self.machine.concurrency())
        bench = self.bench
        requests = [
            TimeTableSets(tuple(cases[worker::workers]), self.repeats, bench.calm_compute_ms, bench.flush_bytes)
            for worker in range(workers)
        ]
        self._make_room_for(self.set_workers)
        answers = self.set_workers.ask_each(requests)
        self.seconds_a_set = (time.monotonic() - began) / len(requests[0].cases)
        return [answers[place % workers][place // workers] for place in range(len(cases))]

    def all_to_all(self, case: CollectiveCase, round_: int) -> CollectiveCost:
        self._make_room_for(self.rank_workers)
        answers = self.rank_workers.ask(TimeAllToAll(case, self.repeats), count=len(case.device_dims))
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:
            return CollectiveCost(case_id=case.case_id, round=round_, error=max(errors))
        calm, now = self.bench.calm_all_to_all_ms.get(str(len(answers))), reference_ms(answers)
        cost = collective_cost(case, round_, [one.forward for one in answers], [one.backward for one in answers])
        return cost.scaled(calm / now, case.waiting_ms) if calm and now else cost

    def beyond_hbm(self, case: TierCase, round_: int) -> TierCost:
        if self.no_tiers:
            raise MeasureError(self.no_tiers)
        if fault := fault_of_tables(case.tables, self.machine.kind):
            return TierCost(case_id=case.case_id, round=round_, error=fault)
        self._make_room_for(self.set_workers)
        # on one GPU, as those of a host would share its memory
        cost: TierCost = self.set_workers.ask(TimeBeyondHbm(case, round_, self.repeats), count=1)[0]
        return cost

    def steps(self, sets: Sequence[ComputeCase | None], all_to_all: CollectiveCase) -> list[DeviceCost] | None:
        if any(case and fault_of_tables(case.tables, self.machine.kind) for case in sets):
            return None  # measured one by one, that device has an error
        lookups = max(sum(t.pooling_factor for t in case.tables) for case in sets if case) * self.settings.batch_size
        of_rank = sum(self.buffers) + int(lookups) * LOOKUP_BYTES + (self.bench.flush_bytes or 0)
        # asked first, since workers that are closed for nothing take seconds to start again
        if self.settings.threads > 1 or not self.machine.take_steps(len(sets)):
            return None
        if not self._room_for_steps(len(sets), of_rank):
            return None
        request = TimeSteps(tuple(sets), all_to_all, self.repeats, self.bench.flush_bytes)
        return self.step_workers.ask(request, count=len(sets))

    def _room_for_steps(self, ranks: int, rank_bytes: int) -> bool:
        """Whether memory holds the ranks of steps, once other workers have given theirs back. Ranks that run hold it already."""
        if self.step_workers.workers:
            return True
        self.set_workers.close()
        self.rank_workers.close()
        return self.machine.holds(ranks, rank_bytes)

    def _make_room_for(self, pool: WorkerPool) -> None:
        """End the other pool's workers where memory does not hold both."""
        other = self.rank_workers if pool is self.set_workers else self.set_workers
        if self.apart and other.workers:
            other.close()

    def _probed(self, begun: Bench | None, sets_wanted: bool) -> dict[str, Any]:
        """The fields of the bench that are found by timing, such as how fast the machine is in calm.

        All labels are scaled to them, so a run that continues keeps the fields of `begun`, and adds numbers of devices.
        """
        found: dict[str, Any] = {"reorder_ms": begun.reorder_ms if begun else None}
        if self.machine.kind == "cpu":
            known = begun.calm_all_to_all_ms if begun else {}
            found["calm_all_to_all_ms"] = known | self._calm_all_to_all_ms(known)
        if found["reorder_ms"] is None and self.counts and self.most_devices != 1:
            found["reorder_ms"] = self._reorder_ms(max(self.counts))
        if self.machine.kind != "cpu":
            return found
        if begun and begun.calm_compute_ms:
            return found | {"flush_bytes": begun.flush_bytes, "calm_compute_ms": begun.calm_compute_ms}
        if sets_wanted:
            budget = self.settings.budget_seconds
            seconds = min(CALM_SECONDS, self.settings.timeout_seconds / 4, CALM_SHARE * (budget or math.inf))
            self._make_room_for(self.set_workers)
            request = ProbeCpu(seconds, begun.flush_bytes if begun else None)
            probe = tried(lambda: self.set_workers.ask(request, count=1)[0])
            found |= {"flush_bytes": probe.flush_bytes, "calm_compute_ms": probe.calm_ms}
        return found

    def _reorder_ms(self, devices: int) -> float | None:
        """As in `Bench`: the mean of the devices, which do it at the same time; None if they are lost."""
        self._make_room_for(self.rank_workers)
        try:
            answers = tried(lambda: self.rank_workers.ask(TimeReorder(devices), count=devices))
        except WorkerLost as error:
            log(f"note: what putting outputs into order takes is not measured: {error}")
            return None
        return statistics.mean(answers)

    def _calm_all_to_all_ms(self, known: Mapping[str, float]) -> dict[str, float]:
        """The reference kernel's ms for each number of devices that is not `known`: the median of some trials.

        If the ranks are lost, no all-to-all can be measured, and `most_devices` is 1 for this run.
        """
        counts = [count for count in self.counts if str(count) not in known]
        if not counts:
            return {}
        trials: list[tuple[int, list[Any]]] = []
        self._make_room_for(self.rank_workers)
        try:
            trials = tried(
                lambda: [
                    (n, self.rank_workers.ask(TimeAllToAll(reference_all_to_all(n), self.repeats), count=n))
                    for _ in range(CALM_TRIALS)
                    for n in counts
                ]
            )
        except WorkerLost as error:  # table sets can still be measured
            log(f"note: no all-to-all can be measured on this machine, so all are left out: {error}")
            self.most_devices = 1
        taken: dict[str, list[float]] = {}
        for devices, answers in trials:
            if not any(isinstance(answer, str) for answer in answers):
                taken.setdefault(str(devices), []).append(reference_ms(answers))
        return {devices: statistics.median(ms) for devices, ms in sorted(taken.items())}

    def close(self) -> None:
        self.set_workers.close()
        self.rank_workers.close()
        self.step_workers.close()
        self.meetings.close()

    def _ranks(self) -> list[tuple[Any, ...]]:
        """Arguments of each rank, with a new folder where they meet. Rank 0 removes it then; otherwise `close` does."""
        self.meetings.close()
        folder = self.meetings.enter_context(
            tempfile.TemporaryDirectory(prefix="neuroshard-all-to-all-", ignore_cleanup_errors=True)
        )
        return [(self.machine.kind, rank, self.counts, folder, self.settings) for rank in range(max(self.counts))]


def kept_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """GLIBC_TUNABLES with MEMORY, and with the other settings that `environment` has there."""
    others = [
        setting
        for setting in environment.get("GLIBC_TUNABLES", "").split(":")
        if setting and setting.partition("=")[0] not in MEMORY
    ]
    return {"GLIBC_TUNABLES": ":".join([*others, *(f"{name}={value}" for name, value in MEMORY.items())])}


def reference_ms(answers: Sequence[RankTiming]) -> float:
    """The reference kernel's mean ms over the ranks; 0 on GPUs, which have none."""
    return statistics.mean(answer.reference_ms or 0.0 for answer in answers)


# backends of this machine's CPU, and of its NVIDIA GPUs
cpu, cuda = (partial(RealDevices, machine) for machine in (CpuMachine(), CudaMachine()))
