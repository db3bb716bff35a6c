"""Our harness against the plain way, a fresh operator for every case: cases a second, and how far repeated labels differ.

    make bench-measure            (or: .venv/bin/python tests/bench/measure.py --quick)

Both measure the same cases on this CPU, with the same flushes and the same reference kernels, in one process. They alternate
group by group of cases, so both see the same machine. Ours visits the sets of a group in turns. A fresh operator needs new
weights for each visit, so it has all repeats of a case in one visit. Every case is measured twice, a whole pass apart.
"""

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from neuroshard.measure.timing.clocks import Cpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.publishing import page
from helpers.restart import restart_with
from neuroshard.augment.run import augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import ComputeCase
from neuroshard.core.cost import ComputeCost
from neuroshard.core.table import Table
from neuroshard.devices import cpu
from neuroshard.files.importers.presets import preset
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.machine import CpuMachine
from neuroshard.measure.real_devices import CALM_SECONDS, kept_memory
from neuroshard.measure.rowcap import buffer_bytes, default_memory_limit
from neuroshard.measure.timing import calm
from neuroshard.measure.timing.fbgemm import TableBatchedEmbedding, TableLookups
from neuroshard.measure.timing.harness import compute_cost
from neuroshard.measure.timing.table_sets import CpuProbe, ProbeCpu, TableSets, TimeTableSets

CASES, QUICK_CASES = 60, 8
BATCH = 512
SPEED_UP = 5.0  # to reach, with at most NOISIER times the noise
NOISIER = 1.2


class Fresh(TableBatchedEmbedding):
    """A new operator with new weights and newly drawn lookups for every case, as the original NeuroShard measures."""

    def __init__(self, settings: MeasureSettings, limit: int) -> None:
        super().__init__("cpu", 0, settings, limit, 0, 0)
        self.buffers = None

    def steps(self, case: ComputeCase) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        self.lookups = TableLookups(self.settings.seed, self.settings.traces, cache_bytes=0)
        return super().steps(case)

    def operator(self, tables: Sequence[Table], rows: Sequence[int], *tier: Any) -> Any:
        operator = super().operator(tables, rows, *tier)
        operator.init_embedding_weights_uniform(
            -0.01, 0.01
        )  # memory that was never written is one page of zeros, which the cache holds
        return operator


def one_visit(
    fresh: Fresh, reference_kernel: calm.ReferenceKernel, calm_ms: dict[str, float], case: ComputeCase
) -> ComputeCost:
    """A case on a fresh operator, with as many repeats as ours."""
    visits, each = calm.dealt_out(fresh.settings.repeats)
    slow = partial(reference_kernel.slowness, calm_ms)
    repeats = calm.visit(fresh.device, *fresh.steps(case), fresh.settings.warmup, visits * each, slow)
    return compute_cost(case, 0, *calm.case_timing([repeats]))


def main() -> None:
    parser = page.parser(__doc__, f"{QUICK_CASES} cases instead of {CASES}")
    parser.add_argument("--batch-size", type=int, default=BATCH)
    asked = page.asked(parser)
    restart_with(kept_memory(os.environ))  # workers have these settings; glibc reads them when a process begins
    warnings.simplefilter("ignore")  # FBGEMM's, while it is imported

    drawn = augment(
        preset("mlperf-dlrm-dcnv2"),
        AugmentSettings(
            compute_cases=QUICK_CASES if asked.quick else CASES,
            collective_cases=0,
            devices=(4,),
            memory_bytes=32 * 2**30,
            seed=0,
        ),
    )
    cases = drawn.compute
    settings, limit = MeasureSettings(batch_size=asked.batch_size), default_memory_limit()
    began = time.perf_counter()
    ours = TableSets("cpu", 0, settings, limit, *buffer_bytes(cases, settings.optimizer, limit))
    reference_kernel = ours.reference_kernel
    assert reference_kernel
    probe = ours(ProbeCpu(CALM_SECONDS, None))
    assert isinstance(probe, CpuProbe)
    calm_ms, flush_bytes = probe.calm_ms, probe.flush_bytes
    starting = time.perf_counter() - began
    fresh = Fresh(settings, limit)
    assert isinstance(fresh.device, Cpu)
    fresh.device.flush_with(flush_bytes)
    ways: dict[str, Callable[[Sequence[ComputeCase]], list[ComputeCost]]] = {
        "our harness": lambda group: ours(  # type: ignore[dict-item,return-value]
            TimeTableSets(tuple((case, 0) for case in group), settings.repeats, calm_ms, flush_bytes)
        ),
        "a fresh operator a case": lambda group: [one_visit(fresh, reference_kernel, calm_ms, case) for case in group],
    }

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    labels: dict[str, list[list[ComputeCost]]] = {way: [[], []] for way in ways}
    together = CpuMachine().in_turns()
    for round_ in range(2):
        for place in range(0, len(cases), together):
            group = cases[place : place + together]
            order = list(ways) if (place // together + round_) % 2 else list(reversed(ways))
            for way in order:
                began = time.perf_counter()
                labels[way][round_] += ways[way](group)
                seconds[way].append(time.perf_counter() - began)
            done = place + len(group) + round_ * len(cases)
            print(f"\r{done}/{2 * len(cases)} cases", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    print(
        f"{cpu().name}, batch {asked.batch_size}, {len(cases)} cases twice; load {os.getloadavg()[0]:.1f} at the end\n"
    )
    rates, noises, rows = {}, {}, []
    for way in ways:
        pairs = zip(*labels[way], strict=True)
        differences = [abs(b.total_ms / a.total_ms - 1) for a, b in pairs if not a.error and not b.error]
        rates[way], noises[way] = 2 * len(cases) / sum(seconds[way]), statistics.mean(differences)
        disturbed = statistics.mean(cost.disturbed for costs in labels[way] for cost in costs)
        medians = f"{statistics.median(differences):.1%}"
        rows.append((way, f"{rates[way]:.2f}", medians, f"{noises[way]:.1%}", f"{disturbed:.0%}"))
    question = (
        f"What does our harness gain over a fresh operator for every case? {len(cases)} sets, each measured twice."
    )
    columns = ["", "cases a second", "noise of labels: median", "mean", "disturbed"]
    page.show("measure-harness", question, columns, rows, "measured", published=asked.publish)
    mine, other = ways
    print(f"\n{rates[mine] / rates[other]:.1f} x the cases a second; buffers were made once, in {starting:.1f} s")
    noisier = noises[mine] > NOISIER * noises[other] and not asked.quick  # of 8 pairs the noise is a guess
    if rates[mine] < SPEED_UP * rates[other] or noisier:
        sys.exit(f"error: less than {SPEED_UP:g} x, or more than {NOISIER:g} x the noise")


if __name__ == "__main__":
    main()
