"""Labels -> trained nets, in PyTorch: one loop for all three nets.

The paper's shapes with another recipe. The loss is the error of the logarithm, so that 10 % count alike on 0.1 and on
100 ms (with the paper's squared error in ms, the few slowest sets outvote all others); the rate falls as a cosine; weights
decay, which helps most on tables never seen. docs/decisions/0004-cost-model.md has the figures.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from neuroshard.core.case import CommCase, ComputeCase
from neuroshard.costmodel.features import FEATURES, table_features
from neuroshard.costmodel.nets import (
    EXCHANGE_WIDTHS,
    HEAD_WIDTHS,
    TABLE_WIDTHS,
    ComputeNet,
    Dense,
    ExchangeNet,
    ExchangeScale,
    FeatureScale,
    Layers,
    waiting_ms,
)
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.costmodel.report import Fit
from neuroshard.pretrain.labels import Labels
from neuroshard.pretrain.metrics import CLOCK_MS
from neuroshard.progress import progress

LEARNING_RATE: Final = 2e-3
WEIGHT_DECAY: Final = 0.3
PATIENCE: Final = 0.4  # of all epochs: stop when the error on `valid` has not fallen for as long
LARGEST_BATCH: Final = 512  # the paper's; fewer cases get smaller batches, so that an epoch still takes 20 steps
STEPS_AN_EPOCH: Final = 20
OUTLIER: Final = 0.1  # log error from which on a label pulls no harder: a disturbed measurement is not worth more


class Samples(Protocol):
    """Cases as tensors. `unit_ms` is what the labels are divided by."""

    labels: Tensor
    unit_ms: float

    def inputs(self, cases: Tensor) -> tuple[Tensor, ...]:
        """What the net takes for these cases."""


def train_compute(
    labels: Labels[ComputeCase], train: Ints, valid: Ints, batch_size: int, epochs: int, generator: torch.Generator
) -> tuple[ComputeNet, Fit]:
    """The compute net from the cases at `train`, the best epoch by those at `valid`."""
    samples = SetSamples(labels, train, batch_size)
    net = _SumNet(generator)
    fit = _fit("train compute net", net, samples, train, valid, epochs, generator)
    return ComputeNet(samples.scale, _layers(net.table), _layers(net.head), samples.unit_ms), fit


def train_exchange(
    labels: Labels[CommCase], train: Ints, valid: Ints, delays: bool, epochs: int, generator: torch.Generator
) -> tuple[ExchangeNet, Fit]:
    """An exchange net of one number of devices; with `delays` forward, without backward."""
    samples = ExchangeSamples(labels, train, delays)
    net = _ExchangeNet(samples.inputs_of_all.shape[1], labels.ms.shape[1], generator)
    what = f"train {'forward' if delays else 'backward'} exchange net, {labels.ms.shape[1]} devices"
    fit = _fit(what, net, samples, train, valid, epochs, generator)
    return ExchangeNet(samples.scale, _layers(net.layers), samples.unit_ms), fit


def _fit(
    what: str, net: nn.Module, samples: Samples, train: Ints, valid: Ints, epochs: int, generator: torch.Generator
) -> Fit:
    """Train `net` in place and leave it as it was after its best epoch."""
    batch = min(max(len(train) // STEPS_AN_EPOCH, 8), LARGEST_BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(train) / batch))
    cases, held_out = torch.from_numpy(train), torch.from_numpy(valid)
    best, best_epoch, best_state = math.inf, 0, copy.deepcopy(net.state_dict())

    with progress(what, total=epochs, unit="epochs") as bar:
        for epoch in range(1, epochs + 1):
            for chosen in torch.split(cases[torch.randperm(len(cases), generator=generator)], batch):
                off = _log_errors(net, samples, chosen)
                optimizer.zero_grad()
                functional.smooth_l1_loss(off, torch.zeros_like(off), beta=OUTLIER).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()

            with torch.no_grad():
                error = float(_log_errors(net, samples, held_out).abs().mean())
            if error < best:
                best, best_epoch, best_state = error, epoch, copy.deepcopy(net.state_dict())
            bar.advance(1, f"error {math.expm1(best):.1%}")
            if epoch - best_epoch > PATIENCE * epochs:
                break

    net.load_state_dict(best_state)
    return Fit(train_cases=len(train), valid_cases=len(valid), epochs=epoch, best_epoch=best_epoch)


def _log_errors(net: nn.Module, samples: Samples, cases: Tensor) -> Tensor:
    """log(predicted / measured) of the cases."""
    predicted: Tensor = net(*samples.inputs(cases))
    floor = CLOCK_MS / samples.unit_ms
    return torch.log((predicted + floor) / (samples.labels[cases] + floor))


class SetSamples:
    """Sets of tables, one after another in flat tensors: the tables of case i are features[start[i] : start[i] + count[i]]."""

    def __init__(self, labels: Labels[ComputeCase], train: Ints, batch_size: int) -> None:
        tables = [table for case in labels.cases for table in case.tables]
        counts = np.array([len(case.tables) for case in labels.cases])
        features = table_features(tables, np.array([table.dim for table in tables]), batch_size)
        trained = np.repeat(np.isin(np.arange(len(counts)), train), counts)
        self.scale = FeatureScale.of(features[trained])
        self.features = torch.from_numpy(self.scale.apply(features).astype(np.float32))
        self.counts = torch.from_numpy(counts)
        self.starts = self.counts.cumsum(0) - self.counts
        self.labels, self.unit_ms = _in_units(labels.ms, train)

    def inputs(self, cases: Tensor) -> tuple[Tensor, ...]:
        """Features of all tables of the cases, the place of each table's case, and the number of cases."""
        counts = self.counts[cases]
        places = torch.repeat_interleave(torch.arange(len(cases)), counts)
        within = torch.arange(len(places)) - (counts.cumsum(0) - counts)[places]
        return self.features[self.starts[cases][places] + within], places, torch.tensor(len(cases))


