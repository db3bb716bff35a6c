"""A cost model's nets as torch modules with the same weights, for a search that asks them at batch 1."""

from itertools import chain

import numpy as np
import torch
from torch import nn

from neuroshard.core.table import Table
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.features import table_features
from neuroshard.costmodel.nets import ExchangeNet, Layers


class TorchNets:
    """Float64, as the cost model's own, so that costs agree to the last digits."""

    def __init__(self, model: TrainedCostModel, devices: int) -> None:
        self.batch_size, net = model.batch_size, model.nets.compute
        self.scale, self.unit_ms = net.scale, net.unit_ms
        self.table, self.head = _module(net.table), _module(net.head)
        if devices > 1:
            self.forward_net, self.backward_net = model.nets.forward[devices], model.nets.backward[devices]
            self.forward_module, self.backward_module = (
                _module(self.forward_net.layers),
                _module(self.backward_net.layers),
            )

    def features(self, table: Table, dim: int) -> torch.Tensor:
        features = table_features([table], np.array([dim]), self.batch_size)
        return torch.from_numpy(self.scale.apply(features)[0])

    def compute(self, features: torch.Tensor) -> torch.Tensor:
        """(tables, F) -> ms of one device that holds them."""
        vectors = torch.relu(self.table(features))
        return nn.functional.softplus(self.head(vectors.sum(dim=0))) * self.unit_ms

    def forward(self, dims: torch.Tensor, start_delays_ms: torch.Tensor) -> torch.Tensor:
        waiting = start_delays_ms.max() - start_delays_ms
        return waiting + _transfer(self.forward_net, self.forward_module, dims, start_delays_ms)

    def backward(self, dims: torch.Tensor) -> torch.Tensor:
        return _transfer(self.backward_net, self.backward_module, dims, None)


def _transfer(net: ExchangeNet, module: nn.Module, dims: torch.Tensor, delays: torch.Tensor | None) -> torch.Tensor:
    view = net.scale.view(dims.numpy(), None if delays is None else delays.numpy())
    ordered = nn.functional.softplus(module(torch.from_numpy(view.inputs))).numpy() * view.size * net.unit_ms
    return torch.from_numpy(view.by_device(ordered))


def _module(layers: Layers) -> nn.Sequential:
    """Dense layers with ReLU between them."""
    linears = []
    for layer in layers:
        linear = nn.Linear(*reversed(layer.weight.shape), dtype=torch.float64)
        linear.weight.data, linear.bias.data = (
            torch.from_numpy(layer.weight.copy()),
            torch.from_numpy(layer.bias.copy()),
        )
        linears.append(linear)
    return nn.Sequential(*list(chain.from_iterable((linear, nn.ReLU()) for linear in linears))[:-1]).eval()
