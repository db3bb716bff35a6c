"""A trained net against what was measured: its report."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from neuroshard.core.case import CollectiveCase, ComputeCase, Split
from neuroshard.core.label import Case
from neuroshard.core.part import Part
from neuroshard.costmodel.all_to_all_net import AllToAllNet
from neuroshard.costmodel.compute_net import ComputeNet
from neuroshard.costmodel.features import part_features
from neuroshard.costmodel.protocol import Floats, Ints, sums_of_sets
from neuroshard.costmodel.report import SET_SIZES, Coverage, Errors, Fit, NetReport, Noise, SizeError
from neuroshard.pretrain.all_to_all import Way, predicted_ms
from neuroshard.pretrain.calibrate import Quantiles
from neuroshard.pretrain.labels import CLOCK_MS, Labels, errors, mape

MOST_JUDGED: Final = 400  # cases on which the predicted deviation is tested


def compute_report(
    net: ComputeNet, labels: Labels[ComputeCase], batch_sizes: Ints, fit: Fit, held_back: Ints, least_ms: float
) -> NetReport:
    """Errors of the compute net on unseen sets and on unseen tables, also by the number of tables in a set, and how often
    they lie within its predicted deviation, of at least `least_ms`, which was calibrated on the cases at `held_back`."""

    def sums(places: Ints) -> Floats:
        return set_sums(net, [labels.cases[i] for i in places], batch_sizes[places])

    def predict(places: Ints) -> Floats:
        return net.ms(sums(places))

    held_out = labels.of_split("test_sets", "test_tables")
    tables = np.array([len(labels.cases[i].tables) for i in held_out])
    by_size = []
    for fewest, most in SET_SIZES:
        places = held_out[(tables >= fewest) & (tables <= (most or np.inf))]
        if len(places):
            error = mape(labels.ms[places], predict(places))
            by_size.append(SizeError(fewest=fewest, most=most, values=len(places), mape=error))
    return NetReport(
        kind="compute",
        fit=fit,
        splits=_by_split(labels, predict, "test_sets", "test_tables"),
        by_size=tuple(by_size),
        coverage=_coverage(net, sums(held_back), [labels.cases[i] for i in held_back], labels.ms[held_back], least_ms),
        label_noise=_noise(labels),
    )


def set_sums(net: ComputeNet, cases: Sequence[ComputeCase], batch_sizes: Ints) -> Floats:
    """The vector sum of each case, in a batch of its size: N cases and (N,) -> (N, width)."""
    parts = [Part.of(table) for case in cases for table in case.tables]
    counts = [len(case.tables) for case in cases]
    return sums_of_sets(net.vectors(part_features(parts, np.repeat(batch_sizes, counts))), counts)


def all_to_all_report(
    net: AllToAllNet, labels: Labels[CollectiveCase], batch_size: int, way: Way, fit: Fit
) -> NetReport:
    """Errors of an all-to-all net on unseen all-to-alls of one number of devices, over all devices of all of them."""

    def predict(places: Ints) -> Floats:
        return predicted_ms(net, [labels.cases[i] for i in places], batch_size, way)

    return NetReport(
        kind="forward all-to-all" if way == "forward" else "backward all-to-all",
        devices=labels.ms.shape[1],
        fit=fit,
        splits=_by_split(labels, predict, "test_sets"),
        label_noise=_noise(labels),
    )


def _by_split(labels: Labels[Case], predict: Callable[[Ints], Floats], *splits: Split) -> dict[Split, Errors | None]:
    found: dict[Split, Errors | None] = {}
    for split in splits:
        places = labels.of_split(split)
        found[split] = errors(labels.ms[places], predict(places)) if len(places) else None
    return found


def log_errors(predicted_ms: Floats, measured_ms: Floats) -> Floats:
    """log(predicted / measured); what the clocks do not resolve is no error."""
    off: Floats = np.log((predicted_ms + CLOCK_MS) / (measured_ms + CLOCK_MS))
    return off


def _coverage(
    net: ComputeNet, sums: Floats, cases: Sequence[ComputeCase], measured_ms: Floats, least_ms: float
) -> dict[Split, Coverage]:
    """How often the deviation holds the errors on unseen tables. For each case it is scaled anew, on those of N held-back cases
    that have none of its tables."""
    judged = np.flatnonzero([case.split == "test_tables" for case in cases])
    judged = judged[:: max(len(judged) // MOST_JUDGED, 1)]
    if not len(judged):
        return {}
    predicted = net.ms(sums)
    spread = np.hypot(net.spread_ms(sums), least_ms) / predicted
    scores = np.abs(log_errors(predicted, measured_ms)) / spread
    names = [frozenset(table.name for table in case.tables) for case in cases]
    scaled = []
    for place in judged:
        others = np.array([names[place].isdisjoint(other) for other in names])
        scaled.append(Quantiles.of(scores[others]))
    one, two = np.array(scaled).T
    return {
        "test_tables": Coverage(
            values=len(judged),
            share=float((scores[judged] <= one).mean()),
            spread=float(np.median(one * spread[judged])),
            two_share=float((scores[judged] <= two).mean()),
            two_spread=float(np.median(two * spread[judged])),
        )
    }


def _noise(labels: Labels[Case]) -> Noise | None:
    label, again = labels.twice
    return Noise(values=label.size, mape=mape(label, again)) if label.size else None