class ExchangeSamples:
    """Exchanges with their devices sorted as the net sees them, so that no order needs to be learned."""

    def __init__(self, labels: Labels[CommCase], train: Ints, delays: bool) -> None:
        dims = np.array([case.device_dims for case in labels.cases], dtype=np.float64)
        starts = np.array([case.start_delays_ms for case in labels.cases]) if delays else None
        waits = np.zeros_like(dims) if starts is None else waiting_ms(starts)
        self.scale = ExchangeScale(
            unit_dims=max(float(dims[train].mean()), 1.0),
            unit_delay_ms=None if starts is None else max(float(waits[train].max()), CLOCK_MS),
        )
        inputs, order = self.scale.inputs(dims, starts)
        transfer = np.maximum(labels.ms - waits, CLOCK_MS)
        _, self.unit_ms = _in_units(transfer, train)
        self.inputs_of_all = torch.from_numpy(inputs.astype(np.float32))
        self.waits = torch.from_numpy(np.take_along_axis(waits, order, axis=1) / self.unit_ms).float()
        self.labels = torch.from_numpy(np.take_along_axis(labels.ms, order, axis=1) / self.unit_ms).float()

    def inputs(self, cases: Tensor) -> tuple[Tensor, ...]:
        return self.inputs_of_all[cases], self.waits[cases]


def _in_units(ms: Floats, train: Ints) -> tuple[Tensor, float]:
    """Labels in units of their median, and the unit in ms."""
    unit = max(float(np.median(ms[train])), CLOCK_MS)
    return torch.from_numpy(ms / unit).float(), unit


class _SumNet(nn.Module):
    """ComputeNet for training."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.table = _perceptron((len(FEATURES), *TABLE_WIDTHS), generator)
        self.head = _perceptron((TABLE_WIDTHS[-1], *HEAD_WIDTHS), generator)

    def forward(self, features: Tensor, places: Tensor, cases: Tensor) -> Tensor:
        vectors = torch.relu(self.table(features))
        sums = torch.zeros(int(cases), vectors.shape[1]).index_add_(0, places, vectors)
        return functional.softplus(self.head(sums).squeeze(1))


class _ExchangeNet(nn.Module):
    """ExchangeNet for training."""

    def __init__(self, inputs: int, devices: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = _perceptron((inputs, *EXCHANGE_WIDTHS, devices), generator)

    def forward(self, inputs: Tensor, waits: Tensor) -> Tensor:
        return waits + functional.softplus(self.layers(inputs))


def _perceptron(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Dense layers with ReLU between them, weights drawn as torch's Linear does, but from our generator."""
    modules: list[nn.Module] = []
    for into, out in pairwise(widths):
        layer = nn.Linear(into, out, device="meta").to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -(into**-0.5), into**-0.5, generator=generator)
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def _layers(sequential: nn.Sequential) -> Layers:
    """The same layers for NumPy."""
    dense = [module for module in sequential if isinstance(module, nn.Linear)]
    return tuple(Dense(m.weight.detach().double().numpy(), m.bias.detach().double().numpy()) for m in dense)


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: these nets are too small for two, and sums then have one order whatever the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
