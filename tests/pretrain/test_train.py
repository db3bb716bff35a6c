"""Training: what the tensors hold, and that NumPy predicts what PyTorch learned."""

from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
import torch

from helpers.parts import wholes
from neuroshard.core.table import Table
from neuroshard.costmodel.compute_net import BY_BYTES, BY_DIGITS, BY_ROWS, BYTES, COUNTED_IN
from neuroshard.costmodel.features import TOUCHED_COLUMN, part_features
from neuroshard.pretrain.all_to_all import AllToAllSamples, predicted_ms, train_all_to_all
from neuroshard.pretrain.compute import (
    FEWEST_EACH_SIDE,
    WEIGHT_DECAY,
    ComputeTraining,
    SetSamples,
    _Ensemble,
    train_compute,
)
from neuroshard.pretrain.evaluate import set_sums
from neuroshard.pretrain.labels import collect
from neuroshard.pretrain.train import Net, Recipe, fit_net, kept_positive, one_thread

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sets(costs):
    return collect(costs.compute[:40], lambda cost: cost.total_ms)


@pytest.fixture(scope="module")
def all_to_alls(costs):
    rows = [[row for row in costs.collective if len(row[0].device_dims) == devices][:40] for devices in (2, 4)]
    return {way: [collect(some, attrgetter(f"{way}_ms")) for some in rows] for way in ("forward", "backward")}


PLACES = np.arange(30), np.arange(30, 40)
BATCHES = np.full(40, 65536)


def test_a_batch_holds_the_tables_of_its_cases_and_no_other(sets):
    samples = SetSamples(sets, BATCHES, PLACES[0])

    features, _, places, cases = samples.inputs(torch.tensor([7, 3]))

    counts = [len(sets.cases[i].tables) for i in (7, 3)]
    starts = np.cumsum([0, *(len(case.tables) for case in sets.cases)])
    expected = torch.cat([samples.features[starts[i] : starts[i + 1]] for i in (7, 3)])
    assert int(cases) == 2
    assert places.tolist() == [0] * counts[0] + [1] * counts[1]
    assert torch.equal(features, expected)


def test_rows_of_an_all_to_all_are_its_devices_with_their_labels_and_waits(all_to_alls):
    labels = all_to_alls["forward"]
    samples = AllToAllSamples(labels, [PLACES[0]] * 2, 65536, way="forward")

    chosen = torch.tensor([3, 45])  # of 40 cases with 2 devices, then 40 with 4
    features, _, waits = samples.inputs(chosen)

    pair, four = labels[0].cases[3], labels[1].cases[5]
    assert features.shape == (6, 21)
    expected = [max(case.start_delays_ms) - delay for case in (pair, four) for delay in case.start_delays_ms]
    assert (waits * samples.unit_ms).tolist() == pytest.approx(expected, abs=1e-4)
    measured = np.concatenate([labels[0].ms[3], labels[1].ms[5]])
    assert (samples.measured(chosen)[0] * samples.unit_ms).tolist() == pytest.approx(measured, rel=1e-5)
    sent = [dims * (1 - 1 / len(case.device_dims)) for case in (pair, four) for dims in case.device_dims]
    assert (features[:, 0] * samples.unit_bytes / 65536 / 4).tolist() == pytest.approx(sent, rel=1e-5)


@pytest.fixture(scope="module")
def many(costs):
    return collect(costs.compute[:300], lambda cost: cost.total_ms)


def test_the_learning_rate_falls_to_next_to_nothing_in_the_last_step(many, monkeypatch):
    """257 cases are no whole number of batches."""
    rates, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda one, *_: rates.append(one.param_groups[0]["lr"]) or step(one))
    places = np.arange(257), np.arange(257, 300)
    train_compute(many, np.full(300, 65536), *places, torch.Generator(), ComputeTraining(epochs=2))
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.01 * rates[0]


def test_rates_are_learned_where_enough_cases_lie_on_both_sides_of_a_threshold(many):
    batches, train, valid = np.full(300, 65536), np.arange(250), np.arange(250, 300)
    net, _ = train_compute(many, batches, train, valid, torch.Generator().manual_seed(0), ComputeTraining(epochs=3))
    rows = np.array([sum(table.rows for table in case.tables) for case in many.cases])[train]
    touched = np.array([_touched_bytes(case.tables) for case in many.cases])[train]

    by_digits = [min((rows >= t).sum(), (rows <= 64 / 65 * t).sum()) >= FEWEST_EACH_SIDE for t in BY_DIGITS]
    by_bytes = [min((touched >= t).sum(), (touched <= 0.25 * t).sum()) >= FEWEST_EACH_SIDE for t in BY_BYTES]

    assert 3 < sum(by_digits) < 20
    assert 1 < sum(by_bytes) < 10
    assert net.rates.any(axis=(0, 1)).tolist() == [False] * len(BY_ROWS) + by_bytes + by_digits
    assert net.monotone


