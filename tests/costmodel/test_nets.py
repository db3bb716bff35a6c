"""The nets in NumPy: batches, slopes, spreads, the order of devices, and what lies beyond the measured range."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.costs import bent_both_ways, random_model
from helpers.parts import cut_to
from neuroshard.core.table import Table
from neuroshard.costmodel.compute_net import (
    BY_BYTES,
    BY_DIGITS,
    BY_ROWS,
    BYTES,
    MEMBERS,
    OWN,
    ROWS,
    TABLE_WIDTHS,
    THRESHOLDS,
    FeatureScale,
    Layer,
    steps,
)
from neuroshard.costmodel.features import FEATURES, SHARE_COLUMNS, part_features, split_features
from neuroshard.costmodel.protocol import slope_by_differences

K = MEMBERS * TABLE_WIDTHS[-1]


@pytest.fixture(scope="module")
def nets():
    return random_model(2, 4).nets


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_layer_of_every_member_by_hand():
    layer = Layer(np.array([[[1.0], [2.0]], [[0.0], [-1.0]]]), np.array([[[10.0]], [[0.5]]]))

    assert layer(np.array([[1.0, 1.0], [0.0, 3.0]])).tolist() == [[[13.0], [16.0]], [[-0.5], [-2.5]]]


def test_the_compute_net_is_the_mean_of_its_members(nets, rng):
    sums, net = rng.random(K), nets.compute
    expected = []
    for member, own in enumerate(sums.reshape(MEMBERS, -1)):
        hidden = np.maximum(own @ net.head.weight[member] + net.head.bias[member, 0], 0)
        expected.append(hidden @ net.out.weight[member] + net.out.bias[member, 0] + own @ net.skip[member])

    assert net.ms(sums) == pytest.approx(np.mean(expected) * net.unit_ms)


def test_sums_of_lifted_vectors_give_the_prediction_for_sums_of_vectors(nets, rng):
    vectors, net = rng.random((3, 40, 5, K)), nets.compute
    lifted, nothing = net.mean.lifted(vectors), np.zeros((1, K))

    assert net.mean.ms(lifted.sum(axis=2) + net.mean.ground) == pytest.approx(net.ms(vectors.sum(axis=2)))
    assert net.mean.ms(net.mean.ground[None]) == pytest.approx(net.ms(nothing))


def test_a_batch_predicts_what_each_one_would(nets, rng):
    sums, dims, delays = rng.random((5, 7, K)), rng.integers(1, 9, (5, 7, 4)) * 4.0, rng.random((5, 7, 4))

    for ask in (nets.compute.ms, nets.compute.spread_ms):
        assert ask(sums).shape == (5, 7)
        assert ask(sums)[2, 3] == pytest.approx(ask(sums[2, 3]))
    assert nets.compute.slope(sums)[2, 3] == pytest.approx(nets.compute.slope(sums[2, 3]))
    assert nets.forward.ms(dims, delays)[2, 3] == pytest.approx(nets.forward.ms(dims[2, 3], delays[2, 3]))
    assert nets.backward.ms(dims)[2, 3] == pytest.approx(nets.backward.ms(dims[2, 3]))


def test_no_sums_and_no_all_to_alls_are_no_predictions(nets):
    assert nets.compute.ms(np.zeros((0, K))).shape == nets.compute.spread_ms(np.zeros((0, K))).shape == (0,)
    assert nets.compute.slope(np.zeros((0, K))).shape == (0, K)
    assert nets.forward.ms(np.zeros((0, 4)), np.zeros((0, 4))).shape == (0, 4)
    assert nets.compute.vectors(np.zeros((0, len(FEATURES)))).shape == (0, K)


@pytest.fixture
def signed(nets, rng):
    """A compute net whose table layers and biases have both signs, as trained ones have, and its head's weights have not."""

    def centred(layer):
        return Layer(layer.weight - 0.6, layer.bias - 0.6)

    net = nets.compute
    head = Layer(net.head.weight, -rng.random(net.head.bias.shape) * 40)
    return replace(net, table=tuple(centred(layer) for layer in net.table), head=head, floor=1e-3)


