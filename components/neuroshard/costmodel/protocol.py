"""What a search asks of a cost model. Any object with these methods is one: trained nets, a formula, a table of costs.

A device's compute cost is a function of the *sum* of its tables' vectors, so placing a table is one vector addition.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.table import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class CostModel(Protocol):
    """Predicted milliseconds on the hardware that the model was made for. `D` is the number of devices."""

    @property
    def name(self) -> str:
        """Digest of the bundle, or a name, for provenance."""

    @property
    def backend(self) -> str:
        """What its costs were measured on: synthetic, cpu or cuda."""

    @property
    def device_name(self) -> str:
        """The hardware, as people call it."""

    @property
    def batch_size(self) -> int:
        """Global batch size that the costs are for."""

    @property
    def max_dim(self) -> int:
        """Widest shard that was measured; wider ones are extrapolated."""

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Numbers of devices whose all-to-all it can predict; empty where it can predict any."""

    @property
    def bounded(self) -> bool:
        """True where a search may draw lower bounds from it.

        Then vectors are not negative; `compute_ms` falls with no component and is convex, but for what a `Bending` model says;
        and for a fixed number of devices the all-to-all of each without its waiting is convex in the dims of all, falls with none
        of them, and stays what it is where the others are numbered otherwise. So all together take least where they hold the same
        dims, and one where all others do.
        Waiting is added by rule: forward = (latest start - own start) + transfer.
        """

    def table_vectors(self, tables: Sequence[Table], dims: Ints) -> Floats:
        """Vector of each table cut to dims[i] columns: (len(tables),) tables and dims -> (len(tables), K)."""

    def compute_ms(self, vector_sums: Floats) -> Floats:
        """Forward + backward ms of devices from the sums of their tables' vectors: (…, K) -> (…)."""

    def compute_slope(self, vector_sums: Floats) -> Floats:
        """How `compute_ms` grows at the sums, ms a unit of each component: (…, K) -> (…, K). Where it is convex a subgradient."""

    def forward_collective_ms(self, device_dims: Floats, start_delays_ms: Floats) -> Floats:
        """Forward all-to-all ms a device, waiting included: two (…, D) -> (…, D)."""

    def backward_collective_ms(self, device_dims: Floats) -> Floats:
        """Backward all-to-all ms a device: (…, D) -> (…, D)."""

    def spread_ms(self, vector_sums: Floats, device_dims: Floats) -> Floats:
        """One standard deviation of each device's predicted total, calibrated: (…, D, K) and (…, D) -> (…, D).

        Zeros where costs are given and not predicted.
        """

    def caveats(self, devices: int, tables: Sequence[Table] = ()) -> tuple[str, ...]:
        """A line for each cost of a plan of these tables on so many devices that lies beyond what was measured."""


@dataclass(frozen=True)
class Dips:
    """Where a cost bends down: convex but for these, it is concave in the vector sum times `weight` (K, J) plus `bias` (J,)."""

    weight: Floats
    bias: Floats


@runtime_checkable
class Bending(CostModel, Protocol):
    """A cost model whose compute cost may not be convex: it has dips, or costs that set in with the rows of a device."""

    @property
    def convex(self) -> bool:
        """True where it is."""

    @property
    def dips(self) -> Dips:
        """All of them."""

    def convex_below(self, low: Floats, high: Floats) -> CostModel:
        """A cost model whose compute cost is convex, and not above this one's where each dip is between `low` and `high` (J,)."""


def device_costs(model: CostModel, vector_sums: Floats, device_dims: Floats) -> tuple[Floats, Floats, Floats]:
    """Compute, forward all-to-all and backward all-to-all ms of every device: (…, D, K) and (…, D) -> three (…, D).

    An empty device computes nothing.
    """
    compute = np.where(device_dims > 0, model.compute_ms(vector_sums), 0.0)
    return compute, *all_to_all_costs(model, compute, device_dims)


def all_to_all_costs(model: CostModel, compute_ms: Floats, device_dims: Floats) -> tuple[Floats, Floats]:
    """Forward and backward all-to-all ms of devices whose compute ms are known: two (…, D) -> two (…, D).

    A device enters the forward all-to-all when its backward all-to-all of the step before and its compute are done, so its
    start delay is how much later that is than on the first device (as in the paper). One device alone needs no all-to-all.
    """
    if device_dims.shape[-1] == 1:
        return np.zeros_like(compute_ms), np.zeros_like(compute_ms)
    backward = model.backward_collective_ms(device_dims)
    ready = compute_ms + backward
    forward = model.forward_collective_ms(device_dims, ready - ready.min(axis=-1, keepdims=True))
    return forward, backward


def slope_by_differences(compute_ms: Callable[[Floats], Floats], vector_sums: Floats) -> Floats:
    """`compute_slope` of a cost that has no derivative at hand: what a millionth more of each component adds."""
    steps = np.maximum(np.abs(vector_sums), 1.0)[..., None] * 1e-6 * np.eye(vector_sums.shape[-1])
    slope: Floats = (compute_ms(vector_sums[..., None, :] + steps) - compute_ms(vector_sums)[..., None]) / steps.sum(-1)
    return slope