def test_few_tables_teach_no_rates_by_bytes_nor_steps(many):
    names = sorted({table.name for case in many.cases for table in case.tables})[:20]
    few = [
        case.model_copy(update={"tables": tuple(t.model_copy(update={"name": names[i % 20]}) for t in case.tables)})
        for i, case in enumerate(many.cases)
    ]
    same, batches, places = replace(many, cases=tuple(few)), np.full(300, 65536), (np.arange(250), np.arange(250, 300))
    net, _ = train_compute(same, batches, *places, torch.Generator(), ComputeTraining(epochs=1))
    begun, _ = train_compute(many, batches, *places, torch.Generator(), ComputeTraining(epochs=1))
    begun, _ = train_compute(same, batches, *places, torch.Generator(), ComputeTraining(epochs=1, start=begun))

    assert net.rates[..., : len(BY_ROWS)].any()
    assert not net.rates[..., len(BY_ROWS) :].any()
    assert begun.rates[..., : len(BY_ROWS)].any()
    assert not begun.rates[..., -len(BY_DIGITS) :].any()


def _touched_bytes(tables):
    features = part_features(wholes(tables), 65536)
    return features[:, TOUCHED_COLUMN].sum() * 2**30


@pytest.mark.parametrize(
    ("pooling_factor", "by_bytes"), [(1.0, True), (1e6, False)], ids=["rows alike", "rows and bytes alike"]
)
def test_where_all_cases_are_alike_there_are_no_rates(many, pooling_factor, by_bytes):
    huge = Table(name="huge", rows=10**9, dim=128, pooling_factor=pooling_factor)
    with_it = [case.model_copy(update={"tables": (*case.tables, huge)}) for case in many.cases]
    same = replace(many, cases=tuple(with_it))
    net, _ = train_compute(
        same, np.full(300, 65536), np.arange(250), np.arange(250, 300), torch.Generator(), ComputeTraining(epochs=1)
    )

    assert (net.rates is not None) == by_bytes
    if net.rates is not None:
        assert not net.rates[..., : len(BY_ROWS)].any()
        assert not net.rates[..., -len(BY_DIGITS) :].any()
    assert net.rates is None or (COUNTED_IN[net.mean.used] == BYTES).all()


