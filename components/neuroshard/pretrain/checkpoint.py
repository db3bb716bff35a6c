"""The state of a training on disk, so that a killed run can continue.

One safetensors file a net, replaced atomically. It holds the digest of data and settings, and is ignored for others.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from neuroshard.files.disk import write_bytes

SAVE_EVERY_SECONDS: Final = 5.0  # at the end of an epoch, if the last time is as long ago; a killed run loses the rest


@dataclass
class Progress:
    """Epochs done, the running mean of the weights, and the mean at the best epoch so far."""

    epoch: int = 0
    best_epoch: int = 0
    best: float = math.inf
    mean_net: dict[str, Tensor] = field(default_factory=dict)
    best_net: dict[str, Tensor] = field(default_factory=dict)
    errors: list[tuple[float, float]] = field(default_factory=list)  # (training, validation) of each epoch

    def keep(self, error: float) -> None:
        """Record the current mean as the best."""
        self.best, self.best_epoch = error, self.epoch
        self.best_net = _copied(self.mean_net)


class Checkpoint:
    """The file of a training's state; without a path there is none. `key` is a digest of data and settings."""

    def __init__(self, path: Path | None, key: str = "") -> None:
        self.path, self.key = path, key
        self.saved_at = time.monotonic()

    def resume(self, net: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> Progress:
        """The saved state, also loaded into the three arguments; a fresh state if none was saved for this training."""
        state = Progress(mean_net=_copied(net.state_dict()), best_net=_copied(net.state_dict()))
        tensors = self._read(state.best_net)
        if tensors is None:
            return state
        scalars = tensors["scalars"].tolist()
        state.epoch, state.best_epoch, state.best = int(scalars[0]), int(scalars[1]), scalars[2]
        state.best_net, state.mean_net = _under(tensors, "best."), _under(tensors, "mean.")
        state.errors = [(train, valid) for train, valid in tensors["errors"].tolist()]
        net.load_state_dict(_under(tensors, "net."))
        generator.set_state(tensors["generator"])
        flat, moments = _under(tensors, "optimizer."), optimizer.state_dict()
        moments["state"] = _nested(flat)
        optimizer.load_state_dict(moments)
        return state

    def save(
        self, state: Progress, net: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
    ) -> None:
        """Write the state, at most every SAVE_EVERY_SECONDS."""
        if self.path is None or time.monotonic() - self.saved_at < SAVE_EVERY_SECONDS:
            return
        tensors = {
            "key": torch.frombuffer(bytearray(self.key.encode()), dtype=torch.uint8),
            "scalars": torch.tensor([state.epoch, state.best_epoch, state.best], dtype=torch.float64),
            "errors": torch.tensor(state.errors, dtype=torch.float64).reshape(-1, 2),
            "generator": generator.get_state(),
            **{f"best.{name}": tensor for name, tensor in state.best_net.items()},
            **{f"mean.{name}": tensor for name, tensor in state.mean_net.items()},
            **{f"net.{name}": tensor for name, tensor in net.state_dict().items()},
        }
        for number, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": moment for name, moment in moments.items()}
        write_bytes(self.path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        self.saved_at = time.monotonic()

    def _read(self, net: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """The saved tensors; None if there are none, or if they are damaged or of another training or another net."""
        if self.path is None or not self.path.exists():
            return None
        try:
            tensors: dict[str, Tensor] = load(self.path.read_bytes())
        except (SafetensorError, OSError):
            return None
        same = bytes(tensors.get("key", torch.empty(0, dtype=torch.uint8)).tolist()) == self.key.encode()
        return tensors if same and _shapes(_under(tensors, "net.")) == _shapes(net) else None


NONE: Final = Checkpoint(None)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _nested(flat: dict[str, Tensor]) -> dict[int, dict[str, Any]]:
    """`0.step` -> {0: {"step": …}}, as an optimizer has its state."""
    nested: dict[int, dict[str, Any]] = {}
    for name, tensor in flat.items():
        number, _, moment = name.partition(".")
        nested.setdefault(int(number), {})[moment] = tensor
    return nested
