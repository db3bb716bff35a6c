"""Measured all-to-alls -> the all-to-all net (costmodel/all_to_all_net.py), trained on all numbers of devices together."""

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from neuroshard.core.case import CollectiveCase
from neuroshard.costmodel.all_to_all_net import (
    BY_DEVICES,
    DEVICE_INPUTS,
    HIDDEN_WIDTH,
    SHARED_INPUTS,
    AllToAllNet,
    all_to_all_inputs,
    by_devices,
    latencies,
    waiting_ms,
)
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.costmodel.report import Fit
from neuroshard.pretrain.calibrate import LEAST_SPREAD, typical
from neuroshard.pretrain.checkpoint import NONE, Checkpoint
from neuroshard.pretrain.labels import CLOCK_MS, Labels
from neuroshard.pretrain.train import Net, Recipe, as_floats, fit_net, kept_positive, rows_of, uniform

WEIGHT_DECAY: Final = 0.03  # little, as test all-to-alls are drawn like the training ones
UNLIKELY: Final = 0.01  # initial weights of the inputs that depend on the number of devices, as a share of the others
FIRST_LATENCY: Final = (0.1, 0.05)  # initial weights of `latencies`, in units of the median transfer; not tuned
INPUTS: Final = len(DEVICE_INPUTS) + len(SHARED_INPUTS)

Way = Literal["forward", "backward"]  # only in forward does a device wait for the last one to start
WAYS: Final[tuple[Way, ...]] = get_args(Way)


def train_all_to_all(
    labels: list[Labels[CollectiveCase]],
    places: tuple[list[Ints], list[Ints]],
    batch_size: int,
    way: Way,
    epochs: int | None,
    generator: torch.Generator,
    checkpoint: Checkpoint = NONE,
) -> tuple[AllToAllNet, Fit]:
    """The forward or the backward all-to-all net, for all numbers of devices.

    `labels` has an entry for each number of devices, and `places` the training and the validation cases of each entry.
    """
    samples = AllToAllSamples(labels, places[0], batch_size, way)
    net = _AllToAllNet(generator)
    train, valid = (samples.number(some) for some in places)
    what, recipe = f"train {way} all-to-all net", Recipe(epochs, WEIGHT_DECAY)
    fit = fit_net(what, net, samples, (train, valid), recipe, generator, checkpoint)

    found = net.as_numpy(samples.unit_bytes, samples.unit_ms)
    held_out = [_transfer_errors(found, one, at, batch_size, way) for one, at in zip(labels, places[1], strict=True)]
    return dataclasses.replace(found, spread=max(typical(np.concatenate(held_out)), LEAST_SPREAD)), fit


def predicted_ms(net: AllToAllNet, cases: Sequence[CollectiveCase], batch_size: int, way: Way) -> Floats:
    """Predicted ms of all-to-alls of one number of devices D, in forward with waiting: (cases, D)."""
    delays_ms = np.array([case.start_delays_ms for case in cases]) if way == "forward" else None
    return net.ms(_sent_bytes(cases, batch_size), delays_ms)


def _sent_bytes(cases: Sequence[CollectiveCase], batch_size: int) -> Floats:
    """Bytes of the whole batch's outputs on each device, in fp32: (cases, D)."""
    return np.array([case.device_dims for case in cases], dtype=np.float64) * 4.0 * batch_size


def _transfer_errors(
    net: AllToAllNet, labels: Labels[CollectiveCase], places: Ints, batch_size: int, way: Way
) -> Floats:
    """Log errors of those devices that spend at least half of their all-to-all on the transfer.

    Waiting is added by rule; its error is that of the compute net, not of this one.
    """
    cases = [labels.cases[i] for i in places]
    if not cases:
        return np.empty(0)
    transfer, total = net.ms(_sent_bytes(cases, batch_size)), predicted_ms(net, cases, batch_size, way)
    mostly_transfer = total <= 2 * transfer
    measured = np.maximum(labels.ms[places], CLOCK_MS)
    return (np.log(np.maximum(total, CLOCK_MS)) - np.log(measured))[mostly_transfer]