@pytest.mark.parametrize("before", [40, 300])
def test_a_net_with_rates_begins_from_one_with_or_without(many, before):
    batches, generator = np.full(300, 65536), torch.Generator().manual_seed(0)
    first, _ = train_compute(
        many, batches, np.arange(30 * before // 40), np.arange(before), generator, ComputeTraining(epochs=30)
    )
    net, _ = train_compute(
        many, batches, np.arange(250), np.arange(250, 300), generator, ComputeTraining(epochs=1, start=first)
    )

    off = np.log(net.ms(set_sums(net, many.cases, batches)) / many.ms)

    assert (first.rates is None) == (before == 40)
    assert net.rates is not None
    assert np.abs(off).mean() < 0.3


def test_of_few_cases_a_net_keeps_the_rates_that_it_begins_with(many):
    batches, generator = np.full(300, 65536), torch.Generator().manual_seed(0)
    first, _ = train_compute(many, batches, np.arange(250), np.arange(250, 300), generator, ComputeTraining(epochs=3))
    net, _ = train_compute(
        many, batches, np.arange(30), np.arange(30, 40), generator, ComputeTraining(epochs=1, start=first)
    )

    assert (net.rates.any(axis=(0, 1)) == first.rates.any(axis=(0, 1))).all()


def test_rates_of_few_tables_go_on_as_steps_with_many(many):
    batches, generator = np.full(300, 65536), torch.Generator().manual_seed(0)
    first, _ = train_compute(many, batches, np.arange(250), np.arange(250, 300), generator, ComputeTraining(epochs=3))
    rates = np.zeros_like(first.rates)
    rates[..., 5] = 1e-3
    slow = replace(first, rates=rates)
    net, _ = train_compute(
        many, batches, np.arange(250), np.arange(250, 300), generator, ComputeTraining(epochs=1, start=slow)
    )

    begun = np.asarray(net.rates.any(axis=(0, 1)))
    assert not begun[: len(BY_ROWS)].any()
    assert begun[-len(BY_DIGITS) :][5]
    assert (begun | ~first.rates.any(axis=(0, 1))).all()


@pytest.mark.parametrize("monotone", [True, False])
def test_with_rates_numpy_predicts_what_the_ensemble_does(many, monotone):
    generator, train = torch.Generator().manual_seed(0), np.arange(300)
    samples = SetSamples(many, np.full(300, 65536), train)
    ensemble = _Ensemble(generator, monotone, samples.floor, samples.learnable(train))
    net = ensemble.as_numpy(samples.scale, samples.unit_ms)

    with torch.no_grad():
        predicted, *parts = ensemble(*samples.inputs(torch.from_numpy(train))).mean(0).numpy() * samples.unit_ms

    assert net.ms(set_sums(net, many.cases, np.full(300, 65536))) == pytest.approx(predicted, rel=1e-3)
    assert sum(parts) == pytest.approx(predicted, rel=1e-3)


class OneNumber(Net):
    """Predicts the same for every case."""

    def __init__(self):
        super().__init__()
        self.ms = torch.nn.Parameter(torch.tensor([1.0]))

    def forward(self, cases):
        return self.ms.expand(1, 1, len(cases))


class LeadAway:
    """Training labels that lead away from what is right for the valid cases, the last two."""

    unit_ms = 1.0

    def inputs(self, cases):
        return (cases,)

    def measured(self, cases):
        return torch.tensor([10.0] * 8 + [1.1] * 2)[cases][None]


def test_the_net_is_that_of_the_best_epoch():
    net = OneNumber()

    fit = fit_net("test", net, LeadAway(), (np.arange(8), np.arange(8, 10)), Recipe(100), torch.Generator())

    # Adam moves about 0.005 a step, so 1.1 is reached after about 20, by the running mean after about 40; then the error
    # rises until patience ends
    assert (fit.train_cases, fit.valid_cases) == (8, 2)
    assert 20 < fit.best_epoch < fit.epochs < 100
    assert len(fit.train_errors) == len(fit.valid_errors) == fit.epochs
    assert np.argmin(fit.valid_errors) + 1 == fit.best_epoch
    assert fit.train_errors[-1] < fit.train_errors[0]
    assert float(net.ms.detach()) == pytest.approx(1.1, abs=0.01)


class TwoNumbers(Net):
    """A whole, and a part that it knows nothing of."""

    def __init__(self):
        super().__init__()
        self.ms = torch.nn.Parameter(torch.tensor([1.0, 1.0]))

    def forward(self, cases):
        return self.ms[None, :, None].expand(1, 2, len(cases))


class WholeAndPart:
    unit_ms = 1.0

    def inputs(self, cases):
        return (cases,)

    def measured(self, cases):
        return torch.tensor([[1.0], [0.5]]).expand(2, len(cases))


def test_what_a_cost_is_made_of_is_learned_too_but_tells_no_error():
    net = TwoNumbers()

    fit = fit_net("test", net, WholeAndPart(), (np.arange(8), np.arange(8, 10)), Recipe(100), torch.Generator())

    assert fit.best_epoch == 1  # the whole is right from the start
    assert set(fit.train_errors) == set(fit.valid_errors) == {0.0}
    whole, part = net.ms.tolist()
    assert 0.5 < part < whole == 1.0  # left as after that epoch


def test_an_ensemble_learns_forward_and_backward_apart(many):
    generator, train, valid = torch.Generator().manual_seed(0), np.arange(250), np.arange(250, 300)
    samples = SetSamples(many, np.full(300, 65536), train)
    net = _Ensemble(generator, True, samples.floor, samples.learnable(train))
    fit_net("test", net, samples, (train, valid), Recipe(60, WEIGHT_DECAY), generator)

    with torch.no_grad():
        _, *parts = net(*samples.inputs(torch.from_numpy(valid))).mean(0).numpy() * samples.unit_ms

    for part, measured in zip(parts, many.parts[valid].T, strict=True):
        assert np.abs(part / measured - 1).mean() < 0.1


def test_training_stops_when_the_error_has_stopped_falling(sets):
    _, fit = train_compute(sets, BATCHES, *PLACES, torch.Generator().manual_seed(0), ComputeTraining(epochs=10))

    assert fit.epochs == min(10, fit.best_epoch + 5)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_all_to_all_net_that_saw_a_few_cases_predicts_those(all_to_alls, way):
    labels = all_to_alls[way]
    places = [PLACES[0]] * 2, [PLACES[1]] * 2
    net, _ = train_all_to_all(labels, places, 65536, way, 300, torch.Generator().manual_seed(0))

    for one in labels:
        predicted = predicted_ms(net, one.cases[:30], 65536, way)
        assert np.abs(predicted / one.ms[:30] - 1).mean() < 0.1
    assert 0.001 < net.spread < 0.1
    assert net.convex


def test_what_the_ensemble_learned_is_what_numpy_predicts(sets):
    net, _ = train_compute(sets, BATCHES, *PLACES, torch.Generator().manual_seed(0), ComputeTraining(epochs=200))
    sums = set_sums(net, sets.cases[:30], BATCHES[:30])

    assert np.abs(net.ms(sums) / sets.ms[:30] - 1).mean() < 0.1
    assert np.ptp(net.disagreements(sums)) > 0


def test_what_sinks_below_the_floor_stays_positive_and_keeps_a_slope():
    x = torch.tensor([3.0, 0.05, -1.0], requires_grad=True)

    kept = kept_positive(x, 0.1)
    kept.sum().backward()

    assert kept[0] == 3
    assert 0 < kept[2] < kept[1] < 0.1
    assert (x.grad > 0).all()


def test_one_thread_gives_the_threads_back():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
