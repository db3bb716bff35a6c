"""Errors on held-out cases -> how wide the predicted standard deviation must be.

The members of an ensemble agree too well, because they learned from the same labels. So the predicted deviation of log(time) is

    hypot(multiple * disagreement of the members, least deviation)

The two constants are chosen by maximum likelihood of the held-out errors, then scaled so that 68 % of the errors are within one
deviation. The 68 % must hold in the worst of five groups of cases, by number of tables: the devices of a plan resemble one
another, so their errors do not average out as those of random cases do.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from neuroshard.costmodel.compute_net import ComputeNet
from neuroshard.costmodel.protocol import Floats, Ints

ONE_SIGMA: Final = 0.6827  # of normal errors lie within one standard deviation
LEAST_SPREAD: Final = 1e-4
KINDS: Final = 5  # groups of cases, by number of tables
FEWEST_OF_A_KIND: Final = 50  # cases in a group; of fewer, the 68 % quantile is mostly chance
# Candidates: the share of the usual error that either term explains.
_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5)


def calibrated(net: ComputeNet, log_errors: Floats, disagreements: Floats, tables: Ints) -> ComputeNet:
    """The net with both constants fitted to N held-out cases: log errors, disagreements, numbers of tables, (N,) each."""
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
    """The 68 % quantile of the absolute errors."""
    return float(np.quantile(np.abs(errors), ONE_SIGMA)) if errors.size else 1.0


def _likelihood(errors: Floats, deviations: Floats) -> float:
    """Mean log density by Student's t with 4 degrees of freedom: its heavy tails allow for disturbed labels."""
    return float(np.mean(-np.log(deviations) - 2.5 * np.log1p((errors / deviations) ** 2 / 4)))
