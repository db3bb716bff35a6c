"""Errors on cases that were held back -> how wide a predicted standard deviation must be.

An ensemble's members agree too well: they learned from the same labels. So the deviation is a multiple of their disagreement
beside a least one, both chosen by how likely they make the errors, and both scaled until 68 % of the errors lie within it.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from neuroshard.costmodel.compute_net import ComputeNet
from neuroshard.costmodel.protocol import Floats

ONE_SIGMA: Final = 0.6827  # of normal errors lie within one standard deviation
LEAST_SPREAD: Final = 1e-4
_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5)  # of the usual error, that either of the two explains


def calibrated(net: ComputeNet, log_errors: Floats, disagreements: Floats) -> ComputeNet:
    """The net with the multiple and the least deviation that fit these held-back cases: two (N,)."""
    usual = max(typical(log_errors), LEAST_SPREAD)
    multiple = usual / max(float(np.median(disagreements)), LEAST_SPREAD)
    best = max(
        ((by_members * multiple, least * usual) for by_members in _SHARES for least in _SHARES[1:]),
        key=lambda pair: _likelihood(log_errors, np.hypot(pair[0] * disagreements, pair[1])),
    )
    widen = max(typical(log_errors / np.hypot(best[0] * disagreements, best[1])), LEAST_SPREAD)
    return replace(
        net, disagreement=max(best[0] * widen, LEAST_SPREAD), least_spread=max(best[1] * widen, LEAST_SPREAD)
    )


def typical(errors: Floats) -> float:
    """What 68 % of the errors do not exceed."""
    return float(np.quantile(np.abs(errors), ONE_SIGMA)) if errors.size else 1.0


def _likelihood(errors: Floats, deviations: Floats) -> float:
    """Mean logarithm of the density, with tails of Student's t (4 degrees of freedom), since some labels are disturbed."""
    return float(np.mean(-np.log(deviations) - 2.5 * np.log1p((errors / deviations) ** 2 / 4)))
