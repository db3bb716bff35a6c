"""The all-to-all net in NumPy: how many bytes each device holds for the others -> ms of the all-to-all on each device.

One net serves any number of devices D. Every device asks it with inputs of its own (bytes sent and received) and with maxima and
sums over all devices. So renumbering the devices renumbers the predictions and changes nothing else, to the last bit.

All inputs are convex in the columns that the devices hold, no weight is negative, and the activations are ReLUs. So the time of
each device is convex, and the sum over the devices is least where all hold equally many columns: a search derives bounds from it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from neuroshard.costmodel.network import Network
from neuroshard.costmodel.protocol import Floats

HIDDEN_WIDTH: Final = 16

# Inputs of the net, in bytes: those of a device, then those that all devices share.
DEVICE_INPUTS: Final = ("sent", "received", "sent_or_received")  # the last is the larger of the two
SHARED_INPUTS: Final = ("most_sent", "most_received", "most_sent_or_received", "mean")
BY_DEVICES: Final = 3  # each input comes three times: as it is, times log2(D) / 8, and times 0.5 / D


@dataclass(frozen=True)
class AllToAllNet:
    """A hidden layer of ReLUs and a linear skip, all weights of which depend linearly on (1, log2(D) / 8, 0.5 / D).

    It predicts the transfer alone, in units of `unit_ms` from inputs in units of `unit_bytes`. How long a device waits for the
    last one to start is not learned but added.
    """

    weight: Floats  # (BY_DEVICES, inputs, hidden)
    bias: Floats  # (hidden,)
    out: Floats  # (hidden,)
    skip: Floats  # (BY_DEVICES, inputs)
    latency: Floats  # (2,): a constant, and what eight more devices add
    unit_bytes: float
    unit_ms: float
    spread: float  # standard deviation of log(predicted / measured), without waiting

    @property
    def convex(self) -> bool:
        """True if the net is convex, by the signs of its weights."""
        return all(float(weights.min()) >= 0 for weights in (self.weight, self.out, self.skip))

    def ms(self, device_bytes: Floats, start_delays_ms: Floats | None = None, network: Network | None = None) -> Floats:
        """Ms of every device, from the bytes of all samples' pooled embeddings on each: (…, D) -> (…, D).

        With `start_delays_ms` (…, D) the time that each waits for the last to start is included. Over a `network` the net
        predicts what stays in a domain.
        """
        # bytes are whole numbers, whose sum is exact in any order
        own, shared = all_to_all_inputs(device_bytes) if network is None else near_inputs(device_bytes, network)
        own /= self.unit_bytes
        shared /= self.unit_bytes
        weight, skip, latency = self.between(device_bytes.shape[-1] if network is None else network.domain)
        split = own.shape[-1]
        hidden = own @ weight[:split]
        hidden += shared @ weight[split:] + self.bias
        np.maximum(hidden, 0.0, out=hidden)
        # not by a matrix product: BLAS sums some rows in another order than others
        hidden *= self.out
        own *= skip[:split]
        transfer: Floats = hidden.sum(axis=-1)
        transfer += own.sum(axis=-1)
        transfer += shared @ skip[split:]
        transfer += latency
        transfer *= self.unit_ms
        if network is not None:
            transfer = np.maximum(transfer, network.far_ms(device_bytes))
        return transfer if start_delays_ms is None else transfer + waiting_ms(start_delays_ms)

    def between(self, devices: int) -> tuple[Floats, Floats, float]:
        """Weight (inputs, hidden), skip (inputs,), and latency for one number of devices."""
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
        """Results of `between`, kept by number of devices."""
        return {}


@dataclass(frozen=True)
class Transfers:
    """The forward and the backward net as one, for one number of near devices, without waiting: what a search asks at every step.

    The units are multiplied into the weights, and the skips are two more columns of `weight`.
    """

    weight: Floats  # (inputs, hidden of both + 2)
    bias: Floats  # (hidden of both + 2,)
    out: Floats  # (hidden of both, 2)

    @classmethod
    def of(cls, nets: tuple[AllToAllNet, AllToAllNet], devices: int) -> "Transfers":
        """The forward and the backward net for this many near devices."""
        hidden = sum(len(net.bias) for net in nets)
        inputs = nets[0].weight.shape[1]
        weight, bias, out = np.zeros((inputs, hidden + 2)), np.zeros(hidden + 2), np.zeros((hidden, 2))
        begin = 0
        for place, net in enumerate(nets):
            of_net, of_skip = slice(begin, begin + len(net.bias)), hidden + place
            layer, skip, latency = net.between(devices)
            weight[:, of_net], weight[:, of_skip] = layer / net.unit_bytes, skip * (net.unit_ms / net.unit_bytes)
            bias[of_net], bias[of_skip], out[of_net, place] = net.bias, latency * net.unit_ms, net.out * net.unit_ms
            begin += len(net.bias)
        return cls(weight, bias, out)

    def ms(self, device_bytes: Floats, network: Network | None = None) -> Floats:
        """Forward and backward transfer ms of every device, from its bytes: (…, D) -> (…, D, 2)."""
        own, shared = all_to_all_inputs(device_bytes) if network is None else near_inputs(device_bytes, network)
        split, hidden = own.shape[-1], len(self.out)
        both = own @ self.weight[:split]
        both += shared @ self.weight[split:] + self.bias
        ms: Floats = np.maximum(both[..., :hidden], 0.0) @ self.out
        ms += both[..., hidden:]
        return ms if network is None else np.maximum(ms, network.far_ms(device_bytes)[..., None])


def all_to_all_inputs(device_bytes: Floats) -> tuple[Floats, Floats]:
    """The inputs of each device (DEVICE_INPUTS) and those that all share (SHARED_INPUTS): (…, D) -> (…, D, 3) and (…, 1, 4).

    Of the embeddings of the whole batch, a device sends those of its own columns to the other devices, (D - 1) / D of them, and
    receives the other columns for its own samples.
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


def near_inputs(device_bytes: Floats, network: Network) -> tuple[Floats, Floats]:
    """The inputs of the near part of an all-to-all, as `all_to_all_inputs` has them for one domain.

    Every device is assumed to receive as much as the mean device, so that it does not matter which of them share a domain.
    """
    near, ranks = network.near(device_bytes), network.domain
    sent = near * ((ranks - 1) / ranks)
    mean = sent.mean(axis=-1, keepdims=True)
    own = np.stack([sent, np.broadcast_to(mean, sent.shape), np.maximum(sent, mean)], axis=-1)
    shared = np.empty((*mean.shape, len(SHARED_INPUTS)))
    own.max(axis=-2, keepdims=True, out=shared[..., :-1])
    shared[..., -1] = mean
    return own, shared


def by_devices(devices: int) -> Floats:
    """The factors of the inputs for a number of devices: (BY_DEVICES,).

    The last two are small, so that training uses them only where the number of devices changes what a byte costs.
    """
    return np.array([1.0, np.log2(devices) / 8, 0.5 / devices])


def latencies(devices: int) -> Floats:
    """The inputs of the latency, which depends on the number of devices and not on bytes: (2,).

    There is no logarithm among them: few numbers of devices cannot distinguish it from a straight line, and for many devices
    the prediction would be off by 40 %.
    """
    return np.array([1.0, (devices - 1) / 8])


def waiting_ms(start_delays_ms: Floats) -> Floats:
    """How long each device waits for the last one to start: (…, D) -> (…, D)."""
    last: Floats = start_delays_ms.max(axis=-1, keepdims=True)
    return last - start_delays_ms
