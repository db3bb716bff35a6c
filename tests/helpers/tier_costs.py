"""Costs of tables beyond HBM by a formula whose constants are known, as a GPU's bench would write them."""

import math

import numpy as np

from neuroshard.augment.settings import AugmentSettings
from neuroshard.augment.tiers import draw_tiers
from neuroshard.core.case import TierCase
from neuroshard.core.cost import Bench, Costs, Hardware, TierCost
from neuroshard.core.table import Table
from neuroshard.costmodel.manifest import MeasuredTiers, Rates

L2, SECTOR = 50e6, 32  # of an H100
# Of a bus as slow as PCIe 4, and of kernels that every table launches: unlike the datasheet of an H100
TRUTH = MeasuredTiers(
    cached_forward=Rates(table_ms=0.08, lookup_ms=3e-6, row_ms=2e-6, byte_ms=1 / 25e6),
    cached_backward=Rates(table_ms=0.02, lookup_ms=4e-7),
    host_forward=Rates(table_ms=0.01, row_ms=1e-6, byte_ms=1 / 22e6),
    host_backward=Rates(table_ms=0.03, row_ms=2e-6, byte_ms=1 / 18e6),
    cases=0,
)


def gpu_bench(optimizer: str = "rowwise_adagrad") -> Bench:
    return Bench(
        backend="cuda",
        hardware=Hardware(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30),
        batch_size=65536,
        warmup=1,
        repeats=7,
        optimizer=optimizer,
        threads=1,
        seed=0,
    )


def tables_beyond(count: int = 12, seed: int = 0) -> tuple[Table, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"big{n}",
            rows=int(10 ** rng.uniform(6, 8)),
            dim=128,
            pooling_factor=float(10 ** rng.uniform(0, 1.5)),
            element_bytes=int(rng.choice([2, 4])),
        )
        for n in range(count)
    )


def tier_cost(case: TierCase, bench: Bench, truth: MeasuredTiers, rng: np.random.Generator, noise: float) -> TierCost:
    """What a case takes, by hand: table by table, in words of its own."""
    batch, state = case.batch_size or bench.batch_size, {"adagrad": 4}.get(bench.optimizer, 0)
    distinct_rows, missed_rows = [], []
    forward = backward = hbm_forward = hbm_backward = 0.0
    for table in case.tables:
        lookups = table.pooling_factor * batch
        distinct = math.floor(min(table.rows, lookups) * rng.uniform(0.2, 0.9))
        missed = math.floor(case.missed_share * distinct) if case.tier == "cached" else 0
        row = math.ceil(table.dim * table.element_bytes / SECTOR) * SECTOR
        hbm_forward += 0.01 + lookups * row / 2e9
        hbm_backward += 0.05 + 2 * distinct * row / 2e9
        in_place = truth.host_backward
        if state:
            backward += distinct * (in_place.row_ms + table.dim * state * in_place.byte_ms)
        if case.tier == "cached":
            of, back = truth.cached_forward, truth.cached_backward
            forward += of.table_ms + lookups * of.lookup_ms + missed * (of.row_ms + row * of.byte_ms)
            backward += back.table_ms + lookups * back.lookup_ms
        else:
            between = distinct * (row + batch * table.dim * 4 / lookups)
            read = distinct + (lookups - distinct) * between / (between + L2)
            forward += truth.host_forward.table_ms + read * (
                truth.host_forward.row_ms + row * truth.host_forward.byte_ms
            )
            backward += in_place.table_ms + distinct * (in_place.row_ms + row * in_place.byte_ms)
        distinct_rows.append(float(distinct))
        missed_rows.append(float(missed))
    times = np.array([hbm_forward + forward, hbm_backward + backward, hbm_forward, hbm_backward])
    off = np.exp(noise * rng.standard_normal(4))
    names = ("forward_ms", "backward_ms", "hbm_forward_ms", "hbm_backward_ms")
    return TierCost(
        case_id=case.case_id,
        distinct_rows=tuple(distinct_rows),
        missed_rows=tuple(missed_rows),
        **dict(zip(names, (times * off).tolist(), strict=True)),
    )


def tier_costs(
    *,
    count: int = 48,
    noise: float = 0.02,
    optimizer: str = "rowwise_adagrad",
    truth: MeasuredTiers = TRUTH,
    seed: int = 0,
) -> Costs:
    """Costs of cases beyond HBM alone, drawn as `augment` draws them."""
    tables, bench, rng = tables_beyond(), gpu_bench(optimizer), np.random.default_rng(seed)
    settings = AugmentSettings(
        compute_cases=0, collective_cases=0, devices=(1,), memory_bytes=80 * 2**30, tier_cases=count, seed=seed
    )
    rows = tuple((case, tier_cost(case, bench, truth, rng, noise)) for case in draw_tiers(tables, settings))
    return Costs(bench=bench, compute=(), collective=(), tables=tables, tiers=rows)
