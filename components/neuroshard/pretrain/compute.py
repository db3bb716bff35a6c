"""Table sets and their measured times -> the compute net (costmodel/compute_net.py). All members are trained at once.

Forward and backward are learned by a head each, which share the hidden layer, since two times say more about their causes than
their sum does. The trained heads are added up to one.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from neuroshard.core.case import ComputeCase
from neuroshard.core.errors import InvalidInput
from neuroshard.core.part import Part
from neuroshard.costmodel.compute_net import (
    BY_DIGITS,
    BY_ROWS,
    BYTES,
    COUNTED_IN,
    HEAD_WIDTH,
    MEMBERS,
    SETS_IN,
    TABLE_WIDTHS,
    THRESHOLDS,
    ComputeNet,
    FeatureScale,
    Layer,
    least_skip,
)
from neuroshard.costmodel.features import FEATURES, ROW_COLUMN, TOUCHED_COLUMN, part_features
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.costmodel.report import Fit
from neuroshard.pretrain.checkpoint import NONE, Checkpoint
from neuroshard.pretrain.labels import CLOCK_MS, Labels
from neuroshard.pretrain.train import LEARNING_RATE, Net, Recipe, as_floats, fit_net, kept_positive, rows_of, uniform

WEIGHT_DECAY: Final = 0.3
STARTED_RATE: Final = LEARNING_RATE / 2  # learning rate of a net that starts from another
DIP_WEIGHT: Final = 8e-3  # in the loss, of what dips can take off a cost, as a share of it: dips make bounds loose
SURPLUS_WEIGHT: Final = 0.03  # in the loss, of what rates add beyond each table's own (OWN), as a share of the cost
LEAST_SHARE_EACH_SIDE: Final = 0.05  # a threshold with a smaller share of the cases below it, or above it, gets no rate
FEWEST_EACH_SIDE: Final = 20  # least number of such cases on either side
FEWEST_TABLES: Final = 40  # with fewer distinct tables, bytes and steps in rows only identify the tables: no such rates
PARTS: Final = 2  # forward and backward
FIRST_RATES: Final = 0.02  # initial rates, as a share of a layer's usual initial weights
BEYOND: Final = 0.3  # initial skip beyond its least, as a share of a layer's usual initial weights
FIRST_MS: Final = 0.1  # initial prediction for a device without tables, in units of the median label; not tuned
ROUNDED: Final = 1e-9  # relative margin that keeps the skip above its least whatever the rounding
COUNTS: Final = (COUNTED_IN == BYTES).astype(np.int64)  # what each threshold counts: 0 rows, 1 bytes
SLOW: Final = slice(len(BY_ROWS))  # thresholds in rows whose rates rise slowly; STEPS: at once
STEPS: Final = slice(-len(BY_DIGITS), None)


@dataclass(frozen=True)
class ComputeTraining:
    """How to train a compute net. `epochs` None: as many as the cases need.

    Without `monotone` an added table may lower a prediction. `start` is a net of other hardware to start from.
    """

    epochs: int | None = None
    monotone: bool = True
    start: ComputeNet | None = None
    checkpoint: Checkpoint = NONE


def train_compute(
    labels: Labels[ComputeCase],
    batch_sizes: Ints,
    train: Ints,
    valid: Ints,
    generator: torch.Generator,
    training: ComputeTraining,
) -> tuple[ComputeNet, Fit]:
    """The compute net, trained on the cases at `train` (places among the labels); `valid` chooses the best epoch.

    `batch_sizes` (cases,) are those of the cases. The predicted deviation is not yet calibrated.
    """
    start = training.start
    if start is not None and len(start.scale.mean) < len(FEATURES):
        raise InvalidInput(
            "the cost model to start from was trained on fewer features, by an older neuroshard; train without it"
        )
    samples = SetSamples(labels, batch_sizes, train, start.scale if start else None)
    learnable = samples.learnable(train)
    if start is not None and start.rates is not None:
        rates = _of_kind(start.rates, samples.has_few_tables(train))
        start = replace(start, rates=rates)
        learnable = np.union1d(learnable, np.flatnonzero(rates.any(axis=(0, 1))))
    net = _Ensemble(generator, training.monotone, samples.floor, learnable)
    recipe = Recipe(training.epochs, WEIGHT_DECAY)
    if start is not None:
        net.begin(start)
        net.grow(_ratio(net, samples, train))
        recipe = Recipe(training.epochs, WEIGHT_DECAY, STARTED_RATE)
    fit = fit_net("train compute net", net, samples, (train, valid), recipe, generator, training.checkpoint)
    return net.as_numpy(samples.scale, samples.unit_ms), fit


def _ratio(net: "_Ensemble", samples: "SetSamples", train: Ints) -> float:
    """Median of label / prediction over the training cases."""
    cases = torch.from_numpy(train)
    with torch.no_grad():
        off = torch.log(samples.measured(cases)[0] / net(*samples.inputs(cases)).mean(0)[0])
    return math.exp(float(off.median()))


class SetSamples:
    """Table sets as flat tensors: the tables of case i are features[starts[i] : starts[i] + counts[i]].

    `scale` is that of the net to start from: features that varied in its training keep its scale.
    """

    def __init__(
        self, labels: Labels[ComputeCase], batch_sizes: Ints, train: Ints, scale: FeatureScale | None = None
    ) -> None:
        tables = [table for case in labels.cases for table in case.tables]
        counts = np.array([len(case.tables) for case in labels.cases])
        self.names = [table.name for table in tables]
        self.plain = part_features(list(map(Part.of, tables)), np.repeat(batch_sizes, counts))
        trained = np.repeat(np.isin(np.arange(len(counts)), train), counts)
        here = FeatureScale.of(self.plain[trained])
        self.scale = here if scale is None else _joined(scale, here)
        self.features = torch.from_numpy(self.scale.apply(self.plain).astype(np.float32))
        rows, touched = np.exp2(self.plain[:, ROW_COLUMN]), self.plain[:, TOUCHED_COLUMN] * 2**30
        self.counted = torch.from_numpy(np.stack([rows, touched], axis=1).astype(np.float32))
        self.counts = torch.from_numpy(counts)
        self.starts = self.counts.cumsum(0) - self.counts
        self.unit_ms = max(float(np.median(labels.ms[train])), CLOCK_MS)
        self.labels = torch.from_numpy(np.vstack([labels.ms, labels.parts.T]) / self.unit_ms).float()
        self.floor = max(float(labels.ms[train].min()) / 2, CLOCK_MS) / self.unit_ms

    def inputs(self, cases: Tensor) -> tuple[Tensor, ...]:
        """For the tables of these cases: features (N, F), counts (N, 2: rows, and bytes of touched rows), the place of each
        table's case (N,); and the number of cases."""
        places, tables = self._tables(cases)
        return self.features[tables], self.counted[tables], places, torch.tensor(len(cases))

    def learnable(self, cases: Ints) -> Ints:
        """Places of the thresholds with enough cases on both sides."""
        places, tables = self._tables(torch.from_numpy(cases))
        counted = torch.zeros(len(cases), 2, dtype=torch.float64).index_add_(0, places, self.counted[tables].double())
        of_each = counted.numpy()[:, COUNTS]
        above, below = (of_each >= THRESHOLDS).sum(axis=0), (of_each <= SETS_IN * THRESHOLDS).sum(axis=0)
        apart = np.minimum(above, below) >= max(LEAST_SHARE_EACH_SIDE * len(cases), FEWEST_EACH_SIDE)
        if self.has_few_tables(cases):
            apart[SLOW.stop :] = False
        else:
            apart[SLOW] = False
        return np.flatnonzero(apart)

    def has_few_tables(self, cases: Ints) -> bool:
        """True if the cases have fewer than FEWEST_TABLES distinct tables."""
        _, tables = self._tables(torch.from_numpy(cases))
        return len({self.names[table] for table in tables.tolist()}) < FEWEST_TABLES

    def measured(self, cases: Tensor) -> Tensor:
        """Total, forward and backward time in units: (3, cases)."""
        return self.labels[:, cases]

    def _tables(self, cases: Tensor) -> tuple[Tensor, Tensor]:
        return rows_of(self.counts, self.starts, cases)


