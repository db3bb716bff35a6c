"""The nets of a cost model together."""

from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.all_to_all_net import (
    BY_DEVICES,
    DEVICE_INPUTS,
    HIDDEN_WIDTH,
    SHARED_INPUTS,
    AllToAllNet,
)
from neuroshard.costmodel.compute_net import (
    HEAD_WIDTH,
    MEMBERS,
    TABLE_WIDTHS,
    THRESHOLDS,
    ComputeNet,
    FeatureScale,
    Layer,
)
from neuroshard.costmodel.features import FEATURES


@dataclass(frozen=True)
class Nets:
    """The nets of a cost model; those of the all-to-all are None where none was measured."""

    compute: ComputeNet
    forward: AllToAllNet | None
    backward: AllToAllNet | None

    @property
    def bounded(self) -> bool:
        """True if a search may derive lower bounds from them: see CostModel."""
        return self.compute.monotone and all(net.convex for net in (self.forward, self.backward) if net is not None)


def blank_nets(all_to_all: bool, rates: bool = False, features: int = len(FEATURES)) -> Nets:
    """Untrained nets of the right shapes, with or without those of the all-to-all, and with or without rates."""

    def layer(into: int, out: int) -> Layer:
        return Layer(np.zeros((MEMBERS, into, out)), np.zeros((MEMBERS, 1, out)))

    nothing, (hidden, vector) = np.zeros(features), TABLE_WIDTHS
    inputs = len(DEVICE_INPUTS) + len(SHARED_INPUTS)
    all_to_all_net = AllToAllNet(
        weight=np.zeros((BY_DEVICES, inputs, HIDDEN_WIDTH)),
        bias=np.zeros(HIDDEN_WIDTH),
        out=np.zeros(HIDDEN_WIDTH),
        skip=np.zeros((BY_DEVICES, inputs)),
        latency=np.zeros(2),
        unit_bytes=1.0,
        unit_ms=1.0,
        spread=1.0,
    )
    return Nets(
        compute=ComputeNet(
            FeatureScale(nothing, nothing, nothing, nothing),
            table=(layer(features, hidden), layer(hidden, vector)),
            head=layer(vector, HEAD_WIDTH),
            out=layer(HEAD_WIDTH, 1),
            skip=np.zeros((MEMBERS, vector, 1)),
            unit_ms=1.0,
            floor=1.0,
            disagreement=1.0,
            least_spread=1.0,
            rates=np.zeros((MEMBERS, vector, len(THRESHOLDS))) if rates else None,
        ),
        forward=all_to_all_net if all_to_all else None,
        backward=all_to_all_net if all_to_all else None,
    )
