"""Our harness beside the plain way, a fresh operator for every case: cases a second, and how far labels differ when had again.

    make bench-measure            (or: .venv/bin/python tests/bench/measure.py --quick)

Both measure the same cases on this CPU with the same warm-up, repeats and flushes, in one process, case by case in turns, so
that both see the same machine. Every case is measured twice, a whole pass apart.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence

from neuroshard.augment.run import augment
from neuroshard.core.case import ComputeCase
from neuroshard.core.cost import ComputeCost
from neuroshard.core.table import Table
from neuroshard.devices import cpu
from neuroshard.files.presets import preset
from neuroshard.measure.backends import Settings
from neuroshard.measure.fbgemm import TableBatchedEmbedding
from neuroshard.measure.hardware import HUGE_PAGES
from neuroshard.measure.lookups import TableLookups
from neuroshard.measure.rowcap import buffer_bytes, default_memory_limit

CASES, QUICK_CASES = 60, 8
BATCH = 512
SPEED_UP = 5.0  # promised, at no more than NOISIER times the noise
NOISIER = 1.2


class Fresh(TableBatchedEmbedding):
    """A new operator with new weights, and newly drawn lookups, for every case: as the original measures."""

    def __init__(self, settings: Settings, limit: int) -> None:
        super().__init__("cpu", 0, settings, limit, 0, 0)
        self.buffers = None

    def __call__(self, message: tuple[ComputeCase, int]) -> ComputeCost:
        self.lookups = TableLookups(self.settings.seed, self.settings.traces)
        return super().__call__(message)

    def _operator(self, tables: Sequence[Table], rows: Sequence[int]):
        operator = super()._operator(tables, rows)
        operator.init_embedding_weights_uniform(
            -0.01, 0.01
        )  # untouched memory would be one page of zeros, read from the cache
        return operator


def timed(measure: Callable[[tuple[ComputeCase, int]], ComputeCost], case: ComputeCase) -> tuple[float, ComputeCost]:
    """Seconds that measuring took, and the cost."""
    began = time.perf_counter()
    cost = measure((case, 0))
    return time.perf_counter() - began, cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CASES} cases instead of {CASES}")
    parser.add_argument("--batch-size", type=int, default=BATCH)
    asked = parser.parse_args()
    os.environ.update(HUGE_PAGES)  # before torch allocates, for both ways
    warnings.simplefilter("ignore")  # FBGEMM's, while it is imported

    drawn = augment(
        preset("mlperf-dlrm-dcnv2"),
        compute_cases=QUICK_CASES if asked.quick else CASES,
        comm_cases=0,
        devices=(4,),
        memory_bytes=32 * 2**30,
        seed=0,
    )
    cases = drawn.compute
    settings, limit = Settings(batch_size=asked.batch_size), default_memory_limit()
    began = time.perf_counter()
    ours = TableBatchedEmbedding("cpu", 0, settings, limit, *buffer_bytes(cases, settings.optimizer, limit))
    starting = time.perf_counter() - began
    ways: dict[str, TableBatchedEmbedding] = {"our harness": ours, "a fresh operator a case": Fresh(settings, limit)}

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    labels: dict[str, list[list[ComputeCost]]] = {way: [[], []] for way in ways}
    for round_ in range(2):
        for place, case in enumerate(cases):
            order = list(ways) if (place + round_) % 2 else list(reversed(ways))
            for way in order:
                spent, cost = timed(ways[way], case)
                seconds[way].append(spent)
                labels[way][round_].append(cost)
            print(f"\r{place + 1 + round_ * len(cases)}/{2 * len(cases)} cases", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    print(
        f"{cpu().name}, batch {asked.batch_size}, {len(cases)} cases twice; load {os.getloadavg()[0]:.1f} at the end\n"
    )
    print("| | cases a second | label noise (median) | mean | disturbed |")
    print("|---|---|---|---|---|")
    rates, noises = {}, {}
    for way in ways:
        pairs = zip(*labels[way], strict=True)
        differences = [abs(b.total_ms / a.total_ms - 1) for a, b in pairs if not a.error and not b.error]
        rates[way], noises[way] = len(seconds[way]) / sum(seconds[way]), statistics.mean(differences)
        disturbed = statistics.mean(cost.disturbed for costs in labels[way] for cost in costs)
        print(
            f"| {way} | {rates[way]:.2f} | {statistics.median(differences):.1%} | {noises[way]:.1%} | {disturbed:.0%} |"
        )
    mine, fresh = ways
    print(f"\n{rates[mine] / rates[fresh]:.1f} x the cases a second; buffers were made once, in {starting:.1f} s")
    noisier = noises[mine] > NOISIER * noises[fresh] and not asked.quick  # of 8 pairs the noise is a guess
    if rates[mine] < SPEED_UP * rates[fresh] or noisier:
        sys.exit(f"error: less than {SPEED_UP:g} x, or more than {NOISIER:g} x the noise")


if __name__ == "__main__":
    main()
