"""What a plan may take when it is measured, by the deviations that its cost model states.

A plan costs what its slowest device costs, and a search makes all devices cost alike. If their errors are independent, some
device is nearly always slower than predicted; if they are alike, a whole plan is faster or slower. Single table sets do not show
which it is. So a range ends below where it would if errors were alike, and above where it would if they were independent.
"""

import math
from statistics import NormalDist
from typing import Final, Protocol, TypeGuard

import numpy as np

from neuroshard.core.plan import CostRanges, Plan, parts_of
from neuroshard.costmodel.protocol import CostModel, Floats
from neuroshard.costmodel.report import STAND_IN_ERROR

NORMAL: Final = NormalDist()
HALVINGS: Final = 40  # of the interval in which the largest of many is looked for


class Calibrated(CostModel, Protocol):
    """A cost model whose deviations were fitted to errors on cases held back."""

    @property
    def two_deviations(self) -> float | None:
        """How many deviations hold 95 % of the errors; None where nothing was calibrated."""

    def deviations_ms(self, vector_sums: Floats, forward_ms: Floats, backward_ms: Floats) -> Floats:
        """One deviation of each device's time, which 68 % of the errors are within, from the sum of its vectors and the ms of its
        transfers: (D, K) and two (D,) -> (D,)."""


def is_calibrated(model: CostModel) -> TypeGuard[Calibrated]:
    """Whether it is a `Calibrated` with figures."""
    return getattr(model, "two_deviations", None) is not None


def cost_ranges(model: CostModel, plan: Plan) -> CostRanges | None:
    """Between which times 68 % and 95 % of measurements of a plan should lie; None where the model does not know.

    What launches and input take beside the nets is taken as certain. No errors are known of tables beyond HBM, nor of the network
    between domains and of averaging replicas over it, which may be most of a step.
    """
    if plan.predicted is None or plan.cost_ms is None or not is_calibrated(model):
        return None
    task = plan.held
    networked = task.topology is not None and task.topology.domains(task.devices) > 1
    if networked or task.groups is not None or task.constraints.beyond_hbm:
        return None
    parts, devices = parts_of(task, plan.shards), [shard.device for shard in plan.shards]
    vectors = model.part_vectors(parts)
    sums = np.zeros((task.devices, vectors.shape[1]))
    np.add.at(sums, devices, vectors)
    total, compute, forward, backward = np.array(
        [
            (one.total_ms, one.compute_ms, one.forward_collective_ms, one.backward_collective_ms)
            for one in plan.predicted
        ]
    ).T
    ready = compute + backward
    waiting = np.minimum(ready.max() - ready, forward)
    own, one = total - waiting, model.deviations_ms(sums, forward - waiting, backward)
    busy = own > 0
    own, shares = own[busy], one[busy] / own[busy]
    if not len(own):
        return None
    assert model.two_deviations is not None
    one_low, one_high = _factors(own, shares, 1.0)
    low, high = _factors(own, shares * model.two_deviations / 2, 2.0)
    # with tails lighter than normal ones the largest of many is within less than one deviation of normal errors
    two_low, two_high = min(low, one_low), max(high, one_high)
    cost = plan.cost_ms
    return CostRanges(one=(one_low * cost, one_high * cost), two=(two_low * cost, two_high * cost))


def _factors(own_ms: Floats, deviations: Floats, times: float) -> tuple[float, float]:
    """The least and the most that the slowest of D devices may take, over what it is predicted to: within so many `deviations`
    (D,) of log(time), which are normal, from what each takes by itself (D,)."""
    logs, least = np.log(own_ms / own_ms.max()), np.maximum(deviations, 1e-9)
    low, high = 0.0, (times + 6) * float(least.max())
    for _ in range(HALVINGS):
        most = (low + high) / 2
        all_below = math.prod(NORMAL.cdf(float(z)) for z in (most - logs) / least)
        low, high = (most, high) if all_below < NORMAL.cdf(times) else (low, most)
    return math.exp(-times * float(least[logs.argmax()])), math.exp(high)


def off_by(plan: Plan) -> float:
    """How far the plan's predictions may be off, as a share. Where its cost model states deviations, it is how much less the plan
    may cost within one: two plans of one model share what makes all slower. Else it is the model's error, and at least
    STAND_IN_ERROR for a fallback."""
    ranges = plan.provenance.cost_ranges
    if ranges is not None and plan.cost_ms:
        return 1 - ranges.one[0] / plan.cost_ms
    error = plan.provenance.cost_model_error or 0.0
    guessed = plan.provenance.instead or (plan.provenance.cost_model or "").startswith("analytic:")
    return max(error, STAND_IN_ERROR) if guessed else error
