"""A cost model's nets in torch with the same weights, for a search that asks them at batch 1."""

import numpy as np
import torch

from helpers.parts import cut_to
from neuroshard.core.table import Table
from neuroshard.costmodel.all_to_all_net import AllToAllNet, by_devices, latencies
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.compute_net import steps
from neuroshard.costmodel.features import ROW_COLUMN, TOUCHED_COLUMN, part_features


class TorchNets:
    """Float64, as the cost model's own, so that costs agree to the last digits."""

    def __init__(self, model: TrainedCostModel, devices: int) -> None:
        self.batch_size, net = model.batch_size, model.nets.compute
        self.scale, self.unit_ms, self.floor = net.scale, net.unit_ms, net.floor
        layers = (*net.table, net.head, net.out)
        self.layers = [(_tensor(layer.weight), _tensor(layer.bias)) for layer in layers]
        self.skip, self.rates = _tensor(net.skip), None if net.rates is None else _tensor(net.rates)
        if devices > 1:
            self.forward_net, self.backward_net = (
                AllToAll(net, devices, 4.0 * self.batch_size)
                for net in (model.nets.forward, model.nets.backward)
                if net is not None
            )

    def features(self, table: Table, dim: int) -> torch.Tensor:
        """As the net scales them, the bytes touched, a column that is not used, and the rows."""
        features = part_features(cut_to([table], [dim]), self.batch_size)
        rows = np.rint(np.exp2(features[0, ROW_COLUMN]))
        counted = [features[0, TOUCHED_COLUMN] * 2**30, 0.0, rows]
        return torch.from_numpy(np.append(self.scale.apply(features)[0], counted))

    def compute(self, features: torch.Tensor) -> torch.Tensor:
        """(tables, F + 3) -> ms of one device that holds them."""
        hidden, vector, head, out = self.layers
        features, counted = features[:, :-3], features[:, -3:].sum(dim=0)
        vectors = torch.relu(torch.relu(features @ hidden[0] + hidden[1]) @ vector[0] + vector[1])
        sums = vectors.sum(dim=1, keepdim=True)
        members = torch.relu(sums @ head[0] + head[1]) @ out[0] + out[1] + sums @ self.skip
        if self.rates is not None:
            shares = torch.from_numpy(steps(counted.numpy(), np.arange(self.rates.shape[2])))
            members = members + (sums @ self.rates * shares).sum(dim=2, keepdim=True)
        return members.mean().clamp(min=self.floor) * self.unit_ms

    def forward(self, dims: torch.Tensor, start_delays_ms: torch.Tensor) -> torch.Tensor:
        return start_delays_ms.max() - start_delays_ms + self.forward_net(dims)

    def backward(self, dims: torch.Tensor) -> torch.Tensor:
        return self.backward_net(dims)


class AllToAll:
    """The transfer of one number of devices, from their dims."""

    def __init__(self, net: AllToAllNet, devices: int, column_bytes: float) -> None:
        by = by_devices(devices)
        self.devices, self.unit = devices, column_bytes / net.unit_bytes
        self.weight, self.skip = _tensor(np.tensordot(by, net.weight, 1)), _tensor(by @ net.skip)
        self.bias, self.out, self.unit_ms = _tensor(net.bias), _tensor(net.out), net.unit_ms
        self.latency = float(latencies(devices) @ net.latency)

    def __call__(self, dims: torch.Tensor) -> torch.Tensor:
        held = dims * self.unit
        sent, received = held * ((self.devices - 1) / self.devices), (held.sum() - held) / self.devices
        own = torch.stack([sent, received, torch.maximum(sent, received)], dim=1)
        shared = torch.cat([own.amax(dim=0), sent.mean()[None]]).expand(self.devices, -1)
        inputs = torch.cat([own, shared], dim=1)
        hidden = torch.relu(inputs @ self.weight + self.bias)
        return (hidden @ self.out + inputs @ self.skip + self.latency) * self.unit_ms


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
