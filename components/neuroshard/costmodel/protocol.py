"""The interface of a cost model: whatever predicts what shards cost. Trained nets, a datasheet's formula, a table of given costs.

The compute cost of a device is a function of the *sum* of its parts' vectors. So placing a part is one vector addition,
which is what lets a search price millions of placements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.operator_limits import Device, device_of
from neuroshard.core.part import Part
from neuroshard.core.table import MAX_DIM
from neuroshard.costmodel.manifest import Manifest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class CostModel(Protocol):
    """Predicted milliseconds on one kind of hardware. In shapes, D is the number of devices and K the length of a vector."""

    @property
    def name(self) -> str:
        """The digest of its bundle, or a name. A plan carries it."""

    @property
    def backend(self) -> str:
        """What its costs come from: synthetic, cpu, cuda, analytic or given."""

    @property
    def device_name(self) -> str:
        """The hardware's name, for people."""

    @property
    def batch_size(self) -> int:
        """Global batch size that it predicts for."""

    @property
    def max_dim(self) -> int:
        """Columns of the widest shard that was measured. Costs of wider shards are extrapolated."""

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Numbers of devices whose all-to-all it can predict; empty means any number. See `predicts`."""

    @property
    def manifest(self) -> Manifest | None:
        """What it was trained on, and its errors on held-out cases; None where its costs were not learned."""

    @property
    def error_on_unseen_tables(self) -> float | None:
        """The expected error of its compute costs, as a share: the mean |predicted / measured - 1| over tables that were not
        in its training data. None where it is unknown."""

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """One sentence for each part that was not learned and for which the scaled analytic model answers."""

    @property
    def prices_rows(self) -> bool:
        """True where it can price some of a table's rows. Given costs are of whole tables, by name, all-to-all included."""

    @property
    def bounded(self) -> bool:
        """True where a search may derive lower bounds from it. Then

        - vectors are not negative, and `compute_ms` decreases in no component;
        - `compute_ms` is convex, except as a `Bending` model says;
        - for a fixed number of devices, the all-to-all time of each device without waiting is convex in the dims of all
          devices, decreases in none of them, and does not change when other devices are renumbered. So the sum over devices
          is least where all devices hold equally many columns, and the time of one device is least where all others do;
        - the forward all-to-all is waiting plus transfer, where waiting = latest start - own start.
        """

    @property
    def operator_ms(self) -> float:
        """Ms that one embedding operator takes, forward and backward, with nothing to look up; 0 where costs are given."""

    @property
    def reorder_ms(self) -> float:
        """Ms to copy a column of outputs of all samples into another order and, backward, its gradients; 0 where costs are given.
        Each device does so for its own samples."""

    def caveats(self, devices: int, parts: Sequence[Part] = ()) -> tuple[str, ...]:
        """A line for each cost of a plan of these parts on `devices` devices that is beyond what was measured."""

    def part_vectors(self, parts: Sequence[Part]) -> Floats:
        """The vector of each of N parts of tables: (N, K). A search asks for thousands at once."""

    def compute_ms(self, vector_sums: Floats) -> Floats:
        """Forward + backward compute ms of devices, from the sums of their shards' vectors: (…, K) -> (…)."""

    def compute_slope(self, vector_sums: Floats) -> Floats:
        """The gradient of `compute_ms`, in ms a unit of each component: (…, K) -> (…, K). A subgradient where it is convex."""

    def forward_collective_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        """Forward all-to-all ms of each device, waiting included: two (…, D) -> (…, D)."""

    def backward_collective_ms(self, device_dims: Floats) -> Floats:
        """Backward all-to-all ms of each device: (…, D) -> (…, D)."""


