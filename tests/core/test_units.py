"""Amounts, times and counts as users write them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.refusals import refused
from neuroshard.core.errors import UsageError
from neuroshard.core.units import (
    FEWEST_BARE,
    format_bytes,
    parse_bytes,
    parse_counts,
    parse_duration,
    parse_memory,
    parse_portion,
    parse_share,
    parse_step_time,
)
from neuroshard.core.value import shown


def of_devices(text: str) -> tuple[int, ...]:
    return parse_counts(text, "--devices")


READ: list[tuple[Callable[[str], object], dict[str, object]]] = [
    (
        parse_bytes,
        {"34359738368": 2**35, "32GiB": 2**35, " 32 gib ": 2**35, "80GB": 80 * 10**9, "0.5KiB": 512, "1B": 1},
    ),
    (parse_bytes, {"1.5 TB": 1_500_000_000_000}),
    (parse_duration, {"90s": 90, "3m": 180, "1.5h": 5400, " 2 m ": 120, "7d": 604800}),
    (parse_share, {"2/8": (2, 8)}),
    (of_devices, {"4": (4,), "2, 4,8": (2, 4, 8)}),
    (parse_portion, {"0.5%": 0.005, "0.5 %": 0.005, "0.005": 0.005, "0": 0}),
    (parse_step_time, {"12ms": 12.0, " 1.5 ms ": 1.5, "800us": 0.8, "0.5s": 500.0, "1000s": 1e6}),
]


@pytest.mark.parametrize(
    ("parse", "text", "value"), [(parse, *pair) for parse, pairs in READ for pair in pairs.items()]
)
def test_what_users_write_is_read(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "ways_out"),
    [("80", ("80GiB", "80B")), ("80.0", ("80.0GiB",)), ("81559", ("81559MiB", "81559B")), ("1", ("1GiB", "1B"))],
)
def test_a_small_number_without_a_unit_is_no_number_of_bytes(text, ways_out):
    with refused(UsageError, "--memory", f"'{text}'", "read as", "bytes", *ways_out):
        parse_bytes(text, "--memory")
    assert parse_bytes(ways_out[-1])


@given(st.integers(FEWEST_BARE, 2**53))
def test_plain_bytes_are_exact(count):
    assert parse_bytes(str(count)) == count


def test_memory_is_one_amount_for_all_devices_or_one_each():
    assert parse_memory("1KiB", 3) == (1024, 1024, 1024)
    assert parse_memory("1KiB, 2KiB", 2) == (1024, 2048)
    with refused(UsageError, 2, 3):
        parse_memory("1KiB,2KiB", 3)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**35, "32.0 GiB"),
        (3 * 2**50, "3072.0 TiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(count, text):
    assert format_bytes(count) == text


@given(st.integers(1, 2**53))
def test_bytes_rounded_up_are_enough_for_who_types_them_and_rounded_down_not_too_much(count):
    least, most = (parse_bytes(format_bytes(count, rounded)) for rounded in ("up", "down"))
    assert count * 0.9 - 1 <= most <= count <= least <= count * 1.1 + 1


@pytest.mark.parametrize("text", ["1001s", "2000000ms", "1" + "0" * 300 + "ms"])
def test_a_time_in_a_step_of_more_than_1000_s_is_refused_as_it_was_written(text):
    with refused(UsageError, shown(text), "1000s"):
        parse_step_time(text)
