"""A trained net against what was measured: its report."""

from collections.abc import Callable, Sequence

import numpy as np

from neuroshard.core.case import CommCase, ComputeCase, Split
from neuroshard.costmodel.features import table_features
from neuroshard.costmodel.nets import ComputeNet, ExchangeNet
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.report import SET_SIZES, Errors, Fit, NetReport, Noise, SizeError
from neuroshard.pretrain.labels import Case, Labels
from neuroshard.pretrain.metrics import errors, mape


def compute_report(net: ComputeNet, labels: Labels[ComputeCase], batch_size: int, fit: Fit) -> NetReport:
    """Errors of the compute net on unseen sets and on unseen tables, also by the number of tables in a set."""

    def predict(cases: Sequence[ComputeCase]) -> Floats:
        tables = [table for case in cases for table in case.tables]
        vectors = net.vectors(table_features(tables, np.array([table.dim for table in tables]), batch_size))
        starts = np.cumsum([0, *(len(case.tables) for case in cases)])[:-1]
        return net.ms(np.add.reduceat(vectors, starts, axis=0))

    held_out = labels.of_split("test_sets", "test_tables")
    tables = np.array([len(labels.cases[i].tables) for i in held_out])
    by_size = []
    for fewest, most in SET_SIZES:
        places = held_out[(tables >= fewest) & (tables <= (most or np.inf))]
        if len(places):
            error = mape(labels.ms[places], predict([labels.cases[i] for i in places]))
            by_size.append(SizeError(fewest=fewest, most=most, values=len(places), mape=error))
    return NetReport(
        kind="compute",
        fit=fit,
        splits=_by_split(labels, predict, "test_sets", "test_tables"),
        by_size=tuple(by_size),
        label_noise=_noise(labels),
    )


def exchange_report(net: ExchangeNet, labels: Labels[CommCase], fit: Fit) -> NetReport:
    """Errors of an exchange net on unseen exchanges, over all devices of all of them."""
    forward = net.scale.unit_delay_ms is not None

    def predict(cases: Sequence[CommCase]) -> Floats:
        dims = np.array([case.device_dims for case in cases], dtype=np.float64)
        return net.ms(dims, np.array([case.start_delays_ms for case in cases]) if forward else None)

    return NetReport(
        kind="forward exchange" if forward else "backward exchange",
        devices=labels.ms.shape[1],
        fit=fit,
        splits=_by_split(labels, predict, "test_sets"),
        label_noise=_noise(labels),
    )


def _by_split(
    labels: Labels[Case], predict: Callable[[Sequence[Case]], Floats], *splits: Split
) -> dict[Split, Errors | None]:
    found: dict[Split, Errors | None] = {}
    for split in splits:
        places = labels.of_split(split)
        found[split] = errors(labels.ms[places], predict([labels.cases[i] for i in places])) if len(places) else None
    return found


def _noise(labels: Labels[Case]) -> Noise | None:
    label, again = labels.twice
    return Noise(values=label.size, mape=mape(label, again)) if label.size else None