def _joined(before: FeatureScale, here: FeatureScale) -> FeatureScale:
    """The scale of a net that starts from one with scale `before`: features that vary only now use `here`; ranges are joined."""
    new = before.deviation == 0
    return FeatureScale(
        mean=np.where(new, here.mean, before.mean),
        deviation=np.where(new, here.deviation, before.deviation),
        low=np.minimum(before.low, here.low),
        high=np.maximum(before.high, here.high),
    )


class _Ensemble(Net):
    """ComputeNet for training: a head for forward and one for backward that share the hidden layer.

    The parameter of a skip is what it has beyond its least; if `monotone`, its absolute value counts, and so for rates.
    Dips, and rates beyond OWN, make the bounds of a search loose, so `extra_loss` grows with both, each as a share of the cost.
    `learnable` are the places of the thresholds that get rates.
    """

    def __init__(self, generator: torch.Generator, monotone: bool, floor: float, learnable: Ints) -> None:
        super().__init__()
        self.monotone, self.floor = monotone, floor
        widths, vector = (len(FEATURES), *TABLE_WIDTHS, HEAD_WIDTH, PARTS), TABLE_WIDTHS[-1]
        shapes = list(pairwise(widths))
        self.weights = nn.ParameterList(uniform(MEMBERS, i, o, fan_in=i, generator=generator) for i, o in shapes)
        self.biases = nn.ParameterList(uniform(MEMBERS, 1, o, fan_in=i, generator=generator) for i, o in shapes)
        self.skip = uniform(MEMBERS, vector, PARTS, fan_in=vector, generator=generator)
        with torch.no_grad():
            self.skip.abs_().mul_(BEYOND)  # also where it may turn negative: costs grow
            self.biases[3].fill_(FIRST_MS / PARTS)
        self.learnable = learnable
        self.counts = torch.from_numpy(COUNTS[learnable])
        self.thresholds, self.sets_in = (torch.from_numpy(of[learnable]).float() for of in (THRESHOLDS, SETS_IN))
        if len(learnable):
            self.rates = uniform(MEMBERS, vector, len(learnable), fan_in=1, generator=generator)
            self.in_backward = nn.Parameter(torch.zeros(MEMBERS, 1, len(learnable)))
            with torch.no_grad():
                self.rates.abs_().mul_(FIRST_RATES)

    def forward(self, features: Tensor, counted: Tensor, places: Tensor, cases: Tensor) -> Tensor:
        """Total, forward and backward time in units: (members, 3, cases)."""
        hidden = torch.relu(torch.matmul(features, self.weights[0]) + self.biases[0])
        vectors = torch.relu(torch.baddbmm(self.biases[1], hidden, self.weights[1]))
        sums = torch.zeros(MEMBERS, int(cases), vectors.shape[2]).index_add_(1, places, vectors)
        head, out = self.weights[2:]
        hidden = torch.relu(torch.baddbmm(self.biases[2], sums, head))
        falls = torch.bmm(torch.relu(-head), torch.relu(out)) + torch.bmm(torch.relu(head), torch.relu(-out))
        parts = torch.baddbmm(self.biases[3], hidden, out) + torch.bmm(sums, falls + self._positive(self.skip))
        surplus = torch.zeros(())
        if len(self.learnable):
            rates = self._positive(self.rates)
            counted_a_case = torch.zeros(int(cases), counted.shape[1]).index_add_(0, places, counted)
            added = torch.bmm(sums, rates) * self._steps(counted_a_case)
            alone = (torch.matmul(vectors, rates) * self._steps(counted)).sum(2)
            surplus = added.sum(2) - torch.zeros(MEMBERS, int(cases)).index_add_(1, places, alone)
            of_backward = (added * torch.sigmoid(self.in_backward)).sum(2)
            parts = parts + torch.stack([added.sum(2) - of_backward, of_backward], dim=2)
        answer = kept_positive(parts.sum(2), self.floor)
        if self.monotone:
            taken = torch.bmm(sums, torch.bmm(head.abs(), torch.relu(-out.sum(2, keepdim=True)))).squeeze(2)
            loose = DIP_WEIGHT * taken + SURPLUS_WEIGHT * surplus
            self.extra_loss = (loose / answer.detach().clamp(min=self.floor)).mean()
        return torch.cat([answer[:, None], kept_positive(parts, self.floor / PARTS).swapaxes(1, 2)], dim=1)

    def _steps(self, counted: Tensor) -> Tensor:
        return ((counted[:, self.counts] / self.thresholds - self.sets_in) / (1 - self.sets_in)).clamp(0.0, 1.0)

    def _positive(self, parameter: Tensor) -> Tensor:
        return parameter.abs() if self.monotone else parameter

    def begin(self, net: ComputeNet) -> None:
        """Take the weights of another net; forward and backward each get half of its head."""
        layers = (*net.table, net.head, Layer(net.out.weight / PARTS, net.out.bias / PARTS))
        beyond = (net.skip - least_skip(net.head.weight, net.out.weight)) / PARTS
        with torch.no_grad():
            for layer, weight, bias in zip(layers, self.weights, self.biases, strict=True):
                weight.copy_(torch.from_numpy(layer.weight))
                bias.copy_(torch.from_numpy(layer.bias))
            self.skip.copy_(torch.from_numpy(beyond))
            if len(self.learnable) and net.rates is not None:
                before = net.rates[..., self.learnable]
                # the others keep their initial weights: an absolute value has no slope at 0
                known = before.any(axis=(0, 1))
                self.rates[..., torch.from_numpy(known)] = torch.from_numpy(before[..., known]).float()

    def grow(self, factor: float) -> None:
        """Multiply all predictions by `factor`."""
        with torch.no_grad():
            for parameter in (
                self.weights[3],
                self.biases[3],
                self.skip,
                *([self.rates] if len(self.learnable) else []),
            ):
                parameter.mul_(factor)

    def as_numpy(self, scale: FeatureScale, unit_ms: float) -> ComputeNet:
        """The net in NumPy, its deviation not yet calibrated."""
        layers = [Layer(as_floats(w), as_floats(bias)) for w, bias in zip(self.weights, self.biases, strict=True)]
        head, parts = layers[2:]
        least = sum(least_skip(head.weight, part) for part in np.split(parts.weight, PARTS, axis=2))
        skip = least * (1 + ROUNDED) + _added_up(as_floats(self._positive(self.skip)))
        out = Layer(_added_up(parts.weight), _added_up(parts.bias))
        rates = None
        if len(self.learnable):
            rates = np.zeros((*skip.shape[:2], len(THRESHOLDS)))
            rates[..., self.learnable] = as_floats(self._positive(self.rates))
        return ComputeNet(scale, (layers[0], layers[1]), head, out, skip, unit_ms, self.floor, 1.0, 1.0, rates)


def _added_up(parts: Floats) -> Floats:
    """Forward and backward together: (…, PARTS) -> (…, 1)."""
    both: Floats = parts.sum(axis=-1, keepdims=True)
    return both


def _of_kind(rates: Floats, slow: bool) -> Floats:
    """Rates (members, K, T) with those by rows moved to the slow thresholds (`slow`), or to the steps."""
    whole = rates.copy()
    by_rows = whole[..., SLOW] + whole[..., STEPS]
    whole[..., SLOW], whole[..., STEPS] = (by_rows, 0.0) if slow else (0.0, by_rows)
    return whole
