"""The nets of a cost model together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from neuroshard.core.errors import InvalidInput
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
from neuroshard.costmodel.protocol import Floats


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


RATES = "compute.rates"  # the one tensor that a cost model may lack


def to_tensors(nets: Nets) -> bytes:
    """The nets as safetensors bytes, all float64. The same nets give the same bytes."""
    data: bytes = save(dict(_leaves(nets)))
    return data


def from_tensors(data: bytes, all_to_all: bool, where: str, features: int) -> Nets:
    """Nets of `features` features from safetensors bytes, with or without those of the all-to-all.

    Raises InvalidInput where a tensor is missing, unknown, misshapen or not finite.
    """
    try:
        tensors: dict[str, Floats] = load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: an element type that NumPy lacks
        raise InvalidInput(
            f"{where}: cut off, or no safetensors that are read here ({error}); copy or train the model again"
        ) from None
    blank = blank_nets(all_to_all, rates=RATES in tensors, features=features)
    expected = dict(_leaves(blank))
    for name in sorted(expected.keys() ^ tensors.keys()):
        raise InvalidInput(
            f"{where}: tensor {name} {'is missing' if name in expected else 'is not one of a cost model'}"
        )
    for name, leaf in expected.items():
        _check(tensors[name], leaf, f"{where}: tensor {name}")
    nets: Nets = _with_leaves(blank, tensors)
    return nets


def _check(tensor: Floats, expected: Floats, where: str) -> None:
    if tensor.shape != expected.shape or tensor.dtype != np.float64:
        raise InvalidInput(f"{where} is {tensor.dtype} {tensor.shape}, expected float64 {expected.shape}")
    if not np.isfinite(tensor).all():
        raise InvalidInput(f"{where} holds a value that is not finite; train the model again")
    if tensor.ndim == 0 and tensor <= 0:  # units, floors and spreads
        raise InvalidInput(f"{where} is {tensor:g}, but must be above 0")


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, Floats]]:
    children = _children(node)
    if children is None:
        yield name, np.ascontiguousarray(node, dtype=np.float64).reshape(np.shape(node))
    else:
        for key, child in children.items():
            yield from _leaves(child, f"{name}.{key}" if name else key)


def _with_leaves(node: Any, tensors: Mapping[str, Floats], name: str = "") -> Any:
    """The same structure as `node`, with its numbers from `tensors`."""
    children = _children(node)
    if children is None:
        return float(tensors[name]) if isinstance(node, float) else tensors[name]
    new = {key: _with_leaves(child, tensors, f"{name}.{key}" if name else key) for key, child in children.items()}
    return replace(node, **new) if is_dataclass(node) and not isinstance(node, type) else tuple(new.values())


def _children(node: Any) -> dict[str, Any] | None:
    """Named parts of a dataclass or tuple, without those that are None or hold no numbers; None for a number or an array."""
    if is_dataclass(node):
        parts = {field.name: getattr(node, field.name) for field in fields(node)}
    elif isinstance(node, tuple):
        parts = {str(place): part for place, part in enumerate(node)}
    else:
        return None
    return {name: part for name, part in parts.items() if part is not None and not isinstance(part, bool)}
