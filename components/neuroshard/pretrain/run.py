"""Room 3: measured costs -> a cost model, and how far it can be trusted.

    neuroshard pretrain costs/ -o model/

One compute net, and for every number of devices that was measured a forward and a backward exchange net.
"""

from pathlib import Path
from typing import Final

import numpy as np
import torch

from neuroshard import __version__
from neuroshard.core.case import CommCase
from neuroshard.core.cost import CommCost, Costs
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.value import shown
from neuroshard.costmodel.bundle import Provenance, TrainedCostModel, cost_model, save_cost_model
from neuroshard.costmodel.nets import ComputeNet, ExchangeNet, Nets
from neuroshard.costmodel.protocol import Ints
from neuroshard.costmodel.report import NetReport, Report
from neuroshard.files.costs import read_costs
from neuroshard.pretrain.evaluate import compute_report, exchange_report
from neuroshard.pretrain.labels import (
    Case,
    Labels,
    backward_ms,
    check_one_time_a_device,
    check_unseen,
    collect,
    forward_ms,
)
from neuroshard.pretrain.train import one_thread, train_compute, train_exchange

FEWEST_EXCHANGES: Final = 20  # cases of one number of devices; fewer do not make a net


def run(costs: Path, out: Path, *, seed: int = 0, epochs: int | None = None) -> TrainedCostModel:
    """Read the costs in folder `costs`, write the cost model into folder `out`. Raises what `pretrain` does."""
    model = pretrain(read_costs(costs), seed=seed, epochs=epochs)
    save_cost_model(out, model)
    return model


def pretrain(costs: Costs, *, seed: int = 0, epochs: int | None = None) -> TrainedCostModel:
    """Train on the `train` split, keep the best epoch by `valid`, report the errors on the test splits.

    `epochs` is the most; by default as many as the cases need, and fewer where the error on `valid` has stopped falling.

    The same costs, seed and epochs give the same bytes on one machine. Raises InvalidInput where there is nothing to train
    on, or a test table occurs in training; what else is missing is told in the report's gaps.
    """
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs must be at least 1, not {epochs}")
    check_unseen(case for case, _ in costs.compute)
    generator = torch.Generator().manual_seed(seed)

    gaps: list[str] = []
    with one_thread():
        compute, max_dim, report = _compute_net(costs, epochs, generator)
        forward, backward, exchange_reports = _exchange_nets(costs.comm, epochs, generator, gaps)

    return cost_model(
        Nets(compute, forward, backward),
        costs.bench,
        max_dim,
        Report(
            nets=(report, *exchange_reports),
            left_out=sum(cost.error is not None for rows in (costs.compute, costs.comm) for _, cost in rows),
            gaps=tuple(gaps),
        ),
        Provenance(
            neuroshard_version=__version__,
            seed=seed,
            compute_cases=len({cost.case_id for _, cost in costs.compute if cost.error is None}),
            comm_cases=len({cost.case_id for _, cost in costs.comm if cost.error is None}),
        ),
    )


def _compute_net(costs: Costs, epochs: int | None, generator: torch.Generator) -> tuple[ComputeNet, int, NetReport]:
    """The compute net, the widest table that it was trained on, and its report."""
    labels = collect(costs.compute, lambda cost: cost.total_ms)
    if not len(labels.of_split("train")):
        errors = [cost.error for _, cost in costs.compute if cost.error]
        why = f"{len(errors)} of {len(costs.compute)} rows are errors"
        first = f", the first: {shown(errors[0], 200)}" if errors else ""
        raise InvalidInput(f"no set of tables of the train split was measured ({why}{first}); measure more cases")
    train, valid = _train_and_valid(labels, generator)

    batch_size = costs.bench.batch_size
    net, fit = train_compute(labels, train, valid, batch_size, epochs, generator)
    max_dim = max(table.dim for i in train for table in labels.cases[i].tables)
    return net, max_dim, compute_report(net, labels, batch_size, fit)


def _exchange_nets(
    rows: tuple[tuple[CommCase, CommCost], ...], epochs: int | None, generator: torch.Generator, gaps: list[str]
) -> tuple[dict[int, ExchangeNet], dict[int, ExchangeNet], list[NetReport]]:
    """Forward and backward nets by number of devices, and their reports."""
    forward: dict[int, ExchangeNet] = {}
    backward: dict[int, ExchangeNet] = {}
    reports: list[NetReport] = []
    if not rows:
        gaps.append("no exchange was measured: plans for one device only")
    for devices in sorted({len(case.device_dims) for case, _ in rows}):
        of_devices = [(case, cost) for case, cost in rows if len(case.device_dims) == devices]
        check_one_time_a_device(of_devices)
        usable = sum(cost.error is None and cost.round == 0 and case.split == "train" for case, cost in of_devices)
        if usable < FEWEST_EXCHANGES:
            gaps.append(
                f"no net for the exchange of {devices} devices: {usable} of its training cases were measured, "
                f"{FEWEST_EXCHANGES} are needed"
            )
            continue
        for nets, times in ((forward, forward_ms), (backward, backward_ms)):
            labels = collect(of_devices, times)
            train, valid = _train_and_valid(labels, generator)
            nets[devices], fit = train_exchange(labels, train, valid, nets is forward, epochs, generator)
            reports.append(exchange_report(nets[devices], labels, fit))
    return forward, backward, reports


def _train_and_valid(labels: Labels[Case], generator: torch.Generator) -> tuple[Ints, Ints]:
    """Places of the cases to train on, and to choose the best epoch by: a tenth of the former if none are of that split."""
    train, valid = labels.of_split("train"), labels.of_split("valid")
    if len(valid) or len(train) < 2:
        return train, valid if len(valid) else train
    shuffled = train[torch.randperm(len(train), generator=generator).numpy()]
    held_out = max(len(train) // 10, 1)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])