@pytest.fixture
def bent(nets):
    """A compute net whose cost bends both ways, as those of trained ones do."""
    return replace(bent_both_ways(nets.compute), floor=1e-3)


def test_without_dips_the_compute_net_is_convex_and_grows_with_every_component(signed, rng):
    one, other = rng.random((2, 5000, K)) * rng.choice([0.1, 1, 10], (2, 5000, 1))
    share = rng.random((5000, 1))

    between = signed.ms(share * one + (1 - share) * other)
    assert signed.monotone
    assert not len(signed.dips.bias)
    assert (between <= share[:, 0] * signed.ms(one) + (1 - share[:, 0]) * signed.ms(other) + 1e-9).all()
    assert (signed.ms(one + other) >= signed.ms(one)).all()


def test_a_compute_net_is_convex_only_without_dips_and_without_rates(signed, bent):
    with_rates = replace(signed, rates=np.ones((MEMBERS, TABLE_WIDTHS[-1], len(THRESHOLDS))))

    assert (len(bent.dips.bias) > 0, len(with_rates.dips.bias) > 0) == (True, False)
    assert (signed.convex, bent.convex, with_rates.convex) == (True, False, False)


def test_the_compute_net_grows_with_every_component_where_it_bends_both_ways(bent, rng):
    one, component = rng.random((10_000, K)) * rng.choice([0.1, 1, 10], (10_000, 1)), rng.integers(0, K, 10_000)
    more = one + np.eye(K)[component] * rng.random((10_000, 1))

    between = bent.ms((one + one[::-1]) / 2) - (bent.ms(one) + bent.ms(one[::-1])) / 2

    assert bent.monotone
    assert (bent.slope(one) >= -1e-9).all()
    assert (bent.ms(more) >= bent.ms(one) - 1e-9).all()
    assert between.min() < -0.01 < 0.01 < between.max()  # it does bend both ways


def test_a_convex_net_below_is_below_within_the_range_and_convex_and_grows(bent, rng):
    sums = rng.random((3000, K)) * rng.choice([0.1, 1, 3], (3000, 1))
    dips = sums @ bent.dips.weight + bent.dips.bias

    below = bent.convex_below(dips.min(axis=0), dips.max(axis=0))

    assert below.monotone
    assert not len(below.dips.bias)
    assert (below.ms(sums) <= bent.ms(sums) + 1e-9).all()
    middle = below.ms((sums[:1500] + sums[1500:]) / 2)
    assert (middle <= (below.ms(sums[:1500]) + below.ms(sums[1500:])) / 2 + 1e-9).all()
    assert (below.ms(sums) < bent.ms(sums) - 1e-3).any()


def test_a_dip_that_is_on_one_side_all_over_the_range_costs_the_bound_nothing(bent, rng):
    sums = rng.random((1000, K))
    dips = sums @ bent.dips.weight + bent.dips.bias
    far = replace(bent, head=Layer(bent.head.weight, bent.head.bias + 1000))

    low, high = dips.min(axis=0) + 1000, dips.max(axis=0) + 1000

    assert far.convex_below(low, high).ms(sums) == pytest.approx(far.ms(sums))


@pytest.fixture(params=[25, 37, 62], ids=["row-wise", "by bytes too", "by digits too"])
def rated(request):
    """A compute net whose cost bends both ways, and with rates that are about half of it."""
    net = bent_both_ways(random_model(rates=request.param).nets.compute)
    return replace(net, floor=1e-3, rates=net.rates * 0.3)


@pytest.fixture
def devices(rated, rng):
    """Vectors of 6 tables each on 3,000 devices, of a row to 2^33."""
    tables = [
        Table(name="t", rows=int(2 ** rng.uniform(0, 33)), dim=4, pooling_factor=float(60 ** rng.uniform()))
        for _ in range(500)
    ]
    vectors = rated.vectors(part_features(cut_to(tables, np.full(500, 4)), 65536))
    return vectors[rng.integers(0, 500, (3000, 6))]


