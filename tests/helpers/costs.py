"""Cost sets by the formula of `measure`, in memory, and a cost model with random nets."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from helpers.parts import cut_to
from neuroshard.augment.run import augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, Costs, Hardware
from neuroshard.core.table import Table
from neuroshard.costmodel.bundle import TrainedCostModel, cost_model
from neuroshard.costmodel.compute_net import ComputeNet, Layer, least_skip
from neuroshard.costmodel.features import FEATURES
from neuroshard.costmodel.manifest import TrainedFrom
from neuroshard.costmodel.nets import blank_nets
from neuroshard.costmodel.report import Errors, Fit, ModelReport, NetReport
from neuroshard.measure import formula

BENCH = Bench(
    backend="synthetic",
    hardware=Hardware(kind="synthetic", name="test device", memory_bytes=80 * 2**30),
    batch_size=65536,
    warmup=0,
    repeats=1,
    optimizer="rowwise_adagrad",
    threads=1,
    seed=0,
)


def random_tables(count: int, seed: int = 0) -> tuple[Table, ...]:
    """Tables of 100 to 10 million rows, 1 to 60 lookups a sample."""
    rng = np.random.default_rng(seed)
    return tuple(
        Table(name=f"t{i}", rows=int(10 ** rng.uniform(2, 7)), dim=64, pooling_factor=float(60 ** rng.uniform()))
        for i in range(count)
    )


def compute_cost(case: ComputeCase, rng: np.random.Generator, noise: float, round_: int = 0) -> ComputeCost:
    dims = np.array([table.dim for table in case.tables], dtype=np.int64)
    terms = formula.part_terms(cut_to(case.tables, dims), BENCH.batch_size).sum(axis=0)
    off = np.exp(noise * rng.standard_normal())
    forward, backward = (float(ms * off) for ms in (formula.forward_ms(terms), formula.backward_ms(terms)))
    return ComputeCost(case_id=case.case_id, round=round_, forward_ms=forward, backward_ms=backward)


def collective_cost(case: CollectiveCase, rng: np.random.Generator, noise: float, round_: int = 0) -> CollectiveCost:
    dims, delays = np.array(case.device_dims, dtype=float), np.array(case.start_delays_ms)
    forward = formula.forward_collective_ms(dims, delays, BENCH.batch_size)
    backward = formula.backward_collective_ms(dims, BENCH.batch_size)
    forward, backward = (ms * np.exp(noise * rng.standard_normal(len(dims))) for ms in (forward, backward))
    return CollectiveCost(case_id=case.case_id, round=round_, forward_ms=tuple(forward), backward_ms=tuple(backward))


def formula_costs(
    tables: tuple[Table, ...],
    compute_cases: int = 0,
    collective_cases: int = 0,
    devices: tuple[int, ...] = (4,),
    noise: float = 0.01,
    twice: int = 10,
    max_tables: int | None = 15,
    seed: int = 0,
) -> Costs:
    """What `measure` would write of cases that `augment` drew: labels with log-normal noise, the first `twice` again."""
    rng = np.random.default_rng(seed)
    cases = augment(
        tables,
        AugmentSettings(
            compute_cases=max(compute_cases, 1),
            collective_cases=collective_cases,
            devices=devices,
            memory_bytes=80 * 2**30,
            max_tables=max_tables,
            seed=seed,
        ),
    )
    compute = cases.compute[:compute_cases]
    return Costs(
        bench=BENCH,
        compute=tuple((case, compute_cost(case, rng, noise)) for case in compute)
        + tuple((case, compute_cost(case, rng, noise, 1)) for case in compute[:twice]),
        collective=tuple((case, collective_cost(case, rng, noise)) for case in cases.collective)
        + tuple((case, collective_cost(case, rng, noise, 1)) for case in cases.collective[:twice]),
    )


def random_model(*device_counts: int, seed: int = 0, rates: int = False) -> TrainedCostModel:
    """A cost model that knows nothing: every number of its nets is drawn from 0.1 … 1.1. It has seen every table.

    With `rates` it has those of all thresholds too.
    """
    rng = np.random.default_rng(seed)

    def drawn(node: Any) -> Any:
        if is_dataclass(node) and not isinstance(node, type):
            parts = {field.name: getattr(node, field.name) for field in fields(node)}
            return replace(node, **{name: drawn(part) for name, part in parts.items() if not isinstance(part, bool)})
        if isinstance(node, tuple):
            return tuple(map(drawn, node))
        return None if node is None else node * 0 + 0.1 + rng.random(np.shape(node))

    nets = drawn(blank_nets(bool(device_counts), bool(rates)))
    everything = np.full(len(FEATURES), 1e3)
    scale = replace(nets.compute.scale, low=-everything, high=everything)
    nets = replace(nets, compute=replace(nets.compute, scale=scale))
    provenance = TrainedFrom(neuroshard_version="0", seed=seed, compute_cases=0, collective_cases=0)
    return cost_model(
        nets,
        BENCH,
        ModelReport(nets=()),
        provenance,
        max_dim=128,
        batch_sizes=(BENCH.batch_size,),
        device_counts=device_counts,
    )


def bent_both_ways(net: ComputeNet, seed: int = 0) -> ComputeNet:
    """The net with a head of weights of both signs, and no larger a skip than it must have to grow with every vector."""
    rng = np.random.default_rng(seed)
    head, out = (rng.standard_normal(layer.weight.shape) for layer in (net.head, net.out))
    skip = least_skip(head, out) * (1 + 1e-9)
    return replace(net, head=Layer(head, net.head.bias), out=Layer(out, net.out.bias), skip=skip)


def with_error(model: TrainedCostModel, error: float) -> TrainedCostModel:
    """The same nets, said to have this error on tables that they never saw."""
    unseen = Errors(values=1, mse=0.0, mape=error, r2=None, kendall_tau=None)
    fit = Fit(train_cases=1, valid_cases=1, epochs=1, best_epoch=1)
    report = ModelReport(nets=(NetReport(kind="compute", fit=fit, splits={"test_tables": unseen}),))
    return replace(model, manifest=model.manifest.model_copy(update={"report": report}))
