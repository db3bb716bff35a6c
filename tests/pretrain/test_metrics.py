"""The figures of a report, by hand."""

import numpy as np
import pytest

from neuroshard.costmodel.report import Errors
from neuroshard.pretrain.labels import errors, mape


def test_every_figure_by_hand():
    found = errors(np.array([1.0, 2.0, 4.0]), np.array([1.1, 2.0, 3.0]))

    assert found is not None
    assert found.model_dump() == pytest.approx(
        {"values": 3, "mse": 1.01 / 3, "mape": 0.35 / 3, "r2": 1 - 1.01 / (14 / 3), "kendall_tau": 1.0}
    )


def test_ranks_the_other_way_round_have_a_tau_of_minus_one():
    found = errors(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))

    assert found is not None
    assert found.kendall_tau == pytest.approx(-1)


def test_all_to_alls_count_every_device():
    found = errors(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 2.0], [3.0, 4.0]]))

    assert found == Errors(values=4, mse=0, mape=0, r2=1, kendall_tau=1)


def test_no_values_have_no_figures():
    assert errors(np.empty(0), np.empty(0)) is None


@pytest.mark.parametrize("measured", [[2.0], [2.0, 2.0]])
def test_what_needs_variety_is_none_without_it(measured):
    found = errors(np.array(measured), np.array(measured) + 1)

    assert found == Errors(values=len(measured), mse=1, mape=0.5, r2=None, kendall_tau=None)


def test_constant_predictions_have_no_rank():
    found = errors(np.array([1.0, 3.0]), np.array([2.0, 2.0]))

    assert found is not None
    assert (found.r2, found.kendall_tau) == (0, None)


def test_times_below_the_clock_do_not_blow_up_the_error():
    assert mape(np.array([0.0]), np.array([0.001])) == pytest.approx(1)
