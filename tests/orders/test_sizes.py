"""The options of `neuroshard size`."""

from typing import Any

import pytest

from neuroshard.core.errors import UsageError
from neuroshard.orders.sizes import DenseTime, Kind, numbers_of_devices, size_order

H100, B200 = "analytic:h100", "analytic:b200"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("4-128", (4, 8, 16, 32, 64, 128)),
        ("12-100", (12, 24, 48, 96)),
        ("8-32/8", (8, 16, 24, 32)),
        ("16,4, 12-24,4", (4, 12, 16, 24)),
        ([8, 4], (4, 8)),
        (6, (6,)),
    ],
)
def test_numbers_of_devices(given: object, found: tuple[int, ...]) -> None:
    assert numbers_of_devices("devices", given) == found


@pytest.mark.parametrize("given", ["0", "8-4", "4-128/0", "4..8", "", "5000", "4-x", "-4"])
def test_what_is_no_number_of_devices_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="4-128 doubles"):
        numbers_of_devices("devices", given)


def test_a_kinds_own_value_comes_before_that_of_all() -> None:
    order = size_order(
        [H100, B200, H100],
        devices="8",
        memory=["40GiB,20GiB", f"{B200}=179GiB"],
        price=["$2/h", f"{B200}=5 $/h"],
        dense_time=["1.5ms", f"{B200}=0.5ms@4096"],
        domain=[f"{B200}=4"],
    )
    gib = 2**30
    assert order.kinds == (
        Kind(H100, (20 * gib, 40 * gib), price=2.0, dense=DenseTime(1.5)),
        Kind(B200, (179 * gib,), price=5.0, dense=DenseTime(0.5, 4096), domain=4),
    )
    assert (order.currency, order.priced) == ("$", True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"price": ["analytic:h200=2/h"]}, "'analytic:h200' is not among the models"),
        ({"price": ["$2/h", f"{B200}=3EUR/h"]}, "several currencies"),
        ({"price": [f"{H100}=2/h"]}, "not for analytic:b200"),
        ({"price": ["2"]}, "price of a device and hour"),
        ({"price": ["0/h"]}, "price of a device and hour"),
        ({"price": ["9" * 308 + "/h"]}, "price of a device and hour"),
        ({"price": ["$2EUR/h"]}, "price of a device and hour"),
        ({"price": ["1/h", "2/h"]}, "given twice"),
        ({"dense_time": ["2"]}, "time in a step"),
        ({"dense_time": ["2ms@"]}, "samples of a device"),
        ({"dense_time": ["2ms@0"]}, "samples of a device"),
        ({"dense_time": ["2ms@-4"]}, "samples of a device"),
        ({"dense_time": ["2ms@9999999999"]}, "samples of a device"),
        ({"dense_time": ["@8192"]}, "time in a step"),
        ({"memory": ["80 apples"]}, "--memory"),
        ({"domain": ["none"]}, "number of ranks"),
        ({"batch_per_device": 4, "batch_size": 64}, "one of both"),
        ({"batch_per_device": 0}, "batch_per_device"),
        ({"time_budget": "soon"}, "length of time"),
    ],
)
def test_bad_options_are_refused_in_a_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        size_order([H100, B200], devices="8", **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["algorithm", "previous", "move_budget", "no_such_option"])
def test_an_option_that_a_sweep_does_not_have_is_refused(option: str) -> None:
    with pytest.raises(TypeError, match=rf"size\(\) got an unexpected keyword argument '{option}'"):
        size_order([H100], devices="8", **{option: "random"})


def test_no_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="name a cost model"):
        size_order([], devices="8")
