"""The three nets as NumPy sees them: a few matrix products over any number of leading dimensions.

Shapes are the paper's. Outputs are softplus, which is positive and, far from zero, linear: what lies beyond the measured
range grows in proportion, where an exponential would explode.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.features import FEATURES, SHARE_COLUMNS
from neuroshard.costmodel.protocol import Floats, Ints

TABLE_WIDTHS: Final = (128, 32)  # of the layers after the features; the last is the vector that is summed
HEAD_WIDTHS: Final = (64, 1)
EXCHANGE_WIDTHS: Final = (128, 64, 32, 16)  # and one output a device
LATENCY_SHARE: Final = (
    0.05  # an exchange of nothing takes as long as one of a twentieth of the usual dims, give or take
)


@dataclass(frozen=True)
class Dense:
    """One layer: weight of shape (out, in), bias of shape (out,)."""

    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        return x @ self.weight.T + self.bias


Layers = tuple[Dense, ...]


def perceptron(layers: Layers, x: Floats) -> Floats:
    """Dense layers with ReLU between them and nothing after the last: (…, in) -> (…, out)."""
    for layer in layers[:-1]:
        x = np.maximum(layer(x), 0.0)
    return layers[-1](x)


def blank_layers(*widths: int) -> Layers:
    """Layers of these widths, all zeros."""
    return tuple(Dense(np.zeros((out, into)), np.zeros(out)) for into, out in pairwise(widths))


def softplus(x: Floats) -> Floats:
    return np.logaddexp(0.0, x)


@dataclass(frozen=True)
class FeatureScale:
    """Mean, deviation and range of each feature over the tables that the net was trained on, each of shape (F,).

    Shares are kept to the range that was measured: a reuse bin that was always nearly empty has a tiny deviation, and a
    table that fills it would otherwise stand a thousand deviations off. Sizes go on beyond their range.
    """

    mean: Floats
    deviation: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, features: Floats) -> "FeatureScale":
        """The statistics of (N, F) features. One that never varies is ignored: its deviation counts as infinite (0 here)."""
        low, high = features.min(axis=0), features.max(axis=0)
        deviation = np.where(high - low > 1e-9 * np.abs(high), features.std(axis=0), 0.0)
        return cls(features.mean(axis=0), deviation, low, high)

    def apply(self, features: Floats) -> Floats:
        """Features in deviations from the mean: (…, F) -> (…, F)."""
        clipped = features.copy()
        clipped[..., SHARE_COLUMNS] = np.clip(
            features[..., SHARE_COLUMNS], self.low[SHARE_COLUMNS], self.high[SHARE_COLUMNS]
        )
        return (clipped - self.mean) * np.divide(
            1.0, self.deviation, where=self.deviation > 0, out=np.zeros_like(self.mean)
        )


@dataclass(frozen=True)
class ComputeNet:
    """A vector a table, summed over the tables of a device, then a head. `unit_ms` is the size of an output of 1."""

    scale: FeatureScale
    table: Layers
    head: Layers
    unit_ms: float

    def vectors(self, features: Floats) -> Floats:
        """(…, F) -> (…, K). Never negative, so that a sum only grows."""
        return np.maximum(perceptron(self.table, self.scale.apply(features)), 0.0)

    def ms(self, vector_sums: Floats) -> Floats:
        """Forward + backward ms: (…, K) -> (…)."""
        return softplus(perceptron(self.head, vector_sums)[..., 0]) * self.unit_ms


@dataclass(frozen=True)
class ExchangeScale:
    """How an exchange is put to its net: its size apart from its shape, so that shapes are learned once for all sizes.

    `unit_dims`, `low_dims`, `high_dims`: the usual, least and most dims of the widest device in training. `unit_delay_ms`: the
    longest wait in training; None backward, where every device is ready at once.
    """

    unit_dims: float
    low_dims: float
    high_dims: float
    unit_delay_ms: float | None = None

    def view(self, device_dims: Floats, start_delays_ms: Floats | None) -> "ExchangeView":
        """One or two (…, D) as the net sees them.

        Devices come widest first, of equals the one that waits longest. The widest shows as log2 of its dims, the others as
        shares of it. Sizes that were not measured look to the net like the nearest that was, and cost more in proportion.
        Waits beyond the longest measured change nothing: by then the others have sent what they had.
        """
        waits = np.zeros_like(device_dims)
        if start_delays_ms is not None and self.unit_delay_ms is not None:
            waits = np.minimum(waiting_ms(start_delays_ms) / self.unit_delay_ms, 1.0)
        order = np.lexsort((-waits, -device_dims), axis=-1)
        dims, waits = np.take_along_axis(device_dims, order, axis=-1), np.take_along_axis(waits, order, axis=-1)
        widest = dims[..., :1]
        known = np.clip(widest, self.low_dims, self.high_dims)
        columns = [np.log2(known / self.unit_dims), dims[..., 1:] / np.maximum(widest, 1.0)]
        if self.unit_delay_ms is not None:
            columns.append(waits)
        differs = (np.diff(dims, axis=-1, prepend=np.inf) != 0) | (np.diff(waits, axis=-1, prepend=np.inf) != 0)
        return ExchangeView(np.concatenate(columns, axis=-1), widest / self.unit_dims + LATENCY_SHARE, order, differs)


@dataclass(frozen=True)
class ExchangeView:
    """An exchange as its net sees it: `inputs` (…, D or 2 D), and the `size` (…, 1) that its outputs are multiplied by.

    `order` (…, D) numbers the devices as they come; `differs` (…, D) is False where one is like the one before it.
    """

    inputs: Floats
    size: Floats
    order: Ints
    differs: NDArray[np.bool_]

    def by_device(self, ordered: Floats) -> Floats:
        """Outputs in the net's order as those of devices 0 … D - 1: (…, D) -> (…, D). Devices that are alike get their mean."""
        first = np.flatnonzero(self.differs)
        alike = np.diff(first, append=ordered.size)
        means = np.add.reduceat(ordered.ravel(), first) / alike if ordered.size else ordered.ravel()
        numbered = np.empty_like(ordered)
        np.put_along_axis(numbered, self.order, np.repeat(means, alike).reshape(ordered.shape), axis=-1)
        return numbered


