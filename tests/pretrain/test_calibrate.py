"""Calibration: two thirds of the errors held back lie within the deviation, whatever the members say."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.costs import random_model
from neuroshard.pretrain.calibrate import calibrated


@pytest.fixture
def net():
    return replace(random_model(2).nets.compute, disagreement=1.0, least_spread=1.0)


def deviation(net, disagreements):
    return np.hypot(net.disagreement * disagreements, net.least_spread)


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_members_that_are_as_wrong_as_they_differ_are_believed(net, scale):
    rng = np.random.default_rng(0)
    disagreements = np.exp(rng.normal(-3, 1, 2000))
    errors = rng.standard_normal(2000) * disagreements * scale

    found = deviation(calibrated(net, errors, disagreements), disagreements)

    assert (np.abs(errors) <= found).mean() == pytest.approx(0.683, abs=0.005)
    assert np.corrcoef(np.log(found), np.log(disagreements))[0, 1] > 0.8


def test_members_whose_differences_say_nothing_are_not(net):
    rng = np.random.default_rng(0)
    disagreements, errors = np.exp(rng.normal(-3, 1, 2000)), rng.standard_normal(2000) * 0.04

    found = deviation(calibrated(net, errors, disagreements), disagreements)

    assert found == pytest.approx(np.full(2000, 0.04), rel=0.1)


@pytest.mark.parametrize("errors", [np.zeros(5), np.array([0.03]), np.zeros(1)])
def test_few_or_perfect_cases_still_give_a_positive_deviation(net, errors):
    found = calibrated(net, errors, np.zeros(len(errors)))

    assert found.least_spread > 0
    assert np.isfinite(found.least_spread)
    assert found.disagreement > 0
