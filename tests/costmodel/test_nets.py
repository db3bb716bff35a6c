"""The nets in NumPy: batches, the order of devices, and what lies beyond the measured range."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.costs import random_model
from neuroshard.costmodel.features import FEATURES, SHARE_COLUMNS
from neuroshard.costmodel.nets import Dense, ExchangeScale, FeatureScale, perceptron, softplus


@pytest.fixture(scope="module")
def nets():
    return random_model(4).nets


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_perceptron_has_relu_between_its_layers_and_none_after_the_last():
    layers = (
        Dense(np.array([[1.0, 0.0], [0.0, -1.0]]), np.array([0.5, 0.0])),
        Dense(np.array([[2.0, 3.0]]), np.array([-10.0])),
    )

    assert perceptron(layers, np.array([[1.0, 1.0], [-1.0, -2.0]])).tolist() == [[-7.0], [-4.0]]


def test_softplus_is_positive_and_grows_linearly_far_out():
    assert softplus(np.array([-500.0, 0.0, 1e6])) == pytest.approx([0.0, np.log(2), 1e6])
    assert softplus(np.array([-500.0])) > 0


def test_a_batch_predicts_what_each_one_would(nets, rng):
    sums, dims, delays = rng.random((5, 7, 32)), rng.integers(1, 9, (5, 7, 4)) * 4.0, rng.random((5, 7, 4))
    forward, backward = nets.forward[4], nets.backward[4]

    compute = nets.compute.ms(sums)
    assert compute.shape == (5, 7)
    assert compute[2, 3] == pytest.approx(nets.compute.ms(sums[2, 3]))
    assert forward.ms(dims, delays)[2, 3] == pytest.approx(forward.ms(dims[2, 3], delays[2, 3]))
    assert backward.ms(dims)[2, 3] == pytest.approx(backward.ms(dims[2, 3]))


def test_other_device_numbers_give_the_same_costs_in_the_other_order(nets, rng):
    dims, delays = rng.integers(0, 3, (100, 4)) * 4.0, rng.integers(0, 3, (100, 4)) * 1.0  # many ties
    order = rng.permuted(np.tile(np.arange(4), (100, 1)), axis=1)

    def reordered(values):
        return np.take_along_axis(values, order, axis=1)

    forward, backward = nets.forward[4], nets.backward[4]
    assert forward.ms(reordered(dims), reordered(delays)) == pytest.approx(reordered(forward.ms(dims, delays)))
    assert backward.ms(reordered(dims)) == pytest.approx(reordered(backward.ms(dims)))


def test_every_device_waits_for_the_last_to_start(nets):
    together, one_late = np.zeros(4), np.array([0.0, 0.0, 0.0, 1000.0])

    waited = nets.forward[4].ms(np.full(4, 64.0), one_late) - one_late[::-1].max() * np.array([1, 1, 1, 0])

    assert (waited > 0).all()
    assert waited.max() < 10 * nets.forward[4].ms(np.full(4, 64.0), together).max()


def test_exchanges_larger_than_measured_cost_more_in_proportion(nets):
    dims = np.array([4.0, 3.0, 2.0, 1.0]) * nets.backward[4].scale.high_dims
    sizes = np.array([1.0, 10.0, 1000.0])[:, None]

    costs = nets.backward[4].ms(dims * sizes)

    assert costs[2] / costs[1] == pytest.approx(100, rel=0.05)
    assert costs[1] / costs[0] == pytest.approx(10, rel=0.15)


def test_waits_longer_than_measured_look_like_the_longest():
    scale = ExchangeScale(unit_dims=8, low_dims=4, high_dims=64, unit_delay_ms=2.0)

    view = scale.view(np.array([8.0, 16.0]), np.array([0.0, 50.0]))

    assert view.inputs.tolist() == [1.0, 0.5, 0.0, 1.0]  # log2 of the widest in units, the other's share, both waits
    assert view.size.tolist() == [pytest.approx(2.05)]
    assert view.order.tolist() == [1, 0]


def test_an_exchange_of_nothing_has_a_cost(nets):
    assert (nets.backward[4].ms(np.zeros(4)) > 0).all()
    assert np.isfinite(nets.forward[4].ms(np.zeros(4), np.zeros(4))).all()


def test_a_share_outside_its_measured_range_counts_as_the_nearest_measured(rng):
    measured = rng.random((50, len(FEATURES)))
    measured[:, SHARE_COLUMNS] *= 1e-6
    scale = FeatureScale.of(measured)

    beyond = scale.apply(np.full(len(FEATURES), 1.0))

    assert beyond[SHARE_COLUMNS] == pytest.approx(scale.apply(measured.max(axis=0))[SHARE_COLUMNS])


def test_sizes_go_on_beyond_their_measured_range(rng):
    scale = FeatureScale.of(rng.random((50, len(FEATURES))))

    near, far = scale.apply(np.full(len(FEATURES), 2.0)), scale.apply(np.full(len(FEATURES), 3.0))

    assert (far[0] - near[0]) == pytest.approx(1 / scale.deviation[0])


def test_a_feature_that_never_varied_is_ignored(rng):
    measured = rng.random((50, len(FEATURES)))
    measured[:, 1] = 7.0

    assert FeatureScale.of(measured).apply(np.full((2, len(FEATURES)), 1e9))[:, 1].tolist() == [0, 0]


def test_vectors_are_never_negative(nets, rng):
    negative = replace(nets.compute, table=tuple(Dense(-layer.weight, -layer.bias) for layer in nets.compute.table))

    for net in (nets.compute, negative):
        assert net.vectors(rng.standard_normal((100, len(FEATURES)))).min() >= 0
