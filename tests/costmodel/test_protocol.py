"""How the costs of a device come together, whatever the cost model."""

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from neuroshard.costmodel.protocol import all_to_all_costs


class Late(AnalyticModel):
    """The forward all-to-all costs just what the devices are late by, and the backward one a tenth of the columns."""

    def forward_collective_ms(self, device_dims, start_delays_ms):
        return start_delays_ms

    def backward_collective_ms(self, device_dims):
        return 0.1 * device_dims


def test_a_device_is_as_late_as_its_compute_and_backward_all_to_all_end_after_the_first_ones():
    compute, dims = np.array([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0]]), np.array([[10.0, 20.0, 40.0], [4.0, 4.0, 4.0]])

    forward, backward = all_to_all_costs(Late(), compute, dims)

    assert backward == pytest.approx(np.array([[1, 2, 4], [0.4, 0.4, 0.4]]))
    assert forward == pytest.approx(np.array([[1, 0, 3], [0, 0, 0]]))  # ready at 4, 3 and 6 ms


def test_one_device_alone_all_to_alls_nothing():
    assert np.array(all_to_all_costs(Late(), np.array([[5.0]]), np.array([[8.0]]))).tolist() == [[[0.0]], [[0.0]]]
