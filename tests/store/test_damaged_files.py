"""Pointer, history and plan files that were damaged: what they were, or a clear error; never another plan."""

import random

import pytest

from helpers.damage import CHECKS, two_releases


@pytest.mark.parametrize("kind", CHECKS)
def test_a_damaged_file_is_what_it_was_or_a_clear_error(kind):
    store, rng = two_releases(), random.Random(0)
    taken = [CHECKS[kind](store, rng) for _ in range(300)]

    assert sum(taken) < 150, "most mutations do harm"