@dataclass(frozen=True)
class ExchangeNet:
    """One all-to-all between a fixed number of devices D, from what each sends and, forward, when each starts.

    The devices are sorted before the net sees them, and its outputs put back, so that numbering the devices otherwise
    numbers the prediction otherwise and changes nothing else. What a device must wait for the last one to start is added,
    not learned: the net answers for the transfer alone.
    """

    scale: ExchangeScale
    layers: Layers
    unit_ms: float

    def ms(self, device_dims: Floats, start_delays_ms: Floats | None = None) -> Floats:
        """Ms of every device, waiting included: one or two (…, D) -> (…, D)."""
        view = self.scale.view(device_dims, start_delays_ms)
        transfer = view.by_device(softplus(perceptron(self.layers, view.inputs)) * view.size * self.unit_ms)
        return transfer if start_delays_ms is None else transfer + waiting_ms(start_delays_ms)


def waiting_ms(start_delays_ms: Floats) -> Floats:
    """How long each device waits until the last has started: (…, D) -> (…, D)."""
    last: Floats = start_delays_ms.max(axis=-1, keepdims=True)
    return last - start_delays_ms


@dataclass(frozen=True)
class Nets:
    """The nets of a cost model; exchange nets by their number of devices, the same forward and backward."""

    compute: ComputeNet
    forward: Mapping[int, ExchangeNet]
    backward: Mapping[int, ExchangeNet]


def blank_nets(device_counts: Iterable[int]) -> Nets:
    """Nets of the right shapes and no knowledge."""
    nothing = np.zeros(len(FEATURES))
    counts = tuple(device_counts)
    return Nets(
        compute=ComputeNet(
            FeatureScale(nothing, nothing, nothing, nothing),
            table=blank_layers(len(FEATURES), *TABLE_WIDTHS),
            head=blank_layers(TABLE_WIDTHS[-1], *HEAD_WIDTHS),
            unit_ms=1.0,
        ),
        forward={
            d: ExchangeNet(ExchangeScale(1.0, 1.0, 1.0, 1.0), blank_layers(2 * d, *EXCHANGE_WIDTHS, d), 1.0)
            for d in counts
        },
        backward={
            d: ExchangeNet(ExchangeScale(1.0, 1.0, 1.0), blank_layers(d, *EXCHANGE_WIDTHS, d), 1.0) for d in counts
        },
    )
