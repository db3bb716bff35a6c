"""Backend `synthetic`: the formula with seeded noise, so a net trained on the costs can be compared with the truth."""

import statistics
from collections.abc import Sequence

import numpy as np

from neuroshard import __version__
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase, TierCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, Hardware, TierCost
from neuroshard.core.errors import MeasureError, UsageError
from neuroshard.core.part import Part
from neuroshard.core.plan import DeviceCost
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.protocol import Floats
from neuroshard.measure import formula
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.timing.harness import Timing, collective_cost, compute_cost, timing

NOISE = 0.03  # standard deviation of the logarithm of one repeat: GPU kernels repeat to a few per cent


class Synthetic:
    """Costs by the formula. The same seed, case and round give the same cost, in any order."""

    most_devices: int | None = None
    no_tiers = "the formula of backend synthetic has no tiers"
    concurrency = 1
    apart = False

    def __init__(self, cases: Cases, settings: MeasureSettings, begun: Bench | None) -> None:
        self.settings, self.repeats = settings, settings.repeats
        memory_bytes = settings.memory_limit_bytes or formula.MEMORY_BYTES
        if settings.traces is not None:
            raise UsageError(f"the formula uses no lookups: leave out --traces {settings.traces}")
        nameless = Hardware(kind="synthetic", name=formula.DEVICE_NAME, memory_bytes=memory_bytes)
        if settings.hardware is not None and settings.hardware.kind != "synthetic":
            raise MeasureError(
                f"the formula cannot measure a {settings.hardware.kind} device: {settings.hardware.name}"
            )
        self.bench = Bench(
            backend="synthetic",
            hardware=settings.hardware or nameless,
            batch_size=settings.batch_size,
            warmup=settings.warmup,
            repeats=settings.repeats,
            optimizer=settings.optimizer,
            threads=settings.threads,
            seed=settings.seed,
            versions={"neuroshard": __version__},
            reorder_ms=formula.reorder_ms(settings.batch_size),
            notes=(f"a formula, not measured: measure/formula.py with {NOISE:.0%} noise a repeat",),
        )

    def compute(self, case: ComputeCase, round_: int) -> ComputeCost:
        needed, memory = sum(table.memory_bytes for table in case.tables), self.bench.hardware.memory_bytes
        if needed > memory:
            error = f"out of memory: the tables need {format_bytes(needed)} of {format_bytes(memory)}"
            return ComputeCost(case_id=case.case_id, round=round_, error=error)
        parts, batch_size = [Part.of(table) for table in case.tables], case.batch_size or self.settings.batch_size
        terms = formula.part_terms(parts, batch_size).sum(axis=0)
        truth = np.array([formula.forward_ms(terms), formula.backward_ms(terms)])
        forward, backward = self._measured(case.case_id, round_, truth)
        return compute_cost(case, round_, forward, backward)

    def compute_many(self, cases: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        return [self.compute(case, round_) for case, round_ in cases]

    def all_to_all(self, case: CollectiveCase, round_: int) -> CollectiveCost:
        dims, delays = np.array(case.device_dims, dtype=float), np.array(case.start_delays_ms)
        truth = np.concatenate(
            [
                formula.forward_collective_ms(dims, delays, self.settings.batch_size),
                formula.backward_collective_ms(dims, self.settings.batch_size),
            ]
        )
        timings = self._measured(case.case_id, round_, truth)
        return collective_cost(case, round_, timings[: len(dims)], timings[len(dims) :])

    def beyond_hbm(self, case: TierCase, round_: int) -> TierCost:
        raise MeasureError(self.no_tiers)

    def steps(self, sets: Sequence[ComputeCase | None], all_to_all: CollectiveCase) -> list[DeviceCost] | None:
        return None

    def close(self) -> None:
        """Nothing to end."""

    def _measured(self, case_id: str, round_: int, truth: Floats) -> list[Timing]:
        """Each true time with noise, as the median of `repeats`, since the noise goes both ways: (N,) -> N timings."""
        rng = np.random.default_rng([self.settings.seed, int(case_id, 16), round_])
        noise = rng.lognormal(0.0, NOISE, (self.repeats, len(truth)))
        return [timing(column, statistics.median) for column in (truth * noise).T.tolist()]
