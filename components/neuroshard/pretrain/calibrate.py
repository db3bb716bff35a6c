"""Errors on held-out cases -> how wide the predicted standard deviation must be.

The members of an ensemble agree too well, because they learned from the same labels. So the predicted deviation of log(time) is

    hypot(multiple * disagreement of the members, least deviation, least ms / predicted ms)

The three constants are chosen by maximum likelihood of the held-out errors, then scaled so that one deviation holds 68 % of them.
The last is 0 unless short times are measured less exactly than long ones, as on CPUs.
How many deviations hold 95 % is taken from the errors as well: their tails are heavier than those of normal errors.
Both quantiles are those of split conformal prediction, which hold for the next case like these, however errors are distributed.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from neuroshard.costmodel.compute_net import ComputeNet
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.report import Deviations

ONE_SIGMA: Final = 0.6827  # of normal errors lie within one standard deviation
TWO_SIGMAS: Final = 0.9545
LEAST_SPREAD: Final = 1e-4
FEWEST_FOR_TWO: Final = 22  # of fewer cases, the largest error is no bound of 95 %
# Candidates: the share of the usual error that each term explains, the last of a case of median ms.
_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
_OF_MS: Final = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


class Quantiles(NamedTuple):
    """What the absolute error over the predicted deviation is in 68 % and in 95 % of the cases, at most."""

    one: float
    two: float

    @classmethod
    def of(cls, scores: Floats) -> "Quantiles":
        """Of N cases, with the correction of conformal prediction for few. Of too few the tails are those of normal errors."""
        count, ordered = len(scores), np.sort(scores)
        one, two = (float(ordered[min(math.ceil((count + 1) * share), count) - 1]) for share in (ONE_SIGMA, TWO_SIGMAS))
        return cls(one, two if count >= FEWEST_FOR_TWO else max(two, 2 * one))


def calibrated(
    net: ComputeNet, log_errors: Floats, disagreements: Floats, predicted_ms: Floats
) -> tuple[ComputeNet, Deviations]:
    """The net with its constants fitted to N held-out cases, and those that it does not have itself. All are (N,)."""
    usual = max(typical(log_errors), LEAST_SPREAD)
    multiple, median_ms = usual / max(float(np.median(disagreements)), LEAST_SPREAD), float(np.median(predicted_ms))

    def deviations(of_members: float, least: float, least_ms: float) -> Floats:
        found: Floats = np.sqrt((of_members * disagreements) ** 2 + least**2 + (least_ms / predicted_ms) ** 2)
        return found

    best = max(
        (
            (of_members * multiple, least * usual, of_ms * usual * median_ms)
            for of_members, least, of_ms in product(_SHARES, _SHARES[1:], _OF_MS)
        ),
        key=lambda constants: _likelihood(log_errors, deviations(*constants)),
    )
    one, two = Quantiles.of(np.abs(log_errors) / deviations(*best))
    widen = max(one, LEAST_SPREAD)
    of_members, least, least_ms = (constant * widen for constant in best)
    found = replace(net, disagreement=max(of_members, LEAST_SPREAD), least_spread=max(least, LEAST_SPREAD))
    return found, Deviations(least_ms=least_ms, two=max(two / widen, 1.0))


def typical(errors: Floats) -> float:
    """The 68 % quantile of the absolute errors."""
    return float(np.quantile(np.abs(errors), ONE_SIGMA)) if errors.size else 1.0


def _likelihood(errors: Floats, deviations: Floats) -> float:
    """Mean log density by Student's t with 4 degrees of freedom: its heavy tails allow for disturbed labels."""
    return float(np.mean(-np.log(deviations) - 2.5 * np.log1p((errors / deviations) ** 2 / 4)))
