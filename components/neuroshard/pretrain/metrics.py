"""Predicted against measured, in the field's usual figures."""

import numpy as np
from scipy.stats import kendalltau

from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.report import Errors

CLOCK_MS = 1e-3  # a microsecond: shorter times are below what the clocks resolve, so errors are relative to this


def errors(measured_ms: Floats, predicted_ms: Floats) -> Errors | None:
    """The figures of two arrays of one shape. None without values; a figure that needs variety is None without it."""
    if measured_ms.size == 0:
        return None
    measured, predicted = measured_ms.ravel(), predicted_ms.ravel()
    mse = float(np.mean((predicted - measured) ** 2))
    varied = measured.size > 1 and np.ptp(measured) > 0
    ranked = varied and np.ptp(predicted) > 0
    return Errors(
        values=measured.size,
        mse=mse,
        mape=mape(measured, predicted),
        r2=1 - mse / float(measured.var()) if varied else None,
        kendall_tau=float(kendalltau(predicted, measured).statistic) if ranked else None,
    )


def mape(measured_ms: Floats, predicted_ms: Floats) -> float:
    """Mean absolute error relative to what was measured, 0.1 for 10 %."""
    return float(np.mean(np.abs(predicted_ms - measured_ms) / np.maximum(measured_ms, CLOCK_MS)))