def test_rates_rise_from_three_quarters_of_a_threshold_and_are_all_there_at_it():
    sums = np.zeros((7, 3))
    sums[:, ROWS] = [0.0, 192.0, 240.0, 256.0, 384.0, 448.0, 2.0**60]
    shares = steps(sums, np.arange(len(THRESHOLDS)))

    assert shares[:, 0].tolist() == [0, 0, 0.75, 1, 1, 1, 1]
    assert shares[:, 1].tolist() == [0, 0, 0, 0, 0, 0.5, 1]
    assert shares[:, 2 : len(BY_ROWS)].sum(axis=1).tolist() == [0] * 6 + [len(BY_ROWS) - 2]


def test_rates_by_bytes_rise_from_a_quarter_of_a_threshold_and_are_all_there_at_it():
    sums = np.zeros((6, 3))
    sums[:, BYTES] = [0.0, 4096.0, 7168.0, 16384.0, 28672.0, 2.0**60]
    shares = steps(sums, np.arange(len(BY_ROWS), len(BY_ROWS) + len(BY_BYTES)))

    assert shares[:, 0].tolist() == pytest.approx([0, 0, 0.25, 1, 1, 1])
    assert shares[:, 1].tolist() == pytest.approx([0, 0, 0, 0, 0.25, 1])
    assert shares[:, 2:].sum(axis=1).tolist() == [0] * 5 + [len(BY_BYTES) - 2]


def test_rates_by_digits_rise_just_beyond_what_so_many_digits_count():
    sums = np.zeros((6, 3))
    sums[:, ROWS] = [0.0, 256.0, 258.0, 260.0, 512.0, 2.0**60]
    shares = steps(sums, np.arange(len(THRESHOLDS))[-len(BY_DIGITS) :])

    assert shares[:, 0] == pytest.approx([0, 0, 0.5, 1, 1, 1])
    assert shares[:, 1:].sum(axis=1) == pytest.approx([0] * 5 + [len(BY_DIGITS) - 1])


def test_what_rates_add_by_hand(rated, devices):
    sums = devices.sum(axis=1)
    members = sums[:, :K].reshape(-1, MEMBERS, TABLE_WIDTHS[-1])
    added = (
        np.einsum("nmk,mkt,nt->n", members, rated.rates, steps(sums, np.arange(rated.rates.shape[2])))
        * rated.unit_ms
        / MEMBERS
    )

    without = replace(rated, rates=None).ms(sums[:, :K])

    assert rated.ms(sums) == pytest.approx(without + added)
    assert 0.1 < np.median(added / without) < 10
    assert rated._members(sums).mean(axis=0) * rated.unit_ms == pytest.approx(rated.ms(sums))
    assert rated.disagreements(sums).min() > 0


def test_rows_are_counted_to_the_last_one(rated):
    rows = [1, 3, 2**31 - 1, 10**12 + 1]
    tables = [Table(name="t", rows=count, dim=4, pooling_factor=1.0) for count in rows]

    vectors = rated.split_vectors(split_features(cut_to(tables, np.full(4, 4)), 65536))

    assert vectors[:, ROWS].tolist() == rows
    assert rated.vectors(part_features(cut_to(tables, np.full(4, 4)), 65536)) == pytest.approx(vectors)


def test_with_rates_lifted_sums_and_batches_tell_the_same(rated, devices):
    sums, lifted = devices.sum(axis=1), rated.mean.lifted(devices)

    assert rated.mean.ms(lifted.sum(axis=1) + rated.mean.ground) == pytest.approx(rated.ms(sums))
    for some in range(0, 3000, 300):
        assert rated.ms(sums[some]) == pytest.approx(rated.ms(sums)[some])
        assert rated.slope(sums[some]) == pytest.approx(rated.slope(sums)[some])
        assert rated.spread_ms(sums[some]) == pytest.approx(rated.spread_ms(sums)[some])


