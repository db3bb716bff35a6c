"""One device has many spellings: as people write it, as the driver reports it, and as a node's label says it."""

import pytest

from neuroshard.core.hardware_names import is_part_of_name, is_same_name


@pytest.mark.parametrize("wanted", ["h200", "H200", "nvidia h200", "NVIDIA-H200", "H 200"])
def test_case_blanks_and_dashes_never_count(wanted: str) -> None:
    assert is_part_of_name(wanted, "NVIDIA H200")


@pytest.mark.parametrize("wanted", ["", "-", "h100", "NVIDIA H200 NVL"])
def test_what_is_not_in_a_name_is_no_part_of_it(wanted: str) -> None:
    assert not is_part_of_name(wanted, "NVIDIA H200")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a100-sxm4-80gb", "NVIDIA-A100-SXM4-80GB", True),
        ("NVIDIA-H200", "NVIDIA H200, by a formula", True),
        ("a100-sxm4-80gb", "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", False),
        ("", "NVIDIA-H200", False),
    ],
)
def test_a_whole_name_needs_neither_the_maker_nor_what_follows_a_comma(one: str, other: str, same: bool) -> None:
    assert is_same_name(one, other) is is_same_name(other, one) is same
