"""Amounts, times and counts as users write them."""

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


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("34359738368", 2**35),
        ("32GiB", 2**35),
        (" 32 gib ", 2**35),
        ("80GB", 80 * 10**9),
        ("1.5 TB", 1_500_000_000_000),
        ("0.5KiB", 512),
        ("1B", 1),
    ],
)
def test_an_amount_of_memory_is_bytes_or_a_unit(text, count):
    assert parse_bytes(text) == count


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


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("3m", 180), ("1.5h", 5400), (" 2 m ", 120), ("7d", 604800)]
)
def test_a_duration_has_a_unit(text, seconds):
    assert parse_duration(text) == seconds


def test_a_share_says_which_of_how_many():
    assert parse_share("2/8") == (2, 8)


def test_counts_are_whole_numbers_separated_by_commas():
    assert parse_counts("4", "--devices") == (4,)
    assert parse_counts("2, 4,8", "--devices") == (2, 4, 8)


@given(st.integers(1, 2**53))
def test_bytes_rounded_up_are_enough_for_who_types_them_and_rounded_down_not_too_much(count):
    least, most = (parse_bytes(format_bytes(count, rounded)) for rounded in ("up", "down"))
    assert count * 0.9 - 1 <= most <= count <= least <= count * 1.1 + 1


def test_a_portion_is_per_cent_or_a_share():
    assert parse_portion("0.5%") == parse_portion("0.5 %") == parse_portion("0.005") == 0.005
    assert parse_portion("0") == 0


@pytest.mark.parametrize(("text", "ms"), [("12ms", 12.0), (" 1.5 ms ", 1.5), ("800us", 0.8), ("0.5s", 500.0)])
def test_times_in_a_step_are_read_as_ms(text, ms):
    assert parse_step_time(text) == pytest.approx(ms)


@pytest.mark.parametrize("text", ["1001s", "2000000ms", "1" + "0" * 300 + "ms"])
def test_a_time_in_a_step_of_more_than_1000_s_is_refused_as_it_was_written(text):
    assert parse_step_time("1000s") == 1e6
    with refused(UsageError, shown(text), "1000s"):
        parse_step_time(text)