def test_with_rates_a_table_more_never_costs_less(rated, devices, rng):
    before = devices[rng.integers(0, 3000, 10_000), :5].sum(axis=1)
    more = devices[rng.integers(0, 3000, 10_000), 5]
    less = before + more * rng.random((10_000, 1))

    assert rated.monotone
    assert (rated.ms(before + more) >= rated.ms(before)).all()
    assert (rated.ms(before + more) >= rated.ms(less) * (1 - 1e-12)).all()
    assert not replace(rated, rates=-rated.rates).monotone


def test_the_slope_tells_of_rows_and_bytes_where_rates_set_in(rated, devices):
    sums = devices[:20].sum(axis=1)
    sums[:, ROWS] = 0.9 * BY_ROWS[:20]
    counted = [ROWS, BYTES][: rated.counts - 1]
    if BYTES in counted:
        sums[:, BYTES] = 0.6 * BY_BYTES[np.arange(20) % len(BY_BYTES)]

    slope = rated.slope(sums)

    by_hand = slope_by_differences(rated.ms, sums)
    assert slope[:, counted] == pytest.approx(by_hand[:, counted], rel=1e-3)
    assert slope[:, :K] == pytest.approx(by_hand[:, :K], rel=1e-3)
    assert (slope[:, OWN] == 0).all()
    assert slope[:, counted].min() > 0


def test_what_parts_ask_for_by_themselves_is_convex_and_no_more_than_the_rates(rated, devices):
    sums = devices.sum(axis=1)
    dips = sums @ rated.dips.weight + rated.dips.bias

    below = rated.convex_below(dips.min(axis=0), dips.max(axis=0))

    assert not rated.convex
    assert below.convex
    assert below.monotone
    assert (below.ms(sums) <= rated.ms(sums) * (1 + 1e-12)).all()
    middle = below.ms((sums[:1500] + sums[1500:]) / 2)
    assert (middle <= (below.ms(sums[:1500]) + below.ms(sums[1500:])) / 2 * (1 + 1e-12)).all()
    tangent = below.ms(sums) + (below.slope(sums) * (sums[::-1] - sums)).sum(axis=1)
    assert (tangent <= below.ms(sums[::-1]) + 1e-6).all()
    alone, one = devices[:, 0], replace(rated, head=Layer(abs(rated.head.weight), rated.head.bias))
    one = replace(one, out=Layer(abs(rated.out.weight), rated.out.bias))  # without dips
    nothing = np.zeros(0)
    assert one.convex_below(nothing, nothing).ms(alone) == pytest.approx(one.ms(alone))  # of one part, all of them


def test_parts_on_devices_that_hold_other_parts_too_add_no_more_than_the_rates(rated, devices):
    sums, beside = devices.sum(axis=1), devices[:, 0]
    holds = devices + beside[:, None]
    holds[:, 0] = beside
    added = rated.beyond_own_ms(devices, holds).sum(axis=1)
    low, high = (one(sums @ rated.dips.weight + rated.dips.bias, axis=0) for one in (np.min, np.max))

    below = rated.convex_below(low, high).ms(sums)

    assert (below + added <= rated.ms(sums) * (1 + 1e-12)).all()
    assert added.max() > 0


def test_the_slope_lies_below_the_cost_everywhere(signed, rng):
    at, elsewhere = rng.random((2, 2000, K)) * rng.choice([0.1, 1, 10], (2, 2000, 1))

    tangent = signed.ms(at) + (signed.slope(at) * (elsewhere - at)).sum(axis=-1)

    assert (signed.slope(at) >= 0).all()
    assert (tangent <= signed.ms(elsewhere) + 1e-9).all()
    assert np.ptp(signed.slope(at), axis=0).min() > 0  # there are kinks


