"""The paper's cost nets and recipe, to compare with.

20 features as they are, 20-128-32, summed, 32-64-1; squared error in ms, Adam 1e-3, batches of 512, as many epochs as asked,
the best by the held-back cases.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from neuroshard.core.case import ComputeCase

EPOCHS = 1000
BATCH = 512


def train(net: nn.Module, inputs: list[Tensor], labels: Tensor, train: Tensor, valid: Tensor, epochs: int) -> nn.Module:
    """The net, trained; `inputs` are indexed by case."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    best, best_state = np.inf, copy.deepcopy(net.state_dict())
    for _ in range(epochs):
        for chosen in torch.split(train[torch.randperm(len(train))], BATCH):
            loss = nn.functional.mse_loss(net(*(some[chosen] for some in inputs)), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            error = float(nn.functional.mse_loss(net(*(some[valid] for some in inputs)), labels[valid]))
        if error < best:
            best, best_state = error, copy.deepcopy(net.state_dict())
    net.load_state_dict(best_state)
    return net


class SumNet(nn.Module):
    """Sets padded to one length; `there` is 1 for a table and 0 for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 32))
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, tables: Tensor, there: Tensor) -> Tensor:
        return self.head((self.table(tables) * there[..., None]).sum(dim=1)).squeeze(1)


def padded(
    cases: Sequence[ComputeCase], like: tuple[Tensor, Tensor] | None = None
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Features (cases, most tables, 20), scaled by mean and deviation of each (or as `like`), and which are there."""
    most = max(len(case.tables) for case in cases)
    features, there = torch.zeros(len(cases), most, 20), torch.zeros(len(cases), most)
    for i, case in enumerate(cases):
        rows = [[t.dim, t.rows, t.pooling_factor, *t.reuse_bins] for t in case.tables]
        features[i, : len(rows)], there[i, : len(rows)] = torch.tensor(rows, dtype=torch.float32), 1.0
    if like is None:
        flat = features[there > 0]
        like = flat.mean(dim=0), flat.std(dim=0).clamp(min=1e-6)
    return [(features - like[0]) / like[1] * there[..., None], there], like
