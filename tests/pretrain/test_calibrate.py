"""Calibration: two thirds of the errors held back lie within the deviation, whatever the members say."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.costs import random_model
from neuroshard.pretrain.calibrate import calibrated

ALIKE = np.full(2000, 9)  # tables a case


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

    found = deviation(calibrated(net, errors, disagreements, ALIKE[: len(errors)]), disagreements)

    assert (np.abs(errors) <= found).mean() == pytest.approx(0.7, abs=0.02)
    assert np.corrcoef(np.log(found), np.log(disagreements))[0, 1] > 0.8


def test_members_whose_differences_say_nothing_are_not(net):
    rng = np.random.default_rng(0)
    disagreements, errors = np.exp(rng.normal(-3, 1, 2000)), rng.standard_normal(2000) * 0.04

    found = deviation(calibrated(net, errors, disagreements, ALIKE[: len(errors)]), disagreements)

    assert found == pytest.approx(np.full(2000, 0.04), rel=0.1)


def test_two_thirds_are_held_of_the_least_sure_kind_of_cases_too(net):
    rng = np.random.default_rng(0)
    tables = rng.integers(1, 51, 2000)
    errors = rng.standard_normal(2000) * np.where(tables <= 10, 0.06, 0.02)

    found = deviation(calibrated(net, errors, np.zeros(2000), tables), np.zeros(2000))

    held = np.abs(errors) <= found
    assert held[tables <= 10].mean() == pytest.approx(0.683, abs=0.03)
    assert held.mean() > 0.9


def test_a_few_cases_are_of_one_kind(net):
    rng = np.random.default_rng(0)
    tables, errors = rng.integers(1, 51, 99), rng.standard_normal(99) * 0.04

    found = deviation(calibrated(net, errors, np.zeros(99), tables), np.zeros(99))

    assert (np.abs(errors) <= found).mean() == pytest.approx(0.683, abs=0.01)


@pytest.mark.parametrize("errors", [np.zeros(5), np.array([0.03]), np.zeros(1)])
def test_few_or_perfect_cases_still_give_a_positive_deviation(net, errors):
    found = calibrated(net, errors, np.zeros(len(errors)), ALIKE[: len(errors)])

    assert found.least_spread > 0
    assert np.isfinite(found.least_spread)
    assert found.disagreement > 0