def test_at_its_floor_a_cost_has_no_slope(nets):
    floored = replace(nets.compute, floor=1e9)

    assert floored.ms(np.ones(K)) == 1e9 * floored.unit_ms
    assert (floored.slope(np.ones(K)) == 0).all()


def test_a_skip_that_is_less_than_what_the_hidden_layer_may_take_away_gives_no_bounds(nets, bent):
    skip = bent.skip.copy()
    skip[2, 3] *= 0.1

    assert replace(nets, compute=bent).bounded
    assert not replace(nets, compute=replace(bent, skip=skip)).bounded
    assert not replace(nets, forward=replace(nets.forward, skip=-nets.forward.skip)).bounded


def test_the_spread_grows_with_the_disagreement_of_the_members(nets, rng):
    sums = rng.random((100, K))
    sure = replace(nets.compute, disagreement=0.0, least_spread=0.05)
    unsure = replace(sure, disagreement=2.0)

    assert sure.spread_ms(sums) == pytest.approx(0.05 * sure.ms(sums))
    assert (unsure.spread_ms(sums) > sure.spread_ms(sums)).all()


@pytest.mark.parametrize("devices", [2, 3, 4, 7, 8, 13, 64])
def test_other_device_numbers_give_the_same_costs_in_the_other_order(nets, rng, devices):
    dims, delays = rng.integers(0, 300, (100, devices)) * 4.0, rng.random((100, devices)) * 20
    order = rng.permuted(np.tile(np.arange(devices), (100, 1)), axis=1)

    def reordered(values):
        return np.take_along_axis(values, order, axis=1)

    forward, backward = nets.forward.ms(dims, delays), nets.backward.ms(dims)
    assert np.array_equal(nets.forward.ms(reordered(dims), reordered(delays)), reordered(forward))
    assert np.array_equal(nets.backward.ms(reordered(dims)), reordered(backward))


def test_devices_that_are_alike_cost_alike(nets):
    costs = nets.backward.ms(np.array([8.0, 4.0, 8.0, 4.0]))

    assert costs[0] == costs[2] > costs[1] == costs[3]


@pytest.mark.parametrize("devices", [2, 3, 16, 100])
def test_the_mean_all_to_all_is_least_where_all_hold_the_same(nets, rng, devices):
    dims = rng.random((200, devices)) ** 3 * 1000
    bent = replace(nets.backward, bias=nets.backward.bias - 500, unit_bytes=1.0)

    for net in (nets.backward, bent):
        equal = net.ms(np.broadcast_to(dims.mean(axis=1, keepdims=True), dims.shape)).mean(axis=1)
        assert (equal <= net.ms(dims).mean(axis=1) * (1 + 1e-12)).all()


def test_waiting_is_added_by_rule(nets):
    dims, delays = np.array([8.0, 4.0, 0.0, 4.0]), np.array([0.0, 5.0, 1000.0, 20.0])

    waits = nets.forward.ms(dims, delays) - nets.forward.ms(dims)

    assert waits == pytest.approx([1000.0, 995.0, 0.0, 980.0])


def test_all_to_alls_larger_than_measured_cost_more_in_proportion(nets):
    dims = np.array([4.0, 3.0, 2.0, 1.0]) * 1e6 * nets.backward.unit_bytes
    sizes = np.array([1.0, 10.0, 1000.0])[:, None]

    costs = nets.backward.ms(dims * sizes)

    assert costs[2] / costs[1] == pytest.approx(np.full(4, 100), rel=0.01)
    assert costs[1] / costs[0] == pytest.approx(np.full(4, 10), rel=0.01)


def test_an_all_to_all_of_nothing_has_a_cost(nets):
    assert (nets.backward.ms(np.zeros(4)) > 0).all()
    assert np.isfinite(nets.forward.ms(np.zeros(4), np.zeros(4))).all()


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


def test_vectors_are_never_negative(signed, rng):
    assert signed.vectors(rng.standard_normal((100, len(FEATURES)))).min() == 0
