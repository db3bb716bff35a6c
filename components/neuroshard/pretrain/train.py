"""Labels -> trained nets, in PyTorch: one loop for all three nets.

The paper's shapes with another recipe. The loss is the error of the logarithm, so that 10 % count alike on 0.1 and on
100 ms (with the paper's squared error in ms, the few slowest sets outvote all others); the rate falls as a cosine; weights
decay, the compute net's most, which helps on tables never seen. docs/decisions/0004-cost-model.md has the figures.
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

LEARNING_RATE: Final = 5e-3
COMPUTE_WEIGHT_DECAY: Final = 0.3
EXCHANGE_WEIGHT_DECAY: Final = 0.03  # nothing unseen to prepare for: test exchanges are drawn as the training ones
PATIENCE: Final = 0.4  # of all epochs: stop when the error on `valid` has not fallen for as long
LARGEST_BATCH: Final = 512  # the paper's; fewer cases get smaller batches, so that an epoch still takes 20 steps
STEPS_AN_EPOCH: Final = 20
MOST_EPOCHS: Final = 300
FEWEST_EPOCHS: Final = 30
ENOUGH_STEPS: Final = 12_000  # 100,000 cases take 200 steps an epoch, so 60 epochs
OUTLIER: Final = 0.1  # log error from which on a label pulls no harder: a disturbed measurement is not worth more


class Samples(Protocol):
    """Cases as tensors. `unit_ms` is what the labels are divided by."""

    labels: Tensor
    unit_ms: float

    def inputs(self, cases: Tensor) -> tuple[Tensor, ...]:
        """What the net takes for these cases."""


def train_compute(
    labels: Labels[ComputeCase],
    train: Ints,
    valid: Ints,
    batch_size: int,
    epochs: int | None,
    generator: torch.Generator,
) -> tuple[ComputeNet, Fit]:
    """The compute net from the cases at `train`, the best epoch by those at `valid`."""
    samples = SetSamples(labels, train, batch_size)
    net = _SumNet(generator)
    fit = fit_net("train compute net", net, samples, (train, valid), epochs, COMPUTE_WEIGHT_DECAY, generator)
    return ComputeNet(samples.scale, _layers(net.table), _layers(net.head), samples.unit_ms), fit


def train_exchange(
    labels: Labels[CommCase], train: Ints, valid: Ints, delays: bool, epochs: int | None, generator: torch.Generator
) -> tuple[ExchangeNet, Fit]:
    """An exchange net of one number of devices; with `delays` forward, without backward."""
    samples = ExchangeSamples(labels, train, delays)
    net = _ExchangeNet(samples.shown.shape[1], labels.ms.shape[1], generator)
    what = f"train {'forward' if delays else 'backward'} exchange net, {labels.ms.shape[1]} devices"
    fit = fit_net(what, net, samples, (train, valid), epochs, EXCHANGE_WEIGHT_DECAY, generator)
    return ExchangeNet(samples.scale, _layers(net.layers), samples.unit_ms), fit


def fit_net(
    what: str,
    net: nn.Module,
    samples: Samples,
    places: tuple[Ints, Ints],
    epochs: int | None,
    weight_decay: float,
    generator: torch.Generator,
) -> Fit:
    """Train `net` in place on the first of the two places, and leave it as after the epoch that was best on the second."""
    cases, held_out = (torch.from_numpy(some) for some in places)
    batch = min(max(len(cases) // STEPS_AN_EPOCH, 8), LARGEST_BATCH)
    steps = math.ceil(len(cases) / batch)
    epochs = epochs or min(max(ENOUGH_STEPS // steps, FEWEST_EPOCHS), MOST_EPOCHS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
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
    return Fit(train_cases=len(cases), valid_cases=len(held_out), epochs=epoch, best_epoch=best_epoch)


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
        widest = np.maximum(dims[train].max(axis=1), 1.0)
        self.scale = ExchangeScale(
            unit_dims=float(np.median(widest)),
            low_dims=float(widest.min()),
            high_dims=float(widest.max()),
            unit_delay_ms=max(float(waits[train].max()), CLOCK_MS) if delays else None,
        )
        view = self.scale.view(dims, starts)
        ms, waits = (np.take_along_axis(array, view.order, axis=1) for array in (labels.ms, waits))
        _, self.unit_ms = _in_units(np.maximum(ms - waits, 0.0) / view.size, train)
        self.labels = torch.from_numpy(ms / self.unit_ms).float()
        self.shown, self.size, self.waits = (
            torch.from_numpy(array).float() for array in (view.inputs, view.size, waits / self.unit_ms)
        )

    def inputs(self, cases: Tensor) -> tuple[Tensor, ...]:
        """What the net is shown, the size that its outputs are multiplied by, and the waits in units."""
        return self.shown[cases], self.size[cases], self.waits[cases]


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

    def forward(self, shown: Tensor, size: Tensor, waits: Tensor) -> Tensor:
        return waits + size * functional.softplus(self.layers(shown))


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
