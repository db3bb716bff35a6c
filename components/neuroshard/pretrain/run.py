"""Room 3: measured costs -> a cost model, and how far it can be trusted.

    neuroshard pretrain costs/ -o model/

It trains one compute net, one forward and one backward all-to-all net, the latter two for all numbers of devices. A run that
was killed continues from its checkpoints when it is started again.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from neuroshard import __version__
from neuroshard.core.case import CollectiveCase, ComputeCase, Split
from neuroshard.core.cost import CollectiveCost, Costs
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.label import Case, teaches
from neuroshard.core.value import canonical_json, sha256, shown
from neuroshard.costmodel.all_to_all_net import AllToAllNet
from neuroshard.costmodel.bundle import TrainedCostModel, cost_model, save_cost_model
from neuroshard.costmodel.compute_net import ComputeNet
from neuroshard.costmodel.manifest import MODEL_FORMAT, TrainedFrom
from neuroshard.costmodel.nets import Nets
from neuroshard.costmodel.protocol import Ints
from neuroshard.costmodel.report import STAND_IN_ERROR, Deviations, ModelReport, NetReport
from neuroshard.files.costs import read_costs
from neuroshard.files.disk import check_can_write, only_writer
from neuroshard.pretrain.all_to_all import WAYS, Way, predicted_ms, train_all_to_all
from neuroshard.pretrain.calibrate import calibrated
from neuroshard.pretrain.checkpoint import Checkpoint
from neuroshard.pretrain.compute import ComputeTraining, train_compute
from neuroshard.pretrain.evaluate import all_to_all_report, compute_report, log_errors, set_sums
from neuroshard.pretrain.labels import (
    Labels,
    check_one_time_a_device,
    check_unseen,
    collect,
    mape,
)
from neuroshard.pretrain.stand_in import (
    SETS,
    Compared,
    Completed,
    LearnedPart,
    all_to_alls_error,
    completed,
    of_ranks,
    sets_error,
    wanted_ranks,
)
from neuroshard.pretrain.tiers import learn_tiers
from neuroshard.pretrain.train import one_thread

STAND_IN_EPOCHS: Final = 120  # after which a net is within 3 % of the analytic model
FEWEST_COMPARED: Final = 6  # held-back cases needed to compare a net with the analytic model
HELD_BACK: Final[tuple[Split, ...]] = ("valid", "test_sets", "test_tables")
UNFINISHED: Final = ".training"  # folder of checkpoints inside the output folder, removed when the model is written


@dataclass(frozen=True)
class Training:
    """Settings that all nets of a run share. Checkpoints are written into `folder`, if there is one."""

    seed: int
    epochs: int | None
    monotone: bool
    start: TrainedCostModel | None
    folder: Path | None

    def brief_if(self, stands_in: bool) -> "Training":
        """With fewer epochs for a net that learns the analytic model: its labels have no noise."""
        return replace(self, epochs=self.epochs or STAND_IN_EPOCHS) if stands_in else self

    def generator(self, net: str) -> torch.Generator:
        """The random generator of one net, so that a net that is already trained does not change the next."""
        return torch.Generator().manual_seed(int(sha256(f"{self.seed} {net}".encode())[:15], 16))

    def checkpoint(self, net: str, labels: Sequence[Labels[Any]], places: Sequence[Ints]) -> Checkpoint:
        """The checkpoint of a net, keyed by its labels and settings."""
        if self.folder is None:
            return Checkpoint(None)
        start = self.start.name if self.start else ""
        facts = [net, self.seed, self.epochs, self.monotone, start, MODEL_FORMAT, __version__, torch.__version__]
        cases = [[case.case_id for case in one.cases] for one in labels]
        numbers = b"".join(
            array.tobytes() for array in (*(one.ms for one in labels), *(one.parts for one in labels), *places)
        )
        key = sha256(canonical_json([*facts, *cases]) + numbers)
        return Checkpoint(self.folder / f"{net}.safetensors", key)


def run(
    costs: Path,
    out: Path,
    *more: Path,
    seed: int = 0,
    epochs: int | None = None,
    monotone: bool = True,
    start: TrainedCostModel | None = None,
    ranks: Sequence[int] = (),
) -> TrainedCostModel:
    """Read costs from the folder `costs` and from `more` of the same bench; write the cost model into the folder `out`.

    `start` is a cost model to start from. `ranks` adds numbers of ranks whose all-to-all the model must predict, to those of the
    costs. Raises what `pretrain` raises, and InvalidInput if another run trains into `out`. A killed run leaves checkpoints in
    `out`; the next run with the same costs and settings continues from them and writes the same model.
    """
    check_can_write(out, folder=True)
    measured = read_costs(costs, *more)
    measured = measured.model_copy(update={"device_counts": tuple(sorted({*measured.device_counts, *ranks} - {1}))})
    with only_writer(out, "a cost model"):
        checkpoints = out / UNFINISHED
        model = pretrain(measured, seed=seed, epochs=epochs, monotone=monotone, start=start, checkpoints=checkpoints)
        save_cost_model(out, model)
        shutil.rmtree(checkpoints, ignore_errors=True)
    return model


def pretrain(
    costs: Costs,
    *,
    seed: int = 0,
    epochs: int | None = None,
    monotone: bool = True,
    start: TrainedCostModel | None = None,
    checkpoints: Path | None = None,
) -> TrainedCostModel:
    """Train on the split `train`, choose the best epoch by `valid`, report the errors on the test splits.

    The predicted deviation is calibrated on all cases but those trained on. It is tested on `test_tables`, for each case scaled
    without those that have one of its tables.

    `epochs` is an upper limit; by default it follows from the number of cases, and training stops early once the error on `valid`
    no longer falls. Without `monotone` an added table may lower a prediction, and a search then proves no lower bound. `start` is
    a cost model of other hardware or older costs, whose compute net is the starting point. `checkpoints` is a folder to continue
    from.

    Where a part has too few measurements, the fitted analytic model answers for it (stand_in.py), as it does where a net predicts
    the cases held back worse than it; the report says so. So of two answers the one is taken that the tests, too, find better.

    The same costs, seed and settings give the same bytes on one machine. Raises InvalidInput if there are neither costs nor
    tables, or if a test table occurs in training. Whatever else is missing is listed in the report's gaps.
    """
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs must be at least 1, not {epochs}")
    check_unseen(case for case, _ in costs.compute)
    check_one_time_a_device(costs.collective)
    training = Training(seed, epochs, monotone, start, checkpoints)
    beyond = learn_tiers(costs)

    with one_thread():
        known = completed(costs, seed)
        sets = _compute_net(known, training)
        transfers = {way: _all_to_all_net(known, way, training) for way in WAYS}
        if start is None and epochs is None:  # otherwise the caller wants that net
            known = completed(costs, seed, _worse_than_datasheet(known, sets, transfers))
            if SETS in known.worse:
                sets = _compute_net(known, training)
            for way in {part[0] for part in known.worse if isinstance(part, tuple)}:
                transfers[way] = _all_to_all_net(known, way, training)
    compute = sets.net
    if SETS in known.guessed:  # it was calibrated on drawn cases, which have no measuring error
        compute = replace(compute, least_spread=max(compute.least_spread, STAND_IN_ERROR))
    forward, backward = (_with_spread(transfers[way].net, way, known) for way in WAYS)
    device_counts = tuple(sorted({len(case.device_dims) for case, _ in known.all_to_alls["forward"]}))

    return cost_model(
        Nets(compute, forward, backward),
        costs.bench,
        ModelReport(
            nets=(
                sets.report,
                *(one for both in zip(*(transfers[way].reports for way in WAYS), strict=True) for one in both),
            ),
            left_out=sum(not teaches(cost) for _, cost in costs.every),
            gaps=(
                *(() if device_counts else ("no all-to-all was asked for: plans for one device only",)),
                *beyond.gaps,
            ),
            stand_ins=known.stand_ins,
            compute_stands_in=SETS in known.guessed,
            datasheet_better=known.better,
            tiers=beyond.errors,
            deviations=sets.deviations,
        ),
        TrainedFrom(
            neuroshard_version=__version__,
            seed=seed,
            compute_cases=len({cost.case_id for _, cost in costs.compute if teaches(cost)}),
            collective_cases=len({cost.case_id for _, cost in costs.collective if teaches(cost)}),
            started_from=None if start is None else start.name,
        ),
        max_dim=sets.max_dim,
        batch_sizes=sets.batch_sizes,
        device_counts=device_counts,
        tiers=beyond.tiers,
    )


class _Sets(NamedTuple):
    """The compute net, the width of the widest table and the batch sizes of its training, its report, and what its deviations
    lack."""

    net: ComputeNet
    max_dim: int
    batch_sizes: tuple[int, ...]
    report: NetReport
    deviations: Deviations


class _Transfers(NamedTuple):
    """The all-to-all net of one direction, and a report for each number of ranks. Without all-to-alls there are none."""

    net: AllToAllNet | None
    reports: tuple[NetReport, ...]


def _compute_net(known: Completed, training: Training) -> _Sets:
    costs, training = known.costs, training.brief_if(SETS in known.drawn)
    labels = collect(costs.compute, lambda cost: cost.total_ms)
    if not len(labels.of_split("train")):
        errors = [cost.error for _, cost in costs.compute if cost.error]
        why = f"{len(errors)} of {len(costs.compute)} rows are errors"
        if zeros := sum(not teaches(cost) for _, cost in costs.compute) - len(errors):
            why += f", {zeros} take 0 ms"
        first = f", the first: {shown(errors[0], 200)}" if errors else ""
        raise InvalidInput(f"no set of tables of the train split was measured ({why}{first}); measure more cases")
    generator = training.generator("compute")
    train, valid = _train_and_valid(labels, generator)

    batch_sizes = np.array([case.batch_size or costs.bench.batch_size for case in labels.cases])
    how = ComputeTraining(
        training.epochs,
        training.monotone,
        training.start.nets.compute if training.start else None,
        training.checkpoint("compute", [labels], [batch_sizes, train, valid]),
    )
    net, fit = train_compute(labels, batch_sizes, train, valid, generator, how)
    held_back = _measured(labels, known.measured, valid)
    sums = set_sums(net, [labels.cases[i] for i in held_back], batch_sizes[held_back])
    predicted = net.ms(sums)
    off = log_errors(predicted, labels.ms[held_back])
    net, deviations = calibrated(net, off, net.disagreements(sums), predicted)
    max_dim = max(table.dim for i in train for table in labels.cases[i].tables)
    measured = tuple(np.unique(batch_sizes[train]).tolist())
    report = compute_report(net, labels, batch_sizes, fit, held_back, deviations.least_ms)
    return _Sets(net, max_dim, measured, report, deviations)


def _all_to_all_net(known: Completed, way: Way, training: Training) -> _Transfers:
    by_devices: dict[int, list[tuple[CollectiveCase, CollectiveCost]]] = {}
    for case, cost in known.all_to_alls[way]:
        by_devices.setdefault(len(case.device_dims), []).append((case, cost))
    if not by_devices:
        return _Transfers(None, ())
    labels = [collect(rows, attrgetter(f"{way}_ms")) for _, rows in sorted(by_devices.items())]
    generator = training.generator(way)
    splits = [_train_and_valid(one, generator) for one in labels]
    places = [train for train, _ in splits], [valid for _, valid in splits]
    checkpoint = training.checkpoint(way, labels, [*places[0], *places[1]])
    batch_size = known.costs.bench.batch_size
    net, fit = train_all_to_all(labels, places, batch_size, way, training.epochs, generator, checkpoint)
    return _Transfers(net, tuple(all_to_all_report(net, one, batch_size, way, fit) for one in labels))


def _with_spread(net: AllToAllNet | None, way: Way, known: Completed) -> AllToAllNet | None:
    """The net with at least the deviation of the analytic model where that answers: on held-back cases, where there are any."""
    drawn = {STAND_IN_ERROR for part in known.guessed if part[0] == way}
    drawn |= {errors.datasheet for part, errors in known.worse.items() if part[0] == way}
    return net if net is None else replace(net, spread=max(net.spread, *drawn, 0.0))


def _worse_than_datasheet(
    known: Completed, sets: _Sets, transfers: dict[Way, _Transfers]
) -> dict[LearnedPart, Compared]:
    """The parts whose net predicts the measured cases that were held back worse than the fitted analytic model does."""
    costs, found = known.measured, dict[LearnedPart, Compared]()
    compute = collect(costs.compute, lambda cost: cost.total_ms)
    places = compute.of_split(*HELD_BACK)
    cases, batch_size = [compute.cases[place] for place in places], costs.bench.batch_size
    if len(places) >= FEWEST_COMPARED and SETS not in known.guessed:
        batch_sizes = np.array([case.batch_size or batch_size for case in cases])
        of_net = mape(compute.ms[places], sets.net.ms(set_sums(sets.net, cases, batch_sizes)))
        found[SETS] = Compared(sets_error(costs, cases, compute.ms[places]), of_net, len(places))
    for way, ranks in product(WAYS, wanted_ranks(costs)):
        labels, net = collect(of_ranks(costs, ranks), attrgetter(f"{way}_ms")), transfers[way].net
        places = labels.of_split(*HELD_BACK)
        if net is None or len(places) < FEWEST_COMPARED or (way, ranks) in known.guessed:
            continue
        some = [labels.cases[place] for place in places]
        of_net = mape(labels.ms[places], predicted_ms(net, some, batch_size, way))
        found[way, ranks] = Compared(all_to_alls_error(costs, some, labels.ms[places], way), of_net, len(places))
    return {part: errors for part, errors in found.items() if errors.datasheet < errors.net}


def _measured(labels: Labels[ComputeCase], costs: Costs, valid: Ints) -> Ints:
    """Places of the cases held back, to calibrate deviations on: of the measured ones, unless these are too few."""
    held_back = np.concatenate([valid, labels.of_split("test_sets", "test_tables")])
    measured = {case.case_id for case, _ in costs.compute}
    found = held_back[[labels.cases[place].case_id in measured for place in held_back]]
    return found if len(found) >= FEWEST_COMPARED else held_back


def _train_and_valid(labels: Labels[Case], generator: torch.Generator) -> tuple[Ints, Ints]:
    """Places of the cases to train on, and to choose the best epoch by: without `valid` cases, a tenth of the former."""
    train, valid = labels.of_split("train"), labels.of_split("valid")
    if len(valid) or len(train) < 2:
        return train, valid if len(valid) else train
    shuffled = train[torch.randperm(len(train), generator=generator).numpy()]
    held_out = max(len(train) // 10, 1)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])