class AllToAllSamples:
    """All-to-alls as rows, one for each device: those of case i are rows[starts[i] : starts[i] + counts[i]]."""

    def __init__(self, labels: list[Labels[CollectiveCase]], train: list[Ints], batch_size: int, way: Way) -> None:
        dims = [np.array([case.device_dims for case in one.cases], dtype=np.float64) for one in labels]
        starts = [np.array([case.start_delays_ms for case in one.cases]) for one in labels]
        sent = [some * (4.0 * batch_size) for some in dims]
        waits = [waiting_ms(some) if way == "forward" else np.zeros_like(some) for some in starts]
        widest = np.concatenate([some[at].max(axis=1) for some, at in zip(sent, train, strict=True)])
        self.unit_bytes = max(float(np.median(widest)), 1.0)
        transfers = [
            np.maximum(one.ms - wait, CLOCK_MS)[at].ravel() for one, wait, at in zip(labels, waits, train, strict=True)
        ]
        self.unit_ms = max(float(np.median(np.concatenate(transfers))), CLOCK_MS)

        def rows(arrays: list[Floats]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).float()

        self.features = rows([_features(some / self.unit_bytes) for some in sent])
        self.latencies = rows([np.tile(latencies(some.shape[1]), (some.size, 1)) for some in sent])
        self.waits = rows([some.ravel() / self.unit_ms for some in waits])
        self.labels = rows([one.ms.ravel() / self.unit_ms for one in labels])
        self.counts = torch.from_numpy(np.concatenate([np.full(len(some), some.shape[1]) for some in sent]))
        self.starts = self.counts.cumsum(0) - self.counts
        self.first = np.cumsum([0, *(len(one.cases) for one in labels)])[:-1]

    def number(self, places: list[Ints]) -> Ints:
        """Places within each entry of `labels` as places over all cases."""
        return np.concatenate([some + first for some, first in zip(places, self.first, strict=True)])

    def inputs(self, cases: Tensor) -> tuple[Tensor, ...]:
        """For every device of these cases: features, latency inputs, and waiting time in units."""
        rows = self._rows(cases)
        return self.features[rows], self.latencies[rows], self.waits[rows]

    def measured(self, cases: Tensor) -> Tensor:
        return self.labels[self._rows(cases)][None]

    def _rows(self, cases: Tensor) -> Tensor:
        return rows_of(self.counts, self.starts, cases)[1]


def _features(sent: Floats) -> Floats:
    """The inputs of AllToAllNet times `by_devices`: bytes (cases, D) -> (cases x D, BY_DEVICES x INPUTS)."""
    own, shared = all_to_all_inputs(sent)
    inputs = np.concatenate([own, np.broadcast_to(shared, (*own.shape[:-1], shared.shape[-1]))], axis=-1)
    rows: Floats = (by_devices(sent.shape[1])[:, None] * inputs[..., None, :]).reshape(-1, BY_DEVICES * INPUTS)
    return rows


class _AllToAllNet(Net):
    """AllToAllNet for training, a single member. Weights are the absolute values of the parameters, so none is negative."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        inputs = BY_DEVICES * INPUTS
        self.weight = uniform(inputs, HIDDEN_WIDTH, fan_in=inputs, generator=generator)
        self.bias = uniform(HIDDEN_WIDTH, fan_in=inputs, generator=generator)
        self.out = uniform(HIDDEN_WIDTH, fan_in=HIDDEN_WIDTH, generator=generator)
        self.skip = uniform(inputs, fan_in=inputs, generator=generator)
        self.latency = nn.Parameter(torch.tensor(FIRST_LATENCY))
        with torch.no_grad():
            for weights in (self.weight, self.skip):
                weights[INPUTS:] *= UNLIKELY

    def forward(self, features: Tensor, latency_inputs: Tensor, waits: Tensor) -> Tensor:
        hidden = torch.relu(features @ self.weight.abs() + self.bias)
        transfer = hidden @ self.out.abs() + features @ self.skip.abs() + latency_inputs @ self.latency.abs()
        return (kept_positive(transfer, 1e-6) + waits)[None, None]

    def as_numpy(self, unit_bytes: float, unit_ms: float) -> AllToAllNet:
        by = (BY_DEVICES, INPUTS)
        return AllToAllNet(
            weight=as_floats(self.weight.abs().reshape(*by, -1)),
            bias=as_floats(self.bias),
            out=as_floats(self.out.abs()),
            skip=as_floats(self.skip.abs().reshape(by)),
            latency=as_floats(self.latency.abs()),
            unit_bytes=unit_bytes,
            unit_ms=unit_ms,
            spread=1.0,
        )
