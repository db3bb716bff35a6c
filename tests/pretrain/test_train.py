"""Training: what the tensors hold, and that NumPy predicts what PyTorch learned."""

import numpy as np
import pytest
import torch

from neuroshard.costmodel.report import Fit
from neuroshard.pretrain.labels import backward_ms, collect, forward_ms
from neuroshard.pretrain.train import (
    ExchangeSamples,
    SetSamples,
    fit_net,
    one_thread,
    train_compute,
    train_exchange,
)


@pytest.fixture(scope="module")
def sets(costs):
    return collect(costs.compute[:40], lambda cost: cost.total_ms)


@pytest.fixture(scope="module")
def exchanges(costs):
    rows = [(case, cost) for case, cost in costs.comm if len(case.device_dims) == 4][:40]
    return {"forward": collect(rows, forward_ms), "backward": collect(rows, backward_ms)}


PLACES = np.arange(30), np.arange(30, 40)


def test_a_batch_holds_the_tables_of_its_cases_and_no_other(sets):
    samples = SetSamples(sets, PLACES[0], 65536)

    features, places, cases = samples.inputs(torch.tensor([7, 3]))

    counts = [len(sets.cases[i].tables) for i in (7, 3)]
    starts = np.cumsum([0, *(len(case.tables) for case in sets.cases)])
    expected = torch.cat([samples.features[starts[i] : starts[i + 1]] for i in (7, 3)])
    assert int(cases) == 2
    assert places.tolist() == [0] * counts[0] + [1] * counts[1]
    assert torch.equal(features, expected)


def test_labels_and_waits_stand_beside_the_devices_that_they_belong_to(exchanges):
    labels = exchanges["forward"]
    samples = ExchangeSamples(labels, PLACES[0], delays=True)

    for i, case in enumerate(labels.cases):
        ms = dict(zip(labels.ms[i].tolist(), zip(case.device_dims, case.start_delays_ms, strict=True), strict=True))
        by_ms = [
            ms[min(ms, key=lambda one: abs(one - shown))] for shown in (samples.labels[i] * samples.unit_ms).tolist()
        ]
        assert [dims for dims, _ in by_ms] == sorted(case.device_dims, reverse=True)
        last = max(case.start_delays_ms)
        waits = (samples.waits[i] * samples.unit_ms).tolist()
        assert waits == pytest.approx([last - delay for _, delay in by_ms], abs=1e-4)


class OneNumber(torch.nn.Module):
    """Predicts the same for every case."""

    def __init__(self):
        super().__init__()
        self.ms = torch.nn.Parameter(torch.tensor([1.0]))

    def forward(self, cases):
        return self.ms.expand(len(cases))


class LeadAway:
    """Training labels that lead away from what is right for the valid cases, the last two."""

    labels = torch.tensor([10.0] * 8 + [1.1] * 2)
    unit_ms = 1.0

    def inputs(self, cases):
        return (cases,)


def test_the_net_is_that_of_the_best_epoch():
    net = OneNumber()

    fit = fit_net("test", net, LeadAway(), (np.arange(8), np.arange(8, 10)), 100, 0.0, torch.Generator())

    # Adam moves about 0.005 a step, so 1.1 is reached after about 20, and then the error rises until patience ends
    assert fit == Fit(train_cases=8, valid_cases=2, epochs=62, best_epoch=21)
    assert float(net.ms.detach()) == pytest.approx(1.1, abs=0.01)


def test_training_stops_when_the_error_has_stopped_falling(sets):
    _, fit = train_compute(sets, *PLACES, 65536, 10, torch.Generator().manual_seed(0))

    assert fit.epochs == min(10, fit.best_epoch + 5)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_exchange_net_that_saw_a_few_cases_predicts_those(exchanges, way):
    labels = exchanges[way]
    net, _ = train_exchange(labels, *PLACES, way == "forward", 300, torch.Generator().manual_seed(0))

    cases = labels.cases[:30]
    dims = np.array([case.device_dims for case in cases], dtype=float)
    delays = np.array([case.start_delays_ms for case in cases]) if way == "forward" else None
    assert np.abs(net.ms(dims, delays) / labels.ms[:30] - 1).mean() < 0.05


def test_one_thread_gives_the_threads_back():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
