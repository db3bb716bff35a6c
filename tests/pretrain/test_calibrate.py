"""Calibration: 68 % of the errors held back lie within one deviation and 95 % within two, whatever the members say."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.costs import random_model
from neuroshard.pretrain.calibrate import Quantiles, calibrated


@pytest.fixture
def net():
    return replace(random_model(2).nets.compute, disagreement=1.0, least_spread=1.0)


def deviations(found, disagreements, ms=1.0):
    """The first and the second of each case."""
    net, more = found
    one = np.sqrt((net.disagreement * disagreements) ** 2 + net.least_spread**2 + (more.least_ms / ms) ** 2)
    return one, one * more.two


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_members_that_are_as_wrong_as_they_differ_are_believed(net, scale):
    rng = np.random.default_rng(0)
    disagreements = np.exp(rng.normal(-3, 1, 2000))
    errors = rng.standard_normal(2000) * disagreements * scale

    one, two = deviations(calibrated(net, errors, disagreements, np.ones(2000)), disagreements)

    assert (np.abs(errors) <= one).mean() == pytest.approx(0.683, abs=0.01)
    assert (np.abs(errors) <= two).mean() == pytest.approx(0.954, abs=0.01)
    assert np.corrcoef(np.log(one), np.log(disagreements))[0, 1] > 0.8


def test_members_whose_differences_say_nothing_are_not(net):
    rng = np.random.default_rng(0)
    disagreements, errors = np.exp(rng.normal(-3, 1, 2000)), rng.standard_normal(2000) * 0.04

    one, two = deviations(calibrated(net, errors, disagreements, np.ones(2000)), disagreements)

    assert one == pytest.approx(np.full(2000, 0.04), rel=0.1)
    assert two == pytest.approx(np.full(2000, 0.08), rel=0.1)


def test_short_times_that_are_measured_less_exactly_have_wider_deviations(net):
    rng = np.random.default_rng(0)
    ms = np.exp(rng.normal(0, 1.5, 2000))
    errors = rng.standard_normal(2000) * np.hypot(0.03, 0.05 / ms)

    one, _ = deviations(calibrated(net, errors, np.zeros(2000), ms), np.zeros(2000), ms)

    for some in (ms < 0.5, ms > 2):
        assert (np.abs(errors) <= one)[some].mean() == pytest.approx(0.683, abs=0.05)


@pytest.mark.parametrize("few", [30, 200])
def test_both_hold_as_often_as_they_should_for_cases_that_were_not_calibrated_on(few):
    """Errors with heavy tails, of which twice the 68 % quantile holds 91 %."""
    rng = np.random.default_rng(0)
    found = [Quantiles.of(np.abs(rng.standard_t(2, few))) for _ in range(400)]
    fresh = np.abs(rng.standard_t(2, (400, 100)))

    one, two = np.array(found).T[..., None]

    assert (fresh <= 2 * one).mean() < 0.94
    assert (fresh <= one).mean() == pytest.approx(0.683, abs=0.04)
    assert (fresh <= two).mean() == pytest.approx(0.954, abs=0.02)


@pytest.mark.parametrize("errors", [np.zeros(5), np.array([0.03]), np.zeros(1)])
def test_few_or_perfect_cases_still_give_a_positive_deviation(net, errors):
    found, more = calibrated(net, errors, np.zeros(len(errors)), np.ones(len(errors)))

    assert 0 < found.least_spread < np.inf
    assert found.disagreement > 0
    assert 1 <= more.two < np.inf
