"""The datasheet's model, fitted to what little was measured, by hand."""

import numpy as np
import pytest

from helpers.costs import collective_cost
from neuroshard.core.case import CollectiveCase
from neuroshard.pretrain.all_to_all import _features
from neuroshard.pretrain.stand_in import FEWEST_FOR_CONSTANT, SHARES, Fitted, _by

DATASHEET_MS = np.arange(1.0, 10.0)  # the middle is 5


@pytest.mark.parametrize(
    ("share", "factor", "constant_ms"),
    [(SHARES[0], 3.0, 0.0), (SHARES[20], 3 * SHARES[20], 15 * (1 - SHARES[20])), (0.0, 0.0, 15.0)],
)
def test_a_factor_and_a_constant_are_found_again(share: float, factor: float, constant_ms: float) -> None:
    fitted = Fitted.to(3 * (5 + share * (DATASHEET_MS - 5)), DATASHEET_MS)
    assert fitted == pytest.approx((constant_ms, factor, 9))
    assert fitted.ms(np.array([5.0])) == pytest.approx([15.0])


def test_of_few_times_only_the_factor_is_fitted() -> None:
    some = DATASHEET_MS[: FEWEST_FOR_CONSTANT - 1]
    assert Fitted.to(2 + some, some) == pytest.approx((0.0, float(np.median(2 / some + 1)), len(some)))
    assert Fitted.to(some[:0], some[:0]) == (0.0, 1.0, 0)


def test_what_was_not_measured_says_how_many_failed_and_why() -> None:
    case = CollectiveCase(device_dims=(4, 8), start_delays_ms=(0, 0))
    rows = [
        (case, cost.model_copy(update={"forward_ms": None, "backward_ms": None, "error": error}) if error else cost)
        for error in ("out of memory", None, "lost")
        for cost in [collective_cost(case, np.random.default_rng(0), 0.0)]
    ]
    alone = "from datasheets alone, since none was measured"
    assert (
        _by(Fitted(0.0, 1.0, 0), "times 1", "all-to-all", rows)
        == f"{alone} (2 of 3 failed, the first: 'out of memory')"
    )
    assert _by(Fitted(0.0, 1.0, 0), "times 1", "all-to-all", rows[1:2]) == alone
    assert _by(Fitted(0.0, 2.0, 3), "times 2", "all-to-all", rows) == "times 2 by 3 measured all-to-alls"


def test_a_nets_inputs_are_those_of_an_all_to_all_by_the_factors_of_its_number_of_devices() -> None:
    """The inputs of the first of four devices that send 40, 0, 8 and 0 bytes; the factors are 1, log2(4) / 8 and 1 / 8."""
    inputs = np.array([30, 2, 30, 30, 12, 30, 9])
    assert _features(np.array([[40.0, 0.0, 8.0, 0.0]]))[0] == pytest.approx(
        np.concatenate([inputs, inputs / 4, inputs / 8])
    )
