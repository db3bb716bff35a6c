"""How accurate the predictions are: errors against the noise of measuring, predicted against measured, learning curves, and the
evaluation of a plan on real hardware, as `neuroshard evaluate -o evaluation.json` writes it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, Costs
from neuroshard.core.errors import InvalidInput
from neuroshard.core.label import labels, rounds_of
from neuroshard.core.part import Part
from neuroshard.core.plan import DeviceCost, Plan
from neuroshard.core.text import counted
from neuroshard.core.value import Value, check_format, decode_json
from neuroshard.costmodel.protocol import CostModel
from neuroshard.costmodel.report import ModelReport
from neuroshard.files.disk import read_bytes
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


def error_columns(report: ModelReport) -> Columns:
    """A value for each net and split of unseen cases: the mean error of predictions, and the noise of the labels."""
    rows = [
        (net.name, SPLITS.get(split, split) if net.devices is None else ALL_TO_ALLS, net.label_noise, errors)
        for net in report.nets
        for split, errors in net.splits.items()
        if errors is not None
    ]
    return {
        "what": [f"compute, {split}" if name == "compute" else name for name, split, *_ in rows],
        "split": [split for _, split, *_ in rows],
        "noise": [None if noise is None else noise.mape for *_, noise, _ in rows],
        "error": [errors.mape for *_, errors in rows],
        "values": [errors.values for *_, errors in rows],
        "tau": [errors.kendall_tau for *_, errors in rows],
    }


def curves(report: ModelReport) -> dict[str, dict[str, Columns]]:
    """The learning curves of the nets that have them, by the titles of their charts; `kept` is the epoch that was. The all-to-all
    net of all numbers of devices is listed once."""
    fits = {net.kind: net.fit for net in reversed(report.nets) if net.fit.valid_errors}
    found = {}
    for kind, fit in reversed(fits.items()):
        errors = {"in training": short(fit.train_errors), "held out": short(fit.valid_errors)}
        epochs = [*range(1, len(fit.train_errors) + 1)]
        kept = [epoch == fit.best_epoch for epoch in epochs]
        found[f"{kind}, epoch {fit.best_epoch} of {len(epochs)}"] = {"curve": {"epoch": epochs, "kept": kept, **errors}}
    return found


def points(model: CostModel, costs: Costs) -> dict[str, dict[str, Columns]]:
    """Predicted and measured ms of unseen cases, by chart, and the `ends` of the line where both are equal. Raises InvalidInput
    for costs of another bench."""
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
    nets = model.manifest.report.nets
    noises = {
        name: max((net.label_noise.mape for net in nets if net.name.startswith(name) and net.label_noise), default=0.0)
        for name in charts
    }
    return {name: _columns(found, name, noises[name]) for name, found in charts.items() if found}


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


def _columns(found: list[Point], chart: str, noise: float) -> dict[str, Columns]:
    kept: list[Point] = []
    for split in SPLITS:
        some = [point for point in found if point.split == split and point.measured_ms > 0 and point.predicted_ms > 0]
        kept += some[:: -(-len(some) // MOST_POINTS) or 1]
    of_sets = chart == "compute"
    points: Columns = {
        "split": [SPLITS[point.split] if of_sets else ALL_TO_ALLS for point in kept],
        "size": [counted(point.tables, "table" if of_sets else "device") for point in kept],
        "measured": short(point.measured_ms for point in kept),
        "predicted": short(point.predicted_ms for point in kept),
    }
    all_ms = [*points["measured"], *points["predicted"]]
    ends = [min(all_ms, default=1.0), max(all_ms, default=1.0)]
    low, high = (short(ms * (1 + side * noise) for ms in ends) for side in (-2, 2))
    return {"points": points, "ends": {"ms": ends, "low": low, "high": high}}


class EvaluatedDevice(Value):
    """The measured cost of one device; None where measuring failed."""

    device: int
    measured: DeviceCost | None = None


class Evaluated(Value):
    """The part of an evaluation that the page shows. Without a measured all-to-all, only compute is compared."""

    plan_digest: str
    bench: Bench
    all_to_all_measured: bool
    devices: tuple[EvaluatedDevice, ...]

    @property
    def what(self) -> str:
        """What was measured, and on which hardware."""
        part = "" if self.all_to_all_measured else "compute alone, "
        return f"{part}{self.how} {'by' if self.how == 'computed' else 'on'} {self.bench.hardware.name}"

    @property
    def how(self) -> str:
        """`measured`, or `computed` for the costs of a formula."""
        return "computed" if self.bench.backend == "synthetic" else "measured"

    def ms(self) -> list[float | None]:
        """Measured ms of each device: the total, or only the compute."""
        return [None if one.measured is None else self._part(one.measured) for one in self.devices]

    def predicted_ms(self, plan: Plan) -> list[float]:
        """The same part of the predicted ms; empty where the plan does not carry the parts."""
        return [self._part(cost) for cost in plan.predicted or ()]

    def _part(self, cost: DeviceCost) -> float:
        return cost.total_ms if self.all_to_all_measured else cost.compute_ms


def read_evaluation(path: Path, plan: Plan) -> Evaluated:
    """Read the evaluation of this plan. Raises InvalidInput in one line."""
    raw = check_format(decode_json(read_bytes(path), str(path)), 1, str(path))
    found = Evaluated.parse(raw, str(path))
    if found.plan_digest != plan.digest():
        raise InvalidInput(
            f"{path}: is of plan {found.plan_digest[:12]}, not {plan.digest()[:12]}; run `neuroshard evaluate` on this plan"
        )
    if [one.device for one in found.devices] != list(range(plan.task.devices)):
        raise InvalidInput(f"{path}: must list devices 0 to {plan.task.devices - 1}, each once and in order")
    return found