class Unlearned:
    """What cost models say alike that were learned from no measurements."""

    max_dim = MAX_DIM
    device_counts: tuple[int, ...] = ()  # any number
    error_on_unseen_tables: float | None = None
    manifest: Manifest | None = None
    stand_ins: tuple[str, ...] = ()

    def caveats(self, devices: int, parts: Sequence[Part] = ()) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Dips:
    """Where a compute cost is concave: J hyperplanes of the vector sum s, each a kink at `s @ weight + bias = 0`.

    `weight` is (K, J), `bias` (J,). Everywhere else the cost is convex.
    """

    weight: Floats
    bias: Floats


@runtime_checkable
class Bending(CostModel, Protocol):
    """A cost model whose compute cost may not be convex: it has dips, or rates that depend on the rows of a device."""

    @property
    def convex(self) -> bool:
        """True where it has neither."""

    @property
    def dips(self) -> Dips:
        """All dips."""

    def convex_below(self, low: Floats, high: Floats) -> CostModel:
        """A cost model with a convex compute cost that underestimates this one wherever dip j is between low[j] and high[j]."""

    def beyond_own_ms(self, vectors: Floats, holds: Floats) -> Floats:
        """Ms that the rates add to each of these vectors, (…, K) -> (…), on a device that holds `holds` or more in all, (…, K) or
        (K,), beyond those that `convex_below` counts."""


def is_bending(model: CostModel) -> TypeGuard[Bending]:
    """Whether its compute cost is not convex."""
    return isinstance(model, Bending) and not model.convex


def trains_on(model: CostModel) -> Device:
    """The device whose operator trains what is planned by this model: a CPU's only where its costs are of CPUs."""
    # the name of trained nets is a digest: 2 ms for each copy of the model
    return device_of(model.backend, model.name if model.backend == "analytic" else None)


def predicts(model: CostModel, devices: int) -> bool:
    """Whether the model can predict the all-to-all of this many devices. One device needs none."""
    return devices == 1 or not model.device_counts or devices in model.device_counts


def device_costs(model: CostModel, vector_sums: Floats, device_dims: Floats) -> tuple[Floats, Floats, Floats]:
    """Compute, forward all-to-all and backward all-to-all ms of every device: (…, D, K) and (…, D) -> three (…, D).

    An empty device computes nothing.
    """
    compute = np.where(device_dims > 0, model.compute_ms(vector_sums), 0.0)
    return compute, *all_to_all_costs(model, compute, device_dims)


def all_to_all_costs(model: CostModel, compute_ms: Floats, device_dims: Floats) -> tuple[Floats, Floats]:
    """Forward and backward all-to-all ms of devices whose compute ms are known: two (…, D) -> two (…, D).

    As in the paper, a device starts the forward all-to-all when its backward all-to-all of the previous step and its compute
    are done. Its start delay is how much later that is than on the first device. A single device needs no all-to-all.
    """
    if device_dims.shape[-1] == 1:
        return np.zeros_like(compute_ms), np.zeros_like(compute_ms)
    backward = model.backward_collective_ms(device_dims)
    ready = compute_ms + backward
    forward = model.forward_collective_ms(device_dims, ready - ready.min(axis=-1, keepdims=True))
    return forward, backward


def sums_of_sets(vectors: Floats, counts: Sequence[int]) -> Floats:
    """The vector sum of each of N sets, from the vectors of their T tables, set after set: (T, K) and `counts` (N,) -> (N, K).

    `counts` says how many tables each set has, at least one.
    """
    sums: Floats = np.add.reduceat(vectors, np.cumsum([0, *counts])[:-1], axis=0)
    return sums


def slope_by_differences(compute_ms: Callable[[Floats], Floats], vector_sums: Floats) -> Floats:
    """`compute_slope` by finite differences, for a cost without a derivative: each component is increased by a millionth."""
    steps = np.maximum(np.abs(vector_sums), 1.0)[..., None] * 1e-6 * np.eye(vector_sums.shape[-1])
    slope: Floats = (compute_ms(vector_sums[..., None, :] + steps) - compute_ms(vector_sums)[..., None]) / steps.sum(-1)
    return slope
