"""How accurate the predictions are: errors against the noise of measuring, predicted against measured, learning curves."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import CollectiveCost, ComputeCost, Costs
from neuroshard.core.errors import InvalidInput
from neuroshard.core.label import labels, rounds_of
from neuroshard.core.part import Part
from neuroshard.costmodel.protocol import CostModel
from neuroshard.costmodel.report import ModelReport
from neuroshard.models.open import at_batch_size
from neuroshard.report.numbers import Columns, short

MOST_POINTS = 1000  # of a chart and split, evenly spaced, so that the page stays small
SPLITS = {"test_sets": "unseen sets", "test_tables": "unseen tables"}
ALL_TO_ALLS = "unseen all-to-alls"


class Point(NamedTuple):
    """One measured time, and its prediction, in ms."""

    split: str
    tables: int  # of a table set; for an all-to-all, devices
    measured_ms: float
    predicted_ms: float


def error_rows(report: ModelReport) -> list[dict[str, Any]]:
    """A row for each net and split of unseen cases: the mean error of predictions, and the noise of the labels."""
    rows = []
    for net in report.nets:
        noise = net.label_noise.mape if net.label_noise else None
        for split, errors in net.splits.items():
            if errors is not None:
                unseen = SPLITS.get(split, split) if net.devices is None else ALL_TO_ALLS
                row = {"net": net.name, "split": unseen, "noise": noise}
                rows.append({**row, "error": errors.mape, "values": errors.values, "tau": errors.kendall_tau})
    return rows


def curves(report: ModelReport) -> list[dict[str, Any]]:
    """The learning curves of the nets that have them. The all-to-all net of all numbers of devices is listed once."""
    found: dict[str, dict[str, Any]] = {}
    for net in report.nets:
        if net.fit.valid_errors:
            errors = {"train": short(net.fit.train_errors), "valid": short(net.fit.valid_errors)}
            found.setdefault(net.kind, {"net": net.kind, **errors, "best": net.fit.best_epoch})
    return list(found.values())


def points(model: CostModel, costs: Costs) -> dict[str, Columns]:
    """Predicted and measured ms of unseen cases, by chart. Raises InvalidInput for costs of another bench."""
    assert model.manifest is not None
    bench, learned = costs.bench, model.manifest.bench
    if (bench.backend, bench.hardware.fingerprint) != (learned.backend, learned.hardware.fingerprint):
        raise InvalidInput(
            f"the costs were measured on {bench.hardware.name} ({bench.backend}), the cost model is of "
            f"{learned.hardware.name} ({learned.backend}); give the costs that it was trained on"
        )
    charts: dict[str, list[Point]] = {"compute": list(_compute_points(model, costs.compute, bench.batch_size))}
    charts |= {"forward all-to-all": [], "backward all-to-all": []}
    for forward, backward in _all_to_all_points(model, costs.collective, bench.batch_size):
        charts["forward all-to-all"].append(forward)
        charts["backward all-to-all"].append(backward)
    return {name: _columns(found, name == "compute") for name, found in charts.items() if found}


def _compute_points(
    model: CostModel, rows: Sequence[tuple[ComputeCase, ComputeCost]], batch_size: int
) -> Iterator[Point]:
    unseen = [(case, cost) for case, cost in labels(rounds_of(rows)) if case.split in SPLITS]
    for batch in sorted({case.batch_size or batch_size for case, _ in unseen}):
        some = [(case, cost) for case, cost in unseen if (case.batch_size or batch_size) == batch]
        at = at_batch_size(model, batch)
        vectors = at.part_vectors([Part.of(table) for case, _ in some for table in case.tables])
        firsts = np.cumsum([0, *(len(case.tables) for case, _ in some)])[:-1]
        predicted = at.compute_ms(np.add.reduceat(vectors, firsts, axis=0))
        for (case, cost), ms in zip(some, predicted.tolist(), strict=True):
            yield Point(case.split, len(case.tables), cost.total_ms, ms)


def _all_to_all_points(
    model: CostModel, rows: Sequence[tuple[CollectiveCase, CollectiveCost]], batch_size: int
) -> Iterator[tuple[Point, Point]]:
    """Forward and backward ms of the slowest device of every unseen all-to-all."""
    assert model.manifest is not None
    per_sample = batch_size / model.batch_size  # an all-to-all costs by bytes: columns times samples
    for case, cost in labels(rounds_of(rows)):
        known = len(case.device_dims) in model.manifest.device_counts
        if not known or case.split not in SPLITS or cost.forward_ms is None or cost.backward_ms is None:
            continue
        dims, delays = np.array(case.device_dims) * per_sample, np.array(case.start_delays_ms)
        ways = (
            (cost.forward_ms, model.forward_collective_ms(dims, delays)),
            (cost.backward_ms, model.backward_collective_ms(dims)),
        )
        forward, backward = (
            Point(case.split, len(dims), max(took), float(predicted.max())) for took, predicted in ways
        )
        yield forward, backward


def _columns(found: list[Point], of_sets: bool) -> Columns:
    kept: list[Point] = []
    for split in SPLITS:
        some = [point for point in found if point.split == split]
        kept += some[:: -(-len(some) // MOST_POINTS) or 1]
    return {
        "split": [SPLITS[point.split] if of_sets else ALL_TO_ALLS for point in kept],
        "size": [point.tables for point in kept],
        "measured": short(point.measured_ms for point in kept),
        "predicted": short(point.predicted_ms for point in kept),
    }
