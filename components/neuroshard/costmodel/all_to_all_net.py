"""The net of an all-to-all as NumPy sees it, piecewise linear and convex as the compute net is."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from neuroshard.costmodel.protocol import Floats

EXCHANGE_WIDTH: Final = 16

# What a device sees of an all-to-all, in bytes: first its own, then what is the same for all.
DEVICE_INPUTS: Final = ("sent", "received", "sent_or_received")  # the last: whichever is more
SHARED_INPUTS: Final = ("most_sent", "most_received", "most_sent_or_received", "mean")
BY_DEVICES: Final = (
    3  # each input comes three times: as it is, times log2 of the number of devices, and over their number
)


@dataclass(frozen=True)
class AllToAllNet:
    """One all-to-all between any number of devices D, from what each sends and, forward, when each starts.

    Every device asks the same net, from its own bytes and from sums and maxima over all, so that numbering the devices otherwise
    numbers the prediction otherwise and changes nothing else, to the last bit. All inputs are convex in the dims and no weight is
    negative, so what the devices take together is least where all hold the same dims. What a device must wait for the last
    one to start is added, not learned.
    """

    weight: Floats  # (BY_DEVICES, inputs, hidden)
    bias: Floats  # (hidden,)
    out: Floats  # (hidden,)
    skip: Floats  # (BY_DEVICES, inputs)
    latency: Floats  # (2,): of any all-to-all, and for each eight further devices
    unit_bytes: float
    unit_ms: float
    spread: float  # standard deviation of the logarithm of its error, waiting left out

    @property
    def convex(self) -> bool:
        """As of the compute net, by the signs of its weights."""
        return all(float(weights.min()) >= 0 for weights in (self.weight, self.out, self.skip))

    def ms(self, device_bytes: Floats, start_delays_ms: Floats | None = None) -> Floats:
        """Ms of every device, waiting included, from the bytes of all samples' embeddings on each: (…, D) -> (…, D)."""
        own, shared = all_to_all_inputs(device_bytes)  # of whole bytes, whose sum is exact in any order
        own /= self.unit_bytes
        shared /= self.unit_bytes
        weight, skip, latency = self.between(device_bytes.shape[-1])
        split = own.shape[-1]
        hidden = own @ weight[:split]
        hidden += shared @ weight[split:] + self.bias
        np.maximum(hidden, 0.0, out=hidden)
        # not by BLAS, which adds up some rows in another order than others
        hidden *= self.out
        own *= skip[:split]
        transfer: Floats = hidden.sum(axis=-1)
        transfer += own.sum(axis=-1)
        transfer += shared @ skip[split:]
        transfer += latency
        transfer *= self.unit_ms
        return transfer if start_delays_ms is None else transfer + waiting_ms(start_delays_ms)

    def between(self, devices: int) -> tuple[Floats, Floats, float]:
        """Weight (inputs, hidden), skip (inputs,), and latency of an all-to-all between so many devices."""
        if devices not in self._of_devices:
            by = by_devices(devices)
            self._of_devices[devices] = (
                (by @ self.weight.reshape(BY_DEVICES, -1)).reshape(self.weight.shape[1:]),
                by @ self.skip,
                float(latencies(devices) @ self.latency),
            )
        return self._of_devices[devices]

    @cached_property
    def _of_devices(self) -> dict[int, tuple[Floats, Floats, float]]:
        """Of each number of devices asked about."""
        return {}


@dataclass(frozen=True)
class Transfers:
    """Forward and backward all-to-all between one number of devices without waiting, both nets as one: what a search asks for at
    every step. Weights hold the units, and the skips stand beside the hidden layers."""

    weight: Floats  # (inputs, hidden of both + 2)
    bias: Floats  # (hidden of both + 2,)
    out: Floats  # (hidden of both, 2)

    @classmethod
    def of(cls, nets: tuple[AllToAllNet, AllToAllNet], devices: int) -> "Transfers":
        hidden = sum(len(net.bias) for net in nets)
        inputs = nets[0].weight.shape[1]
        weight, bias, out = np.zeros((inputs, hidden + 2)), np.zeros(hidden + 2), np.zeros((hidden, 2))
        begin = 0
        for place, net in enumerate(nets):
            of_net, beside = slice(begin, begin + len(net.bias)), hidden + place
            layer, skip, latency = net.between(devices)
            weight[:, of_net], weight[:, beside] = layer / net.unit_bytes, skip * (net.unit_ms / net.unit_bytes)
            bias[of_net], bias[beside], out[of_net, place] = net.bias, latency * net.unit_ms, net.out * net.unit_ms
            begin += len(net.bias)
        return cls(weight, bias, out)

    def ms(self, device_bytes: Floats) -> Floats:
        """Forward and backward, of every device: (…, D) -> (…, D, 2)."""
        own, shared = all_to_all_inputs(device_bytes)
        split, hidden = own.shape[-1], len(self.out)
        both = own @ self.weight[:split]
        both += shared @ self.weight[split:] + self.bias
        ms: Floats = np.maximum(both[..., :hidden], 0.0) @ self.out
        ms += both[..., hidden:]
        return ms


def all_to_all_inputs(device_bytes: Floats) -> tuple[Floats, Floats]:
    """What each device sees for itself and what all see: (…, D) -> (…, D, 3) and (…, 1, 4).

    A device sends its own columns of the others' samples, and receives the others' columns of its own.
    """
    devices = device_bytes.shape[-1]
    total = device_bytes.sum(axis=-1, keepdims=True)
    sent, received = device_bytes * ((devices - 1) / devices), (total - device_bytes) / devices
    own = np.empty((*device_bytes.shape, len(DEVICE_INPUTS)))
    own[..., 0], own[..., 1] = sent, received
    np.maximum(sent, received, out=own[..., 2])
    shared = np.empty((*total.shape, len(SHARED_INPUTS)))
    own.max(axis=-2, keepdims=True, out=shared[..., :-1])
    shared[..., -1] = total * ((devices - 1) / devices**2)
    return own, shared


def by_devices(devices: int) -> Floats:
    """What the inputs of an all-to-all of so many devices are multiplied by: (BY_DEVICES,). The last two are small, so that
    training turns to them only where the number of devices does change what a byte costs."""
    return np.array([1.0, np.log2(devices) / 8, 0.5 / devices])


def latencies(devices: int) -> Floats:
    """What of an all-to-all grows with the number of devices, and not with bytes: (2,).

    No logarithm: beside it a straight line could not be told from few devices, and many would be guessed 40 % off.
    """
    return np.array([1.0, (devices - 1) / 8])


def waiting_ms(start_delays_ms: Floats) -> Floats:
    """How long each device waits until the last has started: (…, D) -> (…, D)."""
    last: Floats = start_delays_ms.max(axis=-1, keepdims=True)
    return last - start_delays_ms
