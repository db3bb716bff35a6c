"""Errors on cases that were held back -> how wide a predicted standard deviation must be.

An ensemble's members agree too well: they learned from the same labels. So the deviation is a multiple of their disagreement
beside a least one, both chosen by how likely they make the errors, and both scaled until 68 % of the errors lie within it.

Of the least sure kind of cases, that is: a plan's devices are alike, so what they are off by is not evened out by other kinds
of sets, as it is in cases drawn at random (docs/cost-model.md).
"""

from dataclasses import replace
from typing import Final

import numpy as np

from neuroshard.costmodel.compute_net import ComputeNet
from neuroshard.costmodel.protocol import Floats, Ints

ONE_SIGMA: Final = 0.6827  # of normal errors lie within one standard deviation
LEAST_SPREAD: Final = 1e-4
KINDS: Final = 5  # by the number of tables
FEWEST_OF_A_KIND: Final = 50  # cases: what holds 68 % of fewer is as much chance as kind
_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5)  # of the usual error, that either of the two explains


def calibrated(net: ComputeNet, log_errors: Floats, disagreements: Floats, tables: Ints) -> ComputeNet:
    """The net with the multiple and the least deviation that fit these held-back cases of so many `tables`: three (N,)."""
    usual = max(typical(log_errors), LEAST_SPREAD)
    multiple = usual / max(float(np.median(disagreements)), LEAST_SPREAD)
    best = max(
        ((by_members * multiple, least * usual) for by_members in _SHARES for least in _SHARES[1:]),
        key=lambda pair: _likelihood(log_errors, np.hypot(pair[0] * disagreements, pair[1])),
    )
    off = log_errors / np.hypot(best[0] * disagreements, best[1])
    kinds = np.array_split(np.argsort(tables, kind="stable"), min(max(len(tables) // FEWEST_OF_A_KIND, 1), KINDS))
    widen = max(LEAST_SPREAD, *(typical(off[kind]) for kind in kinds))
    return replace(
        net, disagreement=max(best[0] * widen, LEAST_SPREAD), least_spread=max(best[1] * widen, LEAST_SPREAD)
    )


def typical(errors: Floats) -> float:
    """What 68 % of the errors do not exceed."""
    return float(np.quantile(np.abs(errors), ONE_SIGMA)) if errors.size else 1.0


def _likelihood(errors: Floats, deviations: Floats) -> float:
    """Mean logarithm of the density, with tails of Student's t (4 degrees of freedom), since some labels are disturbed."""
    return float(np.mean(-np.log(deviations) - 2.5 * np.log1p((errors / deviations) ** 2 / 4)))
